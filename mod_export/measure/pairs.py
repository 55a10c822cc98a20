"""The engines that are compared with each other: a model and its dense twin, all else equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mod_export.artifacts import Engine, ModelKind, primary_output
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.inputs import timing_batch
from mod_export.measure.latency import LatencyRow, Setting, latency_rows

__all__ = ["engine_pairs", "measure_pair"]


def engine_pairs(engines: Sequence[Engine]) -> dict[Setting, dict[ModelKind, Engine]]:
    """Model and dense twin of every (target, bucket, dtype) that has both."""
    found: dict[Setting, dict[ModelKind, Engine]] = {}
    for engine in engines:
        setting = Setting(target=engine.target, bucket=engine.bucket, dtype=engine.dtype)
        found.setdefault(setting, {})[engine.model] = engine
    return {setting: pair for setting, pair in found.items() if {"mod", "dense"} <= pair.keys()}


def measure_pair(
    root: Path,
    setting: Setting,
    pair: Mapping[ModelKind, Engine],
    vocab_size: int,
    config: BuildConfig,
    gate: float | None = None,
) -> Sequence[LatencyRow]:
    """Loads both engines of the build folder `root` and samples them in turn on the same tokens.

    Args:
        root: the build folder.
        setting: what both engines have in common.
        pair: the two engines.
        vocab_size: the tokens are drawn below it.
        config: how to sample.
        gate: the speed-up that this setting must show, if any.
    """
    builder = ENGINES[setting.target]
    batch = timing_batch(setting.bucket, vocab_size, config.seed)
    with builder.load(root, pair["mod"], config) as mod, builder.load(root, pair["dense"], config) as dense:
        return latency_rows(
            {"mod": mod, "dense": dense},
            batch.feeds,
            setting,
            config.latency,
            seed=config.seed,
            gate=gate,
            outputs=[primary_output(mod.outputs)],
        )
