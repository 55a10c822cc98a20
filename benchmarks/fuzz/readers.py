"""Readers of untrusted bytes, as functions that a fuzzer can call: each reads one input, or refuses it.

A reader may only raise errors that its callers turn into a sentence. A fuzzer could not get past checksums or nested
archives, so where a format has them, the input is what lies inside, and the reader here wraps it. Fuzzing begins with
the inputs in `tests/fuzz/inputs/NAME/`, among them what was found before.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from mod_export.config import config_from_toml
from mod_export.errors import ModExportError
from mod_export.folder.manifest import MANIFEST, open_folder, with_checksum
from mod_export.model.checkpoint import model_from_checkpoint
from mod_export.model.pt2 import MODEL, read_program
from mod_export.rows.report import report_from_json
from mod_export.runtime.chat_template import ChatTemplate
from mod_export.runtime.limited_process import LimitedProcess
from mod_export.runtime.template_process import renderer
from mod_export.serve import inference_protocol
from mod_export.serve.endpoint import ApiError, json_of
from mod_export.serve.openai_formats import ChatRequest, CompletionRequest
from mod_models.checkpoint import CheckpointError
from mod_models.convert.gguf_model import read_gguf
from mod_models.convert.tensor_files import tensors_of_file, tensors_of_folder

INPUTS = Path(__file__).parents[2] / "tests" / "fuzz" / "inputs"
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


class UnusableError(Exception):
    """An input that cannot be wrapped, such as one that is no JSON where JSON is wrapped. It counts as refused."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of untrusted bytes.

    Attributes:
        read: (input, empty folder) -> anything. The folder is for files that the input is written to.
        refusals: errors by which it refuses an input.
        longest: bytes of the longest input.
    """

    read: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...] = (ModExportError,)
    longest: int = 1 << 16


def _manifest(content: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps(with_checksum(_table(content))), encoding="utf-8")
    open_folder(folder)


def _report(content: bytes, _: Path) -> None:
    report_from_json(content.decode("utf-8", errors="replace"))


def _configuration(content: bytes, folder: Path) -> None:
    path = folder / "build.toml"
    path.write_bytes(content)
    config_from_toml(path)


def _gguf(content: bytes, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(content)
    model = read_gguf(path, None, ())
    for part in model.parts.values():
        part.rows(0, 1)


def _safetensors(content: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    for tensor in tensors_of_file(path).values():
        tensor.rows(0, 1)


def _index(content: bytes, folder: Path) -> None:
    save_file({"a": torch.zeros(2, 2)}, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content)
    tensors_of_folder(folder)


def _hugging_face(content: bytes, folder: Path) -> None:
    """Reads a config.json beside weights that cannot fit it, so that every config is refused in the end."""
    save_file({"model.embed_tokens.weight": torch.zeros(8, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(content)
    model_from_checkpoint(folder)


def _checkpoint(content: bytes, folder: Path) -> None:
    """The pickle inside a file of `torch.save`."""
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in (("data.pkl", content), ("byteorder", b"little"), ("data/0", bytes(64)), ("version", b"3")):
            archive.writestr(f"model/{name}", record)
    model_from_checkpoint(path)


def _pt2(content: bytes, folder: Path) -> None:
    """The graph inside a file of `torch.export.save`."""
    path = folder / "model.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as changed:
        for name, record in _records().items():
            changed.writestr(f"model/{name}", content if name == MODEL else record)
    read_program(path)


def _records() -> Mapping[str, bytes]:
    """The records of a small .pt2 file."""
    if not _RECORDS:
        saved = io.BytesIO()
        torch.export.save(small_program(), saved)
        with zipfile.ZipFile(saved) as archive:
            _RECORDS.update({name.partition("/")[2]: archive.read(name) for name in archive.namelist()})
    return _RECORDS


_RECORDS: dict[str, bytes] = {}


def small_program() -> torch.export.ExportedProgram:
    """A program with a weight, a selection of tokens and a sample input."""

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Linear(4, 1, bias=False)
            self.router.weight.data.fill_(0.5)

        def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
            chosen_BK = self.router(x_BSD).squeeze(-1).topk(2).indices
            index_BKD = chosen_BK.unsqueeze(-1).expand(-1, -1, 4)
            return x_BSD.scatter(1, index_BKD, 2 * x_BSD.gather(1, index_BKD))

    return torch.export.export(Routed(), (torch.ones(1, 6, 4),))


class _Here(LimitedProcess):
    """Renders templates in this process, where the fuzzer sees which branches they take."""

    def __init__(self) -> None:
        super().__init__(renderer.__module__)

    def ask(self, question: Any, known: Callable[[], Any], limit_s: float, most_bytes: int) -> Any:
        return renderer(known())(question)


def _chat_request(content: bytes, _: Path) -> None:
    asked = ChatRequest.model_validate_json(json_of(content))
    template = ChatTemplate(CHATML, {}, _Here())
    template.render([message.for_template(template) for message in asked.messages], asked.chat_template_kwargs)
    _ = asked.grammar, asked.offered, asked.demanded, asked.cut


def _completion_request(content: bytes, _: Path) -> None:
    asked = CompletionRequest.model_validate_json(json_of(content))
    _ = asked.several, asked.grammar, asked.cut, asked.scored


def _inference_request(content: bytes, _: Path) -> None:
    """The first two bytes say how long the JSON is, or, if they are 0, that nothing follows it."""
    length, body = int.from_bytes(content[:2], "big"), content[2:]
    asked, rest = inference_protocol._parsed(body, str(length) if length else None)
    feeds = inference_protocol._feeds(asked.inputs, rest)
    inference_protocol._encoded("model", asked, feeds)


def _chat_template(content: bytes, _: Path) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(content.decode("utf-8", errors="replace"), special, _Here())
    _ = template.reads_parts, template.reads_tools, template.reads_argument_texts
    template.render(CONVERSATION, {"tools": [{"type": "function", "function": {"name": "f"}}]})


def _table(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content)
        json.dumps(found).encode()
    except (ValueError, RecursionError) as error:
        raise UnusableError from error
    if not isinstance(found, dict):
        raise UnusableError
    return found


WEIGHTS = (CheckpointError,)
REQUEST = (ModExportError, ApiError, ValidationError)
READERS: Mapping[str, Reader] = {
    "manifest": Reader(_manifest),
    "report": Reader(_report),
    "configuration": Reader(_configuration, longest=4096),
    "gguf": Reader(_gguf, WEIGHTS),
    "safetensors": Reader(_safetensors, WEIGHTS, longest=4096),
    "index": Reader(_index, WEIGHTS, longest=4096),
    "hugging_face": Reader(_hugging_face, longest=4096),
    "checkpoint": Reader(_checkpoint, longest=8192),
    "pt2": Reader(_pt2),
    "chat_request": Reader(_chat_request, REQUEST, longest=8192),
    "completion_request": Reader(_completion_request, REQUEST, longest=4096),
    "inference_request": Reader(_inference_request, REQUEST, longest=4096),
    # Templates may loop for as long as they like (docs/architecture.md, Security); long ones mostly do.
    "chat_template": Reader(_chat_template, longest=1024),
}


def inputs_of(name: str) -> list[Path]:
    """Returns the inputs that are kept for a reader."""
    return sorted(path for path in (INPUTS / name).iterdir() if path.is_file())


def read(name: str, content: bytes, folder: Path) -> bool:
    """Lets a reader read an input; returns whether it took it. Any other error than a refusal is raised."""
    reader = READERS[name]
    try:
        reader.read(content, folder)
    except (UnusableError, *reader.refusals):
        return False
    return True
