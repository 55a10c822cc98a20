"""Stage validate, on a build folder whose other stages are reused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from mod_export.config import BuildConfig
from mod_export.folder.workspace import Workspace
from mod_export.model.model import Model
from mod_export.pipeline import validate as stage
from mod_export.pipeline.build import Build
from mod_export.pipeline.engines import build_engines
from mod_export.pipeline.graphs import capture, onnx
from mod_export.pipeline.passes import passes
from mod_export.pipeline.plan import make_plan
from mod_export.pipeline.rerun import validate_folder
from mod_export.pipeline.validate import validate
from mod_export.report import render_html, render_text
from mod_export.rows.correctness import CausalityRow, ParityRow, RoutingMap, StructureRow
from mod_export.rows.report import report_from_json

ENGINE = "engines/ort-cpu/mod-b1s64-float32.onnx"


def context_of(root: Path, model: Model, config: BuildConfig) -> Iterator[Build]:
    with Workspace(root) as workspace:
        context = Build.start(make_plan(model, None, config, root), workspace, lambda name: None)
        for stage in (capture, onnx, passes, build_engines):
            stage(context)
        assert all(step.reused for step in context.steps)
        context.steps.clear()
        yield context


@pytest.fixture
def context(built_copy: Path, model: Model, config: BuildConfig) -> Iterator[Build]:
    yield from context_of(built_copy, model, config)


@pytest.fixture
def asked_again(built_copy: Path, model: Model, config: BuildConfig) -> Iterator[Build]:
    """Another seed and only one bucket: every input differs, and nothing else is made again."""
    yield from context_of(built_copy, model, config.model_copy(update={"seed": 1, "buckets": ((1, 64),)}))


CELLS = [(bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")]


def test_what_was_found_is_found_again_without_looking(context: Build) -> None:
    validate(context)
    assert all(step.reused for step in context.steps)
    assert [step.name for step in context.steps] == [
        "structure",
        *(f"parity/ort-cpu/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        *(f"parity/portable/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        *(f"causality/ort-cpu/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        "map/b1s64",
        "map/b2s32",
    ]
    assert {row.path for row in context.rows(StructureRow)} == {
        "graphs/weights-float32.data",
        *(f"graphs/{kind}-{bucket}.onnx" for bucket, kind in CELLS),
        *(f"graphs/{kind}-{bucket}.ort-cpu.float32.onnx" for bucket, kind in CELLS),
        *(f"engines/ort-cpu/{kind}-{bucket}-float32.onnx" for bucket, kind in CELLS),
    }
    assert all(row.passed for row in (*context.rows(StructureRow), *context.rows(ParityRow)))
    assert [(row.bucket, row.model) for row in context.rows(ParityRow)] == 2 * CELLS
    assert [row.causal for row in context.rows(CausalityRow)] == [False, True] * 2
    assert [row.bucket for row in context.rows(RoutingMap)] == ["b1s64", "b2s32"]
    assert [layer.layer for layer in context.rows(RoutingMap)[0].layers] == [1, 3]


def test_a_graph_that_memory_has_no_room_for_is_named(context: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with 4 heads over 64 tokens holds 2 x 4 bytes x 4 x 64 x 64, as much as twice a bucket's logits."""
    # Free memory is part of the environment, so the test replaces it.
    needed = 2 * 4 * 4 * 64 * 64
    monkeypatch.setattr(stage, "free_bytes", lambda: 2 * needed)
    validate(context)
    assert [(row.bucket, row.model) for row in context.rows(ParityRow)] == 2 * CELLS
    assert context.not_run == {}
    monkeypatch.setattr(stage, "free_bytes", lambda: 2 * needed - 1)
    validate(context)
    assert len(context.rows(ParityRow)) == 3 * len(CELLS)
    assert list(context.not_run) == [f"graphs/{kind}-{bucket}.onnx" for bucket, kind in CELLS]
    assert context.not_run["graphs/dense-b1s64.onnx"] == (
        "portable b1s64 float32 dense: not run: ONNX Runtime would hold about 0.0 GiB of values at once, more than "
        "half of the 0.0 GiB that are free"
    )


def test_what_was_not_run_is_in_the_report(built_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "free_bytes", lambda: 0)
    found = validate_folder(built_copy, None, ())
    assert found.verdict.status == "pass"
    assert len(found.notes) == len(CELLS)
    assert all(": not run: ONNX Runtime would hold about " in note for note in found.notes)
    report = report_from_json((built_copy / "report.json").read_text(encoding="utf-8"))
    report = report.model_copy(update={"not_run": {note: note for note in found.notes}})
    for note in found.notes:
        assert note in " ".join(render_text(report, "out").split())
        assert note in render_html(report)


@pytest.mark.slow
def test_an_engine_that_cannot_be_run_is_a_result(asked_again: Build) -> None:
    """If the stage failed, there would be no report, and no results of the other engines."""
    (asked_again.root / ENGINE).write_bytes(b"")
    reference = weakref.ref(asked_again.reference("mod"))
    validate(asked_again)
    # The float64 weights of a large model would occupy memory that benchmarks need.
    gc.collect()
    assert reference() is None
    assert [row.passed for row in asked_again.rows(ParityRow)] == [False, *[True] * 3]
    assert (
        asked_again.rows(ParityRow)[0]
        .reasons[0]
        .startswith("cannot be run: mod-b1s64-float32.onnx: ONNX Runtime refuses")
    )
    assert [(row.bucket, row.model) for row in asked_again.rows(CausalityRow)] == CELLS[1:2]
