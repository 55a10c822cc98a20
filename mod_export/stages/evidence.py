"""Stages validate and measure: parity of everything that runs here, and its latency against the dense twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Engine, ModelKind, engine_stem
from mod_export.measure.latency import LatencyRow, Setting
from mod_export.measure.pairs import engine_pairs, measure_pair
from mod_export.stages.context import Context, versions
from mod_export.validate.parity import ParityRow, parity_of_engine
from mod_export.workspace import Step

__all__ = ["measure", "validate"]


def validate(context: Context) -> list[Step]:
    """Parity of every engine that runs here."""
    steps = []
    config = context.plan.config
    for engine in context.runnable():
        inputs = {
            **_conditions(context, [engine]),
            "gate": config.parity.gate(engine.dtype).model_dump(),
            "batches": config.parity.batches_per_kind,
            "seed": config.seed,
            "checkpoint": context.identity(engine.model),
        }
        step = context.step(
            f"parity/{engine.target}/{engine_stem(engine.model, engine.bucket, engine.dtype)}",
            inputs,
            [],
            partial(_parity, context, engine),
        )
        context.parity.append(ParityRow(**step.result))
        steps.append(step)
    return steps


def _parity(context: Context, engine: Engine, paths: Sequence[Path]) -> dict[str, Any]:
    loaded, reference = context.plan.loaded(engine.model), context.reference(engine.model)
    return asdict(parity_of_engine(context.root, engine, loaded, reference, context.plan.config))


def measure(context: Context) -> list[Step]:
    """Latency of model and dense twin, interleaved, for every setting that runs here."""
    steps = []
    config = context.plan.config
    for setting, pair in engine_pairs(context.runnable()).items():
        inputs = {
            **_conditions(context, list(pair.values())),
            "latency": config.latency.model_dump(exclude={"min_speedup", "bootstrap"}),
            "seed": config.seed,
        }
        step = context.step(
            f"latency/{setting.target}/{setting.bucket.name}-{setting.dtype}",
            inputs,
            [],
            partial(_latency, context, setting, pair),
        )
        context.latency += [LatencyRow(**row) for row in step.result]
        steps.append(step)
    return steps


def _latency(
    context: Context, setting: Setting, pair: Mapping[ModelKind, Engine], paths: Sequence[Path]
) -> list[dict[str, Any]]:
    vocab_size = context.plan.model.loaded.vocab_size
    return [asdict(row) for row in measure_pair(context.root, setting, pair, vocab_size, context.plan.config)]


def _conditions(context: Context, engines: Sequence[Engine]) -> dict[str, Any]:
    """What a result on this machine depends on beside its settings."""
    hash_of = context.workspace.hash_of
    return {
        "engines": [hash_of(engine.path) for engine in engines],
        "weights": [hash_of(context.weights_path(engine.model, engine.dtype)) for engine in engines],
        "threads": context.plan.config.latency.threads,
        "machine": [context.machine["cpu"], context.machine["cores"], context.machine["gpu"]],
        "versions": {**versions("mod_export", "torch"), **context.plan.targets[engines[0].target].versions()},
    }
