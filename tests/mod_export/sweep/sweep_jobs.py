"""Jobs for cells of the tiny model, and a look at their processes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import psutil
from tokenizer_folders import write_folder
from tokenizers import Tokenizer

from mod_export.config import config_from_toml
from mod_export.environment import source_digest
from mod_export.model.checkpoint import sha256_of
from mod_export.sweep.cell import CellJob
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

PATIENCE_S = 60


def job_of(checkpoint: Path, folder: Path, config: Path, **changes: Any) -> CellJob:
    """A job with one bucket of 1 x 16, capacity 0.25, and ONNX Runtime on the CPU."""
    fields: dict[str, Any] = {
        "name": "one", "checkpoint": checkpoint, "checkpoint_sha256": sha256_of(checkpoint), "capacity": 0.25,
        "tokenizer_sha256": None,
        "batch": 1, "seq": 16, "target": "ort-cpu",
        "config": config_from_toml(config).model_dump(mode="json", by_alias=True),
        "code": {name: source_digest(name) for name in ("mod_export", "mod_models")}, "command": "mod-export sweep",
        "root": folder / "cells/one", "folder": "cells/one", "row": folder / "cells/one.json", "fingerprint": "f",
    }  # fmt: skip
    return CellJob(**{**fields, **changes})


def with_tokenizer(folder: Path, spec: ModelSpec) -> Path:
    """Writes a model.pt with a tokenizer beside it."""
    tokenizer = Tokenizer.from_file(str(write_folder(folder, "qwen2") / "tokenizer.json"))
    spec = dataclasses.replace(spec, n_layers=2, vocab_size=tokenizer.get_vocab_size())
    save_checkpoint(folder / "model.pt", random_checkpoint(spec, 0))
    return folder / "model.pt"


def cells_below(process: psutil.Process) -> list[psutil.Process]:
    """Processes of cells that a process has started."""
    found = []
    for child in process.children(recursive=True):
        try:
            if "mod_export.sweep.cell" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(holds: Any) -> None:
    """Fails if it is not true within a minute."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
