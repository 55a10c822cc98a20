"""Building blocks for importers of Mixture-of-Depths dialects: the source folder, and tensors by their names.

A dialect is the way in which one public implementation stores a model: names of tensors, whose meaning is only in its
code and in no file. So the user declares the dialect of a folder; it is never guessed from names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mod_models.checkpoint import CheckpointError
from mod_models.convert.config_json import Config
from mod_models.convert.foreign import ForeignModel, Part, Place, TensorRows, part_at, refuse, shapes_of
from mod_models.convert.hugging_face import KNOWN, companions_of
from mod_models.convert.tensor_files import FileTensor, read_json, tensors_of_file, tensors_of_folder
from mod_models.declarations import RoutingSpec
from mod_models.generation_spec import why_not
from mod_models.spec import ModelSpec, SpecError, shown

PICKLES = (".pth", ".pt")
"""Suffixes of a state_dict file beside its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder in a dialect, and the options of the user.

    Attributes:
        path: path of the folder.
        dialect: name of the dialect.
        tensors: name -> tensor, for all tensors of the folder.
        capacity: capacity of the routed layers; None if it was not given.
        max_positions: tokens of the longest row; None if it was not given.
        ignored: configuration fields that the user knows to change nothing.
    """

    path: Path
    dialect: str
    tensors: Mapping[str, FileTensor]
    capacity: float | None
    max_positions: int | None
    ignored: Collection[str]

    def fields(self, name: str) -> Mapping[str, Any]:
        """Reads the fields of its configuration, a JSON file with this name."""
        return read_json(self.path / name)

    def numbers(self, before: str, after: str) -> tuple[int, ...]:
        """Numbers of the layers that have a tensor `before` + number + `after`, ascending."""
        fitting = (name for name in self.tensors if name.startswith(before) and name.endswith(after))
        middles = (name[len(before) : len(name) - len(after)] for name in fitting)
        return tuple(sorted(int(middle) for middle in middles if re.fullmatch("[0-9]{1,6}", middle)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; (0, 0) if it is missing or has no dimensions, so that it is refused later by its name."""
        return (self.tensors[name].shape if name in self.tensors else ()) or (0, 0)

    def unlimited_capacity(self, said: str) -> float:
        """Returns the given capacity, for an implementation that runs every token that wants to run.

        Raises:
            CheckpointError: no capacity was given; the message gives the reason and ends with the sentence `said`.
        """
        if self.capacity is None:
            raise CheckpointError(
                f"{self.path}: give --capacity: {self.dialect} runs every token that its router wants, and a graph has "
                f"a fixed number of slots. --capacity 1 gives each token a slot and computes what its code computes; "
                f"with a smaller share, tokens that find no slot are skipped. {said}"
            )
        return self.capacity


def tensors_of(path: Path) -> dict[str, FileTensor]:
    """Returns all tensors of a folder: a Hugging Face folder, or state_dict files beside their configuration.

    Raises:
        CheckpointError: the folder has no weights, or they are damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder; a dialect has its configuration and its weights in one")
    files = sorted(file for file in path.iterdir() if file.suffix in PICKLES and file.is_file())
    if not files or [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        return tensors_of_folder(path)
    tensors: dict[str, FileTensor] = {}
    for file in files:
        # D-LLM stores its trained tensors in one file, in the table "model" beside the optimizer state.
        for name, tensor in (tensors_of_file(file, "model") or tensors_of_file(file)).items():
            if name in tensors:
                raise CheckpointError(
                    f"{file}: holds {shown(name)}, which {tensors[name].path.name} holds too; expected one whole model "
                    "in a folder, and no shards of it"
                )
            tensors[name] = tensor
    return tensors


class Found(NamedTuple):
    """The tensor of a dialect from which one of our tensors is made.

    Attributes:
        name: its name in the dialect.
        shape: the shape that it must have there.
        made: converts it to our tensor; by default they are the same.
    """

    name: str
    shape: tuple[int, ...]
    made: Callable[[TensorRows], TensorRows] = lambda tensor: tensor


Find = Callable[[str, tuple[int, ...]], Found]
"""(name, shape) of one of our tensors -> its tensor in the dialect."""


def model_from(
    source: Source,
    spec: ModelSpec,
    find: Find,
    *,
    family: str,
    declared_by: str,
    harmless: Collection[str] = (),
    said: Iterable[str] = (),
    dense: Mapping[str, Part] | None = None,
) -> ForeignModel:
    """Builds the model with this spec from the tensors of a folder.

    Args:
        source: the folder.
        spec: the spec of the model.
        find: finds the dialect's tensor for each of our tensors.
        family: name of the dense model.
        declared_by: the file that declares the shapes, for messages.
        harmless: names of tensors that are not used and change nothing.
        said: notes about the conversion for the user, one sentence each.
        dense: our tensors that were already found. If it is given, tensors that are left over are not checked here.

    Raises:
        CheckpointError: tensors are missing, left over, of another shape, or not floats; the message names them.
    """
    parts: dict[str, Part] = dict(dense or {})
    problems, looked_up = [], {*harmless}
    for name, shape in shapes_of(spec).items():
        if name in parts:
            continue
        theirs = find(name, shape)
        looked_up.add(theirs.name)
        part = part_at(Place(theirs.name, theirs.shape), source.tensors, theirs.shape[0], 0.0, declared_by, KNOWN)
        if isinstance(part, str):
            problems.append(part)
        else:
            parts[name] = Part(theirs.made(part.source), 0, shape[0])
    if dense is None:
        problems += [
            f"{shown(name)} belongs to nothing in the dialect {source.dialect}"
            for name in source.tensors
            if name not in looked_up
        ]
    refuse(source.path, problems)
    return ForeignModel(
        path=source.path,
        family=f"{family} in the dialect {source.dialect}",
        spec=spec,
        parts=parts,
        companions=companions_of(source.path),
        notes=(*_notes(spec), *said),
    )


def _notes(spec: ModelSpec) -> tuple[str, ...]:
    """Notes about the routing of a model, and whether it can write text."""
    routing, reason = spec.routing, why_not(spec)
    assert routing is not None, "a dialect routes"
    layers = ", ".join(map(str, spec.routed_layers))
    causal = f"looks ahead: {', '.join(spec.looks_ahead)}" if spec.looks_ahead else "causal"
    text = "can write text token by token" if reason is None else f"cannot write text token by token: {reason}"
    return (
        f"routed layers {layers}; {routing.selection}, capacity {routing.capacity} by the rule {routing.capacity_rule}",
        f"{causal}; {text}",
    )


def slots_note(capacity: float) -> str:
    """Note about the effect of a capacity if the code of the dialect has none."""
    if capacity == 1:
        return "every token has a slot, as in its code; a prompt costs as much as in the dense model, and no less"
    return "tokens that want to run and find no slot are skipped; its code has no such limit (--capacity 1)"


def declared(path: Path, config: Config, make: Callable[[], ModelSpec]) -> ModelSpec:
    """Refuses a configuration with problems, else returns the spec from `make`.

    Raises:
        CheckpointError: the configuration has problems, or is not a valid spec.
    """
    refuse(path, config.problems)
    try:
        return make()
    except SpecError as error:
        raise CheckpointError(f"{path}: " + "; ".join(error.problems)) from error


def with_routing(source: Source, spec: ModelSpec, **routing: Any) -> ModelSpec:
    """Returns the spec with this routing.

    Raises:
        CheckpointError: the routing is not valid, for example because the capacity is out of range.
    """
    try:
        return replace(spec, routing=RoutingSpec(**routing))
    except SpecError as error:
        raise CheckpointError(f"{source.path}: {source.dialect}: " + "; ".join(error.problems)) from error


@dataclass(frozen=True, slots=True)
class Difference:
    """The second row of a tensor minus the first, float32: the logit of the second of two classes against the first."""

    source: TensorRows

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.source.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, start: int, stop: int) -> Tensor:
        """See `foreign.TensorRows.rows`."""
        first, second = self.source.rows(0, 2).float()
        difference: Tensor = second - first
        return difference[None][start:stop]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix plus a low-rank product, float32: W + up @ down (LoRA, Hu et al., arXiv 2106.09685)."""

    source: TensorRows
    down: TensorRows
    up: TensorRows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, start: int, stop: int) -> Tensor:
        """See `foreign.TensorRows.rows`."""
        down = self.down.rows(0, self.down.shape[0]).float()
        return self.source.rows(start, stop).float() + self.up.rows(start, stop).float() @ down
