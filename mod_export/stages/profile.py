"""Stage profile: the cost model, compared with where the time of each engine really goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.benchmark.profile import Profiled, can_profile, part_rows, profile_engine, rooflines_of
from mod_export.engines import ENGINES
from mod_export.results.cost import Work
from mod_export.stages.context import Context
from mod_export.types import Engine

__all__ = ["count_work", "profile"]


def count_work(context: Context) -> None:
    """FLOPs and bytes of every engine that can be profiled, also of those that cannot run here.

    They are kept in the manifest: a server that the folder is moved to may have no ONNX tools.
    """
    for engine in context.engines:
        if engine.role == "forward" and can_profile(engine):
            graph = context.graph_of(engine)
            whole_scores = ENGINES[engine.target].dialect.whole_scores
            inputs = {"graph": context.hash_of(graph.path), "whole_scores": whole_scores, **context.versions("onnx_ir")}
            make = partial(_count, context.root, graph.path, whole_scores)
            step = context.step(f"work/{engine.target}/{engine.stem}", inputs, [], make)
            context.work[engine.path] = tuple(Work.model_validate(item) for item in step.result)


def _count(root: Path, path: str, whole_scores: bool, paths: Sequence[Path]) -> list[dict[str, Any]]:
    import onnx_ir as ir

    from mod_export.benchmark.cost import work_of_graph

    return [one.model_dump(mode="json") for one in work_of_graph(ir.load(root / path), path, whole_scores=whole_scores)]


def profile(context: Context) -> None:
    """The profile of every engine that runs here, beside the time that the machine's roofline predicts."""
    engines = [engine for engine in context.runnable("forward") if engine.path in context.work]
    rooflines = rooflines_of(engines, context.machine, context.config)
    context.add(list(rooflines.values()))
    for engine in engines:
        inputs = {
            **context.conditions([engine]),
            "runs": context.config.cost.profile_runs,
            "seed": context.config.seed,
        }
        step = context.step(f"profile/{engine.target}/{engine.stem}", inputs, [], partial(_profile, context, engine))
        profiled = None if step.result is None else Profiled(**step.result)
        if engine.dtype in rooflines:
            context.add(part_rows(engine, context.work[engine.path], rooflines[engine.dtype], profiled))


def _profile(context: Context, engine: Engine, paths: Sequence[Path]) -> dict[str, Any] | None:
    vocab_size = context.facts[engine.model].vocab_size
    found = profile_engine(context.root, engine, context.work[engine.path], vocab_size, context.config)
    return None if found is None else {"profiler": found.profiler, "ms_by_part": dict(found.ms_by_part)}
