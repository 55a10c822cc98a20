"""Stage report: gives the verdict over all results and writes the last files of a build."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from mod_export.environment import EXPORTERS, versions
from mod_export.folder.manifest import Manifest
from mod_export.folder.programs import PROGRAM
from mod_export.measure.cost import flops_of
from mod_export.measure.verdict import DENSE_ITSELF, NO_SITE_TO_COMPARE, NOTHING_COMPARED, speedup_rows, verdict_of_rows
from mod_export.pipeline.build import Build
from mod_export.report import render_html
from mod_export.rows.base import Result
from mod_export.rows.correctness import CausalityRow, ParityRow, RoutingMap, StructureRow
from mod_export.rows.cost import CostRow, PartRow, Roofline
from mod_export.rows.report import Artifact, BuildReport, ReportedModel, Stage, Target, Verdict, targets_that_ran
from mod_export.rows.speed import (
    DecodeRow,
    FirstTokenRow,
    GenerationReport,
    LatencyRow,
    PrecisionRow,
    QualityRow,
    ServedEngines,
    SpeedupRow,
    TextsRow,
    measured_from_rows,
    served_of,
)
from mod_export.types import Unavailable, having, is_expert

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
"""Field of a report -> the type of its rows, for fields that the evidence stages fill."""
WRITTEN_ROWS: Mapping[str, type[Result]] = {"texts": TextsRow, "decode": DecodeRow, "first_token": FirstTokenRow}
"""Field of `report.generation` -> the type of its rows, likewise."""


def compare_with_baseline(build: Build) -> None:
    """Adds the speed-up, measured, predicted and explained, of every setting that was timed with its dense baseline."""
    portable = having(build.graphs, model="mod", role="forward", target=None)
    k_by_layer = {graph.bucket: graph.k_by_layer for graph in portable}
    flops = {engine.setting: flops_of(build.work[engine.path]) for engine in build.engines if engine.path in build.work}
    build.add(
        speedup_rows(
            build.rows(LatencyRow),
            build.rows(CostRow),
            build.gated_buckets,
            build.config.latency,
            seed=build.config.seed,
            k_by_layer=k_by_layer,
            flops=flops,
            parts=build.rows(PartRow),
        )
    )


def verdict_of_build(build: Build, *, parity: bool = True, speedup: bool = True) -> Verdict:
    """Returns the verdict over everything that runs here, without parity or speed-up if they were not asked for."""
    engines = build.runnable("forward")
    return verdict_of_rows(
        [engine.setting for engine in engines if engine.model == "mod"],
        build.gated_buckets,
        parity=build.rows(ParityRow) if parity else None,
        speedup=build.rows(SpeedupRow) if speedup else None,
        min_speedup=build.config.latency.min_speedup if speedup else 0,
        kinds=list(build.facts),
        structure=build.rows(StructureRow),
        causality=build.rows(CausalityRow),
        reads_rows=reads_rows(build),
        failed=build.failed,
        missing=build.missing,
    )


def reads_rows(build: Build) -> bool:
    """Says whether any engine of the model itself reads whole rows, wherever it runs."""
    return bool(having(build.engines, model="mod", role="forward"))


def not_compared(build: Build) -> str | None:
    """Says why there is no speed-up and how to get one; None if there is a dense baseline."""
    if any(engine.model == "dense" for engine in build.engines):
        return None
    if "dense" in build.facts:
        failed = (row for row in (*build.failed, *build.missing) if row.unbuilt and row.model != "mod")
        lost = next(failed, None)
        return None if lost is None else f"the dense baseline could not be built; of {lost.what}: {lost.why}"
    sites = [site for graph in build.graphs for site in graph.k_by_layer]
    if any(not is_expert(site) for site in sites):
        return NOTHING_COMPARED
    # A captured model declares no routing, so a site may have been missed.
    return NO_SITE_TO_COMPARE if build.facts["mod"].architecture == PROGRAM and not sites else DENSE_ITSELF


def unfollowed(build: Build) -> tuple[str, ...]:
    """Describes the selections of a captured model in which no routing site was found; empty for other models."""
    from mod_export.graph.find_sites import unfollowed_selections  # PyTorch, which a benchmark does without.

    shortest = next(iter(build.plan.model.programs.values()), None)
    if shortest is None or any(graph.k_by_layer for graph in build.graphs):
        return ()
    # Markers are sites, so a program without sites has none.
    return tuple(unfollowed_selections(shortest.program))


def write_report(
    build: Build,
    stages: Sequence[Stage],
    command: str,
    capacity: float | None,
    rebuild: str | None,
    *,
    verified: bool,
) -> BuildReport:
    """Gives the verdict, writes report.json and report.html, and closes the build folder.

    Engines that were not judged or timed miss their gates. A folder that is not `verified` is completed later, by
    `complete`.
    """
    compare_with_baseline(build)
    reused = all(stage.status == "reused" for stage in stages)
    report_stage = Stage(name="report", status="reused" if reused else "built", seconds=0.0, peak_rss_bytes=None)
    report = _report(build, [*stages, report_stage], command, capacity, rebuild)

    def write(paths: Sequence[Path]) -> None:
        for path, text in zip(paths, texts_of(report).values(), strict=True):
            path.write_text(text, encoding="utf-8")

    # The report describes this run, so it is written even if every earlier stage was reused.
    build.step("report", {"report": report.to_json()}, list(texts_of(report)), write)
    _close(build, command, verified=verified)
    return report


def texts_of(report: BuildReport) -> dict[str, str]:
    """Returns file name -> content of the files that show a report."""
    return {"report.json": report.to_json(), "report.html": render_html(report)}


def refused_by(
    build: Build, parity: Sequence[ParityRow], causality: Sequence[CausalityRow], structure: Sequence[StructureRow]
) -> dict[str, tuple[str, ...]]:
    """Returns path -> reasons of every engine and graph that missed a gate, which `load` refuses to serve.

    An engine misses the gates of its weights files too, and every engine of a setting that of its causality.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    for judged in parity:
        if judged.artifact and not judged.passed:
            reasons[judged.artifact] += judged.reasons
    broken = {row.setting: row for row in causality if row.broken}
    files = {graph.path: (graph.path,) for graph in build.graphs} | {one.path: one.files for one in build.engines}
    for path, needed in files.items():
        reasons[path] += [f"{row.path}: {text}" for row in structure if row.path in needed for text in row.reasons]
    for engine in build.engines:
        if engine.setting in broken:
            reasons[engine.path].append(f"causality: {broken[engine.setting].breach}")
    return {path: tuple(texts) for path, texts in reasons.items() if texts}


def served_by(
    build: Build, latency: Sequence[LatencyRow], decode: Sequence[DecodeRow], refused: Container[str]
) -> tuple[ServedEngines, ...]:
    """Returns the engines that are served if no target is named. `refused` has the paths of those that are not."""
    missed = {
        (engine.model, engine.writes_text, engine.target, engine.dtype)
        for engine in build.engines
        if engine.path in refused
    }
    return tuple(served_of(measured_from_rows(latency, decode), missed))


def _refused(build: Build) -> dict[str, tuple[str, ...]]:
    return refused_by(build, build.rows(ParityRow), build.rows(CausalityRow), build.rows(StructureRow))


def _report(
    build: Build, stages: Sequence[Stage], command: str, capacity: float | None, rebuild: str | None
) -> BuildReport:
    model = build.plan.model
    reads_tokens = any(graph.reads_tokens for graph in build.graphs if not graph.writes_text)
    generation = _generation(build) if reads_tokens else None
    return BuildReport(
        command=command,
        rebuild=rebuild,
        capacity=capacity,
        text=build.named_text,
        verdict=verdict_of_build(build),
        not_compared=not_compared(build),
        unfollowed=unfollowed(build),
        model=ReportedModel(
            name=model.name,
            architecture=model.origin.architecture,
            parameters=model.parameters,
            checkpoint_sha256=model.origin.checkpoint_sha256,
            spec=dict(model.spec),
            reads_tokens=reads_tokens,
        ),
        environment=build.machine,
        config=build.config.model_dump(mode="json", by_alias=True),
        stages=tuple(stages),
        artifacts=tuple(_artifacts(build)),
        targets=tuple(_targets(build, generation)),
        cost=tuple(build.rows(CostRow)),
        served=served_by(build, build.rows(LatencyRow), build.rows(DecodeRow), _refused(build)),
        **{name: tuple(build.rows(kind)) for name, kind in ROWS.items()},
        generation=generation,
        failed=tuple(build.failed),
        not_run=dict(build.not_run),
    )


def _generation(build: Build) -> GenerationReport:
    facts = build.generation
    if isinstance(facts, Unavailable):
        return GenerationReport(reason=facts.reason)
    return GenerationReport(
        window=facts.window,
        slots=build.config.generation.slots,
        capacity={str(site): k for site, k in facts.capacity.items()},
        **{name: tuple(build.rows(kind)) for name, kind in WRITTEN_ROWS.items()},
        quality=next(iter(build.rows(QualityRow)), None),
    )


def _artifacts(build: Build) -> list[Artifact]:
    files = {path: entry.model_dump() for path, entry in build.workspace.files().items()}
    artifacts = [
        Artifact(
            kind=kind, path=item.path, role=item.role, target=item.target, model=item.model, bucket=item.bucket.name,
            dtype=item.dtype, **files[item.path],
        )
        for kind, items in (("graph", build.graphs), ("engine", build.engines))
        for item in items
    ]  # fmt: skip
    nothing = dict.fromkeys(("target", "model", "bucket", "role"))
    for path in build.weight_digests:
        dtype = path.rpartition("-")[2].removesuffix(".data")
        artifacts.append(Artifact(kind="weights", path=path, dtype=dtype, **nothing, **files[path]))
    return artifacts


def _targets(build: Build, generation: GenerationReport | None) -> list[Target]:
    ran = targets_that_ran(build.rows(ParityRow), build.rows(LatencyRow), generation)
    built = {engine.target for engine in build.engines}
    rows = []
    for name, status in build.plan.availability.items():
        reason = status.reason
        if name not in built and name in build.plan.targets:
            # The target's own failure says more than a graph's or dtype's, and the model's more than the baseline's.
            lost = min(build.failed, key=lambda row: (row.target != name, row.target is not None, row.model == "dense"))
            reason = f"nothing could be built; of {lost.what}: {lost.why}"
        elif name not in built and status.builds:
            reason = f"not asked for ({status.reason})"
        rows.append(Target(target=name, available=status.builds, reason=reason, ran=name in ran))
    return rows


def _close(build: Build, command: str, *, verified: bool) -> None:
    """Closes the folder with the facts that `validate`, `bench` and `load` need without the checkpoint."""
    plan = build.plan
    manifest = Manifest(
        command=command,
        models=dict(build.facts),
        buckets=build.buckets,
        graphs=tuple(build.graphs),
        engines=tuple(build.engines),
        weight_digests=build.weight_digests,
        exporters=versions(*EXPORTERS),
        verified=verified,
        refused=_refused(build),
        measured=measured_from_rows(build.rows(LatencyRow), build.rows(DecodeRow)),
        generation=build.generation,
        tokenizer=plan.vocabulary,
        text=build.named_text,
        cost=tuple(build.rows(CostRow)),
        work=build.work,
        failed=tuple(row for row in build.failed if row.unbuilt),
        config=plan.config,
        versions={name: build.machine[name] for name in ("mod_export", "torch", "onnx", "onnxruntime")},
        files=build.workspace.files(),
    )
    build.workspace.close(manifest.model_dump(mode="json", by_alias=True))
