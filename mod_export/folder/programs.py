"""The files of a build folder that a captured model is restored from, and its samples, which need no PyTorch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mod_export.errors import BuildFolderError
from mod_export.types import Bucket, ModelKind

PROGRAM = "program"
"""The architecture of a model that is captured already (`model/programs.py`), which no package provides."""
ARRAYS = ("samples", "constants")
"""`b1s512/ids.0` is the input `ids` of the first sample of that bucket; constants are what graphs read beside weights
and inputs, `b1s512.name` where buckets differ."""


def program_files(kind: ModelKind, buckets: Iterable[str]) -> list[str]:
    """All of them, relative to the folder."""
    return [*(graph_file(kind, name) for name in buckets), *(arrays_file(kind, name) for name in ARRAYS)]


def graph_file(kind: ModelKind, bucket: str) -> str:
    """The graph of a bucket, as `models/model.json` of a .pt2."""
    return f"programs/{kind}-{bucket}.json"


def arrays_file(kind: ModelKind, name: str) -> str:
    """A NumPy archive of one of ARRAYS."""
    return f"programs/{kind}-{name}.npz"


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz, for `numpy.load`. Not by `numpy.savez`, which takes names as keywords and has some of its own, and writes
    the time of day.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `write_arrays` has written.

    Raises:
        BuildFolderError: the file is missing or damaged.
    """
    try:
        # Opened here, because numpy leaves the file open where it is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            return dict(found)
    except Exception as error:  # Of any type: a file that was changed may be anything.
        raise BuildFolderError(f"{path}: missing or damaged ({error}); build again") from error


def first_sample(root: Path, bucket: Bucket) -> dict[str, np.ndarray]:
    """Inputs of one run of a bucket, by name.

    Raises:
        BuildFolderError: the file is missing or damaged.
    """
    prefix = f"{bucket.name}/"
    return {
        key.removeprefix(prefix).removesuffix(".0"): array
        for key, array in read_arrays(root / arrays_file("mod", "samples")).items()
        if key.startswith(prefix) and key.endswith(".0")
    }
