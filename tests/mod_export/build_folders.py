"""Helpers that build into a folder and examine it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mod_export.config import BuildConfig, toml_from_config
from mod_export.environment import package_version
from mod_export.folder.manifest import read_manifest
from mod_export.judge import inputs
from mod_export.pipeline.build import Build
from mod_export.pipeline.rerun import Rerun
from mod_export.pipeline.stages import BUILDING, EVIDENCE
from mod_export.rows.correctness import StructureRow
from mod_export.rows.report import Stage

STAGES = ("load", *(name for name, _ in (*BUILDING, *EVIDENCE)), "report")
ENGINE = "engines/ort-cpu/mod-b1s64-float32.onnx"
WEIGHTS = "graphs/weights-float32.data"
DOWN = "layers.2.mlp.down_proj.weight"
"""Files of the folder that `built` returns, and a tensor in the second file."""
WAS_QUIET = Build.was_quiet
"""What decides whether times are reused; in other tests all are."""


class Silent:
    """An observer that does nothing."""

    def stage_started(self, name: str) -> None: ...
    def step_started(self, name: str) -> None: ...
    def stage_finished(self, stage: Stage) -> None: ...


def once(folder: Path, make: Callable[[], object]) -> Path:
    """Returns a folder that the first worker makes; the others wait for it."""
    folder.mkdir(exist_ok=True)
    with (folder / ".once").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another worker may have written since the file was opened, and this one must not make the folder again.
        if not lock.seek(0, os.SEEK_END):
            make()
            lock.write("made")
    return folder


def changed(config: BuildConfig, fields: Mapping[str, Any]) -> BuildConfig:
    """Changes fields of the configuration, named by their path in the TOML file, as in target/ort-cpu/dtypes."""
    data = tomllib.loads(toml_from_config(config))
    for field, value in fields.items():
        *path, last = field.split("/")
        section = data
        for name in path:
            section = section[name]
        assert section[last] != value, field
        section[last] = value
    return BuildConfig.model_validate(data)


@contextlib.contextmanager
def few_searched_rows() -> Iterator[None]:
    """Context in which fewer rows are searched for near-ties, on which a tiny model otherwise spends a third of its
    validation. As many batches of near-ties are found.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "SEARCHED_TOKENS", 2**10)
        yield


@contextlib.contextmanager
def upgraded(folder: Path, monkeypatch: pytest.MonkeyPatch, *packages: str) -> Iterator[None]:
    """Context in which packages have version 99.0: their metadata comes first on the path, as after an upgrade."""
    for name in packages:
        (folder / f"{name}-99.0.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 99.0\n"
        (folder / f"{name}-99.0.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(folder)
    package_version.cache_clear()
    try:
        yield
    finally:
        package_version.cache_clear()


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def steps_of(root: Path) -> dict[str, Any]:
    steps: dict[str, Any] = read_manifest(root)["steps"]
    return steps


def check_files(root: Path) -> None:
    """Checks that the manifest lists every file with its size and hash."""
    files = read_manifest(root)["files"]
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert set(files) == present - {"manifest.json", ".lock"}
    for name, entry in files.items():
        assert entry == file_entry(root / name)


def rewrite_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and its checksum, as if it had been written that way."""
    manifest = read_manifest(root)
    change(manifest)
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum}))


def file_entry(path: Path) -> dict[str, Any]:
    """Entry of a file in the manifest."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def failed(found: Rerun) -> set[str]:
    """Files in which a structure check failed."""
    return {row.path for row in found.rows(StructureRow) if not row.passed}
