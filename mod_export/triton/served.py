"""What models that run mod-export inside of Triton have in common: where the build folder is, and their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = "build"
"""The build folder, in the version folder of a model: Triton takes no folder there for a model."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a model's config.pbtxt says for its code.

    Attributes:
        folder: the build folder.
        target: whose engines run.
        dtype: of the engines.
        threads: of an engine inside one operator; None is every physical core.
        max_queue: texts that may wait for a row.
    """

    folder: Path
    target: str
    dtype: str
    threads: int | None
    max_queue: int


def parameters_of(target: str, dtype: str, threads: int | None, max_queue: int) -> dict[str, str]:
    """The parameters that `settings_of` reads."""
    given = {"target": target, "dtype": dtype, "max_queue": str(max_queue)}
    return given if threads is None else {**given, "threads": str(threads)}


def settings_of(args: Mapping[str, str]) -> Settings:
    """The settings in what Triton gives to `initialize`."""
    parameters = json.loads(args["model_config"])["parameters"]
    given = {name: value["string_value"] for name, value in parameters.items()}
    return Settings(
        folder=Path(args["model_repository"]) / args["model_version"] / FOLDER,
        target=given["target"],
        dtype=given["dtype"],
        threads=int(given["threads"]) if "threads" in given else None,
        max_queue=int(given["max_queue"]),
    )
