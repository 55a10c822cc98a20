"""Reads a program of `torch.export.save` without running code from it.

`torch.export.load` runs code that a file brings along: it unpickles sample inputs and weights where a safe load fails
or the file asks for it (torch 2.13, `torch/export/pt2_archive/_package.py`), always unpickles custom and opaque
objects, evaluates expressions of dynamic sizes and guards as Python, and calls whatever attribute of `torch` a node
names. So the archive is read first, by the same reader, and a file that has any of these is refused. What is left is
raw tensors, and a graph of torch's own operators at fixed sizes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2

from mod_export.errors import CheckpointError

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/", "data/constants/"
TABLES = {WEIGHTS: f"{WEIGHTS}model_weights_config.json", CONSTANTS: f"{CONSTANTS}model_constants_config.json"}
RECORD = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id|\.format_version|\.storage_alignment"
    rf"|{MODEL}|{SAMPLES}|data/(weights|constants)/(weight|tensor)_\d+|{'|'.join(TABLES.values())}"
)
"""What `torch.export.save` writes of a program: anything else is another kind of archive, or an object."""
OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims)\.[a-z]\w*\.\w+|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.\w+"
    r"|torch\.ops\.mod_export\.mark_selection\.default"
    r"|torch\.ops\.higher_order\.(cond|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge)"
)
"""What a node may call."""
FILES = re.compile(r"torch\.ops\.aten\.from_file\b")
"""Operators of torch that read files."""
STATIC = (
    "export it at one length, without `dynamic_shapes`: torch.export.export(module, inputs). A length of your own for "
    "each bucket becomes a file of its own"
)


def read_program(path: Path) -> ExportedProgram:
    """The program of a .pt2 file.

    Raises:
        CheckpointError: it cannot be read, is not a program of `torch.export.save` at fixed sizes, or could run code.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        archive = PT2ArchiveReader(str(path))
        problem = next(_problems(archive), None)
    except (RuntimeError, AssertionError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a program of torch.export.save ({_first_line(error)})") from error
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")
    try:
        # Not torch.export.load, which falls back to older formats, all of them pickles.
        return load_pt2(str(path)).exported_programs["model"]
    except Exception as error:  # Whatever torch makes of a graph that it did not write.
        raise CheckpointError(f"{path}: torch cannot read this program ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _problems(archive: PT2ArchiveReader) -> Iterator[str]:
    """Why this archive must not be given to torch, or is none of a program."""
    names = archive.get_file_names()
    yield from (f"holds {name}, which is no part of a program; save the program alone" for name in _others(names))
    missing = sorted({MODEL, SAMPLES, *TABLES.values()} - set(names))
    if missing:
        yield f"holds no {missing[0]}; expected an archive of torch.export.save"
        return
    for folder, table in TABLES.items():
        for name, entry in json.loads(archive.read_string(table))["config"].items():
            yield from _problems_of_tensor(archive, folder, name, entry)
    try:
        torch.load(io.BytesIO(archive.read_bytes(SAMPLES)), weights_only=True)
    except Exception:  # Of any type: the unpickler is given bytes that may be anything.
        yield "its sample inputs are more than plain tensors, and could run code; export it with tensors as inputs"
    program = json.loads(archive.read_string(MODEL))
    if program.get("guards_code"):
        yield f"has guards, which are Python code; {STATIC}"
    if program["range_constraints"]:
        yield f"has a dynamic size, and a k such as int(c * T) was fixed at the length of the example; {STATIC}"
    yield from _problems_of_graph(program)


def _others(names: list[str]) -> Iterator[str]:
    return (name for name in names if RECORD.fullmatch(name) is None)


def _problems_of_tensor(archive: PT2ArchiveReader, folder: str, name: str, entry: dict[str, Any]) -> Iterator[str]:
    record, about = f"{folder}{entry['path_name']}", entry["tensor_meta"]
    if entry["use_pickle"] or RECORD.fullmatch(record) is None or about is None:
        yield f"{name}: a pickled object in place of a raw tensor, which could run code; save plain tensors only"
        return
    if about["device"]["type"] != "cpu":
        yield (
            f"{name}: is on {about['device']['type']}; export the model from the CPU, or move the program: "
            "torch.export.passes.move_to_device_pass(program, 'cpu')"
        )
    sizes = [size["as_int"] for size in about["sizes"]]
    if archive.archive_file.get_record_size(record) == 0 and 0 not in sizes:
        yield f"{name}: has the shape {sizes} and no data"


def _problems_of_graph(value: Any) -> Iterator[str]:
    """Of a graph as JSON, whatever is nested in it."""
    if isinstance(value, list):
        for one in value:
            yield from _problems_of_graph(one)
    if not isinstance(value, dict):
        return
    for key, one in value.items():
        if key in ("as_expr", "expr_str"):
            yield f"has a dynamic size, and a k such as int(c * T) was fixed at the length of the example; {STATIC}"
        elif key in ("as_custom_obj", "custom_obj", "as_operator"):
            yield f"uses an object ({key}) that only Python can restore, which could run code"
        elif key == "target" and isinstance(one, str) and (OPERATOR.fullmatch(one) is None or FILES.match(one)):
            yield f"calls {one}, which is no operator that tensors are computed with"
        yield from _problems_of_graph(one)
