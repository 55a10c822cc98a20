"""A threshold and a compaction select exactly what TopK does."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import observed
from small_graphs import TENSORRT, make_model, make_spec, op_types, parsed, portable_graph, run, session

from mod_export.errors import GraphError, LimitError
from mod_export.export.passes.select_topk import SelectTopk
from mod_export.export.passes.threshold_selection import ThresholdSelection

INFINITY = float("inf")


def limited(limit: int):
    return dataclasses.replace(TENSORRT, topk_limit=limit)


def selection(B: int, S: int, k: int) -> ir.Model:
    return parsed(
        f"""g (float[{B},{S}] scores) => (int64[{B},{k}] positions) <int64[1] k = {{{k}}}> {{
            values, indices = TopK <axis = -1, largest = 1, sorted = 1> (scores, k)
            positions, order = TopK <axis = -1, largest = 0, sorted = 1> (indices, k)
        }}"""
    )


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


@settings(max_examples=150)
@given(rows())
def test_selects_the_k_largest_ties_to_the_earlier_token(case: tuple[np.ndarray, int, int]) -> None:
    scores, k, limit = case
    model = selection(*scores.shape, k)
    assert ThresholdSelection().run(model, limited(limit), "float32") == 1
    assert ThresholdSelection().ensures(model, limited(limit), "float32") == []
    np.testing.assert_array_equal(run(model, {"scores": scores})[0], expected(scores, k))


@pytest.mark.parametrize("extreme", [INFINITY, -INFINITY, 0.0])
def test_a_row_of_nothing_but_ties_takes_its_first_tokens(extreme: float) -> None:
    model = selection(2, 9, 7)
    ThresholdSelection().run(model, limited(2), "float32")
    found = run(model, {"scores": np.full((2, 9), extreme, np.float32)})[0]
    np.testing.assert_array_equal(found, [list(range(7))] * 2)


def test_positions_stay_unique_and_in_range_when_scores_are_nan() -> None:
    scores = np.array([[np.nan, 1, np.nan, 0, 2, np.nan, 3, 1]], np.float32)
    model = selection(1, 8, 5)
    ThresholdSelection().run(model, limited(3), "float32")
    found = run(model, {"scores": scores})[0][0]
    assert len(set(found.tolist())) == 5
    assert found.min() >= 0
    assert found.max() < 8


def test_counts_stay_exact_over_a_long_row() -> None:
    """70,000 tokens of which nearly all tie: a count in a 16-bit float, or an index in int16, would go wrong."""
    scores = np.zeros((2, 70_000), np.float32)
    scores[0, 69_990:] = 1
    scores[1, ::7] = -1
    model = selection(2, 70_000, 40_000)
    rewritten = selection(2, 70_000, 40_000)
    ThresholdSelection().run(rewritten, TENSORRT, "float32")
    np.testing.assert_array_equal(run(rewritten, {"scores": scores})[0], run(model, {"scores": scores})[0])


def test_counts_rounds_from_the_nearer_end() -> None:
    """All but 3 of 20,000 are taken: one round from below instead of six from above."""
    model = selection(1, 20_000, 19_997)
    ThresholdSelection().run(model, TENSORRT, "float32")
    assert op_types(model).count("TopK") == 1


def test_leaves_selections_within_the_limit_alone() -> None:
    model = selection(2, 16, 4)
    before = op_types(model)
    assert ThresholdSelection().run(model, limited(4), "float32") == 0
    assert op_types(model) == before


def test_applies_to_dialects_with_a_limit() -> None:
    assert ThresholdSelection().applies(TENSORRT, "float32")
    assert not ThresholdSelection().applies(dataclasses.replace(TENSORRT, topk_limit=None), "float32")


def test_keeps_a_real_model_and_its_output_names() -> None:
    spec = make_spec(layers=(0, 1), capacity=0.4)
    module, model = make_model(spec), portable_graph(spec, 3, 20)
    SelectTopk().run(model, TENSORRT, "float32")
    assert ThresholdSelection().run(model, limited(3), "float32") == 2
    runner = session(model)
    ids, lengths = torch.randint(0, 40, (3, 20)), torch.tensor([20, 11, 2])
    logits, *routed = runner.run(None, {"input_ids": ids.numpy(), "lengths": lengths.numpy()})
    assert [value.name for value in runner.get_outputs()] == ["logits", "routed_0", "routed_1"]
    with torch.no_grad():
        reference, selections = observed(module, ids, lengths)
    for found, wanted in zip(routed, selections.values(), strict=True):
        np.testing.assert_array_equal(found, wanted.index_BK.numpy())
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], reference[row, :length].numpy(), atol=2e-5)


def test_refuses_a_topk_whose_values_are_used_and_names_its_layer() -> None:
    model = parsed(
        """g (float[1,8,4] x, float[4,1] w) => (float[1,6] values) <int64[1] k = {6}, int64[1] last = {-1}> {
            wide = MatMul (x, w)
            scores = Squeeze (wide, last)
            values, indices = TopK (scores, k)
        }"""
    )
    for node in model.graph:
        if node.op_type == "MatMul":
            node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layers.3.router', 'linear_7']"
    message = r"^layers\.3 \(TopK\): TopK takes K = 6, but TensorRT takes at most 5, and only a selection .* K <= 5, or"
    with pytest.raises(LimitError, match=message):
        ThresholdSelection().run(model, limited(5), "float32")


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
        (
            "int64[2,6] positions",
            "values, indices = TopK (scores, k) n = Neg (indices) " + ASCENDING.replace("indices", "n"),
        ),
    ],
    ids=["alone", "indices", "order", "values", "smallest", "descending", "axis", "integers", "not the indices"],
)
def test_refuses_what_is_no_selection(outputs: str, body: str) -> None:
    model = parsed(f"g (float[2,8] scores, float[9,8] tall) => ({outputs}) <int64[1] k = {{6}}> {{ {body} }}")
    with pytest.raises(LimitError, match=r"only a selection .* can be rewritten"):
        ThresholdSelection().run(model, limited(5), "float32")


def test_refuses_a_selection_of_unknown_length() -> None:
    model = parsed(
        """g (float[1,S] scores) => (int64[1,6] positions) <int64[1] k = {6}> {
            values, indices = TopK (scores, k)
            positions, order = TopK <largest = 0> (indices, k)
        }"""
    )
    with pytest.raises(
        GraphError, match=r"TopK has scores of shape \[1,S\], expected a static shape; export with fixed"
    ):
        ThresholdSelection().run(model, limited(5), "float32")


def test_says_what_is_left() -> None:
    assert ThresholdSelection().ensures(selection(1, 9, 7), limited(6), "float32") == [
        "TopK still takes 7 of TopK's at most 6",
        "TopK still takes 7 of TopK's at most 6",
    ]
