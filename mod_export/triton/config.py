"""config.pbtxt: the description of a model for Triton, as values and as text; and the settings that its code reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mod_export.folder.ports import TensorPort
from mod_export.serve import MAX_WAIT_S

FOLDER = "build"
"""Name of the build folder inside the version folder of a model, where Triton does not look for models."""
QUEUE_SECONDS = int(MAX_WAIT_S)
"""How many seconds a request may wait in Triton's queue, and a text for a row, before it is refused."""


@dataclass(frozen=True, slots=True)
class Warmup:
    """A request that Triton sends to a model before it reports the model as ready.

    Attributes:
        name: name in the log.
        zeros: inputs filled with zeros; their dims are the shapes of the request.
        read: inputs that are read from the file of their name in the model's folder `warmup`.
    """

    name: str
    zeros: tuple[TensorPort, ...]
    read: tuple[TensorPort, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonModel:
    """A model of a repository.

    Attributes:
        name: name of its folder, also used in URLs.
        about: one line about the model, for readers of config.pbtxt.
        backend: `python`, `onnxruntime` or `tensorrt`.
        inputs: inputs of a request.
        outputs: outputs of a response.
        files: path in its folder -> the file to place there, or its content.
        parameters: text values that its code or backend reads.
        instances: number of copies that run.
        gpu: whether the copies run on GPUs.
        max_queue: how many requests may wait.
        decoupled: whether a request may have any number of responses.
        warmups: requests that run before the model is ready.
        plans: compute capability of a GPU, such as 8.9 -> file in the version folder; empty if one file serves all.
    """

    name: str
    about: str
    backend: str
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    files: Mapping[str, Path | bytes]
    parameters: Mapping[str, str] = field(default_factory=dict)
    instances: int = 1
    gpu: bool = False
    max_queue: int
    decoupled: bool = False
    warmups: tuple[Warmup, ...] = ()
    plans: Mapping[str, str] = field(default_factory=dict)


def config_text(model: TritonModel) -> str:
    """Returns the text of a model's config.pbtxt."""
    pages = Environment(  # noqa: S701 - protobuf text, and every string goes through `quoted`.
        loader=PackageLoader(__package__, "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["quoted"] = _quoted
    template = pages.get_template("config.pbtxt.j2")
    return template.render(model=model, queue_us=QUEUE_SECONDS * 1_000_000)


def _quoted(text: str) -> str:
    """Quotes a string for protobuf's text format; for these strings it has the same escapes as JSON."""
    return json.dumps(text, ensure_ascii=False)


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
