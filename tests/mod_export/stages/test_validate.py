"""Stage validate, on a build folder whose other stages are reused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.model import Model
from mod_export.plan import Plan
from mod_export.stages.context import Context
from mod_export.stages.engines import build_engines, passes
from mod_export.stages.graphs import capture, onnx
from mod_export.stages.validate import validate
from mod_export.workspace import Workspace

ENGINE = "engines/ort-cpu/mod-b1s64-float32.onnx"


def context_of(root: Path, model: Model, config: BuildConfig) -> Iterator[Context]:
    plan = Plan(
        model=model,
        baseline=None,
        config=config,
        buckets=config.bucket_list(256),
        targets={"ort-cpu": ENGINES["ort-cpu"]},
        availability={name: engine.availability() for name, engine in ENGINES.items()},
        generation="not asked for",
        tokenizer=None,
    )
    with Workspace(root) as workspace:
        context = Context(plan, workspace, lambda name: None)
        for stage in (capture, onnx, passes, build_engines):
            assert all(step.reused for step in stage(context))
        yield context


@pytest.fixture
def context(built_copy: Path, model: Model, config: BuildConfig) -> Iterator[Context]:
    yield from context_of(built_copy, model, config)


@pytest.fixture
def asked_again(built_copy: Path, model: Model, config: BuildConfig) -> Iterator[Context]:
    """Another seed: every input is another one, and nothing else has to be made again."""
    yield from context_of(built_copy, model, config.model_copy(update={"seed": 1}))


CELLS = [(bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")]


def test_what_was_found_is_found_again_without_looking(context: Context) -> None:
    steps = validate(context)
    assert all(step.reused for step in steps)
    assert [step.name for step in steps] == [
        "structure",
        *(f"parity/ort-cpu/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        *(f"parity/portable/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        *(f"causality/ort-cpu/{kind}-{bucket}-float32" for bucket, kind in CELLS),
        "map/b1s64",
        "map/b2s32",
    ]
    assert {row.path for row in context.structure} == {
        "graphs/weights-float32.data",
        *(f"graphs/{kind}-{bucket}.onnx" for bucket, kind in CELLS),
        *(f"graphs/{kind}-{bucket}.ort-cpu.float32.onnx" for bucket, kind in CELLS),
        *(f"engines/ort-cpu/{kind}-{bucket}-float32.onnx" for bucket, kind in CELLS),
    }
    assert all(row.passed for row in (*context.structure, *context.parity))
    assert [(row.bucket, row.model) for row in context.parity] == 2 * CELLS
    assert [row.causal for row in context.causality] == [False, True] * 2
    assert [row.bucket for row in context.maps] == ["b1s64", "b2s32"]
    assert [layer["layer"] for layer in context.maps[0].layers] == [1, 3]


def test_an_engine_that_cannot_be_run_is_a_result(asked_again: Context) -> None:
    """A stage that fails leaves no report, and nobody to tell what the other engines are worth."""
    (asked_again.root / ENGINE).write_bytes(b"")
    validate(asked_again)
    assert [row.passed for row in asked_again.parity] == [False, *[True] * 7]
    assert asked_again.parity[0].reasons[0].startswith("cannot be run: mod-b1s64-float32.onnx: ONNX Runtime refuses")
    assert [(row.bucket, row.model) for row in asked_again.causality] == CELLS[1:]
