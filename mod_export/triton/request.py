"""The request for a model repository, and the checks before anything is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mod_export.errors import UsageError
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.runtime.deployment import threads_to_use
from mod_export.serve import MAX_QUEUE

Forward = Literal["python", "onnxruntime", "tensorrt"]
VERSION = "1"
"""Name of the single version folder of every model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryRequest:
    """The options of a model repository.

    Attributes:
        folder: the build folder.
        manifest: manifest of the build folder.
        name: name of the model that runs whole rows; names of the other models begin with it.
        forward: Triton backend that runs whole rows.
        target: target of the engines that the Python models run; None selects the fastest that runs here.
        dtype: dtype of those engines, or of the plans if `forward` is `tensorrt`.
        threads: threads of an engine inside one operator; None uses every physical core.
        max_queue: how many requests may wait for a model.
        instances: number of copies of each model.
    """

    folder: Path
    manifest: Manifest
    name: str
    forward: Forward
    target: str | None
    dtype: str | None
    threads: int | None
    max_queue: int
    instances: int


def read_request(
    folder: Path,
    *,
    forward: Forward = "python",
    name: str | None = None,
    target: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    max_queue: int = MAX_QUEUE,
    instances: int = 1,
) -> RepositoryRequest:
    """Opens a build folder, and checks the options.

    The arguments are the attributes of `RepositoryRequest`; `name` is by default the name of the model.

    Raises:
        BuildFolderError: not a finished build folder.
        UsageError: an argument is out of range.
    """
    manifest = open_folder(folder, verify=False)
    name = manifest.models["mod"].name if name is None else name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name: got {name!r}, expected at most 100 letters, digits, '.', '_' and '-', the first of them a letter "
            "or digit, as it becomes a folder and part of URLs; give another one with --name"
        )
    threads_to_use(threads)
    for option, value in (("--max-queue", max_queue), ("--instances", instances)):
        if value < 1:
            raise UsageError(f"{option}: expected a whole number of at least 1, got {value}")
    return RepositoryRequest(
        folder=folder, manifest=manifest, name=name, forward=forward, target=target, dtype=dtype, threads=threads,
        max_queue=max_queue, instances=instances,
    )  # fmt: skip
