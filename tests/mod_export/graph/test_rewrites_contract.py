"""The contract that every entry of REWRITES must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, feeds, make_model, make_spec, op_types, portable_graph, run

from mod_export.engines import ENGINES
from mod_export.errors import GraphError
from mod_export.graph import rewrites
from mod_export.graph.rewrites import PORTABLE, REWRITES, Rewrite, apply_rewrites, needs_rewrite
from mod_export.graph.target import check_limits
from mod_export.graph.weights import state_of
from mod_export.types import DTYPES, QUANTIZED, DType, TargetLimits

SMALL = TargetLimits(
    name="a target of few operators",
    max_opset=23,
    topk_limit=3,
    topk_saving=2,
    scatter_reduction=False,
    attention_dtypes=frozenset(),
    cache_update=True,
    cache_in_use=True,
)
BLOCKED = TargetLimits(name="a target that takes queries in blocks", max_opset=23, query_blocks=((4, 3), (16, 6)))
ORT_CPU = ENGINES["ort-cpu"].limits
LIMITS = [PORTABLE, SMALL, BLOCKED, *(engine.limits for engine in ENGINES.values() if engine.from_onnx)]
SPEC = make_spec()
# Quantized weights are tested where they have values (test_quantize_weights.py).
TOLERANCE: dict[DType, float] = {"float32": 1e-5, "float16": 2e-2}


CASES = [
    pytest.param(rewrite, needing[0], dtype, id=f"{rewrite.name}-{dtype}")
    for rewrite in REWRITES
    for dtype in DTYPES
    # Of the targets that ONNX Runtime can stand for, only ort-cpu quantizes weights.
    for targets in [(ORT_CPU,) if dtype in QUANTIZED else (SMALL, BLOCKED, ORT_CPU, *LIMITS)]
    if (needing := [limits for limits in targets if rewrite.applies(limits, dtype)])
]
"""Every rewrite, in every dtype in which a target needs it, with the limits of the first such target."""


def graph_for(rewrite: Rewrite, limits: TargetLimits, dtype: DType) -> ir.Model:
    """The graph that this rewrite gets, after all earlier ones."""
    model = portable_graph(SPEC)
    for earlier in REWRITES[: REWRITES.index(rewrite)]:
        if earlier.applies(limits, dtype):
            earlier.run(model, limits, dtype)
    return model


def outputs_of(model: ir.Model) -> list[np.ndarray]:
    """Logits of real tokens, and routed positions."""
    logits_BSV, index_BK = run(model, feeds())
    return [logits_BSV[0].astype(np.float32), logits_BSV[1, :5].astype(np.float32), index_BK]


def test_every_rewrite_has_a_name_and_is_needed_by_some_target() -> None:
    assert {case.values[0] for case in CASES} == set(REWRITES)
    assert len({rewrite.name for rewrite in REWRITES}) == len(REWRITES)
    assert all(type(rewrite).__doc__ for rewrite in REWRITES)


@pytest.mark.parametrize(("rewrite", "limits", "dtype"), CASES)
def test_it_does_what_it_ensures_once_and_keeps_the_meaning(
    rewrite: Rewrite, limits: TargetLimits, dtype: DType
) -> None:
    model = graph_for(rewrite, limits, dtype)
    before = outputs_of(model) if dtype in TOLERANCE else []
    assert rewrite.run(model, limits, dtype) >= 0
    assert list(rewrite.ensures(model, limits, dtype)) == []
    assert rewrite.run(model, limits, dtype) == 0
    assert list(rewrite.ensures(model, limits, dtype)) == []
    if dtype in TOLERANCE:
        after = outputs_of(model)
        for output, expected in zip(after[:2], before[:2], strict=True):
            np.testing.assert_allclose(output, expected, atol=TOLERANCE[dtype], rtol=0)
        np.testing.assert_array_equal(after[2], before[2])


@pytest.mark.parametrize(
    ("limits", "dtype"),
    [
        pytest.param(limits, dtype, id=f"{limits.name}-{dtype}")
        for limits in LIMITS
        for dtype in DTYPES
        if limits is ORT_CPU or dtype not in QUANTIZED
    ],
)
def test_the_table_as_a_whole_gives_every_target_its_graph(limits: TargetLimits, dtype: DType) -> None:
    model = portable_graph(SPEC)
    expected = outputs_of(model)
    applied = apply_rewrites(model, limits, dtype)
    assert list(applied) == [rewrite.name for rewrite in REWRITES if rewrite.applies(limits, dtype)]
    assert (applied["select_topk"], applied.get("threshold_selection", 0)) == (1, int(limits is SMALL))
    check_limits(model, limits, dtype)
    if dtype in TOLERANCE:
        for output, wanted in zip(outputs_of(model)[:2], expected[:2], strict=True):
            np.testing.assert_allclose(output, wanted, atol=TOLERANCE[dtype], rtol=0)
    # Weights keep their names, so that every graph can share one file of them.
    state = set(state_of(make_model(SPEC)))
    if dtype in QUANTIZED:
        return
    assert state & set(model.graph.initializers) == state & set(portable_graph(SPEC).graph.initializers)
    assert set(apply_rewrites(model, limits, dtype).values()) <= {0}


@pytest.mark.parametrize(
    ("limits", "dtype", "needed"),
    [
        (PORTABLE, "float32", False),
        (PORTABLE, "float16", True),
        (TENSORRT, "float32", True),
        (TENSORRT, "bfloat16", True),
        (ENGINES["ort-cpu"].limits, "float32", True),
        (TargetLimits(name="a target of all operators", max_opset=26), "float32", False),
        (ENGINES["ort-cuda"].limits, "float32", True),
        (PORTABLE, "int8", True),
        (ENGINES["ort-cuda"].limits, "float16", True),
    ],
)
def test_whether_a_target_has_graphs_of_its_own(limits: TargetLimits, dtype: DType, needed: bool) -> None:
    assert needs_rewrite(limits, dtype) is needed


def test_a_dense_layer_for_cuda_has_no_transposes_and_one_operator_for_each_rotation() -> None:
    """The start of a kernel costs a GPU as much as its work in a small model."""
    model = portable_graph(SPEC.dense())
    before = run(model, feeds())
    apply_rewrites(model, ENGINES["ort-cuda"].limits, "float32")
    types = op_types(model)
    assert (types.count("RotaryEmbedding"), types.count("Attention")) == (2 * SPEC.n_layers, SPEC.n_layers)
    assert not {"Split", "Concat"} & set(types)
    # What is left are weights, which ONNX Runtime transposes once.
    transposed = [node.inputs[0] for node in model.graph if node.op_type == "Transpose"]
    assert all(value is not None and value.is_initializer() for value in transposed)
    for found, wanted in zip(run(model, feeds()), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class Forgetful:
    """A rewrite that does not keep its promise."""

    name: ClassVar[str] = "forgetful"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return True

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        return 0

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return ["one thing", "another"]


@pytest.mark.parametrize(
    ("table", "before"),
    [((Forgetful(),), "none"), ((REWRITES[0], Forgetful()), "select_topk")],
    ids=["first", "second"],
)
def test_a_broken_promise_is_an_error(monkeypatch: pytest.MonkeyPatch, table: Any, before: str) -> None:
    monkeypatch.setattr(rewrites, "REWRITES", table)
    message = rf"^pass forgetful left: one thing; another \(passes before it: {before}\)$"
    with pytest.raises(GraphError, match=message):
        apply_rewrites(portable_graph(SPEC), PORTABLE, "float32")
