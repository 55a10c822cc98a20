"""What the inputs and outputs of a captured program are called: `PlainProgram` has the rules."""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def input_names(placeholders: Sequence[fx.Node], structure: pytree.TreeSpec) -> list[str]:
    """Of inputs in the order of the structure of the arguments."""
    keys = [_keys(path)[-1:] for path in _paths(structure)]
    return [
        _plain(key[0] if key and keys.count(key) == 1 else _parameter(node.name))
        for node, key in zip(placeholders, keys, strict=True)
    ]


def output_names(returned: Sequence[Any], structure: pytree.TreeSpec) -> list[str]:
    """Of what is returned, which may be None, in the order of the structure; empty for an only output without keys."""
    several = sum(value is not None for value in returned) > 1
    found = []
    for path in _paths(structure):
        name = "_".join(_plain(_text(key)) for key in path) if several or _keys(path) else ""
        found.append(f"output_{name}" if name and not _keys(path) else name)
    return found


def only_output(value: torch.Tensor, first_input: torch.Tensor) -> str:
    """The name of the only output of a program, by its shape."""
    rows = value.dim() in (2, 3) and value.shape[:1] == first_input.shape[:1]
    return "logits" if rows and value.is_floating_point() else "output"


def free_names(names: Sequence[str], taken: Collection[str], suffix: str) -> tuple[str, ...]:
    """Names that are neither taken nor given twice: with the suffix, as often as it needs."""
    found: list[str] = []
    for name in names:
        free = name
        while free in taken or free in found:
            free += suffix
        found.append(free)
    return tuple(found)


def _paths(structure: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    numbered = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    return [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _keys(path: Sequence[Any]) -> list[str]:
    """The names in a path to a leaf: keys of dictionaries, and attributes."""
    return [_text(key) for key in path if not isinstance(key, pytree.SequenceKey)]


def _text(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return str(key.idx)
    return str(key.key if isinstance(key, pytree.MappingKey) else key.name)


def _parameter(name: str) -> str:
    """The parameter that a placeholder is of: `input_1` is of `input`, because that name is one of Python's own."""
    bare = name.removesuffix("_1")
    return bare if hasattr(builtins, bare) else name


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)
