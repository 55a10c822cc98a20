"""Reads a program of `torch.export.save` without running code from it.

torch 2.13 runs code that such a file brings along (`torch/export/pt2_archive/_package.py`,
`torch/_export/serde/serialize.py`), when it loads the file or later when the program runs. Sample inputs and weights
are unpickled if a safe load fails or the file asks for it; custom and opaque objects always are. Expressions of dynamic
sizes and guards are evaluated. Names of values are pasted into generated Python. Structures of inputs import the
modules that they name. A node calls any attribute of `torch` that it names. torch also believes the file about sizes.
So the archive is read here (`archive.py`), and torch is given only what has been checked: mapped tensors whose shapes
fit their bytes, and a graph at fixed sizes in which every name is a plain name, every call is a tensor operator
(`operators.py`), and every size is what torch itself infers.
"""

from __future__ import annotations

import io
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._export.serde import schema
from torch._export.serde.serialize import (
    _SERIALIZE_TO_TORCH_DTYPE,
    ExportedProgramDeserializer,
    _dict_to_dataclass,
)
from torch.export import ExportedProgram
from torch.export.pt2_archive.constants import ARCHIVE_FORMAT_VALUE, ARCHIVE_VERSION_VALUE
from torch.utils import _pytree as pytree

from mod_export.errors import CheckpointError, first_line, shown
from mod_export.graph.program_nodes import inferred_values
from mod_export.model.archive import Archive, ArchiveError, records_of
from mod_export.model.operators import is_operator

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/", "data/constants/"
TABLES = {WEIGHTS: f"{WEIGHTS}model_weights_config.json", CONSTANTS: f"{CONSTANTS}model_constants_config.json"}
RECORDS = {
    MODEL, SAMPLES, *TABLES.values(), "archive_format", "archive_version", "byteorder", "version", ".data/version",
    ".data/serialization_id", ".format_version", ".storage_alignment",
}  # fmt: skip
"""Records that `torch.export.save` writes for a program, besides raw tensors."""
FORMAT = {
    "archive_format": ARCHIVE_FORMAT_VALUE.encode(),
    "archive_version": ARCHIVE_VERSION_VALUE.encode(),
    "byteorder": b"little",
}
TENSOR = re.compile(r"data/(weights/weight|constants/tensor)_[0-9]+")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
PATHS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
"""Keys whose string is a name in the state_dict or the path of a module."""
FREE = ("metadata", "torch_version", "opset_version", "schema_version")
"""Keys that torch neither evaluates nor calls: the origin of a node, and versions."""
SPECS = ("in_spec", "out_spec")
CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict")
NUMBERS = ("Infinity", "NaN")
WIDEST = 16
"""Bytes of a complex128 number, the widest dtype."""
LARGEST = 2**38
"""Bytes of the largest tensor that a graph may compute, 256 GiB: a file of a few lines can ask for any size."""
UNSAFE_SAMPLES = "its sample inputs are more than plain tensors, and could run code; export it with tensors as inputs"
DYNAMIC = (
    "has a dynamic size, and a k such as int(c * T) was fixed at the length of the example; export it at one length, "
    "without `dynamic_shapes`: torch.export.export(module, inputs). A further length becomes a file of its own"
)


def read_program(path: Path) -> ExportedProgram:
    """Returns the program of a .pt2 file. Its weights are mapped from the file.

    Raises:
        CheckpointError: the file cannot be read, is not a program of `torch.export.save` at fixed sizes, or could run
            code.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        archive = Archive.open(path)
        problem = next(_problems_of_records(archive), None)
        if problem is not None:
            raise ArchiveError(problem)
        program = program_of(archive.read(MODEL), _tensors(archive, WEIGHTS), _tensors(archive, CONSTANTS))
        samples = _samples(archive)
    except ArchiveError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # Any type of error: the user's file may hold anything.
        raise CheckpointError(f"{path}: not a program of torch.export.save ({first_line(error)})") from error
    try:
        if samples is not None:
            program.example_inputs = samples
    except ValueError as error:
        raise CheckpointError(
            f"{path}: its sample inputs are not those of the program ({first_line(error)})"
        ) from error
    return program


def program_of(
    text: bytes, weights: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> ExportedProgram:
    """Returns the program whose graph is stored as this JSON, without sample inputs.

    Raises:
        ArchiveError: the program is not at fixed sizes, could run code, or has a graph that torch cannot restore.
    """
    stored = json.loads(text)
    problem = next(_problems_of_program(stored), None)
    if problem is not None:
        raise ArchiveError(problem)
    try:
        # torch.export.load is not used: it reads tensors and sample inputs itself, and older formats that are pickles.
        program = ExportedProgramDeserializer().deserialize(
            _dict_to_dataclass(schema.ExportedProgram, stored),  # type: ignore[no-untyped-call]  # As it is in torch.
            dict(weights),
            dict(constants),
        )
        problem = next(_problems_of_values(program), None)
    except Exception as error:  # Any type of error: torch may not have written this graph.
        raise ArchiveError(f"torch cannot read this program ({first_line(error)})") from error
    if problem is not None:
        raise ArchiveError(problem)
    return program


def _problems_of_records(archive: Archive) -> Iterator[str]:
    """Yields reasons why this is not the archive of a program, or contains more than a program."""
    for name in archive.records:
        if name not in RECORDS and TENSOR.fullmatch(name) is None:
            yield f"holds {shown(name)}, which is no part of a program; save the program alone"
    missing = sorted({MODEL, SAMPLES, *TABLES.values(), *FORMAT} - set(archive.records))
    if missing:
        yield f"holds no {missing[0]}; expected an archive of torch.export.save"
        return
    for name, expected in FORMAT.items():
        if archive.read(name) != expected:
            yield f"{name} is {shown(archive.read(name))}; expected {expected.decode()}"


def _tensors(archive: Archive, folder: str) -> dict[str, torch.Tensor]:
    """Returns weights or constants by name, mapped. Tensors that shared memory when saved share it again."""
    entries = json.loads(archive.read(TABLES[folder]))["config"].items()
    mapped = {record: _aligned(archive.mapped(record)) for record in archive.records if TENSOR.fullmatch(record)}
    return {name: _tensor(mapped, f"{folder}{entry['path_name']}", name, entry) for name, entry in entries}


def _aligned(mapped: torch.Tensor) -> torch.Tensor:
    """Returns the bytes at an address that is aligned for numbers. torch writes them aligned; others are copied."""
    return mapped.clone() if mapped.storage_offset() % WIDEST else mapped


def _tensor(mapped: Mapping[str, torch.Tensor], record: str, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
    about = entry["tensor_meta"]
    if PATH.fullmatch(name) is None:
        raise ArchiveError(f"{shown(name)}: not the name of a weight")
    if entry["use_pickle"] or TENSOR.fullmatch(record) is None or about is None:
        raise ArchiveError(
            f"{shown(name)}: an object in place of a raw tensor, which could run code; save plain tensors only"
        )
    if about["device"]["type"] != "cpu":
        raise ArchiveError(
            f"{shown(name)}: is on {shown(about['device']['type'])}; export the model from the CPU, or move the "
            "program: torch.export.passes.move_to_device_pass(program, 'cpu')"
        )
    sizes, strides = ([n["as_int"] for n in about[key]] for key in ("sizes", "strides"))
    offset, dtype = about["storage_offset"]["as_int"], _SERIALIZE_TO_TORCH_DTYPE[about["dtype"]]
    numbers = len(mapped[record]) // dtype.itemsize
    last = offset
    if not all(isinstance(n, int) and n >= 0 for n in (*sizes, *strides, offset)) or len(sizes) != len(strides):
        raise ArchiveError(f"{shown(name)}: has the shape {shown(sizes)} at strides {shown(strides)}")
    count = 1
    for size, stride in zip(sizes, strides, strict=True):
        count, last = count * size, last + max(0, size - 1) * stride
    if count and (count > numbers or last >= numbers):
        # A tensor with more numbers than data is an expanded one: a file of a few bytes could ask for any memory.
        stored = "no data" if numbers == 0 else f"data for {numbers:,} numbers"
        raise ArchiveError(f"{shown(name)}: has the shape {shown(sizes)} and {stored}; save it with .contiguous()")
    # Leaves out trailing bytes that are too few for a number.
    tensor = mapped[record][: numbers * dtype.itemsize].view(dtype)
    offset = offset + tensor.storage_offset() if count else 0
    tensor = tensor.as_strided(sizes, strides, offset)
    return torch.nn.Parameter(tensor, requires_grad=about["requires_grad"]) if entry["is_param"] else tensor


def _samples(archive: Archive) -> Any:
    """Returns the positional and named arguments that the program was captured with; None if the file holds none."""
    data = archive.read(SAMPLES)
    if not data:
        return None
    try:
        records_of(io.BytesIO(data), len(data))
        samples = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # Any type of error: the unpickler reads untrusted bytes.
        raise ArchiveError(UNSAFE_SAMPLES) from error
    plain = (type(None), bool, int, float, str)
    if not all(_is_plain_tensor(leaf) or isinstance(leaf, plain) for leaf in pytree.tree_leaves(samples)):
        raise ArchiveError(UNSAFE_SAMPLES)
    return samples


def _is_plain_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor on the CPU whose numbers are all stored."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.itemsize <= value.untyped_storage().nbytes()


def _problems_of_program(program: dict[str, Any]) -> Iterator[str]:
    """Yields reasons why torch must not be given this graph, as JSON."""
    if program["range_constraints"]:
        yield DYNAMIC
    if program.get("guards_code"):
        yield "has guards, which are Python code; export it at one length, without `dynamic_shapes`"
    yield from _problems_of(program, "", in_nodes=False)


def _problems_of_values(program: ExportedProgram) -> Iterator[str]:
    """Yields values of the graph that differ from what the file says, or that no machine can hold."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        tensor = program.state_dict.get(str(spec.target), program.constants.get(str(spec.target)))
        if isinstance(tensor, torch.Tensor) and _type(tensor) != _type(node.meta.get("val")):
            yield f"{shown(spec.target)}: is {_type(tensor)}, and the graph reads {_type(node.meta.get('val'))}"
    yield from _problems_of_graph(program.graph_module, [node.meta.get("val") for node in nodes])


def _problems_of_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    values = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), inputs, strict=True))
    for node, value in inferred_values(module, inputs):
        values[node] = value
        for item in pytree.tree_leaves(value):
            if isinstance(item, torch.Tensor) and item.numel() * item.itemsize > LARGEST:
                yield f"{shown(node.name)}: is {_type(item)}, which no machine can hold"
        stored = node.meta.get("val")
        if isinstance(value, torch.Tensor) and stored is not None and _type(value) != _type(stored):
            yield f"{shown(node.name)}: is {_type(value)}, and the file says {_type(stored)}"
        inner = [item for item in node.all_input_nodes if isinstance(values[item], fx.GraphModule)]
        if inner:
            operands = [item for item in node.all_input_nodes if item not in inner]
            # A condition's first operand is its predicate, which its branches do not read.
            operands = operands[1:] if node.target is torch.ops.higher_order.cond else operands
            for item in inner:
                yield from _problems_of_graph(values[item], [values[operand] for operand in operands])


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return shown(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}")


def _problems_of(value: Any, key: str, *, in_nodes: bool) -> Iterator[str]:
    """Yields the problems of a part of the graph as JSON. `key` is the nearest key above it."""
    if isinstance(value, list):
        for item in value:
            yield from _problems_of(item, key, in_nodes=in_nodes)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in FREE and _is_flat(item):
                # A nested item is a value of the graph with such a name, and is checked below.
                yield from _problems_of_notes(name, item)
                continue
            if name in ("as_expr", "expr_str"):
                yield DYNAMIC
            elif name in ("as_custom_obj", "custom_obj", "as_operator"):
                yield f"uses an object ({name}) that only Python can restore, which could run code"
            elif not _is_name(name):
                yield f"{shown(name)}: no name of a value"
            yield from _problems_of(item, name, in_nodes=in_nodes or name == "nodes")
    elif isinstance(value, str):
        yield from _problems_of_text(value, key, in_nodes=in_nodes)


def _problems_of_text(text: str, key: str, *, in_nodes: bool) -> Iterator[str]:
    if key == "target":
        if not is_operator(text):
            yield f"calls {shown(text)}, which is no operator that tensors are computed with"
    elif key in SPECS:
        if not _is_plain(json.loads(text)):
            yield f"{key}: more than tuples, lists and dictionaries of tensors; export a model of these"
    elif (key == "as_string" and in_nodes) or (key in ("as_float", "as_floats") and text.lstrip("-") in NUMBERS):
        return  # An argument of an operator, such as "mean".
    elif not (_is_name(text) or (text == "" and key in ("name", "fqn")) or (key in PATHS and PATH.fullmatch(text))):
        yield f"{shown(text)}: no name of a value ({shown(key)})"


def _problems_of_notes(name: str, notes: Any) -> Iterator[str]:
    """Yields a problem if a value under one of FREE has control characters: it is printed, and terminals obey them."""
    texts = notes.values() if isinstance(notes, dict) else [notes]
    if not all(char.isprintable() or char in "\n\t" for text in texts for char in str(text)):
        yield f"{name} holds control characters"


def _is_flat(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else [value]
    return not any(isinstance(item, (dict, list)) for item in inner)


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None and not keyword.iskeyword(text)


def _is_plain(spec: Any) -> bool:
    """Returns whether a structure (`torch.utils._pytree.treespec_dumps`) consists of Python's own containers alone."""
    if isinstance(spec, list):
        return len(spec) == 2 and spec[0] == 1 and _is_plain(spec[1])
    if not isinstance(spec, dict) or set(spec) != {"type", "context", "children_spec"}:
        return False
    kind, context = spec["type"], spec["context"]
    if kind is None:
        return context is None and spec["children_spec"] == []
    keys: Any = json.loads(context) if isinstance(context, str) else False
    is_dict = kind == "builtins.dict" and isinstance(keys, list)
    known = keys is None or (is_dict and all(isinstance(x, str) and _is_name(x) for x in keys))
    return kind in CONTAINERS and known and all(isinstance(x, dict) and _is_plain(x) for x in spec["children_spec"])
