"""`validate` and `bench`, which run some of the stages again over a finished build folder, on this machine."""

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
from mod_export.folder.manifest import REPORT_FILES
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
    verdict_of_build,
)
from mod_export.pipeline.rivals import CPU_TARGETS, measure_rivals
from mod_export.rows.base import Result, sentences
from mod_export.rows.correctness import ParityRow
from mod_export.rows.report import Stage, Verdict, report_from_json

Row = TypeVar("Row", bound=Result)


class RowsOfType(Protocol):
    """Returns the results of one type."""

    def __call__(self, row_type: type[Row], /) -> list[Row]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The outcome of `validate` or `bench`.

    Attributes:
        rows: returns the results of one type.
        verdict: the verdict over all results.
        notes: what was not run, not compared or not written into the folder, and why.
        not_compared: why `bench` has nothing to compare latencies with; None if it compares them.
    """

    rows: RowsOfType
    verdict: Verdict
    notes: Sequence[str] = ()
    not_compared: str | None = None


def validate_folder(
    root: Path, config: BuildConfig | None, targets: Sequence[str], checkpoint: Path | None = None
) -> Rerun:
    """Checks files, weights and graphs, and compares everything that runs here with eager PyTorch.

    The reference is rebuilt from the folder's own spec and weights, or from `checkpoint`. A file that was changed is a
    finding and not an error: it is judged like any other, except that changed compiled code is not run.

    A folder that was built without evidence counts as verified afterwards, if all of it was judged by its own gates.
    Its report then has the results, and engines that missed a gate are no longer served.

    Raises:
        BuildFolderError: not a whole build folder, or the reference cannot be rebuilt.
        CheckpointError: `checkpoint` cannot be read, or is not the one that the folder was built from.
        TargetError: nothing to run.
    """
    begin = time.perf_counter()
    # Imported here because validation alone needs PyTorch and ONNX; `bench` runs without them.
    from mod_export.pipeline.validate import changed_program, validate

    build = Build.open(root, config, targets, checkpoint, verify=False)
    try:
        validate(build)
    except UsageError:
        raise
    except Exception as error:  # Of any type: a captured program that was changed may do anything.
        changed = changed_program(build)
        if changed is None:
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BuildFolderError(f"{root}: {changed}, so there is no reference ({reason}); build again") from error
    verdict, notes = verdict_of_build(build, speedup=False), _notes(build)
    if checkpoint is None and config is None and not targets and build.runnable("forward"):
        notes += _complete(build, "validate", begin, {"verified": True, "refused": refused_in(build)})
    return Rerun(rows=build.rows, verdict=verdict, notes=notes)


def bench_folder(root: Path, config: BuildConfig | None, targets: Sequence[str], *, rivals: bool = False) -> Rerun:
    """Times engines of every role, interleaved with the dense baseline if there is one.

    This needs no PyTorch unless an `inductor` engine is run. A folder that was built without evidence has the times in
    its report afterwards, provided that all of it was timed as it was built. With `rivals`, other programs that run the
    model are timed beside its engines; their times are in no report, and no verdict depends on them.

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
    verdict = verdict_of_build(build, parity=False)
    facts = {"measured": [row.model_dump(mode="json") for row in measured_in(build)]}
    notes = _complete(build, "benchmark", begin, facts) if config is None and not targets else []
    if rivals:
        timed = list(measure_rivals(build))
        build.add(timed)
        if not timed:
            notes = [*notes, f"no rivals were timed: no engine of {', '.join(CPU_TARGETS)} reads whole rows here"]
    return Rerun(rows=build.rows, verdict=verdict, notes=notes, not_compared=not_compared(build))


def _complete(build: Build, stage: str, begin: float, facts: Mapping[str, Any]) -> list[str]:
    """Adds the results of a stage to a folder that was built without evidence; other folders stay as they are.

    Returns:
        Why the folder could not be amended; empty if it was. The results count in either case.
    """
    assert build.finished is not None
    root, files = build.root, build.finished.manifest.files
    if any(changed_file(root, name, files[name]) for name in REPORT_FILES):
        return []  # `validate` has a row about it, and `report` refuses to show it.
    where = root / REPORT_FILES[0]
    report = report_from_json(where.read_text(encoding="utf-8"), str(where))
    if stage in (earlier.name for earlier in report.stages):
        return []
    seconds, peak = round(time.perf_counter() - begin, 3), peak_rss_bytes() or None
    done = Stage(name=stage, status="built", seconds=seconds, peak_rss_bytes=peak)
    try:
        amend(root, facts, texts_of(completed(build, report, done)))
    except BuildFolderError as error:
        return [f"not written into the folder: {error}"]
    return []


def _notes(build: Build) -> list[str]:
    """Says what was not run or not compared, because this machine cannot or because it was not asked for."""
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
