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
from mod_export.pipeline.build import Build
from mod_export.pipeline.engines import build_engines
from mod_export.pipeline.graphs import capture, onnx
from mod_export.pipeline.passes import passes
from mod_export.pipeline.plan import make_plan
from mod_export.pipeline.validate import validate
from mod_export.rows.correctness import CausalityRow, ParityRow, RoutingMap, StructureRow

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
