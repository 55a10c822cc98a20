"""Attention takes heads side by side where transposes made them a dimension, and is left alone elsewhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.engines.ort import OrtCpu
from mod_export.export.passes.flat_heads import FlatHeads
from mod_export.export.passes.rotary_embedding import RotaryEmbedding

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


def rewritten(model: ir.Model) -> int:
    return FlatHeads().run(model, OrtCpu.dialect, "float32")


def test_the_attention_is_the_same() -> None:
    model = heads()
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.standard_normal(value.shape.numpy(), dtype=np.float32)
        for value in model.graph.inputs
        if value.name and value.shape is not None
    }
    assert rewritten(model) == 1
    (attention,) = (node for node in model.graph if node.op_type == "Attention")
    assert [value.name for value in attention.inputs[:3] if value] == ["q", "k", "v"]
    assert {name: attribute.value for name, attribute in attention.attributes.items()} == {
        "is_causal": 1, "scale": pytest.approx(0.3), "q_num_heads": 4, "kv_num_heads": 2,
    }  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0], run(heads(), feeds)[0], atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        SPLIT + ATTENTION + JOIN.replace("[0,2,1,3]", "[0,2,3,1]").replace("y3)", "y3)"),
        SPLIT.replace("vh = Transpose <perm: ints = [0,2,1,3]> (vs)", "v0 = Transpose <perm: ints = [0,2,1,3]> (vs) "
                      "vh = Neg (v0)") + ATTENTION + JOIN,
        SPLIT + ATTENTION + "n = Neg (a) " + JOIN.replace("(a)", "(n)"),
        SPLIT + "one = Constant <value_float: float = 0.0> () shape = Constant <value_ints: ints = [6,6]> () "
        "m = Expand (one, shape) a = Attention (qh, kh, vh, m) " + JOIN,
    ],
    ids=["another order of the result", "values that were changed", "a result that is changed", "a mask"],
)  # fmt: skip
def test_anything_else_is_left(body: str) -> None:
    model = heads(body)
    assert rewritten(model) == 0
    assert list(FlatHeads().ensures(model, OrtCpu.dialect, "float32")) == []


def test_nothing_is_transposed_any_more() -> None:
    model = portable_graph(make_spec(), 2, 16)
    RotaryEmbedding().run(model, OrtCpu.dialect, "float32")
    assert rewritten(model) == 2
    common.RemoveUnusedNodesPass()(model)
    left = Counter(node.op_type for node in model.graph if not all(v and v.is_initializer() for v in node.inputs[:1]))
    assert left["Transpose"] == 0
    rotations = [node for node in model.graph if node.op_type == "RotaryEmbedding" and node.outputs[0].uses()]
    assert sorted(node.attributes["num_heads"].as_int() for node in rotations) == [1, 1, 2, 2]
