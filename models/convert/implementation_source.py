"""A folder of an implementation of Mixture-of-Depths, and the parts that its reader shares with others.

Some implementations add routers to the layers of a transformers model, whose dense model is a family of
`hugging_face.py`; `with_routers` builds those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mod_models.checkpoint import CheckpointError
from mod_models.convert.foreign import Find, ForeignModel, Part, locate, refuse
from mod_models.convert.hugging_face import CONFIG, DERIVED, FAMILIES, KNOWN, companions_of, model_of
from mod_models.convert.tensor_files import FileTensor, read_json, tensors_of_file, tensors_of_folder
from mod_models.declarations import RoutingSpec
from mod_models.generation_spec import why_not
from mod_models.spec import ModelSpec, SpecError, shown

PICKLES = (".pth", ".pt")
"""Suffixes of a state_dict file beside its configuration."""
PICKLE = "model.bin"
"""Another name of such a file; no file of a Hugging Face folder has it."""
MODEL_LAYERS = "model.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder of an implementation, and the options of the user.

    Attributes:
        path: path of the folder.
        implementation: name of the implementation.
        tensors: name -> tensor, for all tensors of the folder.
        capacity: capacity of the routed layers; None if it was not given.
        max_positions: tokens of the longest row; None if it was not given.
        ignored: configuration fields that the user knows to change nothing.
    """

    path: Path
    implementation: str
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

    def unlimited_capacity(self, said: str = "") -> float:
        """Returns the given capacity, for an implementation that runs every token that wants to run.

        Raises:
            CheckpointError: no capacity was given; the message gives the reason and ends with the sentence `said`.
        """
        if self.capacity is None:
            ending = f". {said}" if said else ""
            raise CheckpointError(
                f"{self.path}: give --capacity: {self.implementation} runs every token that its router wants, and a "
                "graph has a fixed number of slots. --capacity 1 gives each token a slot and computes what its code "
                f"computes; with a smaller share, tokens that find no slot are skipped{ending}"
            )
        return self.capacity


def tensors_of(path: Path) -> dict[str, FileTensor]:
    """Returns all tensors of a folder: a Hugging Face folder, or state_dict files beside their configuration.

    Raises:
        CheckpointError: the folder has no weights, or they are damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: not a folder; an implementation stores its configuration and its weights in one"
        )
    files = sorted(
        file for file in path.iterdir() if (file.suffix in PICKLES or file.name == PICKLE) and file.is_file()
    )
    others = [file for file in (*path.glob("*.safetensors"), *path.glob("*.bin")) if file not in files]
    if not files or others:
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
        find: finds the place of each of our tensors.
        family: name of the dense model.
        declared_by: the file that declares the shapes, for messages.
        harmless: names of tensors that are not used and change nothing.
        said: notes about the conversion for the user, one sentence each.
        dense: our tensors that were already found. If it is given, tensors that are left over are not checked here.

    Raises:
        CheckpointError: tensors are missing, left over, of another shape, or not floats; the message names them.
    """
    parts, problems, unused = locate(spec, find, source.tensors, declared_by, KNOWN, dense)
    if dense is None:
        problems += [
            f"{shown(name)} belongs to nothing in a model of {source.implementation}"
            for name in unused
            if name not in harmless
        ]
    refuse(source.path, problems)
    return ForeignModel(
        path=source.path,
        family=f"{family} as {source.implementation} stores it",
        spec=spec,
        parts=parts,
        companions=companions_of(source.path),
        notes=(*notes_of(spec), *said),
    )


def notes_of(spec: ModelSpec) -> tuple[str, ...]:
    """Notes about the routing of a model, and whether it can write text."""
    routing, reason = spec.routing, why_not(spec)
    causal = f"looks ahead: {', '.join(spec.looks_ahead)}" if spec.looks_ahead else "causal"
    text = "can write text token by token" if reason is None else f"cannot write text token by token: {reason}"
    if routing is None:
        routed = "no layer is routed"
    else:
        layers, rule = ", ".join(map(str, spec.routed_layers)), routing.capacity_rule
        routed = f"routed layers {layers}; {routing.selection}, capacity {routing.capacity} by the rule {rule}"
    return routed, f"{causal}; {text}"


def slots_note(capacity: float) -> str:
    """Note about the effect of a capacity if the code of the implementation has none."""
    if capacity == 1:
        return "every token has a slot, as in its code; a prompt costs as much as in the dense model, and no less"
    return "tokens that want to run and find no slot are skipped; its code has no such limit (--capacity 1)"


def with_routing(source: Source, spec: ModelSpec, **routing: Any) -> ModelSpec:
    """Returns the spec with this routing.

    Raises:
        CheckpointError: the routing is not valid, for example because the capacity is out of range.
    """
    try:
        return replace(spec, routing=RoutingSpec(**routing))
    except SpecError as error:
        raise CheckpointError(f"{source.path}: {source.implementation}: {error}") from error


def declared_layers(source: Source, field: str, listed: object, router: str, problems: list[str]) -> tuple[int, ...]:
    """Returns the layers for which a list of true and false is true; exactly these must have routers.

    Args:
        source: the folder.
        field: name of the list in the configuration.
        listed: its value.
        router: name of the weight of a layer's router, with `{}` for the number of the layer.
        problems: the problems are added here.
    """
    if not isinstance(listed, list) or any(type(flag) is not bool for flag in listed):
        problems.append(f"{field}: expected a list of true and false, got {shown(listed)}")
        return ()
    routed = tuple(layer for layer, flag in enumerate(listed) if flag)
    for layer in sorted({*routed} ^ {*source.numbers(*router.split("{}"))}):
        name = router.format(layer)
        problems.append(f"{name} is missing, and {field} is true there" if layer in routed else
                        f"{name} stands in a layer where {field} is not true")  # fmt: skip
    return routed


def as_family(fields: Mapping[str, Any], family: str, problems: list[str]) -> dict[str, Any]:
    """Returns the fields of config.json that name a family, to replace those of an implementation that extends its
    classes. A `model_type` that names another family becomes a problem.
    """
    kind = str(fields.get("model_type"))
    named_family = next((name for name in FAMILIES if name in kind.lower() and name != family), None)
    if named_family is not None:
        problems.append(
            f"model_type: {shown(kind)} names the family {named_family}, and the tensors are those of {family}"
        )
    return {"model_type": family, "architectures": [FAMILIES[family].architecture]}


def wrapped(name: str, layers: Iterable[int], wrapper: str) -> str:
    """Returns the name in an implementation that wraps the tensors of these layers, such as `layers.1.block.` for
    `layers.1.`.
    """
    for before in (f"{MODEL_LAYERS}{layer}." for layer in layers):
        if name.startswith(before):
            return name.replace(before, before + wrapper, 1)
    return name


def with_routers(
    source: Source,
    fields: Mapping[str, Any],
    routing: Mapping[str, Any],
    find: Find,
    own: Collection[str],
    said: Iterable[str],
    spelled: Callable[[str], str] = str,
) -> ForeignModel:
    """Builds a dense model of a family with routing.

    Args:
        source: the folder.
        fields: the fields of its config.json as the family has them.
        routing: declarations of the routing, with a tuple of layers.
        find: finds the place of our tensors that the dense model does not have.
        own: names of tensors that the dense model does not have.
        said: notes about the conversion for the user.
        spelled: name in the family -> name in the implementation, see `wrapped`.

    Raises:
        CheckpointError: see `hugging_face.model_of` and `model_from`.
    """
    dense = {name: tensor for name, tensor in source.tensors.items() if name not in own and not DERIVED.fullmatch(name)}
    model = model_of(source.path, fields, dense, source.max_positions, source.ignored, spelled)
    spec = with_routing(source, model.spec, **routing)
    return model_from(source, spec, find, family=model.family, declared_by=CONFIG, said=said, dense=model.parts)
