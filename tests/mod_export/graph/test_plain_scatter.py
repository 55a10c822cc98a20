"""A reducing scatter becomes a plain one exactly where its targets are unique, and the result stays the same."""

import itertools
import re

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import TENSORRT, op_types, parsed, random_feeds, run

from mod_export.errors import LimitError
from mod_export.graph.rewrites.plain_scatter import PlainScatter, has_unique_targets

SELECT = """
    values, indices = TopK <axis = -1, largest = 1> (scores, k)
    positions, order = TopK <axis = -1, largest = 0> (indices, k)
"""


def flat(stride: int, reduction: str = "add") -> ir.Model:
    """A scatter to rows position + stride * batch row of the flattened stream, with 16 tokens in a row."""
    return parsed(
        f"""g (float[2,16] scores, float[40,8] x, float[8,8] u) => (float[40,8] y)
        <int64[1] k = {{4}}, int64[2,1] offset = {{0, {stride}}}, int64[2] shape = {{8, 1}}> {{ {SELECT}
            row = Add (positions, offset)
            target = Reshape (row, shape)
            y = ScatterND <reduction = "{reduction}"> (x, target, u)
        }}"""
    )


def pairs(rows: str) -> ir.Model:
    """A scatter to pairs (batch row, position), as in x[rows, positions]."""
    return parsed(
        f"""g (float[2,16] scores, float[2,16,8] x, float[2,4,8] u) => (float[2,16,8] y)
        <int64[1] k = {{4}}, int64[2,1,1] batch = {{{rows}}}, int64[3] shape = {{2, 4, 1}}, int64[1] last = {{-1}}> {{
            {SELECT}
            b = Expand (batch, shape)
            p = Unsqueeze (positions, last)
            target = Concat <axis = -1> (b, p)
            y = ScatterND <reduction = "add"> (x, target, u)
        }}"""
    )


def elements(axis: int, reduction: str = "add") -> ir.Model:
    """A scatter along an axis, as in scatter_add and scatter_reduce."""
    return parsed(
        f"""g (float[2,16] scores, float[2,16,8] x, float[2,4,8] u) => (float[2,16,8] y)
        <int64[1] k = {{4}}, int64[3] shape = {{2, 4, 8}}, int64[1] last = {{-1}}> {{ {SELECT}
            p = Unsqueeze (positions, last)
            target = Expand (p, shape)
            y = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, target, u)
        }}"""
    )


UNIQUE = {
    "flat": flat(16),
    "flat with gaps, mul": flat(20, "mul"),
    "flat, max": flat(16, "max"),
    "flat, min": flat(16, "min"),
    "pairs": pairs("0, 1"),
    "elements": elements(1),
    "elements, mul": elements(-2, "mul"),
}


@pytest.mark.parametrize("model", UNIQUE.values(), ids=UNIQUE.keys())
def test_rewrites_unique_targets(model: ir.Model) -> None:
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert PlainScatter().run(model, TENSORRT, "float32") == 1
    assert PlainScatter().ensures(model, TENSORRT, "float32") == []
    assert not any("reduction" in node.attributes for node in model.graph)
    np.testing.assert_array_equal(run(model, feeds)[0], before)


INPUT = """g (float[9,8] x, int64[4,1] target, float[4,8] u) => (float[9,8] y)
{ y = ScatterND <reduction = "add"> (x, target, u) }"""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            flat(15),
            "ScatterND: ScatterND with reduction 'add' cannot run on TensorRT, and its indices 'target' are",
        ),
        (pairs("1, 1"), "not provably unique, so that gather, Add and a plain scatter could give another result"),
        (elements(0), "write back with index_put(accumulate=False) at the positions of one top-k"),
        (elements(0, "max"), "gather, Max and a plain scatter"),
        (parsed(INPUT), "its indices 'target' are not provably unique"),
    ],
    ids=["overlapping rows", "same row twice", "along the wrong axis", "wrong axis, max", "an input"],
)
def test_refuses_the_others(model: ir.Model, words: str) -> None:
    before = op_types(model)
    with pytest.raises(LimitError, match=re.escape(words)):
        PlainScatter().run(model, TENSORRT, "float32")
    assert op_types(model) == before
    assert [line.partition(" still")[0] for line in PlainScatter().ensures(model, TENSORRT, "float32")] == [before[-1]]


def scatter(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type.startswith("Scatter"))


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.integers(2, 6), st.integers(1, 3), st.lists(st.integers(-3, 12), min_size=3, max_size=3),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_what_is_proven_holds(B: int, S: int, k: int, offsets: list[int], seed: int) -> None:
    """Random row offsets: proven ones never give two equal rows, and non-overlapping ones are always proven."""
    k = min(k, S)
    offset = ", ".join(map(str, offsets[:B]))
    model = parsed(
        f"""g (float[{B},{S}] scores, float[40,1] x, float[{B * k},1] u) => (float[40,1] y, int64[{B},{k}] row)
        <int64[1] k = {{{k}}}, int64[{B},1] offset = {{{offset}}}, int64[2] shape = {{-1, 1}}> {{
            values, positions = TopK (scores, k)
            row = Add (positions, offset)
            target = Reshape (row, shape)
            y = ScatterND <reduction = "add"> (x, target, u)
        }}"""
    )
    starts = sorted(offsets[:B])
    apart = all(b - a >= S for a, b in itertools.pairwise(starts)) and starts[0] >= 0
    proven = has_unique_targets(scatter(model))
    assert proven or not apart
    if proven:
        rng = np.random.default_rng(seed)
        feeds = {
            "scores": rng.normal(size=(B, S)).astype(np.float32),
            "x": np.zeros((40, 1), np.float32),
            "u": np.zeros((B * k, 1), np.float32),
        }
        row = run(model, feeds)[1]
        assert len(np.unique(row)) == B * k


def graph(body: str, length: object = 9) -> ir.Model:
    return parsed(
        f"""g (float[2,{length}] scores, float[40,6] x, float[6,6] u, int64[2,3] free, int64 late) => (float[40,6] y)
        <int64[1] k = {{3}}, int64[1] all = {{-1}}, int64[1] six = {{6}}, int64 first = {{0}}, int64 second = {{1}},
         int64 nine = {{9}}, int64[2,3] zeros = {{0, 0, 0, 0, 0, 0}},
         int64[2] rows = {{6, 1}}, int64[2,1] offset = {{0, 9}},
         int64[2,3] fixed = {{1, 2, 3, 4, 5, 6}}, float[2,3] real = {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0}}> {{
            values, positions = TopK (scores, k)
            {body}
            target = Reshape (row, rows)
            y = ScatterND <reduction = "add"> (x, target, u)
        }}"""
    )


PROVEN = {
    "constants": "row = Identity (fixed)",
    "cast and back": "a = Cast <to = 6> (positions) b = Cast <to = 7> (a) row = Add (b, offset)",
    "transposed": "a = Add (positions, offset) row = Transpose (a)",
    "a part, sorted": "a, order = TopK <largest = 0> (positions, k) row = Add (a, offset)",
    "sorted after the offset": "a = Add (positions, offset) row, order = TopK <largest = 0> (a, k)",
    "offset first": "row = Add (offset, positions)",
    "sorted over both rows": """a = Add (positions, offset) b = Reshape (a, all)
        row, order = TopK <axis = 0, largest = 0> (b, six)""",
    "selected among the selected": """a, order = TopK (positions, k) inner = Cast <to = 7> (order)
        b = GatherElements <axis = 1> (positions, inner) row = Add (b, offset)""",
    "one row after the other": """a = Gather <axis = 0> (positions, first) b = Gather <axis = 0> (positions, second)
        c = Add (b, nine) row = Concat <axis = 0> (a, c)""",
}
UNPROVEN = {
    "no offset": "row = Identity (positions)",
    "an input": "row = Identity (free)",
    "an input added": "row = Add (positions, free)",
    "two unknown positions added": "row = Add (positions, positions)",
    "multiplied": "row = Mul (positions, fixed)",
    "values of another TopK": "row = Cast <to = 7> (values)",
    "sorted over both rows, which meet": "a = Reshape (positions, all) row, order = TopK <axis = 0> (a, six)",
    "looked up twice": "a = GatherElements <axis = 1> (positions, zeros) row = Add (a, offset)",
    "looked up in what is not known": "a = GatherElements <axis = 1> (free, positions) row = Add (a, offset)",
    "a row that is only known later": "a = Gather <axis = 0> (positions, late) row = Concat <axis = 0> (a, a)",
    "cast from a float constant": "row = Cast <to = 7> (real)",
}


def along(axis: int) -> ir.Model:
    return parsed(
        f"""g (float[2,5] scores, float[5,5] x, float[2,3] u) => (float[5,5] y) <int64[1] k = {{3}}> {{
            values, positions = TopK (scores, k)
            y = ScatterElements <axis = {axis}, reduction = "add"> (x, positions, u)
        }}"""
    )


@pytest.mark.parametrize(
    ("model", "proven"),
    [
        *(pytest.param(graph(body), True, id=name) for name, body in PROVEN.items()),
        *(pytest.param(graph(body), False, id=name) for name, body in UNPROVEN.items()),
        pytest.param(graph("row = Add (positions, offset)", "S"), False, id="an axis of unknown length"),
        *(pytest.param(along(axis), axis != 0, id=f"elements along axis {axis}") for axis in (1, -1, 0)),
    ],
)
def test_what_is_proven(model: ir.Model, proven: bool) -> None:
    assert has_unique_targets(scatter(model)) is proven
