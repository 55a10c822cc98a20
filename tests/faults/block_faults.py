"""Faults of attention and of the rest of a block."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from fault_table import FLOAT, HALF, f32, fault, gate_mul, i64, shape_of
from graph_surgery import Surgery


@fault("compact instead of original positions", "layers.1")
def compact(s: Surgery) -> None:
    for gather in s.nodes(1, "Gather"):
        if shape_of(gather.inputs[0])[-1] == 4:
            rows, k = shape_of(s.output("routed_1"))
            gather.replace_input_with(1, s.constant(i64(*[*range(k)] * rows)))


@fault("no rotation of keys", "layers.1")
def no_rotation(s: Surgery) -> None:
    attention = s.node(1, "Attention", 0)
    rotation = s.node(1, "RotaryEmbedding", 1)
    assert attention.inputs[1] is rotation.outputs[0]
    attention.replace_input_with(1, rotation.inputs[0])


@fault("rotation in the other direction", "layers.2")
def other_direction(s: Surgery) -> None:
    s.feed(s.node(2, "RotaryEmbedding", 0), 2, "Neg")


@fault("queries rotated one position too far", "layers.2")
def far_rotation(s: Surgery) -> None:
    rotation = s.node(2, "RotaryEmbedding", 0)
    seq = shape_of(rotation.inputs[1])[1]
    for table in (1, 2):
        s.feed(rotation, table, "Gather", i64(*range(1, seq), seq - 1), axis=1)


def masked(s: Surgery, layer: int, mask_TT: np.ndarray) -> None:
    attention = s.node(layer, "Attention", 0)
    attention.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    q, k, v = attention.inputs[:3]
    attributes = {name: value.value for name, value in attention.attributes.items()}
    made = s.op(attention, "Attention", [q, k, v, mask_TT], attributes, like=attention.outputs[0])
    s.replace(attention.outputs[0], made)


@fault("causal mask admits the next token", "layers.2")
def mask_wide(s: Surgery) -> None:
    masked(s, 2, np.tri(32, k=1, dtype=bool))


@fault("causal mask hides the token itself", "layers.2")
def mask_narrow(s: Surgery) -> None:
    mask_TT = np.tri(32, k=-1, dtype=bool)
    mask_TT[0, 0] = True
    masked(s, 2, mask_TT)


@fault("no causal mask", "layers.2")
def no_mask(s: Surgery) -> None:
    s.node(2, "Attention", 0).attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


@fault("no causal mask among routed tokens", "layers.3")
def no_routed_mask(s: Surgery) -> None:
    s.node(3, "Attention", 0).attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


@fault("wrong scale in attention", "layers.2")
def attention_scale(s: Surgery) -> None:
    s.node(2, "Attention", 0).attributes["scale"] = ir.AttrFloat32("scale", 1 / 8)


@fault("soft cap on attention scores", "layers.2")
def softcap(s: Surgery) -> None:
    s.node(2, "Attention", 0).attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)


@fault("heads of keys in the wrong order", "layers.2")
def head_order(s: Surgery) -> None:
    # Two heads of eight, side by side.
    s.feed(s.node(2, "Attention", 0), 1, "Gather", i64(*range(8, 16), *range(8)), axis=2)


@fault("keys and values swapped", "layers.2")
def keys_values(s: Surgery) -> None:
    k, v = s.nodes(2, "MatMul")[1:3]
    k_weight, v_weight = k.inputs[1], v.inputs[1]
    k.replace_input_with(1, v_weight)
    v.replace_input_with(1, k_weight)


@fault("residual missing", "layers.1")
def no_residual(s: Surgery) -> None:
    mul = gate_mul(s)
    s.replace(mul.outputs[0].uses()[0].node.outputs[0], mul.outputs[0])


@fault("residual doubled", "layers.1")
def double_residual(s: Surgery) -> None:
    s.feed(gate_mul(s).outputs[0].uses()[0].node, 0, "Mul", f32(2.0))


@fault("dense layer dropped", "layers.2")
def dropped(s: Surgery) -> None:
    block = s.node(2, "Add", -1).outputs[0]
    start = s.node(2, "RMSNormalization", 0).inputs[0]
    assert start is not None
    s.replace(block, start)


@fault("routed layer dropped", "layers.1")
def routed_dropped(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    stream = scatter.inputs[0]
    assert stream is not None
    s.replace(scatter.outputs[0], stream)


@fault("norm's epsilon", "layers.2")
def epsilon(s: Surgery) -> None:
    s.node(2, "RMSNormalization", 0).attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


@fault("norm without its weight", "layers.1")
def no_norm_weight(s: Surgery) -> None:
    s.node(1, "RMSNormalization", 0).replace_input_with(1, s.constant(np.ones(32, np.float32)))


@fault("final norm missing", "norm")
def no_final_norm(s: Surgery) -> None:
    norm = s.node(None, "RMSNormalization", -1)
    stream = norm.inputs[0]
    assert stream is not None
    s.replace(norm.outputs[0], stream)


@fault("GELU in place of SiLU", "layers.2")
def gelu(s: Surgery) -> None:
    s.feed(s.node(2, "Sigmoid", 0), 0, "Mul", f32(1.702))


@fault("activations clipped", "layers.2")
def clipped(s: Surgery) -> None:
    s.feed(s.node(2, "MatMul", -1), 0, "Clip", f32(-0.5), f32(0.5))


@fault("accumulation in float16", "layers.2")
def half_product(s: Surgery) -> None:
    product = s.node(2, "MatMul", 4)
    weight = product.inputs[1]
    assert weight is not None
    N, K = shape_of(weight)
    columns = s.op(product, "Transpose", [weight], {"perm": [1, 0]})
    columns.shape = ir.Shape([K, N])
    product.replace_input_with(1, columns)
    product.op_type, product.domain = "MatMul", ""
    product.attributes.clear()
    for index in (0, 1):
        s.feed(product, index, "Cast", to=int(HALF))
    product.outputs[0].dtype = HALF
    s.after(product.outputs[0], "Cast", to=int(FLOAT))
