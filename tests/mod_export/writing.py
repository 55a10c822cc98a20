"""A tiny model that writes text token by token, its build folder, and the eager reference for its texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from command_line import FEW_SAMPLES
from tiny_models import lively_checkpoint

from mod_export.model.model import GeneratingModel, Model
from mod_export.types import QUANTIZED
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

WINDOW = 48
SPEC = ModelSpec(
    vocab_size=256,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    d_ff=64,
    max_positions=64,
    tie_embeddings=False,
    routing=RoutingSpec(capacity=0.375, predictor_hidden=8, layers=(0, 2)),
)
WRITING_TOML = f"""
buckets = [[1, 16]]
targets = ["ort-cpu"]
{FEW_SAMPLES}
[cost]
profile_runs = 0

[generation]
window = 48
prompts = [8, 16]
batches = [1, 3]
compared_texts = 2
compared_tokens = 8
measured_tokens = 5
"""
LAX = {
    f"parity/{dtype}/{gate}": value
    for dtype in QUANTIZED
    for gate, value in (("next_token_agreement", 0.0), ("max_kl", 100.0), ("max_perplexity_ratio", 100.0))
}
"""Gates for integer weights of tiny models. Their weights are random, so the effect of a few bits on next tokens means
nothing.
"""


def writing_checkpoint(seed: int = 6) -> Checkpoint:
    """Weights large enough for texts of many different tokens, which fill one routed layer and not the other."""
    return lively_checkpoint(SPEC, seed)


def eager(model: Model) -> GeneratingModel:
    """The reference for the engines."""
    return model.generating(WINDOW)


def prompts_of_lengths(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Lists of random ids, one for each length."""
    rng = np.random.default_rng(seed)
    found: list[list[int]] = [rng.integers(0, SPEC.vocab_size, length).tolist() for length in lengths]
    return found


def engine_path(folder: Path, name: str) -> Path:
    """Path of an engine in a build folder."""
    return folder / "engines" / "ort-cpu" / f"{name}.onnx"
