"""Stages benchmark and profile: time every engine against its dense baseline and against float32, and every part of a
model against the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.engines import ENGINES
from mod_export.measure.latency import measure_precision, precision_pairs
from mod_export.measure.profile import Profiled, can_profile, part_rows, profile_engine
from mod_export.pipeline.build import Build
from mod_export.pipeline.roles import ROLES
from mod_export.rows.base import setting_fields
from mod_export.rows.cost import Work
from mod_export.rows.speed import PrecisionRow
from mod_export.types import Engine, by_setting


def benchmark(build: Build) -> None:
    """Times model and dense baseline, interleaved, for every setting that runs here.

    Where there is no dense baseline, the model is timed alone.
    """
    for role, stages in ROLES.items():
        for setting, engines in by_setting(build.runnable(role)).items():
            with build.attempt("benchmark", setting_fields(setting)):
                stages.time(build, setting, engines)
    for narrow, wide in precision_pairs(build.runnable("forward")):
        with build.attempt("benchmark", setting_fields(narrow.setting)):
            _precision(build, narrow, wide)


def _precision(build: Build, narrow: Engine, wide: Engine) -> None:
    rows = build.timed_step(
        PrecisionRow,
        f"precision/{narrow.target}/{narrow.stem}",
        build.timing_inputs([narrow, wide], latency=build.config.latency.model_dump(exclude={"min_speedup"})),
        lambda: [measure_precision(build.root, narrow, wide, build.feeds(narrow.bucket), build.config)],
    )
    build.add(rows)


def count_work(build: Build) -> None:
    """Counts FLOPs and bytes of every engine that can be profiled, including engines that cannot run here.

    The manifest keeps them, because a server that the folder is moved to may have no ONNX tools.
    """
    for engine in build.engines:
        if not engine.writes_text and can_profile(engine):
            graph = build.graph_of(engine)
            whole_scores = ENGINES[engine.target].limits.whole_scores
            inputs = {"graph": build.hash_of(graph.path), "whole_scores": whole_scores, **build.versions("onnx_ir")}
            make = partial(_count, build.root, graph.path, whole_scores)
            step = build.step(f"work/{engine.target}/{engine.stem}", inputs, [], make)
            build.work[engine.path] = tuple(Work.model_validate(item) for item in step.result)


def _count(root: Path, path: str, whole_scores: bool, paths: Sequence[Path]) -> list[dict[str, Any]]:
    import onnx_ir as ir

    from mod_export.measure.cost import work_of_graph

    return [row.model_dump(mode="json") for row in work_of_graph(ir.load(root / path), path, whole_scores=whole_scores)]


def profile(build: Build) -> None:
    """Profiles every engine that runs here, beside the time that the machine's roofline predicts."""
    engines = [engine for engine in build.runnable("forward") if engine.path in build.work]
    for engine in engines:
        inputs = {
            **build.conditions([engine]),
            "runs": build.config.cost.profile_runs,
            "seed": build.config.seed,
        }
        with build.attempt("profile", setting_fields(engine.setting)):
            name = f"profile/{engine.target}/{engine.stem}"
            step = build.step(name, inputs, [], partial(_profile, build, engine))
            profiled = None if step.result is None else Profiled(**step.result)
            roofline = build.roofline(engine.dtype)
            if roofline is not None:
                build.add(part_rows(engine, build.work[engine.path], roofline, profiled))
    build.add(build.rooflines)


def _profile(build: Build, engine: Engine, paths: Sequence[Path]) -> dict[str, Any] | None:
    feeds = build.feeds(engine.bucket)
    profiled = profile_engine(build.root, engine, build.work[engine.path], feeds, build.config)
    return None if profiled is None else {"profiler": profiled.profiler, "ms_by_part": dict(profiled.ms_by_part)}
