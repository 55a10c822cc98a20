"""The demo's two models: the trained one that is included, and one that is large enough to be timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed
from packages import OnlyReads
from tokenizers import Tokenizer

from mod_export.cli import cli
from mod_export.cli.demo import demo_checkpoint, next_steps, text_checkpoint, timed_checkpoint
from mod_export.errors import CheckpointError
from mod_export.model import checkpoint as reading
from mod_export.model.checkpoint import model_from_checkpoint


def test_the_shipped_checkpoint_is_trained() -> None:
    path = demo_checkpoint()
    assert path.stat().st_size < 8 * 2**20
    loaded = model_from_checkpoint(path)
    ids = loaded.sample_ids(2, 257, seed=5)
    assert ids is not None
    inputs, targets = torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:])
    with torch.no_grad():
        logits, _ = observed(loaded.module(), inputs, torch.tensor([256, 256]))
    bits = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() / np.log(2)
    # The card says 1.6 bits per byte at a context of 512 bytes; an untrained model has 8.
    assert bits < 2.6
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    assert f"{model_from_checkpoint(path).parameters:,} parameters" in card


def test_the_checkpoint_that_writes_text_is_trained_and_has_its_tokenizer() -> None:
    path = text_checkpoint()
    assert path is not None
    assert sum(file.stat().st_size for file in path.iterdir()) < 8 * 2**20
    loaded = model_from_checkpoint(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    # It has not read this project's own sources.
    ids = tokenizer.encode(Path(reading.__file__).read_text(encoding="utf-8")).ids[:1025]
    with torch.no_grad():
        logits_1SV, _ = observed(loaded.module(), torch.tensor([ids[:-1]]), torch.tensor([1024]))
    nats = torch.nn.functional.cross_entropy(logits_1SV[0], torch.tensor(ids[1:]), reduction="sum").item()
    # The card says 0.9 bits per byte of sources like those that it was trained on; an untrained model has 3.
    assert nats / np.log(2) / len(tokenizer.decode(ids[1:]).encode()) < 2
    assert f"{loaded.parameters:,} parameters" in (path / "README.md").read_text(encoding="utf-8")


def test_the_timed_checkpoint_is_large_and_temporary() -> None:
    with timed_checkpoint() as path:
        found = model_from_checkpoint(path)
        assert found.parameters > 30e6
        assert len(found.k_by_layer(512)) == 6
    assert not path.exists()


def test_the_demo_ends_with_what_to_look_at_and_what_to_try() -> None:
    text = next_steps(Path("m"), Path("build/demo"), Path("build/demo-timed"), ".venv/bin/mod-export")
    lines = [line.strip() for line in text.splitlines()]
    named = [line.rpartition("    ")[0].rstrip() for line in lines if "    " in line]
    assert named == [
        "build/demo/report.html",
        "build/demo-timed/report.html",
        ".venv/bin/mod-export validate build/demo",
        ".venv/bin/mod-export build m -o build/writing",
        '.venv/bin/mod-export generate build/writing --prompt "    # If the file is " --temperature 0.5',
        ".venv/bin/mod-export targets",
        ".venv/bin/mod-export build MODEL",
    ]
    commands = {line.split()[1] for line in named if line.startswith(".venv")}
    assert commands <= set(cli.commands)


def test_nothing_to_show_or_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The installed architectures are the environment of these functions, not the code under test.
    monkeypatch.setattr(reading, "architectures", lambda: {"other": OnlyReads()})
    with pytest.raises(CheckpointError, match="no installed architecture ships a trained checkpoint; build your own"):
        demo_checkpoint()
    with pytest.raises(CheckpointError, match="no installed architecture declares a size to be timed"):
        timed_checkpoint().__enter__()
