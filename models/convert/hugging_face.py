"""Reads a folder from `save_pretrained` of transformers: config.json, weights, and the files of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from mod_models.checkpoint import CheckpointError
from mod_models.convert.config_json import Config
from mod_models.convert.families import DERIVED, FAMILIES, Family, foreign_name, spec_of
from mod_models.convert.foreign import ForeignModel, Part, Place, part_at, projection_rows, refuse, shapes_of
from mod_models.convert.tensor_files import FileTensor, read_json, tensors_of_folder
from mod_models.spec import ModelSpec, SpecError, shown

CONFIG = "config.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
KNOWN = "floating-point numbers of 16, 32 or 64 bits"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def is_hugging_face(path: Path) -> bool:
    """Whether this is a folder whose config.json has a `model_type`."""
    config = path / CONFIG
    if not config.is_file():
        return False
    try:
        return "model_type" in read_json(config)
    except CheckpointError:
        return False


def read_hugging_face(path: Path, max_positions: int | None, ignored: Collection[str]) -> ForeignModel:
    """Reads the model of a folder. Of its weights it only reads headers, and a head that must equal the embedding.

    Args:
        path: path of the folder.
        max_positions: tokens of the longest row, to make it shorter than the model allows.
        ignored: fields of config.json that the caller knows to change nothing.

    Raises:
        CheckpointError: the family is unknown, the config is not a valid spec or does not fit the tensors, or tensors
            are missing, left over, damaged, or not floats.
    """
    return model_of(path, read_json(path / CONFIG), tensors_of_folder(path), max_positions, ignored)


def companions_of(path: Path) -> tuple[Path, ...]:
    """The files of a tokenizer in a folder, and the files that configure its use."""
    return tuple(path / name for name in COMPANIONS if (path / name).is_file())


def model_of(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, FileTensor],
    max_positions: int | None,
    ignored: Collection[str],
    spelled: Callable[[str], str] = str,
) -> ForeignModel:
    """Builds the dense model from the fields of a config.json and from tensors.

    Args:
        path: path of the folder.
        fields: fields of a config.json of the family.
        tensors: name in the file -> tensor.
        max_positions: see `read_hugging_face`.
        ignored: see `read_hugging_face`.
        spelled: name in the family -> name in the file.

    Raises:
        CheckpointError: see `read_hugging_face`.
    """
    kind = fields.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{path / CONFIG}: model_type: {shown(kind)} is no family that can be converted; known: "
            f"{', '.join(FAMILIES)}"
        )
    spec = _spec(path, family, fields, max_positions, ignored)
    parts: dict[str, Part] = {}
    problems: list[str] = []
    looked_up = set()
    for name, shape in shapes_of(spec).items():
        place = _place(family, spec, name, shape)
        place = place._replace(name=spelled(place.name))
        looked_up.add(place.name)
        added = family.norm_offset if name.endswith("norm.weight") else 0.0
        part = part_at(place, tensors, shape[0], added, CONFIG, KNOWN)
        if isinstance(part, Part):
            parts[name] = part
        else:
            problems.append(part)
    embedding = parts.get("embedding.weight") if spec.tie_embeddings else None
    left = {name: tensor for name, tensor in tensors.items() if name not in looked_up}
    problems += _left_over(left, embedding)
    refuse(path, problems)
    return ForeignModel(path=path, family=str(kind), spec=spec, parts=parts, companions=companions_of(path))


def _spec(
    path: Path, family: Family, fields: Mapping[str, object], max_positions: int | None, ignored: Collection[str]
) -> ModelSpec:
    config = Config(fields, family.defaults)
    architectures = fields.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        config.problem("architectures", f"expected {family.architecture}, got {shown(architectures)}")
    try:
        spec = spec_of(family, config, max_positions)
    except SpecError as error:
        raise CheckpointError(f"{path / CONFIG}: " + "; ".join(error.problems)) from error
    config.check_others({*ignored, *family.harmless})
    refuse(path / CONFIG, config.problems)
    assert spec is not None, "without a problem there is a spec"
    return spec


def _place(family: Family, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Place:
    fused = family.fused_with(name)
    if fused is None:
        return Place(foreign_name(name), shape)
    theirs, content, part = fused
    rows = [projection_rows(spec, member) for member in content.parts]
    return Place(theirs, (sum(rows), *shape[1:]), sum(rows[: content.parts.index(part)]))


def _left_over(tensors: Mapping[str, FileTensor], tied: Part | None) -> list[str]:
    """Problems of tensors that the config does not describe. A head that equals the tied embedding is no problem."""
    problems = []
    for name, tensor in tensors.items():
        if name == HEAD and tied is not None:
            if not same(tensor, tied):
                problems.append(f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}")
        elif not DERIVED.fullmatch(name):
            problems.append(f"{shown(name)} belongs to nothing that {CONFIG} describes")
    return problems


def same(tensor: FileTensor, part: Part) -> bool:
    """Whether both have the same shape, dtype and values."""
    if (tensor.shape, tensor.stored) != (part.shape, part.dtype):
        return False
    pairs = zip(Part(tensor, 0, part.length).pieces(), part.pieces(), strict=True)
    return all(torch.equal(piece, expected) for piece, expected in pairs)
