"""`validate` and `bench`: some of the stages again, over a finished build folder, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from mod_export.build_folder.workspace import amend
from mod_export.config import BuildConfig
from mod_export.errors import BuildFolderError, UsageError
from mod_export.plan import without_speed_gate
from mod_export.results.base import Result
from mod_export.results.report import Verdict
from mod_export.stages.benchmark import benchmark, profile
from mod_export.stages.folder import FolderContext, notes
from mod_export.stages.report import compare_with_baseline, not_compared, refused_in, verdict_of

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
        notes: what was not run or not compared, and why.
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
    it was built with, and what missed one of them is not served any more.

    Raises:
        BuildFolderError: not a whole build folder, or nothing that a reference could be rebuilt from.
        CheckpointError: `checkpoint` cannot be read, or is not the one that the folder was built from.
        TargetError: nothing to run.
    """
    # The only stage that needs PyTorch and ONNX.
    from mod_export.stages.validate import changed_program, validate

    context = FolderContext(root, config, targets, checkpoint, verify=False)
    try:
        validate(context)
    except UsageError:
        raise
    except Exception as error:  # Of any type: a captured program that was changed may do anything when it runs.
        changed = changed_program(context)
        if changed is None:
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BuildFolderError(f"{root}: {changed}, so there is no reference ({reason}); build again") from error
    verdict = verdict_of(context, speedup=False)
    as_built = not targets and checkpoint is None and config is None
    if as_built and not context.manifest.verified and context.runnable("forward"):
        amend(root, {"verified": True, "refused": refused_in(context)})
    return Rerun(rows=context.rows, verdict=verdict, notes=notes(context))


def bench_folder(root: Path, config: BuildConfig | None, targets: Sequence[str]) -> Rerun:
    """Time of every role, of model and dense baseline interleaved, or of the model alone where there is none.

    Needs no PyTorch unless an `inductor` engine is run.

    Raises:
        BuildFolderError: not a whole build folder, or damaged.
        ConfigError: `config` demands a speed-up, and the folder has no dense baseline.
        TargetError: nothing to run.
        EngineError: an engine failed.
    """
    context = FolderContext(root, config, targets, verify=True)
    if "dense" not in context.facts:
        context.config = without_speed_gate(context.config)
    benchmark(context)
    profile(context)
    compare_with_baseline(context)
    verdict = verdict_of(context, parity=False)
    return Rerun(rows=context.rows, verdict=verdict, not_compared=not_compared(context))
