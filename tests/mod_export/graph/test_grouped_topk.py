"""TopK in groups gives the values and indices that one TopK gives, ties included."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import TENSORRT, op_types, parsed, run

from mod_export.engines import ENGINES
from mod_export.engines.trt import SAVED_POSITIONS
from mod_export.graph.rewrites.topk import GroupedTopk, Long, group_length, write_groups
from mod_export.types import TargetLimits


def saving(positions: int) -> TargetLimits:
    return dataclasses.replace(TENSORRT, topk_saving=positions)


def topk(shape: tuple[int, ...], k: int, *, axis: int = -1, largest: int = 1, kind: str = "float") -> ir.Model:
    taken = [*shape]
    taken[axis] = k
    shape_in, shape_out = (",".join(map(str, sizes)) for sizes in (shape, taken))
    return parsed(
        f"""g ({kind}[{shape_in}] x) => ({kind}[{shape_out}] values, int64[{shape_out}] index) <int64[1] k = {{{k}}}> {{
            values, index = TopK <axis = {axis}, largest = {largest}> (x, k)
        }}"""
    )


def equal_in_groups(model: ir.Model, x: np.ndarray, k: int, group: int) -> None:
    """Checks that the graph, rewritten with groups of this length, returns the same as before."""
    before = run(model, {"x": x})
    (node,) = model.graph
    # Another test checks how long groups are.
    write_groups(model.graph, Long(node, x.shape, x.ndim - 1, k, group))
    assert op_types(model).count("TopK") == (2 if x.shape[-1] % group == 0 else 3)
    for output, wanted in zip(run(model, {"x": x}), before, strict=True):
        np.testing.assert_array_equal(output, wanted)


@st.composite
def cases(draw: Any) -> tuple[np.ndarray, int, int, int]:
    """Rows with exact ties, near-ties (neighbours in float32) and infinities; k; a group's length; a direction."""
    B, S = draw(st.integers(1, 3)), draw(st.integers(2, 24))
    one = np.float32(1)
    near = [float(np.nextafter(one, np.float32(0))), 1.0, float(np.nextafter(one, np.float32(2)))]
    score = st.sampled_from([-np.inf, np.inf, 0.0, -0.0, *near]) | st.floats(-4, 4, width=32)
    rows = draw(st.lists(st.lists(score, min_size=S, max_size=S), min_size=B, max_size=B))
    # Among the cases are axes that groups do not divide, and k above the length of a group.
    return np.array(rows, np.float32), draw(st.integers(1, S)), draw(st.integers(1, S)), draw(st.integers(0, 1))


@pytest.mark.slow
@settings(max_examples=80)
@given(cases())
def test_it_gives_what_one_topk_gives(case: tuple[np.ndarray, int, int, int]) -> None:
    x, k, group, largest = case
    equal_in_groups(topk(x.shape, k, largest=largest), x, k, group)


@pytest.mark.parametrize(("S", "k", "group"), [(30, 4, 10), (31, 4, 10), (30, 12, 10), (31, 31, 10), (30, 4, 29)])
def test_nothing_but_ties(S: int, k: int, group: int) -> None:
    """Groups divide the axis or not; k is above a group's length, or is all; the last group has one position."""
    model = topk((2, S), k)
    x = np.zeros((2, S), np.float32)
    equal_in_groups(model, x, k, group)
    np.testing.assert_array_equal(run(model, {"x": x})[1], [list(range(k))] * 2)


@pytest.mark.parametrize("group", [75, 80], ids=["divides", "some left"])
def test_scores_that_are_no_numbers_give_positions_of_the_axis(group: int) -> None:
    model = topk((1, 300), 9)
    (node,) = model.graph
    write_groups(model.graph, Long(node, (1, 300), 1, 9, group))
    (_, index) = run(model, {"x": np.full((1, 300), np.nan, np.float32)})
    assert len(set(index[0].tolist())) == 9
    assert 0 <= index.min() <= index.max() < 300


@pytest.mark.parametrize(("axis", "kind"), [(0, "float"), (1, "float"), (-2, "int64"), (2, "float16")])
def test_any_axis_and_any_type(axis: int, kind: str) -> None:
    shape = [4, 5, 6]
    shape[axis] = 200
    x = (
        np.random.default_rng(0)
        .integers(0, 40, shape)
        .astype(np.dtype(kind.replace("float", "f").replace("f16", "f2")))
    )
    model = topk(tuple(shape), 3, axis=axis, kind=kind)
    before = run(model, {"x": x})
    assert GroupedTopk().run(model, saving(100), "float32") == 1
    for output, wanted in zip(run(model, {"x": x}), before, strict=True):
        np.testing.assert_array_equal(output, wanted)


def test_groups_of_a_very_long_axis_are_grouped_again() -> None:
    x = np.random.default_rng(0).integers(0, 9000, (1, 9000)).astype(np.float32)
    model = topk((1, 9000), 2)
    before = run(model, {"x": x})
    (message,) = GroupedTopk().ensures(model, saving(20), "float32")
    assert message.endswith(" still looks at an axis of 9000")
    assert GroupedTopk().run(model, saving(20), "float32") > 1
    assert GroupedTopk().ensures(model, saving(20), "float32") == []
    for output, wanted in zip(run(model, {"x": x}), before, strict=True):
        np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize(
    ("S", "k", "group"),
    [(8400, 300, 1680), (24_000, 300, 3000), (16_384, 2048, 8192), (32_768, 512, 4096), (8192, 1024, None)],
)
def test_what_pays_in_tensorrt(S: int, k: int, group: int | None) -> None:
    """Axes that were measured elsewhere; and K of an eighth of a row, which pays at 16,384 tokens, not at 8,192."""
    model = topk((1, S), k)
    for name in ("tensorrt", "tensorrt-rtx"):
        assert ENGINES[name].limits.topk_saving == SAVED_POSITIONS
    rewritten = GroupedTopk().run(model, ENGINES["tensorrt"].limits, "float32")
    assert (rewritten, op_types(model).count("TopK")) == ((1, 2) if group else (0, 1))
    if group:
        assert group_length(S, k) == group


@pytest.mark.parametrize(
    "model",
    [
        parsed("g (float[2, s] x, int64[1] n) => (float[2, m] v, int64[2, m] y) { v, y = TopK(x, n) }"),
        parsed("g (float[2, 600] x, int64[1] n) => (float[2, m] v, int64[2, m] y) { v, y = TopK(x, n) }"),
        topk((2, 600), 600),
    ],
    ids=["length unknown", "k is computed", "all of them"],
)
def test_everything_else_is_left_alone(model: ir.Model) -> None:
    assert GroupedTopk().run(model, saving(1), "float32") == 0
    assert not GroupedTopk().applies(TENSORRT, "float32")
