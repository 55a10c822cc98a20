"""A full sort that keeps k becomes one TopK, or, where k is too large for TopK, a threshold and a compaction."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import TENSORRT, op_types, parsed, run

from mod_export.errors import GraphError
from mod_export.graph.rewrites import PORTABLE
from mod_export.graph.rewrites.topk import SelectTopk, ThresholdSelection
from mod_export.types import TargetLimits

INFINITY = float("inf")


def full_sort(
    *, sort: str = "axis = -1", size: int = 6, cut: str = "zero, k, last", more: str = "",
    outputs: str = "int64[rows, columns] y",
) -> ir.Model:  # fmt: skip
    """A graph that sorts all of x (2, 6) and keeps two."""
    constants = (
        f"int64[1] size = {{{size}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] k = {{2}}, "
        "int64[1] last = {-1}, int64[1] second = {1}, int64[1] first = {0}, int64[1] all = {9}, int64[1] none = {0}"
    )
    body = f"values, order = TopK <{sort}> (x, size) y = Slice(order, {cut}) {more}"
    return parsed(f"g (float[2, 6] x) => ({outputs}) <{constants}> {{ {body} }}")


def narrowed(model: ir.Model) -> int:
    rewrites = SelectTopk().run(model, PORTABLE, "float32")
    assert list(SelectTopk().ensures(model, PORTABLE, "float32")) == []
    return rewrites


@pytest.mark.parametrize(
    "model",
    [
        full_sort(),
        full_sort(sort="axis = 1"),
        full_sort(cut="zero, k, second"),
        full_sort(sort="largest = 0"),
        full_sort(sort="axis = 0", size=2, cut="zero, one, first"),
        full_sort(cut="zero, k, last, one"),
    ],
    ids=["last", "axis from the front", "cut from the front", "smallest", "first axis", "steps of one"],
)
def test_a_sort_of_which_the_first_are_kept_becomes_a_selection(model: ir.Model) -> None:
    x = np.array([[3, 1, 3, 2, 3, 0], [3, 5, 5, 5, 1, 1]], dtype=np.float32)
    (expected,) = run(model, {"x": x})
    (message,) = SelectTopk().ensures(model, PORTABLE, "float32")
    assert message.endswith(f" still sorts a whole axis of which {min(expected.shape)} are kept")
    for node in model.graph:
        node.name = None  # The rewrite must not depend on the exporter's names.
    assert narrowed(model) == 1
    assert op_types(model) == ["TopK"]
    np.testing.assert_array_equal(run(model, {"x": x})[0], expected)
    assert narrowed(model) == 0


@pytest.mark.parametrize(
    "model",
    [
        full_sort(size=3),
        full_sort(sort="sorted = 0"),
        full_sort(cut="one, k, last"),
        full_sort(cut="zero, all, last"),
        full_sort(cut="zero, none, last", outputs="int64[2, 0] y"),
        full_sort(cut="zero, k, last, k"),
        full_sort(cut="zero, one, first"),
        full_sort(outputs="int64[rows, columns] y, float[2, 6] values"),
        full_sort(outputs="int64[rows, columns] y, int64[2, 6] order"),
        full_sort(more="z = Neg(order)", outputs="int64[rows, columns] y, int64[2, 6] z"),
        parsed("g (float[2, 6] x, int64[1] n) => (float[2, m] v, int64[2, m] y) { v, y = TopK(x, n) }"),
        parsed("g (float[2, 6] x) => (int64[2, 6] z) <int64[1] n = {6}> { v, y = TopK(x, n) z = Neg(y) }"),
        parsed("g (float[2, s] x) => (float[2, 6] v, int64[2, 6] y) <int64[1] n = {6}> { v, y = TopK(x, n) }"),
    ],
    ids=[
        "not the whole axis", "not sorted", "not the first", "all kept", "none kept", "every second", "other axis",
        "values used", "order is an output", "order used twice", "size is computed", "not cut", "dynamic",
    ],
)  # fmt: skip
def test_everything_else_is_left_alone(model: ir.Model) -> None:
    before = op_types(model)
    assert narrowed(model) == 0
    assert op_types(model) == before


def limited(limit: int) -> TargetLimits:
    return dataclasses.replace(TENSORRT, topk_limit=limit)


def selection(B: int, S: int, k: int) -> ir.Model:
    return parsed(
        f"""g (float[{B},{S}] scores) => (int64[{B},{k}] positions) <int64[1] k = {{{k}}}> {{
            values, indices = TopK <axis = -1, largest = 1, sorted = 1> (scores, k)
            positions, order = TopK <axis = -1, largest = 0, sorted = 1> (indices, k)
        }}"""
    )


def selected(scores: np.ndarray, k: int, limit: int) -> np.ndarray:
    """Rewrites a selection and returns its positions."""
    model = selection(*scores.shape, k)
    left = [f"TopK still takes {k} of TopK's at most {limit}"] * 2
    assert ThresholdSelection().ensures(model, limited(limit), "float32") == left
    assert ThresholdSelection().run(model, limited(limit), "float32") == 1
    assert ThresholdSelection().ensures(model, limited(limit), "float32") == []
    positions: np.ndarray = run(model, {"scores": scores})[0]
    return positions


def expected(scores: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :k], axis=-1)


@st.composite
def rows(draw) -> tuple[np.ndarray, int, int]:
    """Scores (B, S) with ties and -inf (padding, so that rows may be shorter than k), k, and a limit below k."""
    B, S = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    k = draw(st.integers(2, S))
    score = st.sampled_from([-INFINITY, -1.5, 0.0, 0.25, 3.0]) | st.floats(-4, 4, width=32)
    scores = np.array(draw(st.lists(st.lists(score, min_size=S, max_size=S), min_size=B, max_size=B)), np.float32)
    for row in range(B):
        scores[row, draw(st.integers(0, S)) :] = -INFINITY
    return scores, k, draw(st.integers(1, k - 1))


@settings(max_examples=60)
@given(rows())
def test_selects_the_k_largest_ties_to_the_earlier_token(case: tuple[np.ndarray, int, int]) -> None:
    scores, k, limit = case
    np.testing.assert_array_equal(selected(scores, k, limit), expected(scores, k))


def test_rows_of_nothing_but_ties_and_of_what_is_no_number() -> None:
    """Ties give the first tokens; NaN gives positions that are unique and in range."""
    ties = np.repeat(np.array([[INFINITY], [-INFINITY], [0]], np.float32), 9, axis=1)
    np.testing.assert_array_equal(selected(ties, 7, 2), [list(range(7))] * 3)
    positions = selected(np.array([[np.nan, 1, np.nan, 0, 2, np.nan, 3, 1]], np.float32), 5, 3)[0]
    assert len(set(positions.tolist())) == 5
    assert 0 <= positions.min() <= positions.max() < 8


def test_counts_stay_exact_over_a_long_row() -> None:
    """Nearly all of 70,000 tokens tie: a count in a 16-bit float, or an index in int16, would be wrong."""
    scores = np.zeros((2, 70_000), np.float32)
    scores[0, 69_990:] = 1
    scores[1, ::7] = -1
    np.testing.assert_array_equal(
        selected(scores, 40_000, 3840), run(selection(2, 70_000, 40_000), {"scores": scores})[0]
    )


@pytest.mark.parametrize(("S", "k", "limit", "sorts"), [(20_000, 19_997, 3840, 1), (16, 4, 4, 2), (16, 12, 2, 3)])
def test_counts_rounds_from_the_nearer_end(S: int, k: int, limit: int, sorts: int) -> None:
    """All but 3 of 20,000 are selected: one round from below replaces six from above. Within the limit, none is."""
    model = selection(1, S, k)
    assert ThresholdSelection().run(model, limited(limit), "float32") == (k > limit)
    assert op_types(model).count("TopK") == sorts


ASCENDING = "positions, order = TopK <largest = 0> (indices, k)"


@pytest.mark.parametrize(
    ("outputs", "body"),
    [
        ("int64[2,6] indices", "values, indices = TopK (scores, k)"),
        ("int64[2,6] indices, int64[2,6] positions", f"values, indices = TopK (scores, k) {ASCENDING}"),
        ("int64[2,6] positions, int64[2,6] order", f"values, indices = TopK (scores, k) {ASCENDING}"),
        ("float[2,6] values, int64[2,6] positions", f"values, indices = TopK (scores, k) {ASCENDING}"),
        ("int64[2,6] positions", f"values, indices = TopK <largest = 0> (scores, k) {ASCENDING}"),
        ("int64[2,6] positions", "values, indices = TopK (scores, k) positions, order = TopK (indices, k)"),
        ("int64[6,8] positions", "values, indices = TopK <axis = 0> (tall, k) positions = Identity (indices)"),
        ("int64[2,6] positions", "w = Cast <to = 7> (scores) values, indices = TopK (w, k) " + ASCENDING),
        ("int64[2,8] indices", "w = Cast <to = 7> (scores) values, indices = TopK (w, all)"),
        ("int64[2,6] positions", "values, i = TopK (scores, k) indices = Neg (i) " + ASCENDING),
        ("float16[2,8] values", "w = Cast <to = 10> (scores) values, indices = TopK <largest = 0> (w, all)"),
    ],
    ids=[
        "alone",
        "indices",
        "order",
        "values",
        "smallest",
        "descending",
        "axis",
        "integers",
        "the least integers",
        "not the indices",
        "all",
    ],
)
def test_any_other_selection_is_made_in_rounds(outputs: str, body: str) -> None:
    """The result is in the order in which one TopK would return it."""
    model = parsed(
        f"""g (float[2,8] scores, float[9,8] tall) => ({outputs})
        <int64[1] k = {{6}}, int64[1] all = {{8}}> {{ {body} }}"""
    )
    feeds = {
        "scores": np.array([[3, 1, -INFINITY, 7, -INFINITY, 5, 0, 2], [8, INFINITY, 6, 5, 4, 3, 2, 1]], np.float32),
        "tall": np.random.default_rng(0).permutation(72).reshape(9, 8).astype(np.float32),
    }
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    before = run(model, feeds)
    for limit in (4, 1):
        rewritten = ir.from_proto(ir.to_proto(model))
        assert ThresholdSelection().run(rewritten, limited(limit), "float32") > 0
        assert ThresholdSelection().ensures(rewritten, limited(limit), "float32") == []
        for output, reference in zip(run(rewritten, feeds), before, strict=True):
            np.testing.assert_array_equal(output, reference)


@pytest.mark.parametrize("more", ["", "other = Neg (values)"])
def test_refuses_a_selection_of_unknown_length(more: str) -> None:
    outputs = "int64[1,6] positions, float[1,6] other" if more else "int64[1,6] positions"
    model = parsed(
        f"g (float[1,S] scores) => ({outputs}) <int64[1] k = {{6}}> "
        f"{{ values, indices = TopK (scores, k) {ASCENDING} {more} }}"
    )
    message = r"TopK has scores of shape \[1,S\], expected a static shape; export with fixed"
    with pytest.raises(GraphError, match=message):
        ThresholdSelection().run(model, limited(5), "float32")
