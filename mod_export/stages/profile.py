"""Stage profile: the cost model, held against where the time of each engine really goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.artifacts import Engine, Graph, engine_stem
from mod_export.engine import ENGINES
from mod_export.measure.parts import Profiled, part_rows
from mod_export.measure.profiles import can_profile, profile_engine, rooflines_of, work_from_json
from mod_export.measure.work import work_of_graph
from mod_export.stages.context import Context
from mod_export.workspace import Step

__all__ = ["profile"]


def profile(context: Context) -> list[Step]:
    """The work of every engine that can be profiled, and the profile of those that run here.

    Work is counted for engines that cannot run here too: whoever moves the folder needs it and may have no ONNX tools.
    """
    steps = [_work_step(context, engine) for engine in context.engines if can_profile(engine)]
    engines = [engine for engine in context.runnable() if can_profile(engine)]
    rooflines = rooflines_of(engines, context.machine, context.plan.config)
    context.rooflines += rooflines.values()
    for engine in engines:
        step = _profile_step(context, engine)
        profiled = None if step.result is None else Profiled(**step.result)
        if engine.dtype in rooflines:
            context.parts += part_rows(engine, context.work[engine.path], rooflines[engine.dtype], profiled)
        steps.append(step)
    return steps


def _work_step(context: Context, engine: Engine) -> Step:
    graph = _graph_of(context, engine)
    whole_scores = ENGINES[engine.target].dialect.whole_scores
    step = context.step(
        f"work/{engine.target}/{engine_stem(engine.model, engine.bucket, engine.dtype)}",
        {"graph": context.workspace.hash_of(graph.path), "whole_scores": whole_scores, **context.versions("onnx_ir")},
        [],
        partial(_count, context, graph, whole_scores),
    )
    context.work[engine.path] = work_from_json(step.result)
    return step


def _graph_of(context: Context, engine: Engine) -> Graph:
    """What the engine was built from; the portable graph, which computes the same, where that is no ONNX graph."""
    key = (engine.target, engine.dtype, engine.model, engine.bucket)
    return context.target_graphs.get(key, context.graphs[engine.model, engine.bucket])


def _count(context: Context, graph: Graph, whole_scores: bool, paths: Sequence[Path]) -> list[dict[str, Any]]:
    model = ir.load(context.root / graph.path)
    return [asdict(one) for one in work_of_graph(model, graph.path, whole_scores=whole_scores)]


def _profile_step(context: Context, engine: Engine) -> Step:
    config = context.plan.config
    inputs = {**context.conditions([engine]), "runs": config.cost.profile_runs, "seed": config.seed}
    return context.step(
        f"profile/{engine.target}/{engine_stem(engine.model, engine.bucket, engine.dtype)}",
        inputs,
        [],
        partial(_profile, context, engine),
    )


def _profile(context: Context, engine: Engine, paths: Sequence[Path]) -> dict[str, Any] | None:
    vocab_size = context.plan.loaded(engine.model).vocab_size
    found = profile_engine(context.root, engine, context.work[engine.path], vocab_size, context.plan.config)
    return None if found is None else asdict(found)
