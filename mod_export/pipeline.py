"""The order of the stages, and nothing else.

load > capture > onnx > passes > engines > validate > measure > report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from mod_export.config import BuildConfig
from mod_export.errors import ModExportError
from mod_export.model import model_from_checkpoint
from mod_export.plan import KINDS, Plan, make_plan
from mod_export.report.schema import BuildReport, Stage
from mod_export.stages.context import Context
from mod_export.stages.engines import build_engines, passes
from mod_export.stages.evidence import measure, validate
from mod_export.stages.graphs import capture, onnx
from mod_export.stages.outcome import write_report
from mod_export.workspace import Step, Workspace, peak_rss_bytes, reset_peak_rss

__all__ = ["STAGES", "Observer", "build"]

T = TypeVar("T")

STAGES = ("load", "capture", "onnx", "passes", "engines", "validate", "measure", "report")


class Observer(Protocol):
    """Is told what a build does, for a person to see."""

    def stage_started(self, name: str) -> None: ...
    def step_started(self, name: str) -> None: ...
    def stage_finished(self, stage: Stage) -> None: ...


def build(
    checkpoint: Path, config: BuildConfig, root: Path, baseline: Path | None, observer: Observer, command: str
) -> BuildReport:
    """Runs every stage. A failing stage leaves what was whole before it, and the next run resumes there.

    Args:
        checkpoint: model.pt or a folder.
        config: the resolved configuration.
        root: the build folder; made if need be.
        baseline: a dense checkpoint to compare with instead of the dense twin.
        observer: is told of stages and steps.
        command: as typed, for the report.

    Raises:
        ModExportError: a stage failed; its notes name the stages that were done.
    """
    record = _Record(observer)
    plan = record.run("load", lambda: _plan(checkpoint, baseline, config, root))
    with Workspace(root) as workspace:
        context = Context(plan, workspace, observer.step_started)
        # The checkpoint is read every time; whether it is the same one decides if the stage counts as reused.
        same = context.step("load", {kind: context.identity(kind) for kind in KINDS}, [], lambda paths: None)
        record.amend("load", [same])
        record.run_steps("capture", lambda: capture(context))
        record.run_steps("onnx", lambda: onnx(context))
        record.run_steps("passes", lambda: passes(context))
        record.run_steps("engines", lambda: build_engines(context))
        record.run_steps("validate", lambda: validate(context))
        record.run_steps("measure", lambda: measure(context))
        return record.run("report", lambda: write_report(context, record.stages, command))


def _plan(checkpoint: Path, baseline: Path | None, config: BuildConfig, root: Path) -> Plan:
    model = model_from_checkpoint(checkpoint)
    return make_plan(model, model_from_checkpoint(baseline) if baseline else None, config, root)


class _Record:
    """Times each stage, watches its memory, and says which were done when one fails."""

    def __init__(self, observer: Observer) -> None:
        self.stages: list[Stage] = []
        self._observer = observer

    def run_steps(self, name: str, work: Callable[[], Sequence[Step]]) -> None:
        """Runs a stage whose steps say whether it was reused."""
        self.run(name, work, lambda steps: all(step.reused for step in steps))

    def run(self, name: str, work: Callable[[], T], reused: Callable[[T], bool] = lambda result: False) -> T:
        """Runs a stage."""
        self._observer.stage_started(name)
        reset_peak_rss()
        begin = time.perf_counter()
        try:
            result = work()
        except ModExportError as error:
            done = ", ".join(stage.name for stage in self.stages) or "none"
            error.add_note(f"stage {name} failed; done before it: {done}")
            raise
        stage = Stage(
            name=name,
            status="reused" if reused(result) else "built",
            seconds=round(time.perf_counter() - begin, 3),
            peak_rss_bytes=peak_rss_bytes() or None,
        )
        self.stages.append(stage)
        self._observer.stage_finished(stage)
        return result

    def amend(self, name: str, steps: Sequence[Step]) -> None:
        """Marks a finished stage as reused when its steps were."""
        if all(step.reused for step in steps):
            self.stages = [
                stage.model_copy(update={"status": "reused"}) if stage.name == name else stage for stage in self.stages
            ]
