"""One file of weights for every graph of a dtype: the safetensors format, which ONNX can point into.

ONNX external data is (file, offset, length), and a safetensors file is a header and then the tensors' bytes, so one
plain file serves ONNX Runtime, TensorRT's parser, AOTInductor and anybody's `safetensors` reader, and no bucket adds a
copy. Names are those of the state_dict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from mod_export.artifacts import DType
from mod_export.errors import BuildFolderError

if TYPE_CHECKING:
    import torch

__all__ = ["WeightsFile", "bind_weights", "state_of", "write_weights"]

ONNX_DTYPES: dict[str, ir.DataType] = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
}


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by name.

    Also the buffers that a state_dict leaves out (RoPE tables), so that no graph needs a copy of its own.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], dtype: DType) -> None:
    """Writes every tensor in `dtype`.

    Raises:
        BuildFolderError: the file could not be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    wanted = getattr(torch, dtype)
    try:
        save_file({name: tensor.detach().to(wanted).contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise BuildFolderError(f"{path}: the weights could not be written ({error})") from error


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
        base = 8 + size
        return cls(
            path.name,
            {
                name: (item["dtype"], tuple(item["shape"]), base + item["data_offsets"][0], _length(item))
                for name, item in header.items()
            },
        )


def _length(item: Mapping[str, list[int]]) -> int:
    begin, end = item["data_offsets"]
    return end - begin


def bind_weights(model: ir.Model, files: Mapping[ir.DataType, WeightsFile], folder: Path) -> int:
    """Points every initializer that is a weight at its bytes in the weights file of its dtype; returns how many."""
    bound = 0
    for name, value in model.graph.initializers.items():
        file = files.get(value.dtype) if value.dtype is not None else None
        if file is None or name not in file.entries:
            continue
        dtype, shape, offset, length = file.entries[name]
        value.const_value = ir.ExternalTensor(
            file.name, offset, length, ONNX_DTYPES[dtype], shape=ir.Shape(shape), name=name, base_dir=folder
        )
        bound += 1
    return bound
