"""Stage report: the verdict over everything that was found, and the files that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mod_export.environment import versions
from mod_export.graph.onnx_export import EXPORTERS
from mod_export.measure.latency import Setting
from mod_export.measure.parts import roofline_ms
from mod_export.measure.profiles import flops_by_engine
from mod_export.measure.statistics import Known, SpeedupRow, speedup_rows
from mod_export.measure.verdict import judge
from mod_export.plan import KINDS, GenerationPlan
from mod_export.report import BuildReport, render_html
from mod_export.report.schema import SCHEMA_VERSION, Stage
from mod_export.stages.context import Context
from mod_export.stages.generation.speed import step_bytes
from mod_export.workspace import TOKENIZER

__all__ = ["write_report"]


def write_report(context: Context, stages: Sequence[Stage], command: str, capacity: float | None) -> BuildReport:
    """Judges, writes report.json and report.html, and closes the build folder."""
    reused = all(stage.status == "reused" for stage in stages)
    own = Stage(name="report", status="reused" if reused else "built", seconds=0.0, peak_rss_bytes=None)
    report = _report(context, [*stages, own], command, capacity)

    def write(paths: Sequence[Path]) -> None:
        paths[0].write_text(report.to_json(), encoding="utf-8")
        paths[1].write_text(render_html(report), encoding="utf-8")

    # Written every time: it tells of this run, also when every stage before it was reused.
    context.step("report", {"report": report.to_json()}, ["report.json", "report.html"], write)
    context.workspace.close(_header(context))
    return report


def _report(context: Context, stages: Sequence[Stage], command: str, capacity: float | None) -> BuildReport:
    plan = context.plan
    settings = list(
        dict.fromkeys(
            Setting(target=engine.target, bucket=engine.bucket, dtype=engine.dtype) for engine in context.runnable()
        )
    )
    speedup = _speedup(context)
    verdict = judge(
        settings,
        plan.buckets,
        parity=[*context.parity, *context.generation.parity],
        speedup=speedup,
        min_speedup=plan.config.latency.min_speedup,
        structure=context.structure,
        causality=context.causality,
    )
    return BuildReport.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "command": command,
            "capacity": capacity,
            "verdict": verdict,
            "model": {
                "name": plan.model.name,
                "architecture": plan.model.architecture,
                "parameters": plan.model.parameters,
                "checkpoint_sha256": plan.model.checkpoint_sha256,
                "spec": plan.model.loaded.spec,
            },
            "environment": context.machine,
            "config": plan.config.model_dump(mode="json", by_alias=True),
            "stages": list(stages),
            "artifacts": _artifacts(context),
            "targets": _targets(context),
            "structure": context.structure,
            "parity": context.parity,
            "causality": context.causality,
            "routing_maps": context.maps,
            "latency": context.latency,
            "speedup": speedup,
            "precision": context.precision,
            "cost": context.cost,
            "roofline": context.rooflines,
            "parts": context.parts,
            "generation": _generation(context),
        }
    )


def _generation(context: Context) -> dict[str, Any]:
    plan, found = context.plan.generation, context.generation
    if not isinstance(plan, GenerationPlan):
        return {"reason": plan}
    mod = plan.models["mod"]
    return {
        "window": plan.window,
        "places": context.plan.config.generation.places,
        "capacity": {str(site): k for site, k in mod.capacity.items()},
        "parity": found.parity,
        "texts": found.texts,
        "decode": found.decode,
        "first_token": found.first_token,
        "quality": found.quality,
    }


def _speedup(context: Context) -> Sequence[SpeedupRow]:
    k_by_layer = {bucket.name: graph.k_by_layer for (kind, bucket), graph in context.graphs.items() if kind == "mod"}
    return speedup_rows(
        context.latency,
        context.cost,
        context.plan.buckets,
        context.plan.config.latency,
        seed=context.plan.config.seed,
        known=Known(
            k_by_layer=k_by_layer,
            flops=flops_by_engine(context.engines, context.work),
            roofline_ms=roofline_ms(context.parts),
            parts=context.parts,
        ),
    )


def _artifacts(context: Context) -> list[dict[str, Any]]:
    files = context.workspace.files()
    rows: list[tuple[str, str, str | None, str | None, str | None, str, str | None]] = []
    for graph in (*context.all_graphs(), *context.generation.graphs):
        rows.append(("graph", graph.path, graph.target, graph.model, graph.bucket.name, graph.dtype, graph.role))
    for engine in (*context.engines, *context.generation.engines):
        about = (engine.target, engine.model, engine.bucket.name, engine.dtype, engine.role)
        rows.append(("engine", engine.path, *about))
    for path in files:
        if path.endswith(".data"):
            dtype = path.rpartition("-")[2].removesuffix(".data")
            rows.append(("weights", path, None, None, None, dtype, None))
    names = ("kind", "path", "target", "model", "bucket", "dtype", "role")
    return [{**dict(zip(names, row, strict=True)), **files[row[1]]} for row in rows]


def _targets(context: Context) -> list[dict[str, Any]]:
    ran = {row.target for row in context.parity}
    built = {engine.target for engine in context.engines}
    rows = []
    for name, found in context.plan.availability.items():
        reason = found.reason if name in built or not found.builds else f"not asked for ({found.reason})"
        rows.append({"target": name, "available": found.builds, "reason": reason, "ran": name in ran})
    return rows


def _decoding(context: Context) -> dict[str, Any]:
    """What writing text needs to know of a folder; or why nothing in it can."""
    plan = context.plan.generation
    if not isinstance(plan, GenerationPlan):
        return {"reason": plan}
    lengths = {bucket.seq for bucket in plan.decodes}
    return {
        "window": plan.window,
        "sites": list(map(str, plan.models["mod"].sites)),
        "kv_bytes": {
            kind: {str(length): sum(model.kv_bytes(length).values()) for length in sorted(lengths)}
            for kind, model in plan.models.items()
        },
        "graphs": [asdict(graph) for graph in context.generation.graphs],
        "engines": [asdict(engine) for engine in context.generation.engines],
        "step_bytes": {
            bucket.name: {kind: asdict(step_bytes(model, bucket)) for kind, model in plan.models.items()}
            for bucket in plan.decodes
        },
    }


def _header(context: Context) -> dict[str, Any]:
    """What `validate`, `bench` and `load` need to know of a folder without the checkpoint."""
    plan = context.plan
    models = {}
    for kind in KINDS:
        source = (plan.baseline if kind == "dense" else None) or plan.model
        models[kind] = {
            "name": source.name,
            "architecture": source.architecture,
            "checkpoint_sha256": source.checkpoint_sha256,
            "spec": plan.loaded(kind).spec,
            "vocab_size": plan.loaded(kind).vocab_size,
            "weights": context.weights_path(kind, "float32"),
            "tensors": sorted(plan.loaded(kind).weights),
        }
    return {
        "models": models,
        "graphs": [asdict(graph) for graph in context.all_graphs()],
        "weight_digests": context.weight_digests,
        "exporters": versions(*EXPORTERS),
        "engines": [asdict(engine) for engine in context.engines],
        # What missed its gates is not shipped: `load` refuses it, with these reasons.
        "refused": {
            row.artifact: row.reasons
            for row in (*context.parity, *context.generation.parity)
            if row.artifact and not row.passed
        },
        "generation": _decoding(context),
        "tokenizer": TOKENIZER if isinstance(plan.tokenizer, Path) else plan.tokenizer,
        "cost": [asdict(row) for row in context.cost],
        "work": {path: [asdict(one) for one in work] for path, work in context.work.items()},
        "buckets": [asdict(bucket) for bucket in plan.buckets],
        "config": plan.config.model_dump(mode="json", by_alias=True),
        "versions": {name: context.machine[name] for name in ("mod_export", "torch", "onnx", "onnxruntime")},
    }
