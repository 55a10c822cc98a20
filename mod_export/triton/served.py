"""Shared by models that run mod-export inside Triton: the place of the build folder, and settings in config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = "build"
"""Name of the build folder inside the version folder of a model, where Triton does not look for models."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that a model's code reads from its config.pbtxt.

    Attributes:
        folder: the build folder.
        target: target of the engines.
        dtype: dtype of the engines.
        threads: threads of an engine inside one operator; None uses every physical core.
        max_queue: how many texts may wait for a row.
    """

    folder: Path
    target: str
    dtype: str
    threads: int | None
    max_queue: int


def parameters_of(target: str, dtype: str, threads: int | None, max_queue: int) -> dict[str, str]:
    """Returns the parameters of config.pbtxt that `settings_of` reads."""
    parameters = {"target": target, "dtype": dtype, "max_queue": str(max_queue)}
    return parameters if threads is None else {**parameters, "threads": str(threads)}


def settings_of(args: Mapping[str, str]) -> Settings:
    """Reads the settings from the arguments that Triton passes to `initialize`."""
    parameters = json.loads(args["model_config"])["parameters"]
    values = {name: value["string_value"] for name, value in parameters.items()}
    return Settings(
        folder=Path(args["model_repository"]) / args["model_version"] / FOLDER,
        target=values["target"],
        dtype=values["dtype"],
        threads=int(values["threads"]) if "threads" in values else None,
        max_queue=int(values["max_queue"]),
    )
