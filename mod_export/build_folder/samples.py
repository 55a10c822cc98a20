"""Inputs that a build folder holds for models that read other things than token ids."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from mod_export.errors import BuildFolderError
from mod_export.types import Bucket

SAMPLES = "programs/mod-samples.npz"
"""Relative to the build folder. `b1s512/ids.0` is the input `ids` of the first sample of that bucket."""


def first_sample(root: Path, bucket: Bucket) -> dict[str, np.ndarray]:
    """Inputs of one run of a bucket, by name. Needs no PyTorch.

    Raises:
        BuildFolderError: the file is missing or damaged.
    """
    path, prefix = root / SAMPLES, f"{bucket.name}/"
    try:
        with np.load(path, allow_pickle=False) as found:
            return {
                key.removeprefix(prefix).removesuffix(".0"): found[key]
                for key in found.files
                if key.startswith(prefix) and key.endswith(".0")
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BuildFolderError(f"{path}: missing or damaged ({error}); build again") from error
