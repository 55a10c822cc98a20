"""The order of the stages, and nothing else.

load > capture > onnx > passes > engines > validate > measure > profile > generation > report
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from mod_export.config import BuildConfig
from mod_export.errors import ModExportError
from mod_export.graph.pages import let_go
from mod_export.memory import limited
from mod_export.model import model_from_checkpoint
from mod_export.plan import KINDS, make_plan
from mod_export.report.schema import BuildReport, Stage
from mod_export.stages.context import Context
from mod_export.stages.engines import build_engines, passes
from mod_export.stages.generation import generation
from mod_export.stages.graphs import capture, onnx
from mod_export.stages.measure import measure
from mod_export.stages.outcome import write_report
from mod_export.stages.profile import profile
from mod_export.stages.validate import validate
from mod_export.workspace import Step, Workspace, peak_rss_bytes, reset_peak_rss

__all__ = ["AFTER_LOAD", "Observer", "build"]

AFTER_LOAD: tuple[tuple[str, Callable[[Context], Sequence[Step]]], ...] = (
    ("capture", capture),
    ("onnx", onnx),
    ("passes", passes),
    ("engines", build_engines),
    ("validate", validate),
    ("measure", measure),
    ("profile", profile),
    ("generation", generation),
)
"""Between reading the checkpoint and writing the report."""


class Observer(Protocol):
    """Is told what a build does, for a person to see."""

    def stage_started(self, name: str) -> None: ...
    def step_started(self, name: str) -> None: ...
    def stage_finished(self, stage: Stage) -> None: ...


def build(
    checkpoint: Path,
    config: BuildConfig,
    root: Path,
    baseline: Path | None,
    observer: Observer,
    command: str,
    capacity: float | None = None,
    tokenizer: Path | None = None,
) -> BuildReport:
    """Runs every stage. A failing stage leaves what was whole before it, and the next run resumes there.

    Args:
        checkpoint: model.pt or a folder.
        config: the resolved configuration.
        root: the build folder; made if need be.
        baseline: a dense checkpoint to compare with instead of the dense twin.
        observer: is told of stages and steps.
        command: as typed, for the report.
        capacity: of every routed layer, in place of the checkpoint's own.
        tokenizer: a file of the package `tokenizers`, for models whose ids are not bytes.

    Raises:
        ModExportError: a stage failed; its notes name the stages that were done.
    """
    stages: list[Stage] = []
    with contextlib.ExitStack() as opened:
        opened.enter_context(limited(config.max_memory))
        with _stage("load", stages, observer) as steps:
            model = model_from_checkpoint(checkpoint)
            model = model if capacity is None else model.with_capacity(capacity)
            let_go(model.loaded.weights.values())
            plan = make_plan(model, model_from_checkpoint(baseline) if baseline else None, config, root, tokenizer)
            # Not before the request is known to be sound: a refused one leaves nothing behind.
            context = Context(plan, opened.enter_context(Workspace(root)), observer.step_started)
            steps.append(context.step("load", {kind: context.identity(kind) for kind in KINDS}, [], lambda paths: None))
        for name, work in AFTER_LOAD:
            with _stage(name, stages, observer) as steps:
                steps += work(context)
        with _stage("report", stages, observer):
            return write_report(context, stages, command, capacity)


@contextlib.contextmanager
def _stage(name: str, stages: list[Stage], observer: Observer) -> Iterator[list[Step]]:
    """Times a stage, watches its memory, and says which stages were done when it fails."""
    observer.stage_started(name)
    reset_peak_rss()
    begin = time.perf_counter()
    steps: list[Step] = []
    try:
        yield steps
    except ModExportError as error:
        done = ", ".join(stage.name for stage in stages) or "none"
        error.add_note(f"stage {name} failed; done before it: {done}")
        raise
    # A stage that had nothing to do is as new or as old as the one before it.
    reused = all(step.reused for step in steps) if steps else all(stage.status == "reused" for stage in stages)
    stage = Stage(
        name=name,
        status="reused" if reused else "built",
        seconds=round(time.perf_counter() - begin, 3),
        peak_rss_bytes=peak_rss_bytes() or None,
    )
    stages.append(stage)
    observer.stage_finished(stage)
