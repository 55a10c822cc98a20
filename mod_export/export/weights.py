"""One file of weights for every graph of a dtype: how it is written, how graphs point into it, and its fingerprints.

The format is safetensors: a header, and then the bytes of the tensors. ONNX external data is (file, offset, length), so
one plain file serves ONNX Runtime, TensorRT's parser, AOTInductor and any reader of `safetensors`, and no bucket adds a
copy. Names are those of the state_dict. The fingerprints prove that a file, or a graph, holds the checkpoint's numbers
and no others.
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

import onnx_ir as ir

from mod_export.environment import let_go
from mod_export.errors import BuildFolderError, CheckpointError
from mod_export.export.quantize import quantize, quantized_tensors
from mod_export.export.weights_file import WeightsFile
from mod_export.sources.protocol import ExportableModel
from mod_export.types import QUANTIZED, DType

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOATS",
    "ONNX_DTYPES",
    "Stored",
    "bind_weights",
    "digests_of_file",
    "digests_of_tensors",
    "files_for",
    "state_of",
    "stored_state",
    "stored_tensors",
    "write_weights",
]

ALIGNMENT = 8
PIECE = 2**22
"""Numbers that are cast and written at a time."""
ONNX_DTYPES: dict[str, ir.DataType] = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
}
NAMES = {kind: name for name, kind in ONNX_DTYPES.items()}
FLOATS: dict[DType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by name.

    Also the buffers that a state_dict leaves out (RoPE tables), so that no graph needs a copy of its own.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def stored_state(loaded: ExportableModel) -> dict[str, torch.Tensor]:
    """The same of a model whose module is not made: weights as the checkpoint stores them, and the other buffers.

    Raises:
        CheckpointError: the module has a parameter that the checkpoint holds nothing for.
    """
    state = {name: loaded.weights.get(name, tensor) for name, tensor in state_of(loaded.skeleton()).items()}
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    if missing:
        raise CheckpointError(f"the checkpoint holds no value for {', '.join(missing[:3])}")
    return state


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a weights file holds it: its type and shape, and what makes its bytes when they are written."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]


def stored_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, Stored]:
    """Name -> tensor as a weights file of `dtype` holds it.

    Args:
        tensors: by their names in the state_dict.
        dtype: of the file. In one of whole numbers everything that is not quantized is float32.
        quantized: names of the weights (N, K) that become whole numbers and scales, see `quantize.quantized_tensors`.
    """
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name in quantized:
            parts = quantized_tensors(name, tuple(tensor.shape), dtype).items()
            for index, (part, (kind, shape)) in enumerate(parts):
                found[part] = Stored(kind, shape, partial(_quantized_bytes, tensor, dtype, index))
        else:
            kind = FLOATS.get(dtype, ir.DataType.FLOAT)
            found[name] = Stored(kind, tuple(tensor.shape), partial(_float_bytes, tensor, kind))
    return found


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, str]:
    """Writes tensors a piece at a time, so that it takes no more memory for a larger model.

    Args:
        path: of the file.
        tensors: by their names in the state_dict.
        dtype: of the file.
        quantized: what becomes whole numbers, see `stored_tensors`.

    Returns:
        Name -> SHA-256 of the tensor's bytes as they were handed to the file.

    Raises:
        BuildFolderError: the file could not be written.
    """
    digests = {}
    # Wide numbers first, then by name: the order of the safetensors library, and every tensor is aligned.
    found = stored_tensors(tensors, dtype, quantized)
    stored = dict(sorted(found.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    try:
        with path.open("wb") as file:
            file.write(_header(stored))
            for name, tensor in stored.items():
                digest = hashlib.sha256()
                for piece in tensor.pieces():
                    digest.update(piece)
                    file.write(piece)
                digests[name] = digest.hexdigest()
    except OSError as error:
        raise BuildFolderError(f"{path}: the weights could not be written ({error})") from error
    return digests


def _header(tensors: Mapping[str, Stored]) -> bytes:
    """https://huggingface.co/docs/safetensors: the length of the table of contents, and the table."""
    end = 0
    table = {}
    for name, tensor in tensors.items():
        begin, end = end, end + int(tensor.dtype.itemsize) * math.prod(tensor.shape)
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _float_bytes(tensor: torch.Tensor, dtype: ir.DataType) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major and little-endian; what was read of a memory-mapped file is let go after it."""
    import torch

    wanted = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}.get(dtype, torch.float32)
    for piece in torch.split(tensor.detach().reshape(-1), PIECE):
        yield piece.to(wanted).contiguous().view(torch.uint8).numpy().data
    let_go([tensor])


def _quantized_bytes(weight_NK: torch.Tensor, dtype: DType, index: int) -> Iterator[memoryview]:
    import torch

    # Whole numbers and scales are written one after the other, so a weight is rounded twice and never kept.
    yield quantize(weight_NK.detach(), dtype)[index].reshape(-1).view(torch.uint8).numpy().data
    let_go([weight_NK])


def files_for(dtype: DType) -> tuple[DType, ...]:
    """The weights files that a graph of this dtype points into. One of whole numbers holds all that it needs."""
    return (dtype,) if dtype in QUANTIZED or dtype == "float32" else (dtype, "float32")


def bind_weights(model: ir.Model, files: Iterable[WeightsFile], folder: Path) -> int:
    """Points every initializer that is a weight at its bytes in the first file that has it in the initializer's dtype.

    Returns:
        How many.
    """
    located = {
        (name, ONNX_DTYPES[entry[0]]): (file.name, *entry)
        for file in reversed(list(files))
        for name, entry in file.entries.items()
    }
    bound = 0
    for name, value in model.graph.initializers.items():
        found = located.get((name, value.dtype)) if value.dtype is not None else None
        if found is None:
            continue
        location, dtype, shape, offset, length = found
        value.const_value = ir.ExternalTensor(
            location, offset, length, ONNX_DTYPES[dtype], shape=ir.Shape(shape), name=name, base_dir=folder
        )
        bound += 1
    return bound


def digests_of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, str]:
    """Name -> SHA-256 of a tensor's bytes as a weights file of `dtype` holds it, see `stored_tensors`."""
    found = {}
    for name, stored in stored_tensors(tensors, dtype, quantized).items():
        digest = hashlib.sha256()
        for piece in stored.pieces():
            digest.update(piece)
        found[name] = digest.hexdigest()
    return found


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
