"""Stages benchmark and profile: time for every role, against the dense baseline or alone where there is none; of
narrower dtypes against float32; and of each part of a model against what the cost model expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.engines import ENGINES
from mod_export.folder.manifest import GenerationFacts
from mod_export.measure.decoding import measure_prompts, measure_steps
from mod_export.measure.latency import measure_latency, measure_precision, precision_pairs
from mod_export.measure.profile import Profiled, can_profile, part_rows, profile_engine, rooflines_of
from mod_export.measure.roofline import cached_roofline
from mod_export.measure.speedup import gate_of
from mod_export.pipeline.context import Context
from mod_export.rows.base import setting_fields
from mod_export.rows.cost import Work
from mod_export.rows.generation import DecodeRow, FirstTokenRow
from mod_export.rows.latency import LatencyRow, PrecisionRow
from mod_export.types import Engine, ModelKind, Role, Setting, by_setting

Engines = Mapping[ModelKind, Engine]
"""Of one setting: that of the model, and that of its dense baseline if it has one."""


def benchmark(context: Context) -> None:
    """Time of model and dense baseline, interleaved, for every setting that runs here; of the model alone where there
    is no dense baseline.
    """
    for role, measure in BENCHMARKS.items():
        for setting, engines in by_setting(context.runnable(role)).items():
            with context.attempt("benchmark", setting_fields(setting)):
                measure(context, setting, engines)
    for narrow, wide in precision_pairs(context.runnable("forward")):
        with context.attempt("benchmark", setting_fields(narrow.setting)):
            _precision(context, narrow, wide)


def _precision(context: Context, narrow: Engine, wide: Engine) -> None:
    context.measure(
        PrecisionRow,
        f"precision/{narrow.target}/{narrow.stem}",
        _inputs(context, [narrow, wide], latency=context.config.latency.model_dump(exclude={"min_speedup"})),
        lambda: [measure_precision(context.root, narrow, wide, context.feeds(narrow.bucket), context.config)],
    )


def _inputs(context: Context, engines: Sequence[Engine], **others: Any) -> dict[str, Any]:
    return {**context.conditions(engines), "seed": context.config.seed, **others}


def _rows(context: Context, setting: Setting, engines: Engines) -> None:
    # Sampling goes on until the gate is settled: another gate may need more samples.
    options = context.config.latency
    gate = gate_of(setting.bucket, context.gated_buckets, options.min_speedup)
    latency = options.model_dump(exclude={"min_speedup", "bootstrap"})
    context.measure(
        LatencyRow,
        f"latency/{setting.target}/{setting.bucket.name}-{setting.dtype}",
        _inputs(context, list(engines.values()), latency=latency, gate=gate),
        lambda: measure_latency(context.root, engines, context.feeds(setting.bucket), context.config, gate),
    )


def _prompts(context: Context, setting: Setting, engines: Engines) -> None:
    decoding = context.decoding_engines()
    context.measure(
        FirstTokenRow,
        f"first_token/{setting.target}/{setting.bucket.name}-{setting.dtype}",
        _inputs(context, list(engines.values()), latency=context.config.latency.model_dump(exclude={"min_speedup"})),
        lambda: [measure_prompts(decoding, engines, context.texts(1, setting.bucket.seq)[0])],
    )


def _steps(context: Context, setting: Setting, engines: Engines) -> None:
    facts, config = context.generation, context.config
    assert isinstance(facts, GenerationFacts)
    decoding = context.decoding_engines()
    # They read the texts at whose positions steps are timed, and the longest of them says how long the texts are.
    readers = [one for kind in engines for one in decoding.prefills(kind, setting.target, setting.dtype)]
    prompts = [context.hash_of(one.path) for one in readers]

    def make() -> list[DecodeRow]:
        # Bytes are moved at one rate, whatever they stand for.
        roofline = cached_roofline(context.machine, "float32", config.latency.threads)
        bandwidth = None if roofline is None else roofline.bandwidth_gbs
        ids_BS = context.texts(setting.bucket.batch, setting.bucket.seq)
        step_bytes = facts.step_bytes[setting.bucket.name][setting.dtype]
        return [measure_steps(decoding, engines, ids_BS, facts.sites, step_bytes, bandwidth)]

    context.measure(
        DecodeRow,
        f"decode/{setting.target}/{setting.bucket.name}-{setting.dtype}",
        _inputs(context, list(engines.values()), positions=config.generation.measured_tokens, prompts=prompts),
        make,
    )


BENCHMARKS: dict[Role, Callable[[Context, Setting, Engines], None]] = {
    "forward": _rows,
    "prefill": _prompts,
    "decode": _steps,
}
"""What is timed of engines of each role: whole rows, the time to the first token, and steps."""


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

    from mod_export.measure.cost import work_of_graph

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
        with context.attempt("profile", setting_fields(engine.setting)):
            name = f"profile/{engine.target}/{engine.stem}"
            step = context.step(name, inputs, [], partial(_profile, context, engine))
            profiled = None if step.result is None else Profiled(**step.result)
            if engine.dtype in rooflines:
                context.add(part_rows(engine, context.work[engine.path], rooflines[engine.dtype], profiled))


def _profile(context: Context, engine: Engine, paths: Sequence[Path]) -> dict[str, Any] | None:
    feeds = context.feeds(engine.bucket)
    found = profile_engine(context.root, engine, context.work[engine.path], feeds, context.config)
    return None if found is None else {"profiler": found.profiler, "ms_by_part": dict(found.ms_by_part)}
