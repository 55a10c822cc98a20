"""Ways in which an exported graph goes wrong. Each is planted into one ONNX file; `layer` is where, if it is local.

The graph is that of `base_folder.SPEC`: layers 0 and 2 are dense, 1 and 3 routed, gate `identity`, combine `paper`.
In a routed layer the products are router, q, k, v, o, gate, up, down; in a dense one the same without the router.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from graph_surgery import Surgery

__all__ = ["GRAPH_FAULTS"]

FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
GRAPH_FAULTS: dict[str, tuple[Callable[[Surgery], None], str | None]] = {}
"""Name -> (how it is planted, the layer or module that must be named)."""


def fault(name: str, where: str | None) -> Callable[[Callable[[Surgery], None]], Callable[[Surgery], None]]:
    def listed(plant: Callable[[Surgery], None]) -> Callable[[Surgery], None]:
        assert name not in GRAPH_FAULTS
        GRAPH_FAULTS[name] = (plant, where)
        return plant

    return listed


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None
    assert value.shape is not None
    return value.shape.numpy()


def gate_mul(s: Surgery) -> ir.Node:
    """g * (attention delta + MLP delta), the last product of the layer."""
    return s.node(1, "Mul", -1)


# --- which tokens -------------------------------------------------------------------------------------------------


@fault("positions in the order of their scores", "layers.1")
def unsorted(s: Surgery) -> None:
    take = s.take(1)
    ascend = next(use.node for use in take.outputs[1].uses())
    s.replace(ascend.outputs[0], take.outputs[1])


@fault("last place holds the token before it again", "layers.1")
def repeated(s: Surgery) -> None:
    routed = s.output("routed_1")
    k = shape_of(routed)[1]
    s.after(routed, "Gather", i64(*range(k - 1), k - 2), axis=1)


@fault("padding is admitted", "layers.1")
def pads(s: Surgery) -> None:
    take = s.take(1)
    where = take.inputs[0].producer()  # type: ignore[union-attr]
    assert where is not None
    take.replace_input_with(0, where.inputs[1])


@fault("one pad of each row counts as real", None)
def one_pad(s: Surgery) -> None:
    s.node(None, "Less", 0).op_type = "LessOrEqual"


@fault("the length of the first row is used for all", None)
def first_length(s: Surgery) -> None:
    less = s.node(None, "Less", 0)
    rows = shape_of(less.inputs[1])[0]
    s.feed(less, 1, "Gather", i64(*[0] * rows), axis=0)


@fault("ties go to the later token", "layers.1")
def later(s: Surgery) -> None:
    take = s.take(1)
    seq = shape_of(take.inputs[0])[1]
    s.feed(take, 0, "Gather", i64(*range(seq - 1, -1, -1)), axis=1)
    positions = take.outputs[1]
    ascend = next(use.node for use in positions.uses())
    last = s.constant(i64(seq - 1))
    ascend.replace_input_with(0, s.op(ascend, "Sub", [last, positions], like=positions))


@fault("the lowest scores are taken", "layers.1")
def lowest(s: Surgery) -> None:
    s.feed(s.node(1, "Where", 0), 1, "Neg")


@fault("the largest absolute scores are taken", "layers.1")
def absolute(s: Surgery) -> None:
    s.feed(s.node(1, "Where", 0), 1, "Abs")


@fault("router in half precision", "layers.1")
def half_router(s: Surgery) -> None:
    halved = s.after(s.node(1, "MatMul", 0).outputs[0], "Cast", to=int(HALF))
    s.after(halved, "Cast", to=int(FLOAT))


@fault("router in bfloat16, for selection only", "layers.1")
def coarse_selection(s: Surgery) -> None:
    where = s.node(1, "Where", 0)
    s.feed(where, 1, "Cast", to=int(BFLOAT))
    s.feed(where, 1, "Cast", to=int(FLOAT))


@fault("router reads the normed stream", "layers.1")
def normed_router(s: Surgery) -> None:
    scale = s.graph.initializers["layers.1.attention_norm.weight"]
    router = s.node(1, "MatMul", 0)
    stream = router.inputs[0]
    normed = s.op(router, "RMSNormalization", [stream, scale], {"axis": -1, "epsilon": 1e-5})
    router.replace_input_with(0, normed)


@fault("routing of the first row is used for all", "layers.1")
def first_row(s: Surgery) -> None:
    routed = s.output("routed_1")
    s.after(routed, "Gather", i64(*[0] * shape_of(routed)[0]), axis=0)


@fault("scores of the neighbour to the left", "layers.1")
def shifted_scores(s: Surgery) -> None:
    where = s.node(1, "Where", 0)
    seq = shape_of(where.inputs[1])[1]
    s.feed(where, 1, "Gather", i64(0, *range(seq - 1)), axis=1)


# --- gate ---------------------------------------------------------------------------------------------------------


@fault("gate missing", "layers.1")
def no_gate(s: Surgery) -> None:
    mul = gate_mul(s)
    delta = mul.inputs[1]
    assert delta is not None
    s.replace(mul.outputs[0], delta)


@fault("gate applied twice", "layers.1")
def gate_twice(s: Surgery) -> None:
    mul = gate_mul(s)
    gate = mul.inputs[0]
    assert gate is not None
    mul.replace_input_with(1, s.op(mul, "Mul", [mul.inputs[1], gate]))


@fault("gate doubled", "layers.1")
def gate_doubled(s: Surgery) -> None:
    s.feed(gate_mul(s), 0, "Mul", f32(2.0))


@fault("gate through a sigmoid", "layers.1")
def gate_sigmoid(s: Surgery) -> None:
    s.feed(gate_mul(s), 0, "Sigmoid")


@fault("gate on the whole block instead of the delta", "layers.1")
def gate_block(s: Surgery) -> None:
    mul = gate_mul(s)
    residual = mul.outputs[0].uses()[0].node
    x = residual.inputs[0]
    mul.replace_input_with(1, s.op(mul, "Add", [x, mul.inputs[1]]))
    s.replace(residual.outputs[0], mul.outputs[0])


@fault("gates of other tokens", "layers.1")
def rolled_gates(s: Surgery) -> None:
    mul = gate_mul(s)
    k = shape_of(mul.inputs[0])[1]
    s.feed(mul, 0, "Gather", i64(k - 1, *range(k - 1)), axis=1)


@fault("gates of the other row", "layers.1")
def swapped_gates(s: Surgery) -> None:
    mul = gate_mul(s)
    s.feed(mul, 0, "Gather", i64(*reversed(range(shape_of(mul.inputs[0])[0]))), axis=0)


@fault("gate on the MLP only", "layers.1")
def gate_mlp(s: Surgery) -> None:
    mul = gate_mul(s)
    total = mul.inputs[1].producer()  # type: ignore[union-attr]
    assert total is not None
    attention, mlp = total.inputs
    mul.replace_input_with(1, mlp)
    after = mul.outputs[0].uses()[0].node
    after.replace_input_with(1, s.op(after, "Add", [mul.outputs[0], attention]))


@fault("gate 0.1 % too large", "layers.1")
def gate_slightly(s: Surgery) -> None:
    s.feed(gate_mul(s), 0, "Mul", f32(1.001))


# --- gather and scatter -------------------------------------------------------------------------------------------


@fault("scatter to the wrong row of the batch", "layers.1")
def scatter_row(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    total = shape_of(scatter.inputs[0])[0]
    index = s.op(scatter, "Add", [scatter.inputs[1], i64(total // 2)])
    scatter.replace_input_with(1, s.op(scatter, "Mod", [index, i64(total)]))


@fault("scatter one position too far", "layers.1")
def scatter_far(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    total = shape_of(scatter.inputs[0])[0]
    index = s.op(scatter, "Add", [scatter.inputs[1], i64(1)])
    scatter.replace_input_with(1, s.op(scatter, "Mod", [index, i64(total)]))


@fault("results in the reverse order of their tokens", "layers.1")
def scatter_reversed(s: Surgery) -> None:
    scatter = s.node(1, "ScatterND", 0)
    s.feed(scatter, 2, "Gather", i64(*reversed(range(shape_of(scatter.inputs[2])[0]))), axis=0)


@fault("scatter adds instead of replacing", "layers.1")
def scatter_adds(s: Surgery) -> None:
    s.node(1, "ScatterND", 0).attributes["reduction"] = ir.AttrString("reduction", "add")


@fault("tokens that pass by are lost", "layers.1")
def passed_by_lost(s: Surgery) -> None:
    s.feed(s.node(1, "ScatterND", 0), 0, "Mul", f32(0.0))


@fault("row offset missing", "layers.1")
def no_offset(s: Surgery) -> None:
    add = s.node(1, "Add", 0)
    positions = add.inputs[0]
    assert positions is not None
    s.replace(add.outputs[0], positions)


@fault("gathers the stream before the layer below", "layers.2")
def gathers_old(s: Surgery) -> None:
    reader = next(node for node in s.nodes(3, "Gather") if shape_of(node.outputs[0])[-1] == 32)
    older = next(node for node in s.nodes(1, "ScatterND")).outputs[0]
    reader.replace_input_with(0, older)


# --- attention ----------------------------------------------------------------------------------------------------


@fault("compact instead of original positions", "layers.1")
def compact(s: Surgery) -> None:
    for gather in s.nodes(1, "Gather"):
        if shape_of(gather.inputs[0])[-1] == 4:
            rows, k = shape_of(s.output("routed_1"))
            gather.replace_input_with(1, s.constant(i64(*[*range(k)] * rows)))


@fault("no rotation of keys", "layers.1")
def no_rotation(s: Surgery) -> None:
    attention = s.node(1, "Attention", 0)
    rotated = s.nodes(1, "Concat")[1]
    split = rotated.inputs[0].producer().inputs[0].producer().inputs[0].producer()  # type: ignore[union-attr]
    assert split is not None
    assert split.op_type == "Split"
    attention.replace_input_with(1, split.inputs[0])


@fault("rotation in the other direction", "layers.2")
def other_direction(s: Surgery) -> None:
    s.node(2, "Sub", 0).op_type = "Add"


@fault("queries rotated one position too far", "layers.2")
def far_rotation(s: Surgery) -> None:
    for node in s.nodes(2, "Mul")[:4]:
        seq = shape_of(node.inputs[1])[0]
        s.feed(node, 1, "Gather", i64(*range(1, seq), seq - 1), axis=0)


def masked(s: Surgery, layer: int, mask_TT: np.ndarray) -> None:
    attention = s.node(layer, "Attention", 0)
    attention.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    q, k, v = attention.inputs[:3]
    made = s.op(attention, "Attention", [q, k, v, mask_TT], {"is_causal": 0}, like=attention.outputs[0])
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
    s.feed(s.node(2, "Attention", 0), 1, "Gather", i64(1, 0), axis=1)


@fault("keys and values swapped", "layers.2")
def keys_values(s: Surgery) -> None:
    k, v = s.nodes(2, "MatMul")[1:3]
    k_weight, v_weight = k.inputs[1], v.inputs[1]
    anchor = s.node(2, "MatMul", 0)
    names = ("layers.2.attention.v_proj.weight", "layers.2.attention.k_proj.weight")
    assert k_weight is not None
    assert v_weight is not None
    for node, name, like in zip((k, v), names, (k_weight, v_weight), strict=True):
        weight = s.graph.initializers[name]
        node.replace_input_with(1, s.op(anchor, "Transpose", [weight], {"perm": [1, 0]}, like=like))


# --- the rest of a block ------------------------------------------------------------------------------------------


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
    for index in (0, 1):
        s.feed(product, index, "Cast", to=int(HALF))
    product.outputs[0].dtype = HALF
    s.after(product.outputs[0], "Cast", to=int(FLOAT))


# --- weights ------------------------------------------------------------------------------------------------------


@fault("weights of two layers swapped", "layers.0")
def swapped_layers(s: Surgery) -> None:
    one, other = "layers.0.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"
    a, b = s.graph.initializers[one].const_value, s.graph.initializers[other].const_value
    s.graph.initializers[one].const_value, s.graph.initializers[other].const_value = b, a


@fault("routers of two layers swapped", "layers.1")
def swapped_routers(s: Surgery) -> None:
    one, other = s.node(1, "MatMul", 0), s.node(3, "MatMul", 0)
    a, b = one.inputs[1].producer(), other.inputs[1].producer()  # type: ignore[union-attr]
    assert a is not None
    assert b is not None
    first, second = a.inputs[0], b.inputs[0]
    a.replace_input_with(0, second)
    b.replace_input_with(0, first)


@fault("one weight transposed", "layers.2")
def transposed(s: Surgery) -> None:
    product = s.node(2, "MatMul", 0)
    product.replace_input_with(1, s.graph.initializers["layers.2.attention.q_proj.weight"])


@fault("gate and up projection swapped", "layers.2")
def gate_up(s: Surgery) -> None:
    gate, up = s.nodes(2, "MatMul")[4:6]
    a, b = gate.inputs[1], up.inputs[1]
    anchor = s.node(2, "MatMul", 0)
    for node, name, like in ((gate, "up", a), (up, "gate", b)):
        weight = s.graph.initializers[f"layers.2.mlp.{name}_proj.weight"]
        node.replace_input_with(1, s.op(anchor, "Transpose", [weight], {"perm": [1, 0]}, like=like))


@fault("one element of one weight changed by 1 %", "layers.2")
def one_element(s: Surgery) -> None:
    name = "layers.2.mlp.up_proj.weight"
    array = s.weight(name)
    array[3, 5] *= np.float32(1.01)
    s.embed(name, array)


@fault("one element of one weight changed by 1 %, under another name", "layers.2")
def one_element_renamed(s: Surgery) -> None:
    array = s.weight("layers.2.mlp.down_proj.weight")
    array[3, 5] *= np.float32(1.01)
    s.node(2, "MatMul", -1).replace_input_with(1, s.constant(np.ascontiguousarray(array.T)))


@fault("one weight rounded to bfloat16", "layers.3")
def rounded(s: Surgery) -> None:
    name = "layers.3.attention.o_proj.weight"
    bits = s.weight(name).view(np.uint32)
    s.embed(name, ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32))


@fault("one weight rounded to eight bits", "layers.0")
def quantized(s: Surgery) -> None:
    name = "layers.0.mlp.gate_proj.weight"
    array = s.weight(name)
    step = np.abs(array).max() / 127
    s.embed(name, (np.round(array / step) * step).astype(np.float32))


@fault("a weight refers to the place of another", "layers.3")
def repointed(s: Surgery) -> None:
    s.repoint("layers.3.mlp.up_proj.weight", "layers.3.mlp.gate_proj.weight")


# --- head ---------------------------------------------------------------------------------------------------------


@fault("NaN in one output element", None)
def nan_output(s: Surgery) -> None:
    shape = shape_of(s.output("logits"))
    poison = np.zeros(shape, np.float32)
    poison[0, 5, 7] = np.nan
    s.after(s.output("logits"), "Add", poison)


@fault("one logit wrong by 0.001", None)
def one_logit(s: Surgery) -> None:
    wrong = np.zeros(shape_of(s.output("logits")), np.float32)
    wrong[-1, 9, 3] = 1e-3
    s.after(s.output("logits"), "Add", wrong)


@fault("logits of the token before", None)
def shifted_logits(s: Surgery) -> None:
    seq = shape_of(s.output("logits"))[1]
    s.after(s.output("logits"), "Gather", i64(0, *range(seq - 1)), axis=1)


@fault("logits scaled", None)
def scaled_logits(s: Surgery) -> None:
    s.after(s.output("logits"), "Mul", f32(1.0005))


@fault("infinite logits", None)
def infinite(s: Surgery) -> None:
    s.after(s.output("logits"), "Div", f32(0.0))


@fault("embedding of the next token id", "embedding")
def next_id(s: Surgery) -> None:
    gather = next(node for node in s.nodes(None, "Gather") if node.inputs[0].name == "embedding.weight")  # type: ignore[union-attr]
    shifted = s.op(gather, "Add", [gather.inputs[1], i64(1)])
    gather.replace_input_with(1, s.op(gather, "Mod", [shifted, i64(256)]))
