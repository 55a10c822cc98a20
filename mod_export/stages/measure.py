"""Stage measure: latency against the dense twin, and of narrower dtypes against float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Engine, ModelKind, engine_stem
from mod_export.measure.latency import Setting, latency_row
from mod_export.measure.pairs import engine_pairs, measure_pair
from mod_export.measure.precision import measure_precision, precision_pairs, precision_row
from mod_export.measure.statistics import gate_of
from mod_export.stages.context import Context
from mod_export.workspace import Step

__all__ = ["measure"]


def measure(context: Context) -> list[Step]:
    """Latency of model and dense twin, interleaved, for every setting that runs here."""
    steps = []
    config = context.plan.config
    for setting, pair in engine_pairs(context.runnable()).items():
        # Sampling goes on until the gate is settled: another gate may need more samples.
        gate = gate_of(setting.bucket.name, context.plan.buckets, config.latency.min_speedup)
        inputs = {
            **context.conditions(list(pair.values())),
            "latency": config.latency.model_dump(exclude={"min_speedup", "bootstrap"}),
            "gate": gate,
            "seed": config.seed,
        }
        step = context.step(
            f"latency/{setting.target}/{setting.bucket.name}-{setting.dtype}",
            inputs,
            [],
            partial(_latency, context, setting, pair, gate),
        )
        context.latency += [latency_row(row) for row in step.result]
        steps.append(step)
    return [*steps, *_precision(context)]


def _precision(context: Context) -> list[Step]:
    steps = []
    config = context.plan.config
    for narrow, wide in precision_pairs(context.runnable()):
        inputs = {
            **context.conditions([narrow, wide]),
            "latency": config.latency.model_dump(exclude={"min_speedup"}),
            "seed": config.seed,
        }
        name = f"precision/{narrow.target}/{engine_stem(narrow.model, narrow.bucket, narrow.dtype, narrow.arch)}"
        step = context.step(name, inputs, [], partial(_measured, context, narrow, wide))
        context.precision.append(precision_row(step.result))
        steps.append(step)
    return steps


def _measured(context: Context, narrow: Engine, wide: Engine, paths: Sequence[Path]) -> dict[str, Any]:
    vocab_size = context.plan.model.loaded.vocab_size
    return asdict(measure_precision(context.root, narrow, wide, vocab_size, context.plan.config))


def _latency(
    context: Context, setting: Setting, pair: Mapping[ModelKind, Engine], gate: float | None, paths: Sequence[Path]
) -> list[dict[str, Any]]:
    vocab_size = context.plan.model.loaded.vocab_size
    return [asdict(row) for row in measure_pair(context.root, setting, pair, vocab_size, context.plan.config, gate)]
