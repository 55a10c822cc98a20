"""Faults in attention and in the rest of a block."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from benchmarks.faults.fault_table import FLOAT, HALF, f32, fault, faults, gate_mul, i64, shape_of
from benchmarks.faults.graph_surgery import Surgery


@fault("compact instead of original positions", "layers.1")
def compact(s: Surgery) -> None:
    for gather in s.nodes(1, "Gather"):
        if shape_of(gather.inputs[0])[-1] == 4:
            rows, k = shape_of(s.output("routed_1"))
            gather.replace_input_with(1, s.constant(i64(*[*range(k)] * rows)))


@fault("queries rotated one position too far", "layers.2")
def far_rotation(s: Surgery) -> None:
    rotation = s.node(2, "RotaryEmbedding", 0)
    seq = shape_of(rotation.inputs[1])[1]
    for table in (1, 2):
        s.feed(rotation, table, "Gather", i64(*range(1, seq), seq - 1), axis=1)


def masked(s: Surgery, mask_TT: np.ndarray) -> None:
    attention = s.node(2, "Attention", 0)
    s.set(attention, is_causal=0)
    q, k, v = attention.inputs[:3]
    attributes = {name: value.value for name, value in attention.attributes.items()}
    made = s.op(attention, "Attention", [q, k, v, mask_TT], attributes, like=attention.outputs[0])
    s.replace(attention.outputs[0], made)


@fault("causal mask hides the token itself", "layers.2")
def mask_narrow(s: Surgery) -> None:
    mask_TT = np.tri(32, k=-1, dtype=bool)
    mask_TT[0, 0] = True
    masked(s, mask_TT)


@fault("accumulation in float16", "layers.2")
def half_product(s: Surgery) -> None:
    product = s.node(2, "MatMul", 4)
    weight = product.inputs[1]
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


faults(
    {
        "no rotation of keys": ("layers.1", lambda s: s.bypass(s.node(1, "RotaryEmbedding", 1), 0)),
        "rotation in the other direction": ("layers.2", lambda s: s.feed(s.node(2, "RotaryEmbedding", 0), 2, "Neg")),
        "causal mask admits the next token": ("layers.2", lambda s: masked(s, np.tri(32, k=1, dtype=bool))),
        "no causal mask": ("layers.2", lambda s: s.set(s.node(2, "Attention", 0), is_causal=0)),
        "no causal mask among routed tokens": ("layers.3", lambda s: s.set(s.node(3, "Attention", 0), is_causal=0)),
        "wrong scale in attention": ("layers.2", lambda s: s.set(s.node(2, "Attention", 0), scale=1 / 8)),
        "soft cap on attention scores": ("layers.2", lambda s: s.set(s.node(2, "Attention", 0), softcap=30.0)),
        "heads of keys in the wrong order": (
            "layers.2",
            lambda s: s.feed(s.node(2, "Attention", 0), 1, "Gather", i64(*range(8, 16), *range(8)), axis=2),
        ),
        "keys and values swapped": ("layers.2", lambda s: s.swap_inputs(*s.nodes(2, "MatMul")[1:3])),
        "residual missing": ("layers.1", lambda s: s.bypass(gate_mul(s).outputs[0].uses()[0].node, 1)),
        "residual doubled": ("layers.1", lambda s: s.feed(gate_mul(s).outputs[0].uses()[0].node, 0, "Mul", f32(2.0))),
        "dense layer dropped": (
            "layers.2",
            lambda s: s.replace(s.node(2, "Add", -1).outputs[0], s.node(2, "RMSNormalization", 0).inputs[0]),
        ),
        "routed layer dropped": ("layers.1", lambda s: s.bypass(s.node(1, "ScatterND", 0), 0)),
        "norm's epsilon": ("layers.2", lambda s: s.set(s.node(2, "RMSNormalization", 0), epsilon=1e-3)),
        "norm without its weight": (
            "layers.1",
            lambda s: s.node(1, "RMSNormalization", 0).replace_input_with(1, s.constant(np.ones(32, np.float32))),
        ),
        "final norm missing": ("norm", lambda s: s.bypass(s.node(None, "RMSNormalization", -1), 0)),
        "GELU in place of SiLU": ("layers.2", lambda s: s.feed(s.node(2, "Sigmoid", 0), 0, "Mul", f32(1.702))),
        "activations clipped": ("layers.2", lambda s: s.feed(s.node(2, "MatMul", -1), 0, "Clip", f32(-0.5), f32(0.5))),
    }
)
