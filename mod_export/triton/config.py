"""config.pbtxt: what Triton is told about a model, as values and as the text of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mod_export.serve import MAX_WAIT_S

ANY = -1
"""A dimension of any size."""

QUEUE_SECONDS = int(MAX_WAIT_S)
"""How long a request may wait in Triton's queue, and a text for a row; then it is refused."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    Attributes:
        name: as requests name it.
        dtype: Triton's name of it, such as INT64 or BYTES.
        dims: its shape, with `ANY` where any size is taken.
        optional: whether a request may leave the input out.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def data_type(self) -> str:
        """As config.pbtxt has it."""
        return "TYPE_STRING" if self.dtype == "BYTES" else f"TYPE_{self.dtype}"


@dataclass(frozen=True, slots=True)
class Warmup:
    """A request that Triton sends to a model before it says that it is ready.

    Attributes:
        name: in the log.
        zeros: inputs of zeros; their dims are the request's shapes.
        files: inputs that are read from a file of the model's folder `warmup`.
    """

    name: str
    zeros: tuple[Port, ...]
    files: tuple[tuple[Port, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonModel:
    """A model of a repository.

    Attributes:
        name: of its folder, and in URLs.
        about: a line about it, for readers of its config.pbtxt.
        backend: `python`, `onnxruntime` or `tensorrt`.
        inputs: what a request has.
        outputs: what a response has.
        files: path in its folder -> the file that is placed there, or its content.
        parameters: plain text that its code or backend reads.
        instances: how many copies run.
        gpu: whether they run on GPUs.
        max_queue: requests that may wait.
        decoupled: whether a request has any number of responses.
        warmups: before it is ready.
        plans: compute capability of a GPU, such as 8.9 -> file of the version folder; empty where there is one for all.
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
    """The text of its config.pbtxt."""
    pages = Environment(  # noqa: S701 - protobuf text, and every string goes through `quoted`.
        loader=PackageLoader(__package__, "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["quoted"] = _quoted
    template = pages.get_template("config.pbtxt.j2")
    return template.render(model=model, queue_us=QUEUE_SECONDS * 1_000_000)


def _quoted(text: str) -> str:
    """A string of protobuf's text format, which has the escapes of JSON for what is quoted here."""
    return json.dumps(text, ensure_ascii=False)
