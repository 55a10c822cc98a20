"""Reads a program of `torch.export.save` without running code from it.

What torch 2.13 does with such a file (`torch/export/pt2_archive/_package.py`, `torch/_export/serde/serialize.py`) runs
code that the file brings along, when it is loaded or later when the program is run: sample inputs and weights are
unpickled where a safe load fails or the file asks for it, custom and opaque objects always; expressions of dynamic
sizes and guards are evaluated; names of values are pasted into generated Python; structures of inputs import the
modules that they name; and a node calls whatever attribute of `torch` it names. So the archive is read first, and
nothing is let through but raw tensors, and a graph at fixed sizes in which every name is a plain name and every call a
tensor operator.
"""

from __future__ import annotations

import io
import json
import keyword
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
RECORDS = {
    MODEL, SAMPLES, *TABLES.values(), "archive_format", "archive_version", "byteorder", "version", ".data/version",
    ".data/serialization_id", ".format_version", ".storage_alignment",
}  # fmt: skip
"""What `torch.export.save` writes of a program, beside raw tensors."""
TENSOR = re.compile(r"data/(weights/weight|constants/tensor)_[0-9]+")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
PATHS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
"""Where a string is a name in the state_dict, or the path of a module."""
FREE = ("metadata", "torch_version", "opset_version", "schema_version")
"""What torch neither evaluates nor calls: where a node comes from, and versions."""
SPECS = ("in_spec", "out_spec")
CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict")
BEYOND_ATEN = {
    "_operator.getitem",
    "torch.ops.mod_export.mark_selection.default",
    "torch.ops.higher_order.cond",
    "torch.ops.higher_order.wrap_with_set_grad_enabled",
    "torch.ops.higher_order.wrap_with_autocast",
}
NUMBERS = ("Infinity", "NaN")
SHOWN = 80
DYNAMIC = (
    "has a dynamic size, and a k such as int(c * T) was fixed at the length of the example; export it at one length, "
    "without `dynamic_shapes`: torch.export.export(module, inputs). A further length becomes a file of its own"
)


def read_program(path: Path) -> ExportedProgram:
    """The program of a .pt2 file.

    Raises:
        CheckpointError: it cannot be read, is not a program of `torch.export.save` at fixed sizes, or could run code.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    with path.open("rb") as file:
        try:
            problem = next(_problems(PT2ArchiveReader(file)), None)
        except Exception as error:  # Of any type: a file that is given to us may be anything.
            raise CheckpointError(f"{path}: not a program of torch.export.save ({_first_line(error)})") from error
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}")
        file.seek(0)
        try:
            # Not torch.export.load, which falls back to older formats, all of them pickles.
            return load_pt2(file).exported_programs["model"]
        except Exception as error:  # Whatever torch makes of a graph that it did not write.
            raise CheckpointError(f"{path}: torch cannot read this program ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return _shown(next(lines, type(error).__name__))


def _shown(text: object) -> str:
    """Text from a file, which may hold anything, for a message of one line."""
    plain = str(text).encode("ascii", "backslashreplace").decode()
    printable = "".join(one if one.isprintable() else repr(one)[1:-1] for one in plain)
    return printable if len(printable) <= SHOWN else printable[: SHOWN - 3] + "..."


def _problems(archive: PT2ArchiveReader) -> Iterator[str]:
    """Why this archive must not be given to torch, or is none of a program."""
    names = archive.get_file_names()
    others = [name for name in names if name not in RECORDS and TENSOR.fullmatch(name) is None]
    yield from (f"holds {_shown(name)}, which is no part of a program; save the program alone" for name in others)
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
    if program["range_constraints"]:
        yield DYNAMIC
    if program.get("guards_code"):
        yield "has guards, which are Python code; export it at one length, without `dynamic_shapes`"
    yield from _problems_of(program, "", in_nodes=False)


def _problems_of_tensor(archive: PT2ArchiveReader, folder: str, name: str, entry: dict[str, Any]) -> Iterator[str]:
    record, about = f"{folder}{entry['path_name']}", entry["tensor_meta"]
    if PATH.fullmatch(name) is None:
        yield f"{_shown(name)}: not the name of a weight"
    if entry["use_pickle"] or TENSOR.fullmatch(record) is None or about is None:
        yield f"{_shown(name)}: an object in place of a raw tensor, which could run code; save plain tensors only"
        return
    if about["device"]["type"] != "cpu":
        yield (
            f"{_shown(name)}: is on {_shown(about['device']['type'])}; export the model from the CPU, or move the "
            "program: torch.export.passes.move_to_device_pass(program, 'cpu')"
        )
    sizes = [size["as_int"] for size in about["sizes"]]
    if archive.archive_file.get_record_size(record) == 0 and 0 not in sizes:
        yield f"{_shown(name)}: has the shape {_shown(sizes)} and no data"


def _problems_of(value: Any, key: str, *, in_nodes: bool) -> Iterator[str]:
    """Of a part of the graph as JSON: `key` is the nearest key above it."""
    if isinstance(value, list):
        for one in value:
            yield from _problems_of(one, key, in_nodes=in_nodes)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name in FREE and _is_flat(one):
                continue  # A value of the graph may have such a name, and then holds more.
            if name in ("as_expr", "expr_str"):
                yield DYNAMIC
            elif name in ("as_custom_obj", "custom_obj", "as_operator"):
                yield f"uses an object ({name}) that only Python can restore, which could run code"
            elif not _is_name(name):
                yield f"{_shown(name)}: no name of a value"
            yield from _problems_of(one, name, in_nodes=in_nodes or name == "nodes")
    elif isinstance(value, str):
        yield from _problems_of_text(value, key, in_nodes=in_nodes)


def _problems_of_text(text: str, key: str, *, in_nodes: bool) -> Iterator[str]:
    if key == "target":
        if not _is_operator(text):
            yield f"calls {_shown(text)}, which is no operator that tensors are computed with"
    elif key in SPECS:
        if not _is_plain(json.loads(text)):
            yield f"{key}: more than tuples, lists and dictionaries of tensors; export a model of these"
    elif (key == "as_string" and in_nodes) or (key in ("as_float", "as_floats") and text.lstrip("-") in NUMBERS):
        return  # An argument of an operator, such as "mean".
    elif not (_is_name(text) or (text == "" and key in ("name", "fqn")) or (key in PATHS and PATH.fullmatch(text))):
        yield f"{_shown(text)}: no name of a value ({_shown(key)})"


def _is_flat(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else [value]
    return not any(isinstance(one, (dict, list)) for one in inner)


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None and not keyword.iskeyword(text)


def _is_operator(target: str) -> bool:
    """Whether it is an operator of torch that computes tensors of what it is given, and reads or writes no file."""
    if target in BEYOND_ATEN:
        return True
    start, _, rest = target.rpartition("torch.ops.")
    parts = rest.split(".")
    if start or len(parts) != 3 or parts[0] not in ("aten", "prims"):
        return False
    packet: Any = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or parts[2] not in ["default", *packet._overload_names]:
        return False
    schema = getattr(packet, parts[2])._schema
    tensors = all(str(one.type) in ("Tensor", "List[Tensor]", "Optional[Tensor]") for one in schema.returns)
    computes = (tensors and bool(schema.returns)) or parts[1].startswith("_assert")
    return computes and not any(one.name == "filename" for one in schema.arguments)


def _is_plain(spec: Any) -> bool:
    """Whether a structure (`torch.utils._pytree.treespec_dumps`) is made of the containers of Python alone."""
    if isinstance(spec, list):
        return len(spec) == 2 and spec[0] == 1 and _is_plain(spec[1])
    if not isinstance(spec, dict) or set(spec) != {"type", "context", "children_spec"}:
        return False
    kind, context = spec["type"], spec["context"]
    if kind is None:
        return context is None and spec["children_spec"] == []
    keys: Any = json.loads(context) if isinstance(context, str) else False
    is_dict = kind == "builtins.dict" and isinstance(keys, list)
    known = keys is None or (is_dict and all(isinstance(one, str) and _is_name(one) for one in keys))
    return (
        kind in CONTAINERS and known and all(isinstance(one, dict) and _is_plain(one) for one in spec["children_spec"])
    )
