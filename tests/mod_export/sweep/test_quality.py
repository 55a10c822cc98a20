"""Perplexity of the eager model, against the definition and against a model that has learnt something."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mod_export.cli.demo import demo_checkpoint
from mod_export.sources.checkpoint import Model, model_from_checkpoint
from mod_export.sweep.cell import QUALITY_TOKENS, quality_of
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec


def test_by_the_definition(model: Model) -> None:
    found = quality_of(model.loaded, 100, seed=3)
    assert found is not None
    assert found.tokens == 8200 >= QUALITY_TOKENS
    ids_RT = model.loaded.sample_ids(82, 101, 3)
    assert ids_RT is not None
    text_RT = torch.from_numpy(ids_RT)
    logits_RSV = model.loaded.module()(text_RT[:, :-1], torch.full((82,), 100))[0]
    probability = torch.softmax(logits_RSV.double(), -1).gather(-1, text_RT[:, 1:, None])
    assert found.perplexity == pytest.approx(float(torch.exp(-probability.log().mean())), rel=1e-6)
    assert found == quality_of(model.loaded, 100, seed=3)


def test_a_trained_model_knows_more_than_an_untrained_one(model: Model) -> None:
    trained = quality_of(model_from_checkpoint(demo_checkpoint()).loaded, 128, seed=0)
    untrained = quality_of(model.loaded, 128, seed=0)
    assert trained is not None
    assert untrained is not None
    assert trained.perplexity < 6 < 200 < untrained.perplexity
    assert trained.dense_perplexity != trained.perplexity


def test_no_text_no_quality(tiny_spec: ModelSpec, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m.pt", random_checkpoint(dataclasses.replace(tiny_spec, vocab_size=100), 0))
    assert quality_of(model_from_checkpoint(tmp_path / "m.pt").loaded, 64, seed=0) is None
