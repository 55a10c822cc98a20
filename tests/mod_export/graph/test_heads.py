"""Rotation and attention each become one operator over heads side by side; other graphs stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common
from small_graphs import make_spec, op_types, parsed, portable_graph, random_feeds, run
from variants import BIASES, NORMED_HEADS

from mod_export.engines.ort import OrtCpu
from mod_export.graph.rewrites.heads import FlatHeads, RotaryEmbedding

ROTATION = (
    "parts = Constant <value_ints: ints = [4, 4]> () a, b = Split <axis = -1> (x, parts) "
    "ac = Mul (a, cos) bs = Mul (b, sin) d = Sub (ac, bs) bc = Mul (b, cos) as = Mul (a, sin) s = Add (bc, as) "
    "y = Concat <axis = -1> (d, s)"
)


def rotation(table: str, body: str = ROTATION) -> ir.Model:
    return parsed(f"g (float[2,3,5,8] x, float[{table}] cos, float[{table}] sin) => (float[2,3,5,8] y) {{ {body} }}")


def rotated(model: ir.Model) -> int:
    rewrites = RotaryEmbedding().run(model, OrtCpu.limits, "float32")
    assert list(RotaryEmbedding().ensures(model, OrtCpu.limits, "float32")) == []
    return rewrites


SWAPPED = ROTATION.replace("(a, cos)", "(cos, a)").replace("(b, sin)", "(sin, b)").replace("(bc, as)", "(as, bc)")


@pytest.mark.parametrize("body", [ROTATION, SWAPPED], ids=["as exported", "factors and terms in another order"])
@pytest.mark.parametrize("table", ["5,4", "2,1,5,4", "1,1,5,4"])
def test_the_rotation_is_the_same(table: str, body: str) -> None:
    model = rotation(table, body)
    feeds = random_feeds(model)
    expected = run(model, feeds)[0]
    assert rotated(model) == 1
    assert op_types(model).count("RotaryEmbedding") == 1
    np.testing.assert_allclose(run(model, feeds)[0], expected, atol=1e-6)


ROTATE_HALF = (
    "c2 = Concat <axis = -1> (half, half) cos = Cos (c2) s2 = Sin (c2) sin = Mul (s2, scale) "
    "b = Slice (x, four, end, last) a = Slice (x, zero, four, last) n = Neg (b) t = Concat <axis = -1> (n, a) "
    "xc = Mul (x, cos) ts = Mul (t, sin) y = Add (xc, ts)"
)
TABLES = {
    "as in transformers": ROTATE_HALF,
    "split, in another order": ROTATE_HALF.replace(
        "b = Slice (x, four, end, last) a = Slice (x, zero, four, last)", "a, b = Split <axis = 3, num_outputs = 2> (x)"
    ).replace("Mul (x, cos) ts = Mul (t, sin) y = Add (xc, ts)", "Mul (cos, x) ts = Mul (sin, t) y = Add (ts, xc)"),
    "of the rows of selected tokens": ROTATE_HALF.replace(
        "cos = Cos (c2)", "g = Gather <axis = 2> (c2, rows) cos = Cos (g)"
    ),
    "looked up in each column": ROTATE_HALF.replace(
        "cos = Cos (c2)", "i = Expand (index, shape) g = GatherElements <axis = 2> (c2, i) cos = Cos (g)"
    ),
    "turned": ROTATE_HALF.replace(
        "cos = Cos (c2)", "u = Transpose <perm = [0,2,1,3]> (c2) g = Transpose <perm = [0,2,1,3]> (u) cos = Cos (g)"
    ),
    "constant": ROTATE_HALF.replace("cos = Cos (c2)", "cos = Expand (fixed, shape)"),
}


def rotate_half(body: str) -> ir.Model:
    fixed = ", ".join(f"{0.1 * n}" for row in range(5) for n in [*range(row, row + 4)] * 2)
    return parsed(
        f"""g (float[2,3,5,8] x, float[2,1,5,4] half) => (float[2,3,5,8] y)
        <int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] end = {{8}}, int64[1] last = {{-1}},
         int64[1] two = {{2}}, float scale = {{0.9}},
         int64[5] rows = {{4, 1, 1, 3, 0}}, int64[2,1,5,1] index = {{0,1,2,3,4, 4,3,2,1,0}},
         int64[4] shape = {{2,1,5,8}},
         int64[2,1,5,8] single = {{{", ".join(str(n % 5) for n in range(80))}}}, float[1,1,5,8] fixed = {{{fixed}}},
         float[1,1,5,8] odd = {{{", ".join(map(str, range(40)))}}}> {{ {body} }}"""
    )


@pytest.mark.parametrize("name", TABLES)
def test_the_rotation_of_transformers_is_the_same(name: str) -> None:
    model = rotate_half(TABLES[name])
    feeds = random_feeds(model)
    expected = run(model, feeds)[0]
    assert rotated(model) == 1
    assert op_types(model).count("RotaryEmbedding") == 1
    np.testing.assert_allclose(run(model, feeds)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n = Neg (b)", "n = Identity (b)"),
        ("(n, a)", "(a, n)"),
        ("x, zero, four", "x, four, end"),
        ("Mul (x, cos)", "Mul (t, cos)"),
        ("Concat <axis = -1> (half, half)", "Concat <axis = -1> (half, other)"),
        ("cos = Cos (c2)", "cos = Expand (odd, shape)"),
        ("cos = Cos (c2)", "g = GatherElements <axis = 2> (c2, single) cos = Cos (g)"),
        ("cos = Cos (c2)", "g = Tanh (c2) cos = Cos (g)"),
        ("y = Add (xc, ts)", "y = Sub (xc, ts)"),
        ("x, zero, four, last", "x, zero, end, last, two"),
    ],
    ids=["no sign", "swapped", "one half twice", "not x", "other halves", "other constants", "an index for each number",
         "another function", "difference", "every second column"],
)  # fmt: skip
def test_what_only_resembles_it_stays(old: str, new: str) -> None:
    body = ("other = Neg (half) " if "other" in new else "") + TABLES["as in transformers"].replace(old, new)
    assert rotated(rotate_half(body)) == 0


OTHER_VALUE = ROTATION.replace("parts) ", "parts) c = Neg (a) ").replace("Mul (a, sin)", "Mul (c, sin)")


@pytest.mark.parametrize(
    ("table", "body", "opset"),
    [
        ("5,4", ROTATION.replace("Sub (ac, bs)", "Add (ac, bs)"), 23),
        ("5,4", ROTATION.replace("Mul (b, cos)", "Mul (a, cos)"), 23),
        ("5,4", ROTATION.replace("Concat <axis = -1> (d, s)", "Concat <axis = -1> (s, d)"), 23),
        ("5,4", ROTATION.replace("Sub (ac, bs)", "Sub (bs, ac)"), 23),
        ("5,4", ROTATION.replace("as = Mul (a, sin)", "as = Mul (a, cos)"), 23),
        ("5,4", OTHER_VALUE, 23),
        ("3,5,4", ROTATION, 23),
        ("5,4", ROTATION, 22),
    ],
    ids=["sum of both", "one half twice", "halves swapped", "the other sign", "cosine twice", "another value",
         "cosines of each head", "an opset without the operator"],
)  # fmt: skip
def test_what_is_no_rotation_stays(table: str, body: str, opset: int) -> None:
    model = rotation(table, body)
    model.opset_imports[""] = opset
    assert rotated(model) == 0


def test_tables_are_prepared_once_for_all_layers() -> None:
    model = portable_graph(make_spec().dense())
    assert rotated(model) == 4
    assert [op_types(model).count(name) for name in ("RotaryEmbedding", "Expand")] == [4, 2]


SPLIT = (
    "q4 = Constant <value_ints: ints = [2,6,4,8]> () k4 = Constant <value_ints: ints = [2,6,2,8]> () "
    "y3 = Constant <value_ints: ints = [2,6,32]> () "
    "qs = Reshape (q, q4) ks = Reshape (k, k4) vs = Reshape (v, k4) "
    "qh = Transpose <perm: ints = [0,2,1,3]> (qs) kh = Transpose <perm: ints = [0,2,1,3]> (ks) "
    "vh = Transpose <perm: ints = [0,2,1,3]> (vs) "
)
ATTENTION = "a = Attention <is_causal = 1, scale = 0.3> (qh, kh, vh) "
JOIN = "t = Transpose <perm: ints = [0,2,1,3]> (a) y = Reshape (t, y3)"


def heads(body: str = SPLIT + ATTENTION + JOIN) -> ir.Model:
    return parsed(f"g (float[2,6,32] q, float[2,6,16] k, float[2,6,16] v) => (float[2,6,32] y) {{ {body} }}")


def flattened(model: ir.Model) -> int:
    rewrites = FlatHeads().run(model, OrtCpu.limits, "float32")
    assert list(FlatHeads().ensures(model, OrtCpu.limits, "float32")) == []
    return rewrites


def test_the_attention_is_the_same() -> None:
    model = heads()
    feeds = random_feeds(model)
    assert flattened(model) == 1
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    assert [value.name for value in attention.inputs[:3] if value] == ["q", "k", "v"]
    assert {name: attribute.value for name, attribute in attention.attributes.items()} == {
        "is_causal": 1, "scale": pytest.approx(0.3), "q_num_heads": 4, "kv_num_heads": 2,
    }  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0], run(heads(), feeds)[0], atol=1e-6)


def test_heads_that_are_normed_are_read_side_by_side() -> None:
    """Qwen3 norms queries and keys like this; the view that the rewrite needs moves no data."""
    normed = SPLIT.replace("(qs) kh", "(qn) kh").replace(
        "qh =", "w = Constant <value_floats: floats = [1., 2., 3., 4., 5., 6., 7., 8.]> () "
        "qn = RMSNormalization <axis = -1> (qs, w) qh =",
    )  # fmt: skip
    body = normed + ATTENTION + JOIN
    model = heads(body)
    feeds = random_feeds(model)
    assert flattened(model) == 1
    common.RemoveUnusedNodesPass()(model)
    assert "Transpose" not in op_types(model)
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    assert [value.name for value in attention.inputs[1:3] if value] == ["k", "v"]
    np.testing.assert_allclose(run(model, feeds)[0], run(heads(body), feeds)[0], atol=1e-6)


CHANGED = SPLIT.replace("vh = Transpose <perm: ints = [0,2,1,3]> (vs)", "vt = Transpose <perm: ints = [0,2,1,3]> (vs)")
MASK = (
    "one = Constant <value_float: float = 0.0> () shape = Constant <value_ints: ints = [6,6]> () "
    "m = Expand (one, shape) a = Attention (qh, kh, vh, m) "
)


@pytest.mark.parametrize(
    "body",
    [
        SPLIT + ATTENTION + JOIN.replace("[0,2,1,3]", "[0,2,3,1]"),
        CHANGED + "vh = Neg (vt) " + ATTENTION + JOIN,
        SPLIT + ATTENTION + "n = Neg (a) " + JOIN.replace("(a)", "(n)"),
        SPLIT + MASK + JOIN,
    ],
    ids=["another order of the result", "values that were changed", "a result that is changed", "a mask"],
)
def test_any_other_attention_is_left(body: str) -> None:
    assert flattened(heads(body)) == 0


TIMM = "z = Reshape (x, s5) p = Transpose <perm = [2,0,3,1,4]> (z) "
INDEXED = " ".join(f"{name} = Gather <axis = 0> (p, i{n})" for n, name in enumerate(("qh", "kh", "vh")))
SLICED = " ".join(
    f"{name}5 = Slice (p, f{n}, e{n}, f0) {name} = Squeeze ({name}5, f0)" for n, name in enumerate(("qh", "kh", "vh"))
)
UNBOUND = "z = Reshape (x, s5) " + " ".join(
    f"{name}5 = Slice (z, f{n}, e{n}, two) {name}4 = Squeeze ({name}5, two) "
    f"{name} = Transpose <perm = [0,2,1,3]> ({name}4)"
    for n, name in enumerate(("qh", "kh", "vh"))
)
TURNED = "rq = RotaryEmbedding (qh, table, table) a = Attention <is_causal = 1> (rq, kh, vh) "


def fused(body: str, parts: str = "3,4,8") -> ir.Model:
    """A graph of attention with 4 heads; queries, keys and values are the parts of x, the result of one product."""
    numbers = ", ".join(f"int64[1] f{n} = {{{n}}}, int64[1] e{n} = {{{n + 1}}}, int64 i{n} = {{{n}}}" for n in range(3))
    table = ", ".join(str(0.01 * n) for n in range(48))
    return parsed(
        f"""g (float[2,6,96] x) => (float[2,6,32] y)
        <int64[5] s5 = {{2,6,{parts}}}, int64[3] y3 = {{2,6,32}}, int64[1] two = {{2}}, int64[1] last = {{-1}},
         int64 back = {{-1}}, float[2,6,4] table = {{{table}}}, {numbers}> {{ {body} {JOIN} }}"""
    )


@pytest.mark.parametrize("attention", [ATTENTION, TURNED], ids=["plain", "rotated"])
@pytest.mark.parametrize("split", [TIMM + INDEXED, TIMM + SLICED, UNBOUND], ids=["indexed", "unbound first", "unbound"])
def test_one_product_makes_queries_keys_and_values(split: str, attention: str) -> None:
    model = fused(f"{split} {attention}")
    feeds = random_feeds(model)
    expected = run(model, feeds)[0]
    assert flattened(model) == 1
    common.RemoveUnusedNodesPass()(model)
    assert set(op_types(model)) <= {"Slice", "RotaryEmbedding", "Attention"}
    np.testing.assert_allclose(run(model, feeds)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        (TIMM.replace("2,0,3,1,4", "3,0,2,1,4") + INDEXED, "4,3,8"),
        (TIMM + INDEXED.replace("(p, i2)", "(p, back)"), "3,4,8"),
        (TIMM + SLICED.replace("vh = Squeeze (vh5, f0)", "vh = ReduceSum <keepdims = 0> (vh5, f0)"), "3,4,8"),
        ("z = Reshape (x, s5) n = Neg (z) " + TIMM.split(") ", 1)[1].replace("(z)", "(n)") + INDEXED, "3,4,8"),
    ],
    ids=["heads before parts", "from the end", "summed", "parts that were changed"],
)
def test_any_other_split_is_left(split: str, parts: str) -> None:
    assert flattened(fused(f"{split} {ATTENTION}", parts)) == 0


@pytest.mark.parametrize("blocks", [{}, BIASES, NORMED_HEADS], ids=["plain", "biases", "normed heads"])
def test_nothing_is_transposed_any_more(blocks: dict[str, Any]) -> None:
    model = portable_graph(dataclasses.replace(make_spec(), **blocks))
    rotated(model)
    assert flattened(model) == 2
    common.RemoveUnusedNodesPass()(model)
    assert [node for node in model.graph if node.op_type == "Transpose" and not node.inputs[0].is_initializer()] == []
    rotations = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    assert sorted(node.attributes["num_heads"].as_int() for node in rotations) == [1, 1, 2, 2]
