"""Adds what `validate` or `bench` found to a folder that was built without evidence.

Such a folder may be completed in several runs and on several machines, because an engine can be judged only where it
runs. So results are added engine by engine, and the folder counts as verified once every engine has been judged. Times
of two machines cannot be compared, so all of them come from one machine. Everything is read and written while the
folder is locked: another run may complete it at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mod_export.engines import ENGINES
from mod_export.environment import peak_rss_bytes
from mod_export.errors import BuildFolderError
from mod_export.folder.files import changed_file
from mod_export.folder.manifest import REPORT_FILES, Manifest, open_folder
from mod_export.folder.workspace import Amendment, amend
from mod_export.measure.verdict import verdict_of_rows
from mod_export.pipeline.build import Build
from mod_export.pipeline.report import ROWS, WRITTEN_ROWS, reads_rows, refused_by, served_by, texts_of
from mod_export.rows.base import FailedRow, Result
from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
from mod_export.rows.report import BuildReport, Stage, Verdict, report_from_json, targets_that_ran
from mod_export.rows.speed import GenerationReport, QualityRow, measured_from_rows
from mod_export.types import Engine, having

Completing = Literal["validate", "benchmark"]
"""The run that completes a folder, by the name of its stage."""
STAGES: Mapping[Completing, tuple[str, ...]] = {"validate": ("validate",), "benchmark": ("benchmark", "profile")}
"""Run -> the stages whose failures it can mend."""
UNEVIDENCED = "structure"
"""A stage that only builds without evidence have."""
ABOUT = ("path", "checked", "artifact", "target", "dtype", "role", "bucket", "model", "part", "threads")
"""Fields that say what a row is about. Of two rows that agree in all of them, one is kept."""
TIMED = ("latency", "precision", "parts", "roofline")
"""Fields of a report whose rows hold times of this machine."""
WRITTEN_TIMED = ("decode", "first_token")
"""Fields of `report.generation`, likewise."""
VARIES = ("load_average", "memory_bytes")
"""Parts of an environment that differ between two runs on one machine: a kernel keeps another share of memory after
every start."""
NOT_WRITTEN = "not written into the folder"
Row = TypeVar("Row", bound=Result)


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of a report, by the names of their fields, and what it says of texts."""

    rows: Mapping[str, tuple[Any, ...]]
    generation: GenerationReport | None

    def written(self, name: str) -> tuple[Any, ...]:
        """Returns rows of `report.generation`; none if the model writes no text."""
        return () if self.generation is None else tuple(getattr(self.generation, name))

    @property
    def ran_targets(self) -> set[str]:
        """The targets of which something was run."""
        return targets_that_ran(self.rows["parity"], self.rows["latency"], self.generation)

    @property
    def are_timed(self) -> bool:
        """Whether anything was timed."""
        return any(self.rows[name] for name in TIMED) or any(self.written(name) for name in WRITTEN_TIMED)


def complete(build: Build, stage: Completing, begin: float) -> list[str]:
    """Adds the results of a run to report and manifest of a folder that was built without evidence.

    Rows of engines that the report has no rows of are added. Of an engine that it has, the earlier row stays, unless
    the later one missed a gate. An engine that could not be run here waits for another machine. `begin` is when the
    run began, by `time.perf_counter`.

    Returns:
        Notes: why nothing was written, or what is still to be judged. The results of the run count in either case.
    """
    if not is_unevidenced(build):
        return _of_evidenced(build)
    unrun = [f"not judged here: {row.setting} {row.model}: {row.reasons[0]}" for row in _rows_not_judged(build)]
    notes: list[str] = []
    try:
        amend(build.root, lambda: _amendment(build, stage, begin, notes))
    except BuildFolderError as error:
        return [*unrun, f"{NOT_WRITTEN}: {error}"]
    return [*unrun, *notes]


def left_as_it_is(build: Build) -> list[str]:
    """Says that a run over a part of a folder, or with other options, completes nothing; empty where nothing is to be
    completed.
    """
    if not is_unevidenced(build):
        return []
    return [f"{NOT_WRITTEN}: that needs a run over all of it, with its own weights, configuration and text"]


def is_unevidenced(build: Build) -> bool:
    """Says whether a finished folder was built without evidence, even if it has been completed since."""
    assert build.finished is not None
    try:
        return any(stage.name == UNEVIDENCED for stage in _read_report(build).stages)
    except (OSError, ValueError, BuildFolderError):
        return not build.finished.manifest.verified  # `complete` says what is wrong with the report.


def _read_report(build: Build) -> BuildReport:
    where = build.root / REPORT_FILES[0]
    return report_from_json(where.read_text(encoding="utf-8"), str(where))


def _of_evidenced(build: Build) -> list[str]:
    assert build.finished is not None
    known = build.finished.manifest.refused
    new = [path for path in _refused_here(build) if path not in known]
    if not new or _damaged(build) is not None:  # `load` refuses a damaged file.
        return []
    return [
        f"{NOT_WRITTEN}, whose report is that of its build: {', '.join(new)} missed a gate here and is still served; "
        "build again on this machine"
    ]


def _refused_here(build: Build) -> list[str]:
    engines = {engine.path for engine in build.engines}
    rows = (_judged_rows(build), build.rows(CausalityRow), build.rows(StructureRow))
    return [path for path in refused_by(build, *rows) if path in engines]


def _amendment(build: Build, stage: Completing, begin: float, notes: list[str]) -> Amendment:
    """Returns the facts and files of the completed folder, and adds notes about it.

    Raises:
        BuildFolderError: nothing can be added; the message says why.
    """
    assert build.finished is not None
    manifest = open_folder(build.root, verify=False)
    changed = next((name for name in REPORT_FILES if changed_file(build.root, name, manifest.files[name])), None)
    if changed is not None:
        raise BuildFolderError(f"{changed} is not the one that was written; build again")
    if _without_report(manifest) != _without_report(build.finished.manifest):
        raise BuildFolderError("it was built again since this run began; repeat the command")
    damaged = _damaged(build)
    if damaged is not None:
        raise BuildFolderError(f"{damaged} is not the file that was built, so the results are of another one")
    report = _read_report(build)
    old = _results_of(report)
    if stage == "benchmark" and old.are_timed:
        _check_machine(build, report.environment)
    new, failed = _joined(build, old), _failures(build, stage, report.failed)
    not_run = _not_run(build, report.not_run, new.rows["parity"])
    if (new, failed, not_run) == (old, report.failed, report.not_run):
        raise BuildFolderError("it has results of everything that runs here")
    seconds, peak = round(time.perf_counter() - begin, 3), peak_rss_bytes() or None
    done = Stage(name=stage, status="built", seconds=seconds, peak_rss_bytes=peak)
    refused = refused_by(build, new.rows["parity"], new.rows["causality"], new.rows["structure"])
    completed = report.model_copy(
        update={
            **new.rows,
            "verdict": _verdict(build, new, failed),
            "failed": failed,
            "not_run": not_run,
            "served": served_by(build, new.rows["latency"], new.written("decode"), refused),
            "generation": new.generation,
            # Times mean something only beside the machine that they were taken on; the other results hold on any.
            "environment": build.machine if stage == "benchmark" else report.environment,
            "stages": (*report.stages[:-1], done, report.stages[-1]),
            "targets": tuple(
                row.model_copy(update={"ran": row.ran or row.target in new.ran_targets}) for row in report.targets
            ),
        }
    )
    unjudged = _unjudged(build.engines, new.rows["parity"])
    if stage == "validate" and unjudged:
        targets = ", ".join(dict.fromkeys(engine.target for engine in unjudged))
        notes.append(
            f"not verified yet: {len(unjudged)} engines of {targets} were judged on no machine so far; use validate "
            "where they run"
        )
    measured = measured_from_rows(new.rows["latency"], new.written("decode"))
    facts = {
        "verified": not unjudged,
        "refused": refused,
        "measured": [row.model_dump(mode="json") for row in measured],
    }
    return facts, texts_of(completed)


def _without_report(manifest: Manifest) -> Mapping[str, str]:
    return {path: entry.sha256 for path, entry in manifest.files.items() if path not in REPORT_FILES}


def _damaged(build: Build) -> str | None:
    """Returns a file that is not the one that was built; None if there is none. Only files in which something was found
    are read again.
    """
    assert build.finished is not None
    files = build.finished.manifest.files
    suspects = dict.fromkeys(row.path for row in build.rows(StructureRow) if not row.passed)
    # Another run may have completed the report since this run looked at it.
    listed = (path for path in suspects if path in files and path not in REPORT_FILES)
    return next((path for path in listed if changed_file(build.root, path, files[path])), None)


def _check_machine(build: Build, environment: Mapping[str, Any]) -> None:
    """Checks that this machine is the one that all times so far were taken on.

    Raises:
        BuildFolderError: it is not, or other versions are installed.
    """
    # What was not known or not installed then changes nothing about the times.
    differ = [
        f"{name} was {was!r} and is {build.machine[name]!r}"
        for name, was in environment.items()
        if name not in VARIES and was is not None and name in build.machine and build.machine[name] != was
    ]
    if differ:
        raise BuildFolderError(
            f"its times were taken under other conditions ({'; '.join(differ)}), and such times cannot be compared; "
            "build again to take all of them here"
        )


def _results_of(report: BuildReport) -> Results:
    return Results({name: getattr(report, name) for name in ROWS}, report.generation)


def _joined(build: Build, old: Results) -> Results:
    """Returns the results with those of this run added."""
    found: dict[str, Sequence[Result]] = {name: build.rows(kind) for name, kind in ROWS.items()}
    # The report is as it was written. If this run saw it otherwise, another run has completed it since.
    found["structure"] = [row for row in build.rows(StructureRow) if row.passed or row.path not in REPORT_FILES]
    # What could not be run here may be right, so it leaves no trace that would outlive a row of another machine.
    found["parity"] = _judged_rows(build)
    rows = {name: _added(old.rows[name], found[name]) for name in ROWS}
    written = old.generation
    if written is not None:
        texts = {name: _added(old.written(name), build.rows(kind)) for name, kind in WRITTEN_ROWS.items()}
        quality = written.quality or next(iter(build.rows(QualityRow)), None)
        written = written.model_copy(update={**texts, "quality": quality})
    return Results(rows, written)


def _added(old: Sequence[Row], new: Sequence[Row]) -> tuple[Row, ...]:
    """Returns one row about each thing: the earlier one, unless the later one missed a gate."""
    rows = {_about(row): row for row in old}
    for row in new:
        # Every run looks at all files, also at those that the last run has written.
        if _about(row) not in rows or isinstance(row, StructureRow) or _missed(row):
            rows[_about(row)] = row
    return tuple(rows.values())


def _judged_rows(build: Build) -> list[ParityRow]:
    return [row for row in build.rows(ParityRow) if row.judged]


def _rows_not_judged(build: Build) -> list[ParityRow]:
    return [row for row in build.rows(ParityRow) if not row.judged]


def _about(row: Result) -> tuple[Any, ...]:
    return tuple(getattr(row, name, None) for name in ABOUT)


def _missed(row: Result) -> bool:
    return (isinstance(row, ParityRow) and not row.passed) or (isinstance(row, CausalityRow) and row.broken)


def _failures(build: Build, stage: Completing, old: Sequence[FailedRow]) -> tuple[FailedRow, ...]:
    """Returns what failed so far, without earlier failures that this run would have repeated."""
    here = {engine.target for engine in build.runnable("forward", "prefill", "decode")}
    # What has no target, such as a map, is done in every run.
    repeated = {None, *here}
    kept = [row for row in old if row.stage not in STAGES[stage] or row.target not in repeated]
    return (*kept, *(row for row in build.failed if row not in kept))


def _not_run(build: Build, old: Mapping[str, str], parity: Sequence[ParityRow]) -> dict[str, str]:
    """Returns the graphs that no machine so far had room for, with the earliest reason for each."""
    judged = {row.artifact for row in parity}
    return {path: why for path, why in {**build.not_run, **old}.items() if path not in judged}


def _unjudged(engines: Sequence[Engine], parity: Sequence[ParityRow]) -> list[Engine]:
    """Returns the engines that `validate` runs on some machine, and has not judged on any."""
    judged = {row.artifact for row in parity}
    runs = (engine for engine in engines if not engine.writes_text or ENGINES[engine.target].binds)
    return [engine for engine in runs if engine.path not in judged]


def _verdict(build: Build, results: Results, failed: Sequence[FailedRow]) -> Verdict:
    """Returns the verdict over everything that runs here or has run elsewhere."""
    seen = {row.setting for name in ("parity", "latency") for row in results.rows[name]}
    unrun = {row.setting for row in _rows_not_judged(build)}
    here = {engine.setting for engine in build.runnable("forward")} - unrun
    expected = [
        engine.setting for engine in having(build.engines, model="mod", role="forward") if engine.setting in here | seen
    ]
    return verdict_of_rows(
        list(dict.fromkeys(expected)),
        build.gated_buckets,
        parity=results.rows["parity"],
        speedup=results.rows["speedup"],
        min_speedup=build.config.latency.min_speedup,
        kinds=list(build.facts),
        structure=results.rows["structure"],
        causality=results.rows["causality"],
        reads_rows=reads_rows(build),
        failed=failed,
    )
