"""Stage report: the verdict over everything that was found, and the files that a build ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mod_export.environment import EXPORTERS, versions
from mod_export.folder.manifest import TOKENIZER, Manifest
from mod_export.folder.programs import PROGRAM
from mod_export.measure.cost import flops_of
from mod_export.measure.speedup import DENSE_ITSELF, NO_SITE_TO_COMPARE, NOTHING_COMPARED, speedup_rows
from mod_export.measure.verdict import judge
from mod_export.pipeline.context import BuildContext, Context
from mod_export.report import render_html
from mod_export.rows.base import Result
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.generation import DecodeRow, FirstTokenRow, GenerationReport, QualityRow, TextsRow
from mod_export.rows.latency import LatencyRow, PrecisionRow, SpeedupRow
from mod_export.rows.parity import ParityRow
from mod_export.rows.report import Artifact, BuildReport, ReportedModel, Stage, Target, Verdict
from mod_export.rows.serving import Measured, Served, measured_from_rows, served_of
from mod_export.rows.structure import CausalityRow, RoutingMap, StructureRow
from mod_export.types import is_expert

ROWS: Mapping[str, type[Result]] = {
    "structure": StructureRow,
    "parity": ParityRow,
    "causality": CausalityRow,
    "routing_maps": RoutingMap,
    "latency": LatencyRow,
    "speedup": SpeedupRow,
    "precision": PrecisionRow,
    "roofline": Roofline,
    "parts": PartRow,
}
"""Field of a report -> its rows, of those that stages of evidence find."""
WRITTEN_ROWS: Mapping[str, type[Result]] = {"texts": TextsRow, "decode": DecodeRow, "first_token": FirstTokenRow}
"""The same of its part about writing text."""


def compare_with_baseline(context: Context) -> None:
    """The speed-up of every setting that was timed with its dense baseline: measured, predicted, and explained."""
    k_by_layer = {
        graph.bucket: graph.k_by_layer
        for graph in context.graphs
        if (graph.model, graph.role, graph.target) == ("mod", "forward", None)
    }
    flops = {
        engine.setting: flops_of(context.work[engine.path]) for engine in context.engines if engine.path in context.work
    }
    context.add(
        speedup_rows(
            context.rows(LatencyRow),
            context.rows(CostRow),
            context.gated_buckets,
            context.config.latency,
            seed=context.config.seed,
            k_by_layer=k_by_layer,
            flops=flops,
            parts=context.rows(PartRow),
        )
    )


def verdict_of(context: Context, *, parity: bool = True, speedup: bool = True) -> Verdict:
    """The verdict over everything that runs here; what was not asked for is left out."""
    engines = context.runnable("forward")
    return judge(
        [engine.setting for engine in engines if engine.model == "mod"],
        context.gated_buckets,
        parity=context.rows(ParityRow) if parity else None,
        speedup=context.rows(SpeedupRow) if speedup else None,
        min_speedup=context.config.latency.min_speedup if speedup else 0,
        kinds=list(context.facts),
        structure=context.rows(StructureRow),
        causality=context.rows(CausalityRow),
        reads_rows=_reads_rows(context),
        failed=context.failed,
        missing=context.missing,
    )


def _reads_rows(context: Context) -> bool:
    return any((engine.model, engine.role) == ("mod", "forward") for engine in context.engines)


def not_compared(context: Context) -> str | None:
    """Why there is no speed-up and how to get one; None where there is a dense baseline."""
    if any(engine.model == "dense" for engine in context.engines):
        return None
    if "dense" in context.facts:
        failed = (row for row in (*context.failed, *context.missing) if row.unbuilt and row.model != "mod")
        lost = next(failed, None)
        return None if lost is None else f"the dense baseline could not be built; of {lost.what}: {lost.why}"
    sites = [site for graph in context.graphs for site in graph.k_by_layer]
    if any(not is_expert(site) for site in sites):
        return NOTHING_COMPARED
    # What a spec does not declare is only known as far as it was found.
    return NO_SITE_TO_COMPARE if context.facts["mod"].architecture == PROGRAM and not sites else DENSE_ITSELF


def unfollowed(context: BuildContext) -> tuple[str, ...]:
    """What a captured model without routing sites selects all the same; nothing of other models."""
    from mod_export.graph.unfollowed import unfollowed_selections  # PyTorch, which a benchmark does without.
    from mod_export.model.programs import ProgramModel

    loaded = context.plan.model.loaded
    if not isinstance(loaded, ProgramModel) or any(graph.k_by_layer for graph in context.graphs):
        return ()
    program = loaded.programs[loaded.buckets[0]].program
    # Markers are sites, so a program without sites has none.
    return tuple(unfollowed_selections(program))


def write_report(
    context: BuildContext,
    stages: Sequence[Stage],
    command: str,
    capacity: float | None,
    rebuild: str | None,
    *,
    verified: bool,
) -> BuildReport:
    """Judges, writes report.json and report.html, and closes the build folder. What was not judged or timed misses its
    gates: not `verified`, the folder is one whose report `completed` goes on with.
    """
    compare_with_baseline(context)
    reused = all(stage.status == "reused" for stage in stages)
    own = Stage(name="report", status="reused" if reused else "built", seconds=0.0, peak_rss_bytes=None)
    report = _report(context, [*stages, own], command, capacity, rebuild)

    def write(paths: Sequence[Path]) -> None:
        for path, text in zip(paths, texts_of(report).values(), strict=True):
            path.write_text(text, encoding="utf-8")

    # Written every time: it tells of this run, also when every stage before it was reused.
    context.step("report", {"report": report.to_json()}, list(texts_of(report)), write)
    _close(context, command, verified=verified)
    return report


def texts_of(report: BuildReport) -> dict[str, str]:
    """The files that a report is written to."""
    return {"report.json": report.to_json(), "report.html": render_html(report)}


def completed(context: Context, report: BuildReport, stage: Stage) -> BuildReport:
    """The report of a folder that was built without evidence, with what this later run found, and a verdict over all
    that is known by now. `stage` is that of the run.
    """
    new = {name: tuple(context.rows(kind)) for name, kind in ROWS.items()}
    known: dict[str, Any] = {name: rows or getattr(report, name) for name, rows in new.items()}
    ran = {row.target for row in known["parity"]}
    written = report.generation
    if written is not None:
        # What a run did not ask for it found nothing of.
        found = {name: tuple(context.rows(kind)) or getattr(written, name) for name, kind in WRITTEN_ROWS.items()}
        quality = next(iter(context.rows(QualityRow)), written.quality)
        written = written.model_copy(update={**found, "quality": quality})
    failed = (*report.failed, *context.failed)
    verdict = judge(
        [engine.setting for engine in context.runnable("forward") if engine.model == "mod"],
        context.gated_buckets,
        parity=known["parity"],
        speedup=known["speedup"],
        min_speedup=context.config.latency.min_speedup,
        kinds=list(context.facts),
        structure=known["structure"],
        causality=known["causality"],
        reads_rows=_reads_rows(context),
        failed=failed,
    )
    return report.model_copy(
        update={
            **known,
            "verdict": verdict,
            "failed": failed,
            "served": _served(known["parity"], known["latency"], () if written is None else written.decode),
            "generation": written,
            "environment": context.machine,
            "stages": (*report.stages[:-1], stage, report.stages[-1]),
            "targets": tuple(one.model_copy(update={"ran": one.target in ran}) for one in report.targets),
        }
    )


def refused_in(context: Context) -> dict[str, tuple[str, ...]]:
    """What missed its gates, with the reasons: it is not served, `load` refuses it."""
    return {row.artifact: row.reasons for row in context.rows(ParityRow) if row.artifact and not row.passed}


def measured_in(context: Context) -> tuple[Measured, ...]:
    """How fast engines were: what `load` chooses from."""
    return measured_from_rows(context.rows(LatencyRow), context.rows(DecodeRow))


def _served(
    parity: Sequence[ParityRow], latency: Sequence[LatencyRow], decode: Sequence[DecodeRow]
) -> tuple[Served, ...]:
    refused = {(row.model, row.role != "forward", row.target, row.dtype) for row in parity if not row.passed}
    return tuple(served_of(measured_from_rows(latency, decode), refused))


def _report(
    context: BuildContext, stages: Sequence[Stage], command: str, capacity: float | None, rebuild: str | None
) -> BuildReport:
    model = context.plan.model
    reads_tokens = any(graph.reads_tokens for graph in context.graphs if graph.role == "forward")
    return BuildReport(
        command=command,
        rebuild=rebuild,
        capacity=capacity,
        verdict=verdict_of(context),
        not_compared=not_compared(context),
        unfollowed=unfollowed(context),
        model=ReportedModel(
            name=model.name,
            architecture=model.architecture,
            parameters=model.parameters,
            checkpoint_sha256=model.checkpoint_sha256,
            spec=dict(model.loaded.spec),
            reads_tokens=reads_tokens,
        ),
        environment=context.machine,
        config=context.config.model_dump(mode="json", by_alias=True),
        stages=tuple(stages),
        artifacts=tuple(_artifacts(context)),
        targets=tuple(_targets(context)),
        cost=tuple(context.rows(CostRow)),
        served=_served(context.rows(ParityRow), context.rows(LatencyRow), context.rows(DecodeRow)),
        **{name: tuple(context.rows(kind)) for name, kind in ROWS.items()},
        generation=_generation(context) if reads_tokens else None,
        failed=tuple(context.failed),
    )


def _generation(context: BuildContext) -> GenerationReport:
    facts = context.generation
    if isinstance(facts, str):
        return GenerationReport(reason=facts)
    return GenerationReport(
        window=facts.window,
        slots=context.config.generation.slots,
        capacity={str(site): k for site, k in facts.capacity.items()},
        **{name: tuple(context.rows(kind)) for name, kind in WRITTEN_ROWS.items()},
        quality=next(iter(context.rows(QualityRow)), None),
    )


def _artifacts(context: BuildContext) -> list[Artifact]:
    files = {path: entry.model_dump() for path, entry in context.workspace.files().items()}
    found = [
        Artifact(
            kind=kind, path=one.path, role=one.role, target=one.target, model=one.model, bucket=one.bucket.name,
            dtype=one.dtype, **files[one.path],
        )
        for kind, made in (("graph", context.graphs), ("engine", context.engines))
        for one in made
    ]  # fmt: skip
    nothing = dict.fromkeys(("target", "model", "bucket", "role"))
    for path in context.weight_digests:
        dtype = path.rpartition("-")[2].removesuffix(".data")
        found.append(Artifact(kind="weights", path=path, dtype=dtype, **nothing, **files[path]))
    return found


def _targets(context: BuildContext) -> list[Target]:
    ran = {row.target for row in context.rows(ParityRow)}
    built = {engine.target for engine in context.engines}
    rows = []
    for name, found in context.plan.availability.items():
        reason = found.reason
        if name not in built and name in context.plan.targets:
            # Its own failure rather than that of a graph or a dtype, and the model's rather than the baseline's.
            lost = min(
                context.failed, key=lambda row: (row.target != name, row.target is not None, row.model == "dense")
            )
            reason = f"nothing could be built; of {lost.what}: {lost.why}"
        elif name not in built and found.builds:
            reason = f"not asked for ({found.reason})"
        rows.append(Target(target=name, available=found.builds, reason=reason, ran=name in ran))
    return rows


def _close(context: BuildContext, command: str, *, verified: bool) -> None:
    """With what `validate`, `bench` and `load` need to know of the folder without the checkpoint."""
    plan = context.plan
    manifest = Manifest(
        command=command,
        models=dict(context.facts),
        buckets=context.buckets,
        graphs=tuple(context.graphs),
        engines=tuple(context.engines),
        weight_digests=context.weight_digests,
        exporters=versions(*EXPORTERS),
        verified=verified,
        refused=refused_in(context),
        measured=measured_in(context),
        generation=context.generation,
        tokenizer=TOKENIZER if isinstance(plan.tokenizer, Path) else plan.tokenizer,
        cost=tuple(context.rows(CostRow)),
        work=context.work,
        failed=tuple(row for row in context.failed if row.unbuilt),
        config=plan.config,
        versions={name: context.machine[name] for name in ("mod_export", "torch", "onnx", "onnxruntime")},
        files=context.workspace.files(),
    )
    context.workspace.close(manifest.model_dump(mode="json", by_alias=True))
