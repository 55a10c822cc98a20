"""The stages of a build, in their order.

load > capture > onnx > passes > engines > validate > benchmark > profile > report

Without evidence, a build ends after the engines, and a check of the structure of its files takes the place of
validation.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from mod_export.config import BuildConfig
from mod_export.environment import limited, peak_rss_bytes, reset_peak_rss
from mod_export.errors import ModExportError
from mod_export.folder.programs import program_files
from mod_export.folder.workspace import Step, Workspace
from mod_export.judge.text import TextFile
from mod_export.model.model import Model
from mod_export.model.program_files import write_graphs
from mod_export.model.programs import ProgramModel
from mod_export.model.tokenizer_files import TokenizerFiles
from mod_export.pipeline.benchmark import benchmark, count_work, profile
from mod_export.pipeline.build import Build
from mod_export.pipeline.engines import build_engines
from mod_export.pipeline.graphs import capture, onnx
from mod_export.pipeline.passes import passes
from mod_export.pipeline.plan import make_plan
from mod_export.pipeline.report import write_report
from mod_export.pipeline.validate import check_structure, validate
from mod_export.rows.base import FailedRow
from mod_export.rows.report import BuildReport, Stage
from mod_export.types import ModelKind

Works = tuple[tuple[str, tuple[Callable[[Build], None], ...]], ...]
BUILDING: Works = (
    ("capture", (capture,)),
    ("onnx", (onnx,)),
    ("passes", (passes,)),
    ("engines", (build_engines, count_work)),
)
EVIDENCE: Works = (
    ("validate", (validate,)),
    ("benchmark", (benchmark,)),
    ("profile", (profile,)),
)
STRUCTURE: Works = (("structure", (check_structure,)),)
"""The last stage of a build without evidence."""


class BuildObserver(Protocol):
    """Receives the progress of a build, for a person to see."""

    def stage_started(self, name: str) -> None: ...
    def step_started(self, name: str) -> None: ...
    def stage_finished(self, stage: Stage) -> None: ...


def build(
    load: Callable[[], tuple[Model, Model | None]],
    config: BuildConfig,
    root: Path,
    observer: BuildObserver,
    command: str,
    capacity: float | None = None,
    tokenizer: TokenizerFiles | None = None,
    rebuild: str | None = None,
    *,
    evidence: bool = True,
    text: Path | None = None,
) -> BuildReport:
    """Runs every stage and writes the report.

    A failure does not end the build: it becomes a row of `report.failed`, and the next run tries that part again. The
    build ends only if a stage leaves nothing of the model itself; finished steps stay, and the next run resumes there.

    Args:
        load: returns the model and, if it is not the model's own, the dense baseline.
        config: the resolved configuration.
        root: the build folder, created if it does not exist.
        observer: receives stages and steps as they happen.
        command: the command as typed, for the report.
        capacity: the capacity that replaced the model's own, for the report.
        tokenizer: the tokenizer of a model whose ids are not bytes.
        rebuild: the command that builds the same with the resolved configuration, for the report.
        evidence: False ends the build after the engines, once the structure of its files has been checked. The
            manifest then says that nothing was verified. `validate_folder` and `bench_folder` complete such a folder,
            and so does the same build with evidence.
        text: a file of text that the model is judged and timed on; without one, held-out text of the model, or else
            Python's documentation, as far as there is a tokenizer.

    Raises:
        ModExportError: nothing could be built, or the request cannot be met; its notes name the stages that were done.
    """
    stages: list[Stage] = []
    steps: list[Step] = []
    failed: list[FailedRow] = []
    with limited(config.max_memory), contextlib.ExitStack() as opened:
        with _stage("load", stages, steps, failed, observer):
            # Read first, because loading a model takes longer.
            file = None if text is None else TextFile.read(text)
            plan = make_plan(*load(), config, root, tokenizer, file)
            # A refused request leaves nothing behind, so the folder is opened only once the plan stands.
            run = Build.start(plan, opened.enter_context(Workspace(root)), observer.step_started)
            run.steps, run.failed = steps, failed
            run.step("load", {kind: run.identity(kind) for kind in run.facts}, [], lambda paths: None)
            _keep_tokenizer(run)
            _keep_programs(run)
        for name, works in (*BUILDING, *(EVIDENCE if evidence else STRUCTURE)):
            with _stage(name, stages, steps, failed, observer):
                for work in works:
                    work(run)
        with _stage("report", stages, steps, failed, observer):
            return write_report(run, stages, command, capacity, rebuild, verified=evidence)


def _keep_tokenizer(build: Build) -> None:
    if build.plan.tokenizer is None:
        return
    data = build.plan.tokenizer.contents
    inputs = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    build.step("tokenizer", inputs, [*data], partial(_write_files, list(data.values())))


def _write_files(contents: Sequence[bytes], paths: Sequence[Path]) -> None:
    for content, path in zip(contents, paths, strict=True):
        path.write_bytes(content)


def _keep_programs(build: Build) -> None:
    """Keeps the programs of a captured model, from which its reference is rebuilt."""
    for kind, model in build.plan.models.items():
        if isinstance(model, ProgramModel):
            files = program_files(kind, [bucket.name for bucket in model.buckets])
            build.step(f"programs/{kind}", build.identity(kind), files, partial(_write_programs, model, kind))


def _write_programs(model: ProgramModel, kind: ModelKind, paths: Sequence[Path]) -> None:
    # The temporary folder has the layout of the build folder.
    write_graphs(model, kind, paths[0].parents[1])


@contextlib.contextmanager
def _stage(
    name: str, stages: list[Stage], steps: list[Step], failed: Sequence[FailedRow], observer: BuildObserver
) -> Iterator[None]:
    """Measures time and memory of a stage and counts its failures. An error says which stages were done before."""
    observer.stage_started(name)
    reset_peak_rss()
    begin, first, before = time.perf_counter(), len(steps), len(failed)
    try:
        yield
    except ModExportError as error:
        done = ", ".join(stage.name for stage in stages) or "none"
        error.add_note(f"stage {name} failed; done before it: {done}")
        raise
    # A stage without steps counts as reused if all stages before it were.
    new_steps, lost = steps[first:], len(failed) - before
    reused = all(step.reused for step in new_steps) if new_steps else all(stage.status == "reused" for stage in stages)
    stage = Stage(
        name=name,
        status="reused" if reused and not lost else "built",
        failed=lost,
        seconds=round(time.perf_counter() - begin, 3),
        peak_rss_bytes=peak_rss_bytes() or None,
    )
    stages.append(stage)
    observer.stage_finished(stage)
