"""Stores a captured model in a build folder: graphs as JSON, samples and constants as npz. Weights are elsewhere.

A build can therefore be validated, and exported again, without the code of its model. The graphs are read by the reader
of .pt2 files (`pt2.py`), which runs no code from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mod_export.errors import BuildFolderError, first_line
from mod_export.folder.programs import ARRAYS, arrays_file, graph_file, read_arrays, write_arrays
from mod_export.graph.program_nodes import inferred_values
from mod_export.model.plain_programs import PlainProgram
from mod_export.model.programs import ProgramModel, digest_of_arrays
from mod_export.model.pt2 import program_of
from mod_export.types import Bucket, ModelKind


def write_graphs(model: ProgramModel, kind: ModelKind, folder: Path) -> None:
    """Writes everything but the weights: the files of `folder.programs.program_files`.

    Args:
        model: the model to write.
        kind: `mod` or `dense`.
        folder: the build folder.
    """
    for bucket, text in model.graph_texts.items():
        path = folder / graph_file(kind, bucket.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    for name, arrays in zip(ARRAYS, (model.named_samples, model.constants), strict=True):
        write_arrays(folder / arrays_file(kind, name), arrays)


def read_graphs(
    folder: Path, kind: ModelKind, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> ProgramModel:
    """Reads a model that `write_graphs` wrote.

    Args:
        folder: the build folder.
        kind: `mod` or `dense`.
        spec: `ProgramModel.spec` of the model.
        weights: `ProgramModel.weights` of the model, in float32.

    Raises:
        BuildFolderError: a file is missing or damaged, or its graph could run code.
    """
    samples, constant_arrays = (read_arrays(folder / arrays_file(kind, name)) for name in ARRAYS)
    constants = {name: torch.from_numpy(array) for name, array in constant_arrays.items()}
    # torch requires parameters where a program reads parameters, and also accepts them in place of buffers.
    state = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights.items()}
    programs, samples_by_bucket = {}, {}
    for name in spec["buckets"]:
        bucket = Bucket.named(name)
        prefix = f"{name}."
        local = {item.removeprefix(prefix): tensor for item, tensor in constants.items() if item.startswith(prefix)}
        path = folder / graph_file(kind, name)
        inputs = tuple(item["name"] for item in spec["inputs"][name])
        try:
            program = program_of(path.read_bytes(), state, {**constants, **local})
            numbers = sorted({int(key.rpartition(".")[2]) for key in samples if key.startswith(f"{name}/")})
            samples_by_bucket[bucket] = [
                [torch.from_numpy(samples[f"{name}/{item}.{number}"]) for item in inputs] for number in numbers
            ]
            placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
            for node, value in inferred_values(program.graph_module, placeholders):
                node.meta["val"] = value  # A file does not store the memory offsets of views.
        except Exception as error:  # Any type of error: a changed file may hold anything.
            raise BuildFolderError(f"{path}: missing or damaged ({first_line(error)}); build again") from error
        programs[bucket] = PlainProgram(program=program, inputs=inputs, outputs=tuple(spec["outputs"]))
    return ProgramModel(programs, samples_by_bucket)


def changed_files(folder: Path, kind: ModelKind, spec: Mapping[str, Any]) -> dict[str, str]:
    """Returns every file of `program_files` -> its problem. The problem is empty if the digests in the model's `spec`
    show that the file holds what was captured.
    """
    problems = {}
    for name, digest in spec["programs"].items():
        path = graph_file(kind, name)
        try:
            actual = hashlib.sha256((folder / path).read_bytes()).hexdigest()
            problems[path] = "" if actual == digest else "not the graph that was captured"
        except OSError as error:
            problems[path] = f"missing or damaged ({error})"
    for name in ARRAYS:
        path = arrays_file(kind, name)
        try:
            actual = digest_of_arrays(read_arrays(folder / path))
            problems[path] = "" if actual == spec[name] else f"not the {name} that were captured"
        except BuildFolderError as error:
            problems[path] = str(error)
    return problems
