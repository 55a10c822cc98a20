"""Stores weights in one file for all graphs of a dtype, as floats or as integers of eight or four bits.

The format is safetensors: a header, and then the bytes of the tensors. ONNX external data is (file, offset, length), so
one plain file serves ONNX Runtime, TensorRT's parser, AOTInductor and any reader of `safetensors`, and no bucket adds a
copy. Names are those of the state_dict. Digests prove that a file, or a graph, holds the checkpoint's numbers and no
others. A server reads the header with this module, so it imports torch and onnx only where it needs them.

Shape legend: a weight is stored as (N, K); N columns of the result, K the summed dimension.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mod_export.environment import let_go
from mod_export.errors import BuildFolderError, LimitError
from mod_export.types import DType

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from mod_export.graph.rounding import Rounded

MOST_SIZES = 16
"""The most elements of a constant that shapes can depend on."""

ALIGNMENT = 8
PIECE = 2**22
"""The number of elements that are cast and written at a time."""
ONNX_TYPES = {
    "F64": "DOUBLE", "F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16", "I64": "INT64", "I32": "INT32",
    "I16": "INT16", "I8": "INT8", "U8": "UINT8", "BOOL": "BOOL",
}  # fmt: skip
"""Name of a dtype in safetensors -> name in ONNX."""
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS: dict[DType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NARROW = ("float16", "bfloat16")
Form = Literal["float", "int8", "int8_blocks", "int8_blocks64", "int4"]
"""How a quantized file stores a weight (N, K): as floats, or in one of the forms that `rounding` describes."""
FORMS: tuple[Form, ...] = get_args(Form)
BITS: Mapping[Form, int] = {"int8_blocks": 8, "int8_blocks64": 8, "int4": 4}
"""Bits of a number, in the forms that have a scale for each block."""
BLOCKS: Mapping[Form, int] = {"int8_blocks": 32, "int8_blocks64": 64, "int4": 32}
"""How many numbers share the scale of a block. Longer blocks are faster but less accurate (docs/LOG.md)."""
Forms = Mapping[str, Collection[Form]]
"""Name of a weight -> the forms that it is stored in; a weight that is not named is stored as floats alone."""
NO_FORMS: Forms = {}
Spec = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor in a file; dtypes have their names in safetensors."""
InFourBits = Iterable[tuple[str, "Rounded"]]
"""Every weight (N, K) that is stored in `int4`, once, with its name."""
FLOATS_ALONE: tuple[Form, ...] = ("float",)
BELOW = ".."
"""Joins the names of weights (N, K) that are stored as one, stacked along N: no state_dict name has an empty part."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The table of contents of a weights file: name -> (dtype, shape, offset in the file, bytes)."""

    name: str
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]

    @classmethod
    def open(cls, path: Path) -> WeightsFile:
        """Reads the header, and loads no weights.

        Raises:
            BuildFolderError: the path is not a regular file, or not a weights file.
        """
        if path.is_symlink() or not path.is_file():
            raise BuildFolderError(f"{path}: expected a regular file of weights; links are refused by ONNX tools")
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= path.stat().st_size else None
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise BuildFolderError(f"{path}: not a weights file, or damaged; delete it and build again")
        header.pop("__metadata__", None)
        entries = {}
        for name, item in header.items():
            begin, end = item["data_offsets"]
            entries[name] = (item["dtype"], tuple(item["shape"]), 8 + size + begin, end - begin)
        return cls(path.name, entries)

    def quantized_bytes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Weight -> bytes of its integers and scales, for the weights of `tensors` that this file quantizes. If it
        has a weight in several forms, the last by name counts, such as `int8_blocks` instead of `int8`.
        """
        sizes: dict[str, int] = {}
        for name, forms in forms_of(self.entries).items():
            for form in sorted(forms - {"float"}):  # int8_blocks comes after int8, and replaces its size.
                for part in name.split(BELOW):
                    stored = quantized_tensors(part, tuple(tensors[part].shape), form).values()
                    sizes[part] = sum(BYTES[kind] * math.prod(shape) for kind, shape in stored)
        return sizes


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by name.

    These include buffers that a state_dict leaves out (RoPE tables), so that no graph needs a copy of its own.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def quantized_tensors(name: str, shape: tuple[int, ...], form: Form) -> dict[str, Spec]:
    """Name -> (safetensors dtype, shape) of the tensors that a weight (N, K) becomes: integers, scales, and for `int4`
    zero points.
    """
    N, K = shape
    if form == "int8":
        return {f"{name}.int8": ("I8", (K, N)), f"{name}.int8_scale": ("F32", (N,))}
    blocks = -(-K // BLOCKS[form])
    whole = (N, blocks, BLOCKS[form] * BITS[form] // 8)
    tensors = {f"{name}.{form}": ("U8", whole), f"{name}.{form}_scale": ("F32", (N, blocks))}
    return tensors | {f"{name}.{form}_zero": ("U8", (N, -(-blocks // 2)))} if form == "int4" else tensors


def beyond_range(name: str, number: float, dtype: str, largest: float) -> LimitError:
    """The error for a weight with a number that a 16-bit dtype cannot hold."""
    return LimitError(
        f"{name}: contains {number:g}, beyond the largest {dtype} number {largest:g}; build this "
        "model in bfloat16 or float32"
    )


def is_of_quantized(name: str) -> bool:
    """Whether a tensor of this name holds the integers, the scales or the zero points of a quantized weight."""
    return name.rpartition(".")[2].removesuffix("_scale").removesuffix("_zero") in FORMS


def forms_of(names: Iterable[str]) -> dict[str, set[Form]]:
    """Weight -> the forms in which it is stored by itself, according to the names of the tensors of a file or graph."""
    result: dict[str, set[Form]] = {}
    for stored in names:
        name, _, kind = stored.rpartition(".")
        form = next((form for form in FORMS if kind == form), None)
        if form is not None:
            result.setdefault(name, set()).add(form)
        elif not is_of_quantized(stored):
            result.setdefault(stored, set()).add("float")
    # A weight that is stored together with others may have no form by itself.
    parts = [part for name in result if BELOW in name for part in name.split(BELOW)]
    return result | {part: result.get(part, set()) for part in parts}


Pieces = Iterable[tuple[str, memoryview]]
"""Bytes of tensors with their names. Those of one tensor come in order."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Holds the tensors that a weight becomes in one form, and a function that makes their bytes."""

    tensors: Mapping[str, Spec]
    pieces: Callable[[], Pieces]

    def digests(self) -> dict[str, str]:
        """Returns name -> SHA-256 of a tensor's bytes."""
        return _digests(self.pieces())


def _digests(pieces: Pieces, write: Callable[[str, memoryview], object] = lambda name, piece: None) -> dict[str, str]:
    """Returns name -> SHA-256 of a tensor's bytes, which are passed to `write` a piece at a time."""
    digests: dict[str, Any] = {}
    for name, piece in pieces:
        digests.setdefault(name, hashlib.sha256()).update(piece)
        write(name, piece)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _stored_tensors(tensors: Mapping[str, torch.Tensor], dtype: DType, forms: Forms) -> dict[tuple[str, Form], _Stored]:
    result: dict[tuple[str, Form], _Stored] = {}
    for name in (*tensors, *(name for name in forms if BELOW in name)):
        for form in forms.get(name, FLOATS_ALONE):
            if form == "float":
                kind = _kind(tensors[name], dtype)
                spec = {name: (kind, tuple(tensors[name].shape))}
                result[name, form] = _Stored(spec, partial(_plain_bytes, name, tensors[name], kind))
                continue
            parts = [tensors[part] for part in name.split(BELOW)]
            shape = (sum(map(len, parts)), *parts[0].shape[1:])
            specs = quantized_tensors(name, shape, form)
            result[name, form] = _Stored(specs, partial(_rounded_bytes, list(specs), parts, form))
    return result


def _kind(tensor: torch.Tensor, dtype: DType) -> str:
    """The dtype of a tensor in a file of this dtype, by its name in safetensors."""
    if tensor.is_floating_point():
        # A table in float64, such as angles, is not a weight: graphs read it as it is.
        return "F64" if tensor.dtype.itemsize == BYTES["F64"] and dtype not in NARROW else FLOATS.get(dtype, "F32")
    name = str(tensor.dtype).removeprefix("torch.")
    return "BOOL" if name == "bool" else name.replace("uint", "U").replace("int", "I")


def _plain_bytes(name: str, tensor: torch.Tensor, kind: str) -> Iterator[tuple[str, memoryview]]:
    """The bytes of a tensor, row-major and little-endian. Pages of a memory-mapped file are released after reading."""
    import torch

    floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    wanted = floats.get(kind, tensor.dtype)
    for piece in torch.split(tensor.detach().reshape(-1), PIECE):
        yield name, _bytes_of(piece.to(wanted).contiguous())
    let_go([tensor])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _rounded_bytes(names: Sequence[str], parts: Iterable[torch.Tensor], form: Form) -> Iterator[tuple[str, memoryview]]:
    """Yields the bytes of the tensors that weights become below each other. `names` are the names of these tensors."""
    from mod_export.graph.rounding import rounded

    for weight_NK in parts:
        yield from _with_names(names, rounded(weight_NK.detach(), form))
        let_go([weight_NK])


def _with_names(names: Sequence[str], weight: Rounded) -> Iterator[tuple[str, memoryview]]:
    tensors = [tensor for tensor in weight if tensor is not None]
    yield from zip(names, map(_bytes_of, tensors), strict=True)


def write_weights(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    dtype: DType,
    forms: Forms = NO_FORMS,
    in_four_bits: InFourBits | None = None,
) -> dict[str, str]:
    """Writes tensors a piece at a time, so that a larger model takes no more memory.

    Args:
        path: path of the file.
        tensors: tensors by their names in the state_dict.
        dtype: dtype of the file's floats. In a quantized file, everything that is not quantized is float32. Integer
            buffers are stored as they are, and so are float64 buffers in float32 and quantized files.
        forms: forms of the weights (N, K) that are quantized, see `quantized_tensors`.
        in_four_bits: the weights in `int4`, in any order; None rounds each to the nearest numbers.

    Returns:
        Name -> SHA-256 of the tensor's bytes as they were handed to the file.

    Raises:
        BuildFolderError: the file could not be written.
    """
    stored = _stored_tensors(tensors, dtype, forms)
    specs = {name: spec for each in stored.values() for name, spec in each.tensors.items()}
    # Wide dtypes come first, then names, as in the safetensors library, so that every tensor is aligned.
    specs = dict(sorted(specs.items(), key=lambda item: (-BYTES[item[1][0]], item[0])))
    header, next_byte = _header(specs)
    # Weights that are rounded elsewhere come last, as they are rounded.
    elsewhere = {key for key in stored if in_four_bits is not None and key[1] == "int4"}
    late = {name: list(stored[name, form].tensors) for name, form in elsewhere}
    early = (each.pieces() for key, each in stored.items() if key not in elsewhere)
    try:
        with path.open("wb") as file:
            file.write(header)

            def write(name: str, piece: memoryview) -> None:
                file.seek(next_byte[name])
                next_byte[name] += file.write(piece)

            digests = _digests(chain(chain.from_iterable(early), _complete(late, in_four_bits or ())), write)
    except OSError as error:
        raise BuildFolderError(f"{path}: the weights could not be written ({error})") from error
    return {name: digests[name] for name in specs}


def _complete(late: Mapping[str, Sequence[str]], in_four_bits: InFourBits) -> Iterator[tuple[str, memoryview]]:
    """Yields the bytes of weights as soon as all of their parts are rounded. `late` has the names of their tensors."""
    left = {name: name.split(BELOW) for name in late}
    waiting: dict[str, Rounded] = {}
    for weight, tensors in in_four_bits:
        waiting[weight] = tensors
        for name in [name for name, parts in left.items() if waiting.keys() >= set(parts)]:
            for part in left.pop(name):
                yield from _with_names(late[name], waiting[part])
        needed = set(chain(*left.values()))
        waiting = {part: each for part, each in waiting.items() if part in needed}


def _header(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """Returns the header by https://huggingface.co/docs/safetensors (the length of the table of contents, and the
    table), and where in the file each tensor begins.
    """
    end = 0
    begins, table = {}, {}
    for name, (dtype, shape) in specs.items():
        begins[name], end = end, end + BYTES[dtype] * math.prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def digests_of_tensors(tensors: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, str]:
    """The digests that `write_weights` would return for these tensors if none is quantized."""
    stored = _stored_tensors(tensors, dtype, NO_FORMS).values()
    return _digests(chain.from_iterable(each.pieces() for each in stored))


def digests_expected(path: Path, tensors: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, str]:
    """The digests that the tensors of a file have if they are a checkpoint's. A weight can be rounded to `int4` in
    several ways, so the file's own digests count if its numbers are within the limits of `rounding`.

    Raises:
        BuildFolderError: the file is not a weights file.
    """
    import torch

    file = WeightsFile.open(path)
    expected: dict[str, str] = {}
    for (name, form), stored in _stored_tensors(tensors, dtype, forms_of(file.entries)).items():
        in_file = {}
        if form == "int4":
            weight_NK = torch.cat([tensors[part].detach() for part in name.split(BELOW)])
            in_file = _digests_in_four_bits(path, file, stored.tensors, weight_NK)
        expected |= in_file or stored.digests()
    return expected


def _digests_in_four_bits(
    path: Path, file: WeightsFile, specs: Mapping[str, Spec], weight_NK: torch.Tensor
) -> dict[str, str]:
    """Returns the digests of the tensors of a weight in `int4`; none if they cannot come from this weight."""
    import torch

    from mod_export.graph.rounding import Rounded, is_rounded

    dtypes = {"U8": torch.uint8, "F32": torch.float32}
    found, digests = [], {}
    for name, spec in specs.items():
        if name not in file.entries or file.entries[name][:2] != spec:
            return {}
        _, shape, offset, length = file.entries[name]
        data = _part_of(path, offset, length)
        if len(data) != BYTES[spec[0]] * math.prod(shape):  # The file is shorter than its header says.
            return {}
        found.append(torch.frombuffer(bytearray(data), dtype=dtypes[spec[0]]).reshape(shape))
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests if is_rounded(Rounded(*found), weight_NK) else {}


def _part_of(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def digests_of_file(path: Path) -> dict[str, str]:
    """The digest of every tensor of a weights file, as it is stored.

    Raises:
        BuildFolderError: the file is not a weights file.
    """
    entries = WeightsFile.open(path).entries.items()
    return {
        name: hashlib.sha256(_part_of(path, offset, length)).hexdigest() for name, (_, _, offset, length) in entries
    }


def is_in_graph(dtype: ir.DataType, shape: Sequence[int]) -> bool:
    """Whether a constant of the model is stored in the graph itself, and not in a file: ONNX Runtime infers shapes from
    indices and sizes, and reads no file for that.
    """
    return (dtype.is_integer() or dtype.name == "BOOL") and math.prod(shape) <= MOST_SIZES


def bind_weights(model: ir.Model, files: Iterable[WeightsFile], folder: Path) -> int:
    """Points each initializer that is a weight at its bytes in the first file that has it in the initializer's dtype,
    or copies its value into the graph (`is_in_graph`).

    Returns:
        The number of these initializers.
    """
    import onnx_ir as ir

    located = {
        (name, ir.DataType[ONNX_TYPES[dtype]]): (file.name, shape, offset, length)
        for file in reversed(list(files))
        for name, (dtype, shape, offset, length) in file.entries.items()
    }
    bound = 0
    for name, value in model.graph.initializers.items():
        entry = located.get((name, value.dtype)) if value.dtype is not None else None
        if entry is None or value.dtype is None:
            continue
        location, shape, offset, length = entry
        stored = ir.ExternalTensor(
            location, offset, length, value.dtype, shape=ir.Shape(shape), name=name, base_dir=folder
        )
        in_graph = is_in_graph(value.dtype, shape)
        value.const_value = ir.tensor(stored.numpy().copy(), name=name) if in_graph else stored
        bound += 1
    return bound
