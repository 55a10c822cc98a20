"""Attention in basic operators becomes the Attention operator with the same numbers, only where it is equivalent."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, op_types, parsed, random_feeds, run

from mod_export.graph.nodes import made_by
from mod_export.graph.rewrites.attention import AttentionOperator, _computed

LOWEST = float(np.finfo(np.float32).min)


def text(values: np.ndarray) -> str:
    if values.dtype == bool:
        return ", ".join(map(str, values.astype(int).reshape(-1)))
    return ", ".join("-inf" if value == -np.inf else repr(float(value)) for value in values.reshape(-1))


def written_out(scores: str, mask: np.ndarray | None = None, *, more: str = "", keys: int = 4) -> ir.Model:
    """A graph of softmax(w) v with 4 queries; `scores` computes w from the product m and the mask, if there is one."""
    fixed = (
        ""
        if mask is None
        else f", {'bool' if mask.dtype == bool else 'float'}[{','.join(map(str, mask.shape))}] mask = {{{text(mask)}}}"
    )
    return parsed(
        f"""g (float[2,2,4,8] q, float[2,2,{keys},8] k, float[2,2,{keys},6] v, float[2,1,4,{keys}] free)
        => (float[2,2,4,6] y{", float[A,B,C,E] z" if more else ""})
        <float ninth = {{-1e9}}, float low = {{-inf}},
         float s = {{0.3}}, float n = {{-0.3}}, float d = {{2.5}}, int64[2] size = {{4, 4}},
         float nought = {{0.0}}, int64 none = {{0}}, int64 one = {{1}}, int64 length = {{4}}, int64[1] minus = {{-1}},
         float[2,2,4,4] t = {{{text(np.arange(64))}}}{fixed}>
        {{
            kt = Transpose <perm = [0, 1, 3, 2]> (k) m = MatMul (q, kt)
            {scores} p = Softmax <axis = -1> (w) y = MatMul (p, v) {more}
        }}"""
    )


def causal(size: int = 4, hidden: float = LOWEST) -> np.ndarray:
    return np.where(np.tril(np.ones((size, size))) > 0, 0, hidden).astype(np.float32)


HIDES = ~np.tril(np.ones((4, 4), dtype=bool))


def rewritten(model: ir.Model) -> ir.Node:
    """Rewrites the model, compares its numbers, and returns the only Attention node."""
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert AttentionOperator().ensures(model, TENSORRT, "float32") != []
    assert AttentionOperator().run(model, TENSORRT, "float32") > 0
    assert AttentionOperator().ensures(model, TENSORRT, "float32") == []
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    return node


def test_attention_that_reads_attention() -> None:
    model = parsed(
        """g (float[2,2,4,8] q, float[2,2,4,8] k, float[2,2,4,8] v) => (float[2,2,4,8] y)
        {
            kt = Transpose <perm = [0, 1, 3, 2]> (k) m = MatMul (q, kt) p = Softmax <axis = -1> (m) x = MatMul (p, v)
            n = MatMul (x, kt) r = Softmax <axis = -1> (n) y = MatMul (r, x)
        }"""
    )
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    feeds = random_feeds(model)
    (before,) = run(model, feeds)
    assert AttentionOperator().run(model, TENSORRT, "float32") == 2
    assert AttentionOperator().ensures(model, TENSORRT, "float32") == []
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("model", "is_causal"),
    [
        (written_out("w = Mul (m, s)"), 0),
        (written_out("a = Mul (m, s) w = Where (mask, low, a)", HIDES), 1),
        (written_out("a = Mul (m, s) w = Where (mask, ninth, a)", HIDES[None, None]), 1),
        (written_out("w = Where (mask, m, low)", ~HIDES), 1),
        (written_out("w = Where (mask, low, m)", HIDES[:, ::-1]), 0),
        (written_out("w = Div (m, d)", keys=5), 0),
        (written_out("a = Div (m, d) w = Add (a, mask)", causal()), 1),
        (written_out("w = Add (mask, m)", causal(hidden=-np.inf)[None, None]), 1),
        (written_out("w = Add (m, mask)", np.repeat(causal()[None, None], 2, 0)), 1),
        (written_out("w = Add (m, mask)", causal(hidden=-1.0)), 0),
        (written_out("w = Add (m, mask)", causal()[::-1]), 0),
        (written_out("w = Add (m, mask)", np.zeros((2, 1, 4, 5), np.float32), keys=5), 0),
    ],
    ids=[
        "scaled",
        "filled",
        "filled with -1e9",
        "kept",
        "filled, not causal",
        "other keys",
        "causal",
        "infinite",
        "batch",
        "a bias",
        "turned",
        "of the batch",
    ],
)
def test_gives_the_same_numbers(model: ir.Model, is_causal: int) -> None:
    node = rewritten(model)
    assert node.inputs[1] is model.graph.inputs[1]
    assert node.attributes.get_int("is_causal", 0) == is_causal
    assert (len(node.inputs) > 3 and node.inputs[3] is not None) is (
        "mask" in model.graph.initializers and not is_causal
    )


def test_keys_are_turned_once() -> None:
    model = parsed(
        """g (float[2,2,4,8] q, float[2,5,2,8] k, float[2,2,5,6] v) => (float[2,2,4,6] y) {
            kt = Transpose <perm = [0, 2, 3, 1]> (k) m = MatMul (q, kt) p = Softmax (m) y = MatMul (p, v)
        }"""
    )
    keys = rewritten(model).inputs[1]
    turned = made_by(keys, "Transpose")
    assert turned is not None
    assert turned.inputs[0] is model.graph.inputs[1]
    assert list(turned.attributes.get_ints("perm")) == [0, 2, 1, 3]


def test_keys_that_come_as_columns_are_turned() -> None:
    model = parsed(
        """g (float[2,2,4,8] q, float[2,2,8,5] k, float[2,2,5,6] v) => (float[2,2,4,6] y)
        { m = MatMul (q, k) p = Softmax (m) y = MatMul (p, v) }"""
    )
    turned = made_by(rewritten(model).inputs[1], "Transpose")
    assert turned is not None
    assert turned.inputs[0] is model.graph.inputs[1]


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_mask_of_the_operator_that_is_causal_becomes_its_attribute(mask: str) -> None:
    numbers = "1,0,0, 1,1,0, 1,1,1" if mask == "bool" else text(causal(3))
    model = parsed(
        f"""g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v) => (float[1,2,3,4] y)
        <{mask}[3,3] m = {{{numbers}}}> {{ y = Attention <scale = 0.4> (q, k, v, m) }}"""
    )
    assert rewritten(model).attributes.get_int("is_causal", 0) == 1


MADE = {
    "triu": "f = Expand (low, size) u = Trilu (f, one)",
    "compared": """r = Range (none, length, one) c = Unsqueeze (r, minus) o = Greater (r, c)
        u = Where (o, low, nought)""",
    "tril": """f = ConstantOfShape <value = float[1] {1.0}> (size) l = Trilu <upper = 0> (f) e = Equal (l, nought)
        u = Where (e, low, nought)""",
}


@pytest.mark.parametrize("name", MADE)
def test_a_mask_that_is_made_when_the_model_runs_is_known(name: str) -> None:
    model = written_out(f"{MADE[name]} w = Add (m, u)")
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    assert rewritten(model).attributes.get_int("is_causal", 0) == 1


def test_a_mask_can_be_computed_partly_in_a_branch() -> None:
    model = parsed(
        """g (bool c, float[4,4] m) => (float[4,4] y)
        <float low = {-1e9}, int64[2] size = {4, 4}, int64 one = {1}> {
            f = Expand (low, size)
            y = If (c) <
                then_branch = t () => (float[4,4] a) { u = Trilu (f, one) a = Add (m, u) },
                else_branch = e () => (float[4,4] b) { b = Identity (m) }
            >
        }"""
    )
    (trilu,) = (node for node in model.graph.all_nodes() if node.op_type == "Trilu")
    for number, node in enumerate(model.graph.all_nodes()):
        node.name = f"node_{number}"
    np.testing.assert_array_equal(_computed(trilu.outputs[0]), np.triu(np.full((4, 4), -1e9, np.float32), 1))


NOT_THE_SAME = {
    "a mask of the data": written_out("w = Add (m, free)"),
    "a mask of random numbers": written_out("u = RandomUniform <shape = [4, 4]> () w = Add (m, u)"),
    "a mask of weights": written_out("c = ReduceMax <keepdims = 0> (free) u = Expand (c, size) w = Add (m, u)"),
    "a long computation": written_out(
        "a0 = Expand (low, size) " + " ".join(f"a{n + 1} = Add (a{n}, a0)" for n in range(24)) + " w = Add (m, a24)"
    ),
    "a mask that hides a query": written_out("w = Add (m, mask)", np.full((4, 4), -np.inf, np.float32)),
    "a fill that is no mask": written_out("w = Where (mask, n, m)", HIDES),
    "a fill for each score": written_out("w = Where (mask, t, m)", HIDES),
    "a fill where the data says": written_out("c = Greater (free, nought) w = Where (c, low, m)"),
    "a fill that hides a query": written_out("w = Where (mask, low, m)", HIDES | (np.arange(4) == 1)[:, None]),
    "scores filled that are used": written_out("w = Where (mask, low, m)", HIDES, more="z = Neg (m)"),
    "a mask of one key": written_out("w = Add (m, mask)", np.zeros((4, 1), np.float32)),
    "a scale for each score": written_out("w = Mul (m, t)"),
    "a negative scale": written_out("w = Mul (m, n)"),
    "another function": written_out("a = Mul (m, s) w = Tanh (a)"),
    "scores that are used": written_out("w = Mul (m, s)", more="z = Neg (m)"),
    "scaled scores that are used": written_out("a = Mul (m, s) w = Add (a, mask)", causal(), more="z = Neg (a)"),
    "weights that are used": written_out("w = Mul (m, s)", more="z = Neg (p)"),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_leaves_what_could_mean_something_else(name: str) -> None:
    model = NOT_THE_SAME[name]
    before = op_types(model)
    assert AttentionOperator().run(model, TENSORRT, "float32") == 0
    assert AttentionOperator().ensures(model, TENSORRT, "float32") == []
    assert op_types(model) == before


OTHER_AXES = {
    "softmax over the queries": "p = Softmax <axis = 2> (m) y = MatMul (p, q)",
    "of three dimensions": "u = MatMul (a, b) p = Softmax <axis = -1> (u) x = MatMul (p, a) y = Identity (q)",
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_leaves_what_is_no_attention(name: str) -> None:
    model = parsed(
        f"""g (float[1,2,4,4] q, float[1,2,4,4] k, float[2,4,4] a, float[2,4,4] b) => (float[1,2,4,4] y)
        {{ m = MatMul (q, k) {OTHER_AXES[name]} }}"""
    )
    assert AttentionOperator().run(model, TENSORRT, "float32") == 0
