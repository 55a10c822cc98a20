"""`validate` and `bench`, which run some of the stages again over a finished build folder, on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from mod_export.config import BuildConfig
from mod_export.errors import BuildFolderError, UsageError
from mod_export.pipeline.benchmark import benchmark, profile
from mod_export.pipeline.build import Build
from mod_export.pipeline.completing import complete, left_as_it_is
from mod_export.pipeline.plan import without_speed_gate
from mod_export.pipeline.report import compare_with_baseline, not_compared, verdict_of_build
from mod_export.pipeline.rivals import CPU_TARGETS, measure_rivals
from mod_export.rows.base import Result, sentences
from mod_export.rows.correctness import ParityRow
from mod_export.rows.report import Verdict
from mod_export.rows.speed import NamedText

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
    root: Path,
    config: BuildConfig | None,
    targets: Sequence[str],
    checkpoint: Path | None = None,
    *,
    text: Path | None = None,
) -> Rerun:
    """Checks files, weights and graphs, and compares everything that runs here with eager PyTorch.

    The reference is rebuilt from the folder's own spec and weights, or from `checkpoint`. A file that was changed is a
    finding and not an error: it is judged like any other, except that changed compiled code is not run. `text` is a
    file of text to judge on.

    The report of a folder that was built without evidence has the results afterwards, if all of it that runs here was
    judged by its own gates and on the text of its build, and engines that missed a gate are no longer served. The
    folder counts as verified once every engine was judged, on this machine or another.

    Raises:
        BuildFolderError: not a whole build folder, or the reference cannot be rebuilt.
        CheckpointError: `checkpoint` cannot be read, or is not the one that the folder was built from.
        TargetError: nothing to run.
    """
    begin = time.perf_counter()
    # Imported here because validation alone needs PyTorch and ONNX; `bench` runs without them.
    from mod_export.pipeline.validate import changed_program, validate

    build = Build.open(root, config, targets, checkpoint, text, verify=False)
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
    is_whole = checkpoint is None and _is_whole(build, config)
    notes += complete(build, "validate", begin) if is_whole else left_as_it_is(build)
    return Rerun(rows=build.rows, verdict=verdict, notes=notes)


def bench_folder(
    root: Path,
    config: BuildConfig | None,
    targets: Sequence[str],
    *,
    rivals: bool = False,
    text: Path | None = None,
) -> Rerun:
    """Times engines of every role, interleaved with the dense baseline if there is one.

    This needs no PyTorch unless an `inductor` engine is run. A folder that was built without evidence has the times in
    its report afterwards, provided that all of it was timed as it was built, and that the times in its report, if any,
    are of this machine. With `rivals`, other programs that run the model are timed beside its engines; their times are
    in no report, and no verdict depends on them. Texts are written and timed on a file of `text` if one is given.

    Raises:
        BuildFolderError: not a whole build folder, or damaged.
        ConfigError: `config` demands a speed-up, and the folder has no dense baseline.
        TargetError: nothing to run.
    """
    begin = time.perf_counter()
    build = Build.open(root, config, targets, text=text, verify=True)
    if "dense" not in build.facts:
        build.config = without_speed_gate(build.config)
    benchmark(build)
    profile(build)
    compare_with_baseline(build)
    verdict = verdict_of_build(build, parity=False)
    notes = complete(build, "benchmark", begin) if _is_whole(build, config) else left_as_it_is(build)
    notes += _other_text(build)
    if rivals:
        timed = list(measure_rivals(build))
        build.add(timed)
        if not timed:
            notes = [*notes, f"no rivals were timed: no engine of {', '.join(CPU_TARGETS)} reads whole rows here"]
    return Rerun(rows=build.rows, verdict=verdict, notes=notes, not_compared=not_compared(build))


def _is_whole(build: Build, config: BuildConfig | None) -> bool:
    """Whether a run covers a folder as it was built: its own configuration, every target, the same text."""
    assert build.finished is not None
    return config is None and not build.targets and _hash(build.named_text) == _hash(build.finished.manifest.text)


def _other_text(build: Build) -> list[str]:
    """Says that the folder was built with a text that was not given again."""
    assert build.finished is not None
    of_build = build.finished.manifest.text
    if of_build is None or _hash(build.named_text) == of_build.sha256:
        return []
    return [f"the text of the build, {of_build.name}, was not given (--text), so another text was read"]


def _hash(text: NamedText | None) -> str | None:
    return None if text is None else text.sha256


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
        if not graph.writes_text and build.hash_of(graph.path) not in ran and graph.path not in build.not_run
    ]
    counts = Counter(missed)
    lost = [row for row in build.missing if not build.targets or row.target in (None, *build.targets)]
    lines = [f"not in this folder: {sentence}" for sentence in sentences(lost)]
    lines += [f"not run: {count} {what}; of these only the files were looked at" for what, count in counts.items()]
    lines += build.not_run.values()
    lines += _other_text(build)
    if build.finished is not None and not build.finished.exports_alike:
        lines.append(
            "graphs were not compared with a fresh export: other versions are installed than those that built them"
        )
    return lines
