"""Matrix products of a static ONNX graph: their FLOPs, counted exactly, and the part of the model that each belongs to.

A product belongs to the part of the model that its weight is named after:

    layers.3.router.projection.weight    routing
    layers.3.attention.q_proj.weight     attention_projections
    (a product without a weight)         attention: scores, and scores times values
    layers.3.experts.up_proj             experts: a batched product, one matrix for each expert
    layers.3.mlp.up_proj.weight          mlp
    head.weight, embedding.weight        head (a tied one is used as a matrix only there)
    anything else                        other
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, cast

import numpy as np

from mod_export.errors import GraphError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "NO_RULE",
    "PARTS",
    "attention_sizes",
    "bytes_of",
    "check_countable",
    "constants_of",
    "input_of",
    "is_product",
    "needed_scores",
    "part_of_product",
    "part_of_weight",
    "product_flops",
    "shape_of",
    "source_names",
]

PARTS: dict[str, frozenset[str]] = {
    "routing": frozenset({"router", "predictor", "mlp_router", "mlp_predictor"}),
    "attention_projections": frozenset({"attention", "attn", "self_attn"}),
    "attention": frozenset(),
    "experts": frozenset({"experts"}),
    "mlp": frozenset({"mlp", "feed_forward", "ffn"}),
    "head": frozenset({"head", "lm_head", "embedding", "embed_tokens"}),
    "other": frozenset(),
}
"""Part -> the components of a state_dict name that say so. The first part that matches counts:
a router of experts is routing, and experts inside a module that is called mlp are experts."""

NO_RULE = frozenset(
    {
        "CausalConvWithState", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "GRU", "If", "LSTM",
        "LinearAttention", "Loop", "QLinearConv", "QLinearMatMul", "RNN", "Scan", "SequenceMap",
    }
)  # fmt: skip
"""Standard operators that multiply matrices, or hold graphs, and have no rule here. Skipping one would be a lie."""


MICROSOFT = "com.microsoft"
PRODUCTS = frozenset(
    {("", "Gemm"), ("", "MatMul"), ("", "MatMulInteger"), (MICROSOFT, "FusedMatMul"), (MICROSOFT, "MatMulNBits")}
)
"""(domain, operator) of what multiplies two matrices, activations on the left."""


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies two matrices and nothing else."""
    return (node.domain.removeprefix("ai.onnx"), node.op_type) in PRODUCTS


def check_countable(node: ir.Node, where: str) -> None:
    """Whether the cost of a node can be counted.

    Raises:
        GraphError: it multiplies matrices in a way that has no rule here, or it is not known what it does.
    """
    if is_product(node):
        return
    if node.domain not in ("", "ai.onnx") or node.op_type in NO_RULE:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise GraphError(
            f"{where}: node {node.name}: FLOPs of {name} cannot be counted; only MatMul, Gemm and Attention of "
            "standard ONNX have a rule, and what mod-export puts in their place. Count the portable graph, or express "
            "the product as MatMul"
        )


def constants_of(graph: ir.Graph) -> Set[ir.Value]:
    """Initializers and what follows from them alone, such as transposed weights: runtimes fold it while loading."""
    constants = set(graph.initializers.values())
    for node in graph:
        if all(value is None or value in constants for value in node.inputs) and not node.op_type.startswith("Random"):
            constants.update(node.outputs)
    return constants


def product_flops(node: ir.Node, where: str) -> int:
    """Of one of PRODUCTS: 2 M N K for every matrix of the broadcast batch (ONNX MatMul follows numpy.matmul).

    Operations on whole numbers count as those on floats do.
    """
    left, right = shape_of(input_of(node, 0), where), shape_of(input_of(node, 1), where)
    if node.op_type == "MatMulNBits":  # Its weights are packed; the sizes are attributes.
        return 2 * math.prod(left) * node.attributes["N"].as_int()
    if node.op_type == "FusedMatMul" and node.attributes.get_int("transB", 0) == 1:
        right = (*right[:-2], right[-1], right[-2])
    if node.op_type == "Gemm":
        rows, inner = reversed(left) if node.attributes.get_int("transA", 0) else left
        columns = right[0] if node.attributes.get_int("transB", 0) else right[1]
        return 2 * rows * columns * inner
    rows, inner = (1, left[0]) if len(left) == 1 else left[-2:]
    columns = 1 if len(right) == 1 else right[-1]
    return 2 * math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns * inner


def attention_sizes(node: ir.Node, where: str) -> tuple[int, int]:
    """Of an Attention node: the number of its scores, B H Tq Tk, and the width of a query's head plus a value's.

    Its FLOPs are 2 x scores x widths: queries times keys and scores times values, of every query head. The operator
    (ONNX opset 23) takes (B, heads, T, E), or (B, T, heads * E) with the number of heads as attributes.
    """
    query, key, value = (shape_of(input_of(node, index), where) for index in range(3))
    if len(query) == 4:
        batch, heads, num_queries, width = query
        num_keys, value_width = key[2], value[3]
    else:
        batch, num_queries, hidden = query
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width, num_keys, value_width = hidden // heads, key[1], value[2] // kv_heads
    past = node.inputs[4] if len(node.inputs) > 4 else None
    num_keys += 0 if past is None else shape_of(past, where)[2]
    return batch * heads * num_queries * num_keys, width + value_width


def needed_scores(node: ir.Node, where: str) -> int:
    """The scores of an Attention node that its causal mask does not hide: for T queries of T keys T (T + 1) / 2 of T T.

    Query i sees the keys up to its own, and those of the past (ONNX opset 23). A mask given as a tensor hides nothing
    here, because its values are not looked at.
    """
    scores, _ = attention_sizes(node, where)
    if not node.attributes.get_int("is_causal", 0):
        return scores
    query, key = (shape_of(input_of(node, index), where) for index in (0, 1))
    queries, keys = query[-2], key[-2]
    past = scores // math.prod(query[:2] if len(query) == 4 else (query[0], node.attributes["q_num_heads"].as_int()))
    past = past // queries - keys
    seen = sum(min(keys, i + 1) for i in range(queries)) + queries * past
    return scores // (queries * (keys + past)) * seen


def part_of_product(node: ir.Node, constants: Set[ir.Value]) -> str:
    """The part that a product belongs to, one of PARTS."""
    weights = [value for value in node.inputs[:2] if value in constants]
    return part_of_weight(source_names(weights)) if weights else "attention"


def part_of_weight(names: Iterable[str]) -> str:
    """The part that state_dict names stand for, one of PARTS."""
    components = {component for name in names for component in name.split(".")}
    return next((part for part, known in PARTS.items() if known & components), "other")


def source_names(values: Sequence[ir.Value | None]) -> Iterator[str]:
    """Names of the initializers that constant values come from, through transposes and whatever else is folded."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        producer = None if value is None else value.producer()
        if producer is not None:
            waiting += producer.inputs
        elif value is not None and value.name:
            yield value.name


def input_of(node: ir.Node, index: int) -> ir.Value:
    """An input that the operator requires."""
    value = node.inputs[index]
    assert value is not None, f"{node.name}: onnx.checker lets no graph through whose required input {index} is missing"
    return value


def shape_of(value: ir.Value, where: str) -> tuple[int, ...]:
    """The static shape of a value.

    Raises:
        GraphError: the graph does not say it.
    """
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        found = "none" if shape is None else str(shape)
        raise GraphError(
            f"{where}: the shape of value {value.name} must be known and static to count its cost, got {found}; "
            "export with fixed shapes and store ONNX shape inference in the graph"
        )
    return cast("tuple[int, ...]", tuple(shape))


def bytes_of(value: ir.Value, where: str) -> int:
    """The size of a value.

    Raises:
        GraphError: the graph does not say its shape or dtype.
    """
    if value.dtype is None:
        raise GraphError(
            f"{where}: the dtype of value {value.name} must be known to count its bytes; "
            "store ONNX shape inference in the graph"
        )
    return math.ceil(math.prod(shape_of(value, where)) * value.dtype.bitwidth / 8)
