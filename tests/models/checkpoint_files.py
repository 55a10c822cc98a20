"""One small checkpoint, files that hold it or almost hold it, and the messages about those that do not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import lively_checkpoint, make_spec

from mod_models.checkpoint import Checkpoint, CheckpointError, load_checkpoint

SPEC = make_spec(predictor_hidden=2, tie_embeddings=False, router="mlp", capacity=(0.5, 0.25))
FORMS = ("model.pt", "folder")


def checkpoint() -> Checkpoint:
    return lively_checkpoint(SPEC)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.spec == other.spec
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert tensor.dtype == other.weights[name].dtype
        assert torch.equal(tensor, other.weights[name])


def saved(path: Path, **changes: Any) -> Path:
    """Saves a model.pt with some entries replaced, or left out if the new value is `...`."""
    header = {"format_version": 1, "architecture": "mod_transformer", "spec": SPEC.to_dict()}
    entries = {**header, "weights": dict(checkpoint().weights), **changes}
    torch.save({name: value for name, value in entries.items() if value is not ...}, path)
    return path


def with_weights(path: Path, changes: Mapping[Any, Any], without: str = "") -> Path:
    weights = {**{n: t for n, t in checkpoint().weights.items() if n != without}, **changes}
    return saved(path, weights=weights)


def refuses(path: Path, words: str) -> None:
    """Checks that loading fails with these words in the message."""
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_checkpoint(path)
