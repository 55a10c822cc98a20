"""What an importer of a Mixture-of-Depths dialect is made of: a folder as it is found, and tensors by their names.

A dialect is how one public implementation stores a model: names of tensors, and a meaning that is in its code and in no
file. So a dialect is declared by whoever has the folder, and never guessed from names.
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
"""What a state_dict beside its configuration may end in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder in some dialect, and what the user says about it.

    Attributes:
        path: of the folder.
        dialect: its name.
        tensors: all of them by name.
        capacity: of the routed layers; None if it was not given.
        max_positions: the longest row; None if it was not given.
        ignored: fields of its configuration that the user knows to change nothing.
    """

    path: Path
    dialect: str
    tensors: Mapping[str, FileTensor]
    capacity: float | None
    max_positions: int | None
    ignored: Collection[str]

    def fields(self, name: str) -> Mapping[str, Any]:
        """Of its configuration, a file of JSON."""
        return read_json(self.path / name)

    def numbers(self, before: str, after: str) -> tuple[int, ...]:
        """Of the layers that have a tensor `before` + number + `after`, ascending."""
        fitting = (name for name in self.tensors if name.startswith(before) and name.endswith(after))
        middles = (name[len(before) : len(name) - len(after)] for name in fitting)
        return tuple(sorted(int(middle) for middle in middles if re.fullmatch("[0-9]{1,6}", middle)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; two zeros where there is none, or one without dimensions, which is then refused by its name."""
        return (self.tensors[name].shape if name in self.tensors else ()) or (0, 0)

    def unlimited_capacity(self, said: str) -> float:
        """The capacity of an implementation that runs every token that wants to run.

        Raises:
            CheckpointError: it was not given; with the reason, and what is `said` about it.
        """
        if self.capacity is None:
            raise CheckpointError(
                f"{self.path}: give --capacity: {self.dialect} runs every token that its router wants, and a graph has "
                f"a fixed number of slots. --capacity 1 gives each token a slot and computes what its code computes; "
                f"with a smaller share, tokens that find no slot are skipped. {said}"
            )
        return self.capacity


def tensors_of(path: Path) -> dict[str, FileTensor]:
    """All tensors of a folder, which may be one or several state_dicts beside their configuration.

    Raises:
        CheckpointError: no weights, or damaged ones.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder; a dialect has its configuration and its weights in one")
    files = sorted(file for file in path.iterdir() if file.suffix in PICKLES and file.is_file())
    if not files or [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        return tensors_of_folder(path)
    found: dict[str, FileTensor] = {}
    for file in files:
        # D-LLM keeps what it trained in one file, in a table beside the state of its optimizer.
        for name, tensor in (tensors_of_file(file, "model") or tensors_of_file(file)).items():
            if name in found:
                raise CheckpointError(
                    f"{file}: holds {shown(name)}, which {found[name].path.name} holds too; expected one whole model "
                    "in a folder, and no shards of it"
                )
            found[name] = tensor
    return found


class Found(NamedTuple):
    """Where a tensor of ours comes from.

    Attributes:
        name: of theirs.
        shape: that it must have there.
        made: from theirs to ours, where they are not the same.
    """

    name: str
    shape: tuple[int, ...]
    made: Callable[[TensorRows], TensorRows] = lambda tensor: tensor


Find = Callable[[str, tuple[int, ...]], Found]
"""From the name and shape of one of our tensors to theirs."""


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
    """The model with this spec.

    Args:
        source: what it is made from.
        spec: what it computes.
        find: where its tensors are.
        family: what the model would be without routing.
        declared_by: what says which shape is expected, for messages.
        harmless: names that the dialect has no use for and that change nothing.
        said: what a person should know of the conversion, a sentence each.
        dense: tensors of ours that were found already, with all of theirs that they are made from.

    Raises:
        CheckpointError: tensors are missing, left over, of another shape or no floats; with their names.
    """
    parts: dict[str, Part] = dict(dense or {})
    problems, asked = [], {*harmless}
    for name, shape in shapes_of(spec).items():
        if name in parts:
            continue
        theirs = find(name, shape)
        asked.add(theirs.name)
        found = part_at(Place(theirs.name, theirs.shape), source.tensors, theirs.shape[0], 0.0, declared_by, KNOWN)
        if isinstance(found, str):
            problems.append(found)
        else:
            parts[name] = Part(theirs.made(found.source), 0, shape[0])
    if dense is None:
        problems += [
            f"{shown(name)} belongs to nothing in the dialect {source.dialect}"
            for name in source.tensors
            if name not in asked
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
    """How a model routes, and whether it can write text."""
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
    """What a capacity means where the dialect's own code has none."""
    if capacity == 1:
        return "every token has a slot, as in its code; a prompt costs as much as in the dense model, and no less"
    return "tokens that want to run and find no slot are skipped; its code has no such limit (--capacity 1)"


def declared(path: Path, config: Config, make: Callable[[], ModelSpec]) -> ModelSpec:
    """The spec that a configuration declares, once it is known to have no problems.

    Raises:
        CheckpointError: it cannot be said.
    """
    refuse(path, config.problems)
    try:
        return make()
    except SpecError as error:
        raise CheckpointError(f"{path}: " + "; ".join(error.problems)) from error


def with_routing(source: Source, spec: ModelSpec, **routing: Any) -> ModelSpec:
    """The spec with other routing, or with some.

    Raises:
        CheckpointError: it cannot be said, such as a capacity that is none.
    """
    try:
        return replace(spec, routing=RoutingSpec(**routing))
    except SpecError as error:
        raise CheckpointError(f"{source.path}: {source.dialect}: " + "; ".join(error.problems)) from error


@dataclass(frozen=True, slots=True)
class Difference:
    """The second row of a tensor minus its first, float32: the logit of the second of two classes over the first."""

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
    """A matrix plus the product of two narrow ones, float32: W + up @ down (LoRA, Hu et al., arXiv 2106.09685)."""

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
