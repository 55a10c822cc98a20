"""Makes a model from .pt2 files: programs of `torch.export.save`, one for each shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from mod_export.errors import CheckpointError, ModExportError, first_line
from mod_export.folder.files import sha256_of_file
from mod_export.folder.programs import PROGRAM
from mod_export.graph.capture import with_found_sites
from mod_export.graph.sites import selected_from
from mod_export.model.functional_programs import functional_program
from mod_export.model.model import Model, Origin
from mod_export.model.plain_programs import PlainProgram, copied, input_values, plain_program
from mod_export.model.programs import ProgramModel
from mod_export.model.pt2 import read_program
from mod_export.types import Bucket

Sample = dict[str, torch.Tensor]


def model_from_pt2(paths: Sequence[Path], samples: Path | None = None, like: Model | None = None) -> ProgramModel:
    """Returns the model whose programs these files hold.

    A program's bucket has as many rows as its first input, and as many tokens as its routing selects from. A program
    without routing takes the tokens of the program of `like` that reads inputs of the same shapes, or else the second
    dimension of its first input. Weights are mapped from the first file.

    Args:
        paths: at least one file.
        samples: a safetensors file of further inputs, which come before those in the files: `ids` or `ids.0`, `ids.1`
            for the program that reads tensors of this shape, or `b1s512/ids.0` for that bucket.
        like: the model that this model is the dense baseline of.

    Raises:
        CheckpointError: a file is not a program at fixed sizes, or could run code; the files do not belong to one
            model; or the samples do not fit it.
        CaptureError: a program does something that no engine can do.
    """
    plain: dict[Bucket, PlainProgram] = {}
    inputs: dict[Bucket, list[list[torch.Tensor]]] = {}
    files: dict[Bucket, Path] = {}
    for path in paths:
        program = read_program(path)
        checked, bucket = _checked(program, path, like)
        if bucket in files:
            raise CheckpointError(
                f"{files[bucket]} and {path}: both are programs of {bucket.name}; give one of each shape"
            )
        files[bucket], plain[bucket] = path, checked
        inputs[bucket] = _own_samples(program, checked, path)
    if samples is not None:
        for bucket, bucket_samples in _samples_of_file(samples, plain).items():
            inputs[bucket] = bucket_samples + inputs[bucket]
    for bucket, bucket_samples in inputs.items():
        if not bucket_samples:
            raise CheckpointError(
                f"{files[bucket]}: holds no sample inputs; give some with --samples, a safetensors file of "
                f"{_expected(plain[bucket])}"
            )
    digest = hashlib.sha256("".join(sha256_of_file(path) for path in paths).encode()).hexdigest()
    model = ProgramModel(plain, inputs)
    model.origin = Origin(name=paths[0].stem, architecture=PROGRAM, checkpoint_sha256=digest)
    return model


def bucket_of(plain: PlainProgram, like: Model | None = None) -> Bucket:
    """Returns the bucket of a program: its rows, and the tokens of a row that routing selects from."""
    shapes = [tuple(value.shape) for value in input_values(plain.program)]
    first = shapes[0]
    tokens = selected_from(with_found_sites(copied(plain.program)))
    batch = first[0] if first else 1
    if tokens:
        return Bucket(batch, max(tokens))
    for bucket, reference in like.programs.items() if like is not None else ():
        if [tuple(value.shape) for value in input_values(reference.program)] == shapes:
            return Bucket(batch, bucket.seq)
    return Bucket(batch, first[1] if len(first) > 1 else 1)


def _checked(program: ExportedProgram, path: Path, like: Model | None) -> tuple[PlainProgram, Bucket]:
    try:
        args, kwargs = program.example_inputs or ((), {})
        samples = [sample_tensors(program, args, kwargs)] if program.example_inputs else []
        plain = plain_program(functional_program(program, str(path), samples), str(path), samples)
        return plain, bucket_of(plain, like)
    except ModExportError:
        raise
    except Exception as error:  # Any type of error: the user's file may hold any graph.
        raise CheckpointError(f"{path}: a program that cannot be used ({first_line(error)})") from error


def sample_tensors(program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments of a program, in the program's order."""
    tree = program.call_spec.in_spec
    assert tree is not None
    leaves = pytree.tree_leaves((tuple(args), reorder_kwargs(dict(kwargs), tree)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _own_samples(program: ExportedProgram, plain: PlainProgram, path: Path) -> list[list[torch.Tensor]]:
    if program.example_inputs is None:
        return []
    args, kwargs = program.example_inputs
    tensors = sample_tensors(program, args, kwargs)
    expected_types = [_type(value) for value in input_values(plain.program)]
    if [_type(tensor) for tensor in tensors] != expected_types:
        raise CheckpointError(f"{path}: its sample inputs are {_types(tensors)}; expected {_expected(plain)}")
    return [tensors]


def _samples_of_file(path: Path, programs: Mapping[Bucket, PlainProgram]) -> dict[Bucket, list[list[torch.Tensor]]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    named: dict[Bucket, dict[int, Sample]] = {bucket: {} for bucket in programs}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # Not a dictionary.
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from error
    for key, tensor in tensors.items():
        targets = [
            (bucket, name, number)
            for bucket, plain in programs.items()
            for name, number in [_place(key, bucket, plain)]
            if name and _fits(tensor, plain, name)
        ]
        if not targets:
            expected = "; ".join(f"{bucket.name}: {_expected(plain)}" for bucket, plain in programs.items())
            raise CheckpointError(f"{path}: {key} is {_types([tensor])}, an input of no program; expected {expected}")
        for bucket, name, number in targets:
            named[bucket].setdefault(number, {})[name] = tensor
    return {bucket: _complete(samples, programs[bucket], f"{path}: {bucket.name}") for bucket, samples in named.items()}


def _place(key: str, bucket: Bucket, plain: PlainProgram) -> tuple[str, int]:
    """Returns the input of this program that a key names (empty if there is none) and the number of the sample."""
    prefix, slash, rest = key.rpartition("/")
    if slash and prefix != bucket.name:
        return "", 0
    name, _, number = rest.rpartition(".")
    if rest in plain.inputs:
        return rest, 0
    return (name, int(number)) if name in plain.inputs and number.isdecimal() else ("", 0)


def _fits(tensor: torch.Tensor, plain: PlainProgram, name: str) -> bool:
    return _type(tensor) == _type(input_values(plain.program)[plain.inputs.index(name)])


def _complete(samples: Mapping[int, Sample], plain: PlainProgram, where: str) -> list[list[torch.Tensor]]:
    for number, sample in samples.items():
        missing = [name for name in plain.inputs if name not in sample]
        if missing:
            raise CheckpointError(f"{where}: sample {number} has no {', '.join(missing)}; expected {_expected(plain)}")
    return [[sample[name] for name in plain.inputs] for _, sample in sorted(samples.items())]


def _type(value: torch.Tensor) -> tuple[Any, ...]:
    """Returns dtype and shape. 16-bit inputs count as float32, which engines read in their place."""
    narrow = value.dtype in (torch.float16, torch.bfloat16)
    return (torch.float32 if narrow else value.dtype, *value.shape)


def _types(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(_type(t)[0]).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def _expected(plain: PlainProgram) -> str:
    values = input_values(plain.program)
    return ", ".join(f"{name} {_types([value])}" for name, value in zip(plain.inputs, values, strict=True))
