"""A norm in basic operators becomes the norm operator with the same numbers, only where it is equivalent."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common
from small_graphs import TENSORRT, op_types, parsed, random_feeds, run
from torch import Tensor, nn

from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.rewrites.norms import NormOperator
from mod_export.graph.weights import state_of

D = 8
CENTRED = "m = ReduceMean (x, last) c = Sub (x, m) "
VARIANCE = "s = Mul (c, c) v = ReduceMean (s, last) e = Add (v, eps) "
SQUARE = "s = Pow (x, two) v = ReduceMean (s, last) e = Add (v, eps) "
ROOT = "r = Sqrt (e) "
INVERSE = ROOT + "i = Reciprocal (r) "


def written_out(body: str, more: str = "", opset: int = 23) -> ir.Model:
    return parsed(
        f"""g (float[2,3,{D}] x, float[{D}] w, float[{D}] b, float[2,3,{D}] wide, float[2,3,1] row)
        => (float[2,3,{D}] y{", float[A,B,C] z" if more else ""})
        <int64[1] last = {{-1}}, int64[1] second = {{1}}, int64[1] third = {{2}}, int64[3] shape = {{2,3,1}},
         float eps = {{0.01}}, float minus = {{-0.01}}, float[3,1] several = {{0.1, 0.2, 0.3}},
         float two = {{2.0}}, float three = {{3.0}}, float half = {{0.5}}, float less = {{-0.5}}, float one = {{1.0}}>
        {{ {body} {more} }}""",
        opset,
    )


def rewritten(model: ir.Model) -> ir.Node:
    """Rewrites the model, compares its numbers, and returns the only node that is left."""
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert len(NormOperator().ensures(model, TENSORRT, "float32")) == 1
    assert NormOperator().run(model, TENSORRT, "float32") == 1
    assert NormOperator().ensures(model, TENSORRT, "float32") == []
    common.RemoveUnusedNodesPass()(model)
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=1e-5)
    (node,) = model.graph
    return node


LAYER_NORMS = {
    "weight and bias": CENTRED + VARIANCE + INVERSE + "n = Mul (c, i) a = Mul (n, w) y = Add (a, b)",
    "the other way round": CENTRED
    + VARIANCE.replace("Add (v, eps)", "Add (eps, v)")
    + INVERSE
    + "n = Mul (i, c) a = Mul (w, n) y = Add (b, a)",
    "weight before": CENTRED + VARIANCE + ROOT + "a = Mul (w, c) n = Div (a, r) y = Add (n, b)",
    "mean taken twice": CENTRED
    + "m2 = ReduceMean (x, third) c2 = Sub (x, m2) s = Mul (c2, c2) v2 = ReduceMean <keepdims = 0> (s, third) "
    + "v = Reshape (v2, shape) e = Add (v, eps) "
    + ROOT
    + "n = Div (c, r) a = Mul (n, w) y = Add (a, b)",
    "no bias": CENTRED + VARIANCE + "r = Pow (e, half) n = Div (c, r) y = Mul (n, w)",
    "neither": CENTRED + VARIANCE + "i = Pow (e, less) y = Mul (c, i)",
}
RMS_NORMS = {
    "weight": SQUARE + INVERSE + "n = Mul (x, i) y = Mul (w, n)",
    "weight before": SQUARE + INVERSE + "n = Mul (x, w) y = Mul (n, i)",
    "no weight": SQUARE.replace("Pow (x, two)", "Mul (x, x)") + ROOT + "y = Div (x, r)",
    "one over the root": SQUARE + ROOT + "i = Div (one, r) y = Mul (x, i)",
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_a_layer_norm_is_the_same(name: str) -> None:
    node = rewritten(written_out(LAYER_NORMS[name]))
    assert node.op_type == "LayerNormalization"
    assert [value.name for value in node.inputs[2:] if value] == (["b"] if "Add (" in LAYER_NORMS[name][-40:] else [])
    assert node.attributes.get_float("epsilon") == pytest.approx(0.01)


@pytest.mark.parametrize("name", RMS_NORMS)
def test_an_rms_norm_is_the_same(name: str) -> None:
    node = rewritten(written_out(RMS_NORMS[name]))
    assert (node.op_type, node.attributes.get_int("stash_type")) == ("RMSNormalization", ir.DataType.FLOAT)
    assert (node.inputs[1] is not None and node.inputs[1].name == "w") is name.startswith("weight")


def test_a_bias_after_an_rms_norm_and_a_row_of_weights_stay() -> None:
    for last, left in (("a = Mul (n, w) y = Add (a, b)", "Add"), ("y = Mul (n, wide)", "Mul")):
        model = written_out(SQUARE + INVERSE + f"n = Mul (x, i) {last}")
        assert NormOperator().run(model, TENSORRT, "float32") == 1
        common.RemoveUnusedNodesPass()(model)
        assert op_types(model) == ["RMSNormalization", left]


def test_what_else_reads_a_part_of_it_still_does() -> None:
    """Other nodes read the norm before its weight, and the root."""
    model = written_out(SQUARE + INVERSE + "n = Mul (x, i) y = Mul (n, w)", more="p = Mul (n, r) z = Neg (p)")
    feeds = random_feeds(model)
    before = run(model, feeds)
    assert NormOperator().run(model, TENSORRT, "float32") == 1
    common.RemoveUnusedNodesPass()(model)
    for output, expected in zip(run(model, feeds), before, strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert {"RMSNormalization", "Sqrt", "Mul"} <= set(op_types(model))


NEITHER = RMS_NORMS["weight"]
NOT_THE_SAME = {
    "another dimension": NEITHER.replace("(s, last)", "(s, second)"),
    "cubes": NEITHER.replace("(x, two)", "(x, three)"),
    "a product of two": NEITHER.replace("Pow (x, two)", "Mul (x, wide)"),
    "a sum": NEITHER.replace("ReduceMean", "ReduceSum"),
    "no epsilon": NEITHER.replace("Add (v, eps)", "Neg (v)"),
    "a negative epsilon": NEITHER.replace("(v, eps)", "(v, minus)"),
    "an epsilon for each row": NEITHER.replace("(v, eps)", "(v, several)"),
    "an epsilon of the data": NEITHER.replace("(v, eps)", "(v, row)"),
    "another value over the root": NEITHER.replace("Mul (x, i)", "Mul (wide, i)"),
    "the root itself": NEITHER.replace("Mul (x, i)", "Mul (x, r)"),
    "root over value": NEITHER.replace("Mul (x, i)", "Div (r, x)"),
    "a cubic root": NEITHER.replace("Sqrt (e)", "Pow (e, three)"),
    "two over the root": NEITHER.replace("Reciprocal (r)", "Div (two, r)"),
    "centred by its maximum": CENTRED.replace("Mean", "Max") + VARIANCE + INVERSE + "y = Mul (x, i)",
    "not centred above": LAYER_NORMS["neither"].replace("y = Mul (c, i)", "y = Mul (x, i)"),
    "not centred below": CENTRED + SQUARE + INVERSE + "y = Mul (c, i)",
    "an older opset": NEITHER,
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_leaves_what_only_resembles_it(name: str) -> None:
    model = written_out(NOT_THE_SAME[name], opset=22 if name == "an older opset" else 23)
    before = op_types(model)
    assert NormOperator().run(model, TENSORRT, "float32") == 0
    assert NormOperator().ensures(model, TENSORRT, "float32") == []
    assert op_types(model) == before


class Written(nn.Module):
    """Norms as users write them: LayerNorm with `var`, RMSNorm as in transformers, and LayerNorm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = self.w * (x - mean) / torch.sqrt(variance + 1e-5) + self.b
        x = x * 300
        x = x.to(torch.float32)
        x = self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.float32)
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_norms_of_a_module_are_operators_also_in_float16() -> None:
    module, x = Written().eval(), torch.randn(2, 3, D)
    state = state_of(module)
    model = onnx_from_captured(captured(module, (x,), "test"), state, ["x"], ["y"])
    for name, tensor in state.items():
        model.graph.initializers[name].const_value = ir.tensor(tensor.detach().numpy(), name=name)
    expected = module(x).detach().numpy()
    assert apply_rewrites(model, PORTABLE, "float32")["norm_operator"] == 3
    assert op_types(model) == ["LayerNormalization", "Mul", "RMSNormalization", "LayerNormalization"]
    np.testing.assert_allclose(run(model, {"x": x.numpy()})[0], expected, atol=1e-5)
    apply_rewrites(model, TENSORRT, "float16")
    norms = [node for node in model.graph if "Norm" in node.op_type]
    assert [node.outputs[0].dtype for node in norms] == [ir.DataType.FLOAT16] * 3
    assert [node.attributes.get_int("stash_type") for node in norms] == [ir.DataType.FLOAT] * 3
    np.testing.assert_allclose(run(model, {"x": x.numpy()})[0], expected, atol=2e-2)
