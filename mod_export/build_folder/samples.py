"""Inputs that a build folder holds of a model that reads other things than token ids: of each bucket several sets.

A NumPy archive, so that a benchmark needs no PyTorch.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mod_export.errors import BuildFolderError
from mod_export.types import Bucket

SAMPLES = "programs/samples.npz"
"""Relative to the build folder."""
Samples = Mapping[Bucket, Sequence[Mapping[str, np.ndarray]]]


def write_samples(path: Path, samples: Samples) -> None:
    """Writes sets of inputs by name, in the order of the module's arguments."""
    arrays = {
        f"{bucket.name}/{n}/{name}": array
        for bucket, many in samples.items()
        for n, feeds in enumerate(many)
        for name, array in feeds.items()
    }
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_samples(path: Path) -> dict[Bucket, list[dict[str, np.ndarray]]]:
    """The same as they were written.

    Raises:
        BuildFolderError: missing, or damaged.
    """
    found: dict[Bucket, list[dict[str, np.ndarray]]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for key in archive.files:
                bucket, n, name = key.split("/", 2)
                many = found.setdefault(Bucket.named(bucket), [])
                many += [{} for _ in range(int(n) + 1 - len(many))]
                many[int(n)][name] = archive[key]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BuildFolderError(f"{path}: cannot be read ({error}); build again") from error
    return found
