"""manifest.json: the contents of a build folder, what they were made from, and the hash of every file.

While a build runs, the manifest holds its steps (`workspace.py`). A finished build adds the facts that `load`,
`validate` and `bench` need without the checkpoint: `Manifest`. They are checked once, when the folder is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from mod_export.config import BuildConfig, with_defaults
from mod_export.errors import BuildFolderError
from mod_export.folder.files import FileEntry, verify_files
from mod_export.folder.programs import PROGRAM, program_files
from mod_export.rows.base import FailedRow
from mod_export.rows.cost import CostRow, Work
from mod_export.rows.speed import EngineSpeed, NamedText, StepBytes
from mod_export.types import Bucket, DType, Engine, Graph, ModelKind, SiteKey, Unavailable, graph_of

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
"""Tokenizer of a model whose ids are not bytes: beside its weights, as in Hugging Face folders, and in the build
folder."""
BESIDE_TOKENIZER = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
"""Files that say how the tokenizer is used and where texts end; kept with the tokenizer if there is anything to say."""
FORMAT = "mod-export build folder"
FORMAT_VERSION = 3
CHECKSUM = "checksum"
EMPTY: Mapping[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "steps": {}}
"""The manifest of a folder in which nothing has been built."""
REPORT_FILES = ("report.json", "report.html")


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(_Facts):
    """Origin of the model or of its dense baseline, and the data from which its reference is rebuilt.

    Attributes:
        checkpoint_sha256: hash of the checkpoint file, or of the files of the checkpoint folder.
        spec: the spec as plain data; a capacity that replaced the model's own is already in it.
        vocab_size: vocabulary size of a model of token ids, else None.
        weights: the folder's float32 weights file.
        tensors: names of this model's tensors in that file.
    """

    name: str
    architecture: str
    checkpoint_sha256: str
    spec: dict[str, JsonValue]
    vocab_size: int | None
    weights: str
    tensors: tuple[str, ...]


class GenerationFacts(_Facts):
    """Facts that are needed to write text.

    Attributes:
        window: number of tokens of the longest text.
        sites: model -> its routing sites, in the order of the columns of a cache's counts.
        capacity: routing site -> largest number of tokens of a text that it selects.
        kv_bytes: model -> length of a cache -> float32 bytes of the keys and values of one row.
        step_bytes: decode bucket -> dtype -> model -> bytes that a step must read.
    """

    window: int
    sites: dict[ModelKind, tuple[SiteKey, ...]]
    capacity: dict[SiteKey, int]
    kv_bytes: dict[ModelKind, dict[int, int]]
    step_bytes: dict[str, dict[DType, dict[ModelKind, StepBytes]]]


class Manifest(_Facts):
    """A finished build folder.

    Attributes:
        command: the command that built it, as typed; None if there was no command.
        models: `mod`, and `dense` if there is a dense baseline.
        buckets: buckets of whole rows, ascending.
        weight_digests: weights file -> tensor -> SHA-256 of the checkpoint's tensor in the dtype of the file.
        exporters: versions of the packages that an exported graph depends on.
        verified: whether its engines were judged. False for a build without evidence, until it is validated.
        refused: engine or graph that missed a gate -> the reasons; `load` does not serve it.
        measured: measured speed of the engines; `load` chooses by it if no target is named.
        generation: facts that are needed to write text, or the reason why this folder cannot.
        tokenizer: `bytes`, a file of the folder, or None if ids stand for no text.
        text: the user's file of text to judge and to time on; None if there was none.
        cost: FLOPs and bytes of every portable graph of whole rows.
        work: engine -> work of its graph, for profiles.
        failed: what was requested and could not be built.
        config: the resolved configuration.
    """

    command: str | None = None
    models: dict[ModelKind, ModelFacts]
    buckets: tuple[Bucket, ...]
    graphs: tuple[Graph, ...]
    engines: tuple[Engine, ...]
    weight_digests: dict[str, dict[str, str]]
    exporters: dict[str, str | None]
    verified: bool
    refused: dict[str, tuple[str, ...]]
    measured: tuple[EngineSpeed, ...] = ()
    generation: GenerationFacts | Unavailable
    tokenizer: str | None
    text: NamedText | None = None
    cost: tuple[CostRow, ...]
    work: dict[str, tuple[Work, ...]]
    failed: tuple[FailedRow, ...] = ()
    config: BuildConfig
    versions: dict[str, str | None]
    files: dict[str, FileEntry]

    def entries(self, paths: Iterable[str]) -> dict[str, FileEntry]:
        """Returns the entries of some of its files."""
        return {path: self.files[path] for path in paths}


def open_folder(root: Path, *, verify: bool = True) -> Manifest:
    """Opens a finished build folder and returns its manifest. With `verify`, compares its files with their hashes.

    Raises:
        BuildFolderError: the folder is not a build folder, or is unfinished, from another release, damaged, or
            contradicts itself.
    """
    data = read_manifest(root)
    if "files" not in data:
        raise BuildFolderError(f"{root}: the build was not finished; run the same build again, it resumes")
    facts = {name: value for name, value in data.items() if name not in EMPTY}
    if isinstance(facts.get("config"), dict):
        facts["config"] = with_defaults(facts["config"])
    try:
        manifest = Manifest.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BuildFolderError(
            f"{root / MANIFEST}: not as this release writes it ({where}: {first['msg']}); open it with the release "
            f"that built it ({_builder(data)}), or build again"
        ) from error
    problems = _contradictions(manifest)
    if problems:
        raise BuildFolderError(f"{root / MANIFEST}: contradicts itself: {'; '.join(problems)}; build again")
    if verify:
        verify_files(root, manifest.files)
    return manifest


def _contradictions(manifest: Manifest) -> list[str]:
    """Returns contradictions between parts of the manifest. A file that one part lists and another part lacks would not
    be judged.
    """
    files, engines, graphs = manifest.files, manifest.engines, manifest.graphs
    listed = {*(graph.path for graph in graphs), *(path for engine in engines for path in engine.files)}
    listed |= {*manifest.weight_digests, *(facts.weights for facts in manifest.models.values())}
    for kind, facts in manifest.models.items():
        buckets = facts.spec.get("buckets")
        if facts.architecture == PROGRAM and isinstance(buckets, list):
            listed.update(program_files(kind, map(str, buckets)))
    kinds = dict.fromkeys(["mod", *(graph.model for graph in graphs), *(engine.model for engine in engines)])
    problems = [f"{kind} is not described" for kind in kinds if kind not in manifest.models]
    problems += [f"{path} is no file of it" for path in sorted(listed - files.keys())]
    problems += [
        f"{item.path} has no weights file" for item in engines if item.weights is None and item.path.endswith(".onnx")
    ]
    known = {*REPORT_FILES, TOKENIZER, *BESIDE_TOKENIZER}
    problems += [f"{path} is nothing that it describes" for path in sorted(files.keys() - listed - known)]
    for engine in engines:
        graph = graph_of(engine, graphs)
        if graph is None:
            problems.append(f"{engine.path} was built from no graph of it")
        elif engine.path.endswith(".onnx") and graph.dtype != engine.dtype:
            problems.append(f"{engine.path} is listed as {engine.dtype} and its graph as {graph.dtype}")
    return problems


def read_manifest(root: Path) -> dict[str, Any]:
    """Returns the manifest as JSON, without its checksum, also for an unfinished folder.

    Raises:
        BuildFolderError: there is no build folder, or its manifest is damaged or has another format version.
    """
    try:
        data = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BuildFolderError(f"{root}: no {MANIFEST} here, so this is not a build folder of mod-export") from None
    except OSError as error:
        raise BuildFolderError(f"{root / MANIFEST}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BuildFolderError(f"{root / MANIFEST}: damaged ({error}); delete the folder and build again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("steps"), dict):
        raise BuildFolderError(f"{root / MANIFEST}: not a manifest of mod-export; name another folder")
    _check_version(root, data)
    if data.pop(CHECKSUM, None) != checksum(data):
        raise BuildFolderError(
            f"{root / MANIFEST}: has been changed since it was written; delete the folder and build again"
        )
    return data


def _check_version(root: Path, data: Mapping[str, Any]) -> None:
    version = data.get("format_version")
    if version == FORMAT_VERSION:
        return
    if not isinstance(version, int):
        raise BuildFolderError(f"{root / MANIFEST}: damaged (no format version); delete the folder and build again")
    if version < FORMAT_VERSION:
        raise BuildFolderError(
            f"{root}: format version {version}, written by {_builder(data)}; this release reads version "
            f"{FORMAT_VERSION}: {way_out(data.get('command') or _reported_command(root))}"
        )
    raise BuildFolderError(
        f"{root}: format version {version}, and this release reads {FORMAT_VERSION}; it needs a newer mod-export"
    )


def way_out(command: str | None) -> str:
    """Returns what to do with a folder that this release does not read; `command` is the one that built it."""
    return f"delete the folder and build again ({command or 'mod-export build MODEL'})"


def _reported_command(root: Path) -> str | None:
    """Returns the command that built a folder of mod-export 0.1.0, which wrote the command only to report.json; None if
    report.json lacks it.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        command = json.loads((root / REPORT_FILES[0]).read_text(encoding="utf-8")).get("command")
        return command if isinstance(command, str) else None
    return None


def _builder(data: Mapping[str, Any]) -> str:
    versions = data.get("versions")
    version = versions.get("mod_export") if isinstance(versions, dict) else None
    return f"mod-export {str(version).split('+')[0]}" if version else "another release"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest as it is written."""
    return {**data, CHECKSUM: checksum(data)}


def checksum(data: Any) -> str:
    """Returns the SHA-256 of plain data after a JSON round trip: number keys become text, which sorts differently."""
    data = json.loads(json.dumps(data))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
