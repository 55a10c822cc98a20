"""Fingerprints of tensors: proof that a weights file, or a graph, holds the checkpoint's numbers and no others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.artifacts import DType
from mod_export.graph.weights import WeightsFile

if TYPE_CHECKING:
    import torch

__all__ = ["digests_of_file", "digests_of_tensors"]


def digests_of_tensors(tensors: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, str]:
    """Name -> SHA-256 of the tensor's bytes, row-major and little-endian, once it is cast to `dtype`."""
    import torch

    wanted = getattr(torch, dtype)
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to(wanted).reshape(-1)
        found[name] = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
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
