from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import TENSORRT, op_types, parsed, run

from mod_export.export.passes import PORTABLE
from mod_export.export.passes.select_topk import SelectTopk
from mod_export.types import DTYPES

SORT = "values, order = TopK <axis = {axis}, largest = {largest}, sorted = {sorted}> (x, size)"
CUT = "y = Slice(order, {start}, {end}, {axes}{steps})"


def graph(
    *,
    axis: int = -1,
    largest: int = 1,
    ordered: int = 1,
    size: int = 6,
    start: str = "zero",
    end: str = "k",
    axes: str = "last",
    steps: str = "",
    shape: str = "2, 6",
    more: str = "",
    outputs: str = "int64[?, ?] y",
) -> ir.Model:
    """Sorts x (2, 6) whole and keeps two."""
    sort = SORT.format(axis=axis, largest=largest, sorted=ordered)
    cut = CUT.format(start=start, end=end, axes=axes, steps=steps)
    constants = (
        f"int64[1] size = {{{size}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] k = {{2}}, "
        "int64[1] last = {-1}, int64[1] second = {1}, int64[1] first = {0}, int64[1] all = {9}, int64[1] none = {0}"
    )
    outputs = outputs.replace("?, ?", "rows, columns")
    return parsed(f"g (float[{shape}] x) => ({outputs}) <{constants}> {{ {sort} {cut} {more} }}")


def narrowed(model: ir.Model) -> int:
    found = SelectTopk()
    rewrites = found.run(model, PORTABLE, "float32")
    assert list(found.ensures(model, PORTABLE, "float32")) == []
    return rewrites


def test_it_applies_to_every_graph() -> None:
    assert all(SelectTopk().applies(dialect, dtype) for dialect in (PORTABLE, TENSORRT) for dtype in DTYPES)


@pytest.mark.parametrize(
    "model",
    [
        graph(),
        graph(axis=1),
        graph(axes="second"),
        graph(largest=0),
        graph(axis=0, size=2, end="one", axes="first"),
        graph(steps=", one"),
    ],
    ids=["last", "axis-from-the-front", "cut-from-the-front", "smallest", "first-axis", "steps-of-one"],
)
def test_a_sort_of_which_the_first_are_kept_becomes_a_selection(model: ir.Model) -> None:
    x = np.array([[3, 1, 3, 2, 3, 0], [3, 5, 5, 5, 1, 1]], dtype=np.float32)
    (expected,) = run(model, {"x": x})
    (message,) = SelectTopk().ensures(model, PORTABLE, "float32")
    assert message.endswith(f" still sorts a whole axis of which {min(expected.shape)} are kept")
    assert narrowed(model) == 1
    assert op_types(model) == ["TopK"]
    (found,) = run(model, {"x": x})
    np.testing.assert_array_equal(found, expected)
    assert narrowed(model) == 0


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.0, 1.0, 2.0]), min_size=12, max_size=12))
def test_ties_keep_their_order(numbers: list[float]) -> None:
    x = np.array(numbers, dtype=np.float32).reshape(2, 6)
    model = graph()
    (expected,) = run(model, {"x": x})
    assert narrowed(model) == 1
    np.testing.assert_array_equal(run(model, {"x": x})[0], expected)


@pytest.mark.parametrize(
    "model",
    [
        graph(size=3),
        graph(ordered=0),
        graph(start="one"),
        graph(end="all"),
        graph(end="none", outputs="int64[2, 0] y"),
        graph(steps=", k"),
        graph(axes="first", end="one"),
        graph(outputs="int64[?, ?] y, float[2, 6] values"),
        graph(outputs="int64[?, ?] y, int64[2, 6] order"),
        graph(more="z = Neg(order)", outputs="int64[?, ?] y, int64[2, 6] z"),
        parsed("g (float[2, 6] x, int64[1] n) => (float[2, m] v, int64[2, m] y) { v, y = TopK(x, n) }"),
        parsed("g (float[2, 6] x) => (int64[2, 6] z) <int64[1] n = {6}> { v, y = TopK(x, n) z = Neg(y) }"),
        parsed("g (float[2, s] x) => (float[2, 6] v, int64[2, 6] y) <int64[1] n = {6}> { v, y = TopK(x, n) }"),
    ],
    ids=[
        "not-the-whole-axis", "not-sorted", "not-the-first", "all-kept", "none-kept", "every-second", "other-axis",
        "values-used", "order-is-an-output", "order-used-twice", "size-is-computed", "not-cut", "dynamic",
    ],
)  # fmt: skip
def test_everything_else_is_left_alone(model: ir.Model) -> None:
    before = op_types(model)
    assert narrowed(model) == 0
    assert op_types(model) == before


def test_sorts_without_a_name_are_told_apart() -> None:
    constants = "int64[1] n = {6}, int64[1] zero = {0}, int64[1] a = {2}, int64[1] b = {3}, int64[1] last = {-1}"
    model = parsed(
        f"g (float[2, 6] x) => (int64[2, 2] y, int64[2, 3] z, int64[2, 2] w) <{constants}> {{"
        "v, o = TopK(x, n) y = Slice(o, zero, a, last)"
        "u, p = TopK(x, n) z = Slice(p, zero, b, last)"
        "t, q = TopK(x, n) w = Slice(q, zero, a, last) }"
    )
    for node in model.graph:
        node.name = None
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    expected = run(model, {"x": x})
    assert narrowed(model) == 3
    for found, wanted in zip(run(model, {"x": x}), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
