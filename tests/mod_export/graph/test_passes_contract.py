"""The contract that every entry of PASSES must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, feeds, make_model, make_spec, portable_graph, run

from mod_export.engines import ENGINES
from mod_export.errors import GraphError
from mod_export.graph import passes
from mod_export.graph.dialect import check_dialect
from mod_export.graph.passes import PASSES, PORTABLE, GraphPass, needs_rewrite, run_passes
from mod_export.graph.weights import state_of
from mod_export.types import DTYPES, QUANTIZED, Dialect, DType

SMALL = Dialect(
    name="a target of few operators",
    max_opset=23,
    topk_limit=3,
    topk_saving=2,
    scatter_reduction=False,
    attention_dtypes=frozenset(),
    cache_update=True,
)
BLOCKED = Dialect(name="a target that takes queries in blocks", max_opset=23, query_blocks=((4, 3), (16, 6)))
ORT_CPU = ENGINES["ort-cpu"].dialect
DIALECTS = [PORTABLE, SMALL, BLOCKED, *(engine.dialect for engine in ENGINES.values() if engine.from_onnx)]
SPEC = make_spec()
# Quantized weights are tested where they have values (test_quantize_weights.py).
TOLERANCE: dict[DType, float] = {"float32": 1e-5, "float16": 2e-2}


CASES = [
    pytest.param(graph_pass, needing[0], dtype, id=f"{graph_pass.name}-{dtype}")
    for graph_pass in PASSES
    for dtype in DTYPES
    # Of these dialects, only that of ort-cpu quantizes weights.
    for dialects in [(ORT_CPU,) if dtype in QUANTIZED else (SMALL, BLOCKED, ORT_CPU)]
    if (needing := [dialect for dialect in dialects if graph_pass.applies(dialect, dtype)])
]
"""Every pass, in every dtype in which a dialect needs it, with the first such dialect."""


def graph_for(graph_pass: GraphPass, dialect: Dialect, dtype: DType) -> ir.Model:
    """The graph that this pass gets, after all earlier passes."""
    model = portable_graph(SPEC)
    for earlier in PASSES[: PASSES.index(graph_pass)]:
        if earlier.applies(dialect, dtype):
            earlier.run(model, dialect, dtype)
    return model


def outputs_of(model: ir.Model) -> list[np.ndarray]:
    """Logits of real tokens, and routed positions."""
    logits_BSV, index_BK = run(model, feeds())
    return [logits_BSV[0].astype(np.float32), logits_BSV[1, :5].astype(np.float32), index_BK]


def test_every_pass_has_a_name_and_is_needed_by_some_dialect() -> None:
    assert {case.values[0] for case in CASES} == set(PASSES)
    assert len({graph_pass.name for graph_pass in PASSES}) == len(PASSES)
    assert all(type(graph_pass).__doc__ for graph_pass in PASSES)


@pytest.mark.parametrize(("graph_pass", "dialect", "dtype"), CASES)
def test_it_does_what_it_ensures_once_and_keeps_the_meaning(
    graph_pass: GraphPass, dialect: Dialect, dtype: DType
) -> None:
    model = graph_for(graph_pass, dialect, dtype)
    before = outputs_of(model) if dtype in TOLERANCE else []
    assert graph_pass.run(model, dialect, dtype) >= 0
    assert list(graph_pass.ensures(model, dialect, dtype)) == []
    assert graph_pass.run(model, dialect, dtype) == 0
    assert list(graph_pass.ensures(model, dialect, dtype)) == []
    if dtype in TOLERANCE:
        after = outputs_of(model)
        for output, expected in zip(after[:2], before[:2], strict=True):
            np.testing.assert_allclose(output, expected, atol=TOLERANCE[dtype], rtol=0)
        np.testing.assert_array_equal(after[2], before[2])


@pytest.mark.parametrize(
    ("dialect", "dtype"),
    [
        pytest.param(dialect, dtype, id=f"{dialect.name}-{dtype}")
        for dialect in DIALECTS
        for dtype in DTYPES
        if dialect is ORT_CPU or dtype not in QUANTIZED
    ],
)
def test_the_table_as_a_whole_gives_every_dialect_its_graph(dialect: Dialect, dtype: DType) -> None:
    model = portable_graph(SPEC)
    expected = outputs_of(model)
    applied = run_passes(model, dialect, dtype)
    assert list(applied) == [graph_pass.name for graph_pass in PASSES if graph_pass.applies(dialect, dtype)]
    assert (applied["select_topk"], applied.get("threshold_selection", 0)) == (1, int(dialect is SMALL))
    check_dialect(model, dialect, dtype)
    if dtype in TOLERANCE:
        for output, wanted in zip(outputs_of(model)[:2], expected[:2], strict=True):
            np.testing.assert_allclose(output, wanted, atol=TOLERANCE[dtype], rtol=0)
    # Weights keep their names, so that every graph can share one file of them.
    state = set(state_of(make_model(SPEC)))
    if dtype in QUANTIZED:
        return
    assert state & set(model.graph.initializers) == state & set(portable_graph(SPEC).graph.initializers)
    assert set(run_passes(model, dialect, dtype).values()) <= {0}


@pytest.mark.parametrize(
    ("dialect", "dtype", "needed"),
    [
        (PORTABLE, "float32", False),
        (PORTABLE, "float16", True),
        (TENSORRT, "float32", True),
        (TENSORRT, "bfloat16", True),
        (ENGINES["ort-cpu"].dialect, "float32", True),
        (ENGINES["ort-cuda"].dialect, "float32", False),
        (PORTABLE, "int8", True),
        (ENGINES["ort-cuda"].dialect, "float16", True),
    ],
)
def test_whether_a_dialect_has_graphs_of_its_own(dialect: Dialect, dtype: DType, needed: bool) -> None:
    assert needs_rewrite(dialect, dtype) is needed


class Forgetful:
    """A pass that does not keep its promise."""

    name: ClassVar[str] = "forgetful"

    def applies(self, dialect: Dialect, dtype: DType) -> bool:
        return True

    def run(self, model: ir.Model, dialect: Dialect, dtype: DType) -> int:
        return 0

    def ensures(self, model: ir.Model, dialect: Dialect, dtype: DType) -> Sequence[str]:
        return ["one thing", "another"]


@pytest.mark.parametrize(
    ("table", "before"), [((Forgetful(),), "none"), ((PASSES[0], Forgetful()), "select_topk")], ids=["first", "second"]
)
def test_a_broken_promise_is_an_error(monkeypatch: pytest.MonkeyPatch, table: Any, before: str) -> None:
    monkeypatch.setattr(passes, "PASSES", table)
    message = rf"^pass forgetful left: one thing; another \(passes before it: {before}\)$"
    with pytest.raises(GraphError, match=message):
        run_passes(portable_graph(SPEC), PORTABLE, "float32")
