"""config.pbtxt: the description of a model for Triton, as values and as the text of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mod_export.serve import MAX_WAIT_S

ANY = -1
"""Size of a dimension that may have any size."""

QUEUE_SECONDS = int(MAX_WAIT_S)
"""How many seconds a request may wait in Triton's queue, and a text for a row, before it is refused."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    Attributes:
        name: name in requests and responses.
        dtype: Triton's name of the data type, such as INT64 or BYTES.
        dims: shape, with `ANY` for a dimension of any size.
        optional: whether a request may leave the input out.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def data_type(self) -> str:
        """Name of the data type in config.pbtxt."""
        return "TYPE_STRING" if self.dtype == "BYTES" else f"TYPE_{self.dtype}"


@dataclass(frozen=True, slots=True)
class Warmup:
    """A request that Triton sends to a model before it reports the model as ready.

    Attributes:
        name: name in the log.
        zeros: inputs filled with zeros; their dims are the shapes of the request.
        files: (input, file name); the input is read from this file in the model's folder `warmup`.
    """

    name: str
    zeros: tuple[Port, ...]
    files: tuple[tuple[Port, str], ...] = ()


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
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
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
