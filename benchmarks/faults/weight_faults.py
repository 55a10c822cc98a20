"""Faults in the weights and in the head of a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from benchmarks.faults.fault_table import FLOAT, f32, fault, faults, i64, shape_of
from benchmarks.faults.graph_surgery import Surgery


@fault("weights of two layers swapped", "layers.0")
def swapped_layers(s: Surgery) -> None:
    first_name, second_name = "layers.0.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"
    first, second = s.graph.initializers[first_name].const_value, s.graph.initializers[second_name].const_value
    s.graph.initializers[first_name].const_value, s.graph.initializers[second_name].const_value = second, first


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
    s.node(2, "MatMul", -1).replace_input_with(1, s.constant(array))


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


@fault("embedding of the next token id", "embedding")
def next_id(s: Surgery) -> None:
    # Every Gather has two inputs, so `inputs[0]` is never missing.
    gather = next(node for node in s.nodes(None, "Gather") if node.inputs[0].name == "embedding.weight")
    shifted = s.op(gather, "Add", [gather.inputs[1], i64(1)])
    gather.replace_input_with(1, s.op(gather, "Mod", [shifted, i64(256)]))


def wrong_where(s: Surgery, rows: ir.Value, shape: tuple[int, ...]) -> None:
    """Multiplies the logits by 1.5 where the bool value `rows`, reshaped to `shape`, is true."""
    logits = s.output("logits")
    last = logits.producer()
    wide = s.op(last, "Reshape", [rows, i64(*shape)])
    wide.shape = ir.Shape(shape)
    factor = s.op(last, "Where", [wide, f32(1.5), f32(1.0)])
    factor.dtype = FLOAT
    product = s.after(logits, "Mul", f32(1.0)).producer()
    product.replace_input_with(1, factor)


@fault("wrong only where a row has exactly k tokens", None)
def length_is_k(s: Surgery) -> None:
    batch, k = shape_of(s.output("routed_1"))
    lengths = next(value for value in s.graph.inputs if value.name == "lengths")
    rows = s.op(s.graph[0], "Equal", [lengths, i64(k)])
    rows.dtype = ir.DataType.BOOL
    wrong_where(s, rows, (batch, 1, 1))


@fault("wrong only for one rare token id", None)
def rare_id(s: Surgery) -> None:
    batch, seq, _ = shape_of(s.output("logits"))
    ids = next(value for value in s.graph.inputs if value.name == "input_ids")
    tokens = s.op(s.graph[0], "Equal", [ids, i64(249)])
    tokens.dtype = ir.DataType.BOOL
    wrong_where(s, tokens, (batch, seq, 1))


faults(
    {
        "routers of two layers swapped": (
            "layers.1",
            lambda s: s.swap_inputs(s.node(1, "MatMul", 0), s.node(3, "MatMul", 0)),
        ),
        "one weight transposed": ("layers.2", lambda s: s.set(s.node(2, "MatMul", 0), transB=0)),
        "gate and up projection swapped": ("layers.2", lambda s: s.swap_inputs(*s.nodes(2, "MatMul")[4:6])),
        "a weight refers to the place of another": (
            "layers.3",
            lambda s: s.repoint("layers.3.mlp.up_proj.weight", "layers.3.mlp.gate_proj.weight"),
        ),
        "logits of the token before": (
            None,
            lambda s: s.after(s.output("logits"), "Gather", i64(0, *range(31)), axis=1),
        ),
        "logits scaled": (None, lambda s: s.after(s.output("logits"), "Mul", f32(1.0005))),
        "infinite logits": (None, lambda s: s.after(s.output("logits"), "Div", f32(0.0))),
    }
)
