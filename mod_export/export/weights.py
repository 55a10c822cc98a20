"""How weights are stored: in one file for every graph of a dtype, as floats or in eight or four bits.

The format is safetensors: a header, and then the bytes of the tensors. ONNX external data is (file, offset, length), so
one plain file serves ONNX Runtime, TensorRT's parser, AOTInductor and any reader of `safetensors`, and no bucket adds a
copy. Names are those of the state_dict. The fingerprints prove that a file, or a graph, holds the checkpoint's numbers
and no others. A server reads the header with this module, so it loads torch and onnx only where it needs them.

int8   q (K, N) = round(w / scale), scale (N,) = largest |w_2i| + |w_2i+1| of the column / 127. Processors without VNNI
       multiply two neighbours by unsigned bytes and add the products in 16 bits, where they saturate beyond 32,767
       (Intel, vpmaddubsw). With this scale the two are at most 128 together, and 255 x 128 fits: the same artefact
       gives the same numbers everywhere, with a third of a bit more than the usual seven.
int4   q (N, K / 32, 16) two numbers to a byte, the first in the low half, of value q - 8; scale (N, K / 32) = the w of
       largest |w| in the block / -8, so that all sixteen numbers are used. The layout of ONNX Runtime's MatMulNBits.

Shape legend: a weight is stored as (N, K); N columns of the result, K what is summed over.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.environment import let_go
from mod_export.errors import BuildFolderError
from mod_export.types import QUANTIZED, DType

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch


ALIGNMENT = 8
PIECE = 2**22
"""Numbers that are cast and written at a time."""
ONNX_TYPES = {
    "F64": "DOUBLE", "F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16", "I64": "INT64", "I32": "INT32",
    "I16": "INT16", "I8": "INT8", "U8": "UINT8", "BOOL": "BOOL",
}  # fmt: skip
"""Name of a dtype in safetensors -> in ONNX."""
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS: dict[DType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NARROW = ("float16", "bfloat16")
BLOCK = 32
LARGEST_INT8 = 127
ZERO_INT4 = 8


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The table of contents of a weights file: name -> (dtype, shape, offset in the file, bytes)."""

    name: str
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]

    @classmethod
    def open(cls, path: Path) -> WeightsFile:
        """Reads the header only; nothing of the weights is loaded.

        Raises:
            BuildFolderError: not a regular file, or not a weights file.
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


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by name.

    Also the buffers that a state_dict leaves out (RoPE tables), so that no graph needs a copy of its own.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def quantized_tensors(name: str, shape: tuple[int, ...], dtype: DType) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (safetensors dtype, shape) of what a weight (N, K) becomes: the whole numbers, then their scales."""
    N, K = shape
    if dtype == "int8":
        return {f"{name}.int8": ("I8", (K, N)), f"{name}.int8_scale": ("F32", (N,))}
    blocks = -(-K // BLOCK)
    return {f"{name}.int4": ("U8", (N, blocks, BLOCK // 2)), f"{name}.int4_scale": ("F32", (N, blocks))}


def source_of(stored: str) -> str | None:
    """The weight that a stored tensor of whole numbers was made from; None for the name of anything else."""
    name, _, kind = stored.rpartition(".")
    return name if kind in QUANTIZED else None


def quantize(weight_NK: torch.Tensor, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as whole numbers and scales, of the types and shapes of `quantized_tensors`."""
    import torch

    def not_zero(scale: torch.Tensor) -> torch.Tensor:
        return torch.where(scale != 0, scale, 1.0)  # Where all weights are zero nothing is divided by zero.

    N, K = weight_NK.shape
    if dtype == "int8":
        pairs_NPK = torch.nn.functional.pad(weight_NK.float(), (0, K % 2)).reshape(N, -1, 2)
        scale_N1 = not_zero(pairs_NPK.abs().sum(-1).amax(-1, keepdim=True) / LARGEST_INT8)
        return torch.round(weight_NK.float() / scale_N1).to(torch.int8).T.contiguous(), scale_N1[:, 0].contiguous()
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -K % BLOCK))
    blocks_NMK = padded_NK.reshape(N, -1, BLOCK)
    largest_NM1 = blocks_NMK.gather(-1, blocks_NMK.abs().argmax(-1, keepdim=True))
    scale_NM1 = not_zero(largest_NM1 / -ZERO_INT4)
    whole_NMK = (torch.round(blocks_NMK / scale_NM1) + ZERO_INT4).clamp(0, 2 * ZERO_INT4 - 1).to(torch.uint8)
    return whole_NMK[..., 0::2] | whole_NMK[..., 1::2] << 4, scale_NM1[..., 0].contiguous()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as a weights file holds it: its type and shape, and what makes its bytes when they are written."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]

    def digest(self, write: Callable[[memoryview], object] = lambda piece: None) -> str:
        """SHA-256 of its bytes, which are written a piece at a time."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
            write(piece)
        return digest.hexdigest()


def _stored_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str]
) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name not in quantized:
            kind = _kind(tensor, dtype)
            found[name] = _Stored(kind, shape, partial(_plain_bytes, tensor, kind))
            continue
        for index, (part, (kind, size)) in enumerate(quantized_tensors(name, shape, dtype).items()):
            found[part] = _Stored(kind, size, partial(_quantized_bytes, tensor, dtype, index))
    return found


def _kind(tensor: torch.Tensor, dtype: DType) -> str:
    """The dtype that a tensor has in a file of this dtype, in safetensors' words."""
    if tensor.is_floating_point():
        # A table in float64, such as angles, is not what a model's weights are: graphs read it as it is.
        return "F64" if tensor.dtype.itemsize == BYTES["F64"] and dtype not in NARROW else FLOATS.get(dtype, "F32")
    name = str(tensor.dtype).removeprefix("torch.")
    return "BOOL" if name == "bool" else name.replace("uint", "U").replace("int", "I")


def _plain_bytes(tensor: torch.Tensor, kind: str) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major and little-endian; what was read of a memory-mapped file is let go after it."""
    import torch

    floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    wanted = floats.get(kind, tensor.dtype)
    for piece in torch.split(tensor.detach().reshape(-1), PIECE):
        yield piece.to(wanted).contiguous().view(torch.uint8).numpy().data
    let_go([tensor])


def _quantized_bytes(weight_NK: torch.Tensor, dtype: DType, index: int) -> Iterator[memoryview]:
    import torch

    # Whole numbers and scales are written one after the other, so a weight is rounded twice and never kept.
    yield quantize(weight_NK.detach(), dtype)[index].reshape(-1).view(torch.uint8).numpy().data
    let_go([weight_NK])


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, str]:
    """Writes tensors a piece at a time, so that it takes no more memory for a larger model.

    Args:
        path: of the file.
        tensors: by their names in the state_dict.
        dtype: of the file's floats. In one of whole numbers everything that is not quantized is float32. Buffers of
            whole numbers are stored as they are, and those of float64 in files of float32 and of whole numbers.
        quantized: names of the weights (N, K) that become whole numbers and scales, see `quantized_tensors`.

    Returns:
        Name -> SHA-256 of the tensor's bytes as they were handed to the file.

    Raises:
        BuildFolderError: the file could not be written.
    """
    # Wide numbers first, then by name: the order of the safetensors library, and every tensor is aligned.
    found = _stored_tensors(tensors, dtype, quantized)
    stored = dict(sorted(found.items(), key=lambda item: (-BYTES[item[1].dtype], item[0])))
    try:
        with path.open("wb") as file:
            file.write(_header(stored))
            return {name: tensor.digest(file.write) for name, tensor in stored.items()}
    except OSError as error:
        raise BuildFolderError(f"{path}: the weights could not be written ({error})") from error


def _header(tensors: Mapping[str, _Stored]) -> bytes:
    """https://huggingface.co/docs/safetensors: the length of the table of contents, and the table."""
    end = 0
    table = {}
    for name, tensor in tensors.items():
        begin, end = end, end + BYTES[tensor.dtype] * math.prod(tensor.shape)
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def digests_of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, str]:
    """What `write_weights` returns, without writing."""
    return {name: stored.digest() for name, stored in _stored_tensors(tensors, dtype, quantized).items()}


def digests_of_file(path: Path) -> dict[str, str]:
    """The same for every tensor of a weights file, as it is stored.

    Raises:
        BuildFolderError: not a weights file.
    """
    found, entries = {}, WeightsFile.open(path).entries
    with path.open("rb") as file:
        for name, (_, _, offset, length) in entries.items():
            file.seek(offset)
            found[name] = hashlib.sha256(file.read(length)).hexdigest()
    return found


def files_for(dtype: DType) -> tuple[DType, ...]:
    """The weights files that a graph of this dtype points into. One of whole numbers holds all that it needs."""
    return (dtype,) if dtype in QUANTIZED or dtype == "float32" else (dtype, "float32")


def bind_weights(model: ir.Model, files: Iterable[WeightsFile], folder: Path) -> int:
    """Points every initializer that is a weight at its bytes in the first file that has it in the initializer's dtype.

    Returns:
        How many.
    """
    import onnx_ir as ir

    located = {
        (name, ir.DataType[ONNX_TYPES[dtype]]): (file.name, shape, offset, length)
        for file in reversed(list(files))
        for name, (dtype, shape, offset, length) in file.entries.items()
    }
    bound = 0
    for name, value in model.graph.initializers.items():
        found = located.get((name, value.dtype)) if value.dtype is not None else None
        if found is None or value.dtype is None:
            continue
        location, shape, offset, length = found
        value.const_value = ir.ExternalTensor(
            location, offset, length, value.dtype, shape=ir.Shape(shape), name=name, base_dir=folder
        )
        bound += 1
    return bound
