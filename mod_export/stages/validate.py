"""Stage validate: everything that runs here against eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Engine, engine_stem
from mod_export.stages.context import Context
from mod_export.validate.parity import ParityRow, parity_of_engine
from mod_export.workspace import Step

__all__ = ["validate"]


def validate(context: Context) -> list[Step]:
    """Parity of every engine that runs here."""
    steps = []
    config = context.plan.config
    for engine in context.runnable():
        inputs = {
            **context.conditions([engine]),
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
