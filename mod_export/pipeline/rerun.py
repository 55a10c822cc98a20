"""`validate` and `bench`: some of the stages again, over a finished build folder, on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mod_export.config import BuildConfig
from mod_export.environment import peak_rss_bytes
from mod_export.errors import BuildFolderError, UsageError
from mod_export.folder.files import changed_file
from mod_export.folder.workspace import amend
from mod_export.pipeline.benchmark import benchmark, profile
from mod_export.pipeline.build import Build
from mod_export.pipeline.plan import without_speed_gate
from mod_export.pipeline.report import (
    compare_with_baseline,
    completed,
    measured_in,
    not_compared,
    refused_in,
    texts_of,
    verdict_of,
)
from mod_export.rows.base import Result
from mod_export.rows.failures import sentences
from mod_export.rows.parity import ParityRow
from mod_export.rows.report import Stage, Verdict, report_from_json

REPORT = ("report.json", "report.html")
Row = TypeVar("Row", bound=Result)


class Rows(Protocol):
    """Gives the results of one type."""

    def __call__(self, row_type: type[Row], /) -> list[Row]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What was found.

    Attributes:
        rows: type of a result -> the rows of that type.
        verdict: over all of them.
        notes: what was not run, not compared or not written into the folder, and why.
        not_compared: why the latencies of `bench` are compared with nothing; None where they are.
    """

    rows: Rows
    verdict: Verdict
    notes: Sequence[str] = ()
    not_compared: str | None = None


def validate_folder(
    root: Path, config: BuildConfig | None, targets: Sequence[str], checkpoint: Path | None = None
) -> Rerun:
    """Files, weights, graphs, and everything that runs here against eager PyTorch.

    The reference is rebuilt from the folder's own spec and weights, or from `checkpoint`. A file that is not the one
    that was built is a finding, not an error: it is looked at like any other, but for compiled code, which is not run.
    A folder that was built without evidence counts as verified afterwards, if all of it was asked for by the gates that
    it was built with; its report says what was found, and what missed a gate is not served any more.

    Raises:
        BuildFolderError: not a whole build folder, or nothing that a reference could be rebuilt from.
        CheckpointError: `checkpoint` cannot be read, or is not the one that the folder was built from.
        TargetError: nothing to run.
    """
    begin = time.perf_counter()
    # The only stage that needs PyTorch and ONNX.
    from mod_export.pipeline.validate import changed_program, validate

    build = Build.open(root, config, targets, checkpoint, verify=False)
    try:
        validate(build)
    except UsageError:
        raise
    except Exception as error:  # Of any type: a captured program that was changed may do anything when it runs.
        changed = changed_program(build)
        if changed is None:
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BuildFolderError(f"{root}: {changed}, so there is no reference ({reason}); build again") from error
    verdict, said = verdict_of(build, speedup=False), _notes(build)
    if checkpoint is None and config is None and not targets and build.runnable("forward"):
        said += _complete(build, "validate", begin, {"verified": True, "refused": refused_in(build)})
    return Rerun(rows=build.rows, verdict=verdict, notes=said)


def bench_folder(root: Path, config: BuildConfig | None, targets: Sequence[str]) -> Rerun:
    """Time of every role, of model and dense baseline interleaved, or of the model alone where there is none.

    Needs no PyTorch unless an `inductor` engine is run. A folder that was built without evidence has the times in its
    report afterwards, if all of it was asked for as it was built.

    Raises:
        BuildFolderError: not a whole build folder, or damaged.
        ConfigError: `config` demands a speed-up, and the folder has no dense baseline.
        TargetError: nothing to run.
    """
    begin = time.perf_counter()
    build = Build.open(root, config, targets, verify=True)
    if "dense" not in build.facts:
        build.config = without_speed_gate(build.config)
    benchmark(build)
    profile(build)
    compare_with_baseline(build)
    verdict = verdict_of(build, parity=False)
    facts = {"measured": [one.model_dump(mode="json") for one in measured_in(build)]}
    said = _complete(build, "benchmark", begin, facts) if config is None and not targets else []
    return Rerun(rows=build.rows, verdict=verdict, notes=said, not_compared=not_compared(build))


def _complete(build: Build, stage: str, begin: float, facts: Mapping[str, Any]) -> list[str]:
    """Amends a folder that was built without evidence, once for each stage; one that was built whole stays as it is.

    Returns:
        Why it could not be amended, if so: what was found counts also where nothing can be written.
    """
    assert build.finished is not None
    root, files = build.root, build.finished.manifest.files
    if any(changed_file(root, name, files[name]) for name in REPORT):
        return []  # A finding of `validate`; `report` says it as well.
    where = root / REPORT[0]
    report = report_from_json(where.read_text(encoding="utf-8"), str(where))
    if stage in (one.name for one in report.stages):
        return []
    seconds, peak = round(time.perf_counter() - begin, 3), peak_rss_bytes() or None
    done = Stage(name=stage, status="built", seconds=seconds, peak_rss_bytes=peak)
    try:
        amend(root, facts, texts_of(completed(build, report, done)))
    except BuildFolderError as error:
        return [f"not written into the folder: {error}"]
    return []


def _notes(build: Build) -> list[str]:
    """What was not run or not compared, because it cannot be here or was not asked for."""
    ran = {build.hash_of(row.artifact) for row in build.rows(ParityRow) if row.artifact is not None}
    missed = [
        f"{engine.target} engines{' that write text' if engine.writes_text else ''}"
        for engine in build.engines
        if build.hash_of(engine.path) not in ran
    ]
    missed += [
        f"{graph.dtype} graphs of {graph.target or 'no target'}"
        for graph in build.graphs
        if not graph.writes_text and build.hash_of(graph.path) not in ran
    ]
    counts = Counter(missed)
    lost = [row for row in build.missing if not build.targets or row.target in (None, *build.targets)]
    lines = [f"not in this folder: {sentence}" for sentence in sentences(lost)]
    lines += [f"not run: {count} {what}; of these only the files were looked at" for what, count in counts.items()]
    if build.finished is not None and not build.finished.exports_alike:
        lines.append(
            "graphs were not compared with a fresh export: other versions are installed than those that built them"
        )
    return lines
