"""Restores the names that tensors have in the model itself, if a wrapper of it was saved, or only a part of it.

A training script that saves `wrapper.state_dict()` writes names that begin with the wrapper's own attribute. A base
model (`LlamaModel`) has no `model.` in front of its names, which `LlamaForCausalLM` has. Nothing is guessed: no name
of a family contains the attribute of a wrapper, and names that become equal are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from mod_models.checkpoint import CheckpointError
from mod_models.spec import shown

MODEL = "model."
IN_BASE = "embed_tokens.weight"
"""The tensor by which the names of a base model are recognised."""
HEAD = "lm_head.weight"
AT_START = ("module.", "base_model.model.")
"""Wrappers of a whole model: DataParallel and DistributedDataParallel of torch, and PEFT."""
COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
"""Wrapper of torch.compile, which can be around any module of a model."""
T = TypeVar("T")


def without_wrappers(path: Path, tensors: Mapping[str, T]) -> tuple[dict[str, T], tuple[str, ...]]:
    """Removes the wrappers from names of tensors.

    Returns:
        Name without wrappers -> tensor; and a note that says what was removed, if anything was.

    Raises:
        CheckpointError: two names are equal without the wrappers.
    """
    removed: dict[str, None] = {}

    def bare(name: str) -> str:
        while True:
            if wrapper := next((start for start in AT_START if name.startswith(start)), None):
                removed[wrapper] = None
                name = name.removeprefix(wrapper)
            elif COMPILED.search(name):
                removed["_orig_mod."] = None
                name = COMPILED.sub("", name)
            else:
                return name

    named = _renamed(path, tensors, bare)
    if not removed:
        return named, ()
    wrappers = " and ".join(f"`{wrapper}`" for wrapper in removed)
    were = "a wrapper, which was" if len(removed) == 1 else "wrappers, which were"
    return named, (f"{path}: names of its tensors have the {wrappers} of {were} removed",)


def with_model(path: Path, tensors: Mapping[str, T]) -> tuple[dict[str, T], tuple[str, ...]]:
    """Adds `model.` to the names of a base model, like `without_wrappers`. Other names stay as they are."""
    if IN_BASE not in tensors:
        return dict(tensors), ()
    named = _renamed(path, tensors, lambda name: name if name.startswith(MODEL) or name == HEAD else MODEL + name)
    return named, (f"{path}: names of its tensors are those of a base model, so `{MODEL}` was added to them",)


def _renamed(path: Path, tensors: Mapping[str, T], rename: Callable[[str], str]) -> dict[str, T]:
    named: dict[str, T] = {}
    before: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in named:
            raise CheckpointError(
                f"{path}: {shown(before[new])} and {shown(name)} both stand for {shown(new)}, so it is not known which "
                "of them counts; save the model again without its wrapper"
            )
        named[new], before[new] = tensor, name
    return named
