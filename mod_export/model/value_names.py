"""Names the inputs and outputs of a captured program; `PlainProgram` documents the rules."""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def input_names(placeholders: Sequence[fx.Node], structure: pytree.TreeSpec) -> list[str]:
    """Returns the names of inputs, in the order of the structure of the arguments."""
    keys = [_keys(path)[-1:] for path in _paths(structure)]
    return [
        _plain(key[0] if key and keys.count(key) == 1 else _parameter(node.name))
        for node, key in zip(placeholders, keys, strict=True)
    ]


def output_names(returned: Sequence[Any], structure: pytree.TreeSpec) -> list[str]:
    """Returns the names of the returned values, in the order of the structure. A value that is no node of the graph,
    such as None, has a name too, but does not count as an output. The name of a single output without keys is empty.
    """
    several = sum(isinstance(value, fx.Node) for value in returned) > 1
    names = []
    for path in _paths(structure):
        name = "_".join(_plain(_text(key)) for key in path) if several or _keys(path) else ""
        names.append(f"output_{name}" if name and not _keys(path) else name)
    return names


def only_output(value: torch.Tensor, first_input: torch.Tensor) -> str:
    """Returns the name of a program's single output, by its shape."""
    rows = value.dim() in (2, 3) and value.shape[:1] == first_input.shape[:1]
    return "logits" if rows and value.is_floating_point() else "output"


def free_names(names: Sequence[str], taken: Collection[str], suffix: str) -> tuple[str, ...]:
    """Returns unique names that are not taken; the suffix is added to a name as often as necessary."""
    unique: list[str] = []
    for name in names:
        free = name
        while free in taken or free in unique:
            free += suffix
        unique.append(free)
    return tuple(unique)


def _paths(structure: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    numbered = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    return [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _keys(path: Sequence[Any]) -> list[str]:
    """Returns the names in a path to a leaf: dictionary keys and attributes."""
    return [_text(key) for key in path if not isinstance(key, pytree.SequenceKey)]


def _text(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return str(key.idx)
    return str(key.key if isinstance(key, pytree.MappingKey) else key.name)


def _parameter(name: str) -> str:
    """Returns the parameter of a placeholder: `input_1` stands for `input`, because that name is a Python builtin."""
    bare = name.removesuffix("_1")
    return bare if hasattr(builtins, bare) else name


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)
