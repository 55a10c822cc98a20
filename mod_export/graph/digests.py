"""Fingerprints of tensors: proof that a weights file, or a graph, holds the checkpoint's numbers and no others."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.artifacts import DType
from mod_export.graph.weights import stored_tensors
from mod_export.graph.weights_file import WeightsFile

if TYPE_CHECKING:
    import torch

__all__ = ["digests_of_file", "digests_of_tensors"]


def digests_of_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: DType, quantized: Collection[str] = ()
) -> dict[str, str]:
    """Name -> SHA-256 of a tensor's bytes as a weights file of `dtype` holds it, see `weights.stored_tensors`."""
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
