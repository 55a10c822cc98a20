"""Files of a build folder from which a captured model is restored, and its samples. Reading them needs no PyTorch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mod_export.errors import BuildFolderError
from mod_export.types import Bucket, ModelKind

PROGRAM = "program"
"""Architecture of a model that was captured (`model/programs.py`); no package provides it."""
ARRAYS = ("samples", "constants")
"""Archives of arrays. In `samples`, `b1s512/ids.0` is the input `ids` of the first sample of that bucket. `constants`
holds the values that graphs read besides weights and inputs; one that differs between buckets is `b1s512.name`."""


def program_files(kind: ModelKind, buckets: Iterable[str]) -> list[str]:
    """Returns the names of all these files, relative to the folder."""
    return [*(graph_file(kind, name) for name in buckets), *(arrays_file(kind, name) for name in ARRAYS)]


def graph_file(kind: ModelKind, bucket: str) -> str:
    """Returns the file with the graph of a bucket, in the form of `models/model.json` of a .pt2."""
    return f"programs/{kind}-{bucket}.json"


def arrays_file(kind: ModelKind, name: str) -> str:
    """Returns the NumPy archive for one of ARRAYS."""
    return f"programs/{kind}-{name}.npz"


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an npz for `numpy.load`. `numpy.savez` does not fit: it takes names as keyword arguments, which can clash
    with its own, and writes the time of day.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays that `write_arrays` wrote.

    Raises:
        BuildFolderError: the file is missing or damaged.
    """
    try:
        # Opened here, because numpy leaves the file open if it is not an archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return dict(archive)
    except Exception as error:  # Any exception, because a file that was changed may contain anything.
        raise BuildFolderError(f"{path}: missing or damaged ({error}); build again") from error


def first_sample(root: Path, bucket: Bucket) -> dict[str, np.ndarray]:
    """Returns the inputs of one run of a bucket, by name.

    Raises:
        BuildFolderError: the file is missing or damaged.
    """
    prefix = f"{bucket.name}/"
    return {
        key.removeprefix(prefix).removesuffix(".0"): array
        for key, array in read_arrays(root / arrays_file("mod", "samples")).items()
        if key.startswith(prefix) and key.endswith(".0")
    }
