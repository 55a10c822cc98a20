"""What a graph costs on paper: FLOPs and bytes, counted from the static ONNX graph that is deployed.

Counted are the multiplications of matrix products, two FLOPs for each multiply-add, exactly. Norms, activations,
rotations, softmax, top-k, gathers and scatters are not counted: they are bound by memory, not by arithmetic.
Attention counts as the full square of queries and keys even where it is causal, because that is what a kernel without
block skipping computes and what `torch.utils.flop_counter` reports.

A product belongs to the part of the model that its weight is named after:

    layers.3.router.projection.weight    routing
    layers.3.attention.q_proj.weight     attention_projections
    (a product without a weight)         attention: scores, and scores times values
    layers.3.mlp.up_proj.weight          mlp
    head.weight, embedding.weight        head (a tied one is used as a matrix only there)
    anything else                        other
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from mod_export.artifacts import Bucket, ModelKind
from mod_export.errors import GraphError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PARTS", "CostRow", "cost_row"]

PARTS: dict[str, frozenset[str]] = {
    "routing": frozenset({"router", "predictor"}),
    "attention_projections": frozenset({"attention", "attn", "self_attn"}),
    "attention": frozenset(),
    "mlp": frozenset({"mlp", "feed_forward", "ffn", "experts"}),
    "head": frozenset({"head", "lm_head", "embedding", "embed_tokens"}),
    "other": frozenset(),
}
"""Part -> the components of a state_dict name that say so. The first part that matches counts."""

NO_RULE = frozenset(
    {
        "CausalConvWithState", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "GRU", "If", "LSTM",
        "LinearAttention", "Loop", "MatMulInteger", "QLinearConv", "QLinearMatMul", "RNN", "Scan", "SequenceMap",
    }
)  # fmt: skip
"""Standard operators that multiply matrices, or hold graphs, and have no rule here. Skipping one would be a lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The cost of one run of one graph.

    Attributes:
        model: `mod` or `dense`.
        bucket: name of the bucket.
        flops: of all matrix products.
        flops_by_part: the same by part of the model, every part of PARTS, zeros included.
        weight_bytes: initializers kept in external data, each stored tensor once; buffers such as RoPE tables are
            among them. What is stored, not what one run reads: an embedding is read row by row.
        activation_bytes: every value that a node computes from the inputs, outputs and reshaped views included, each
            once. A measure of traffic, not a peak: most of them do not live at the same time.
        kv_bytes: keys and values as attention reads them, summed over the layers.
    """

    model: ModelKind
    bucket: str
    flops: int
    flops_by_part: dict[str, int]
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int


def cost_row(model: ir.Model, kind: ModelKind, bucket: Bucket) -> CostRow:
    """Counts a graph whose shapes are all static and stored in it, as ONNX shape inference leaves them.

    Raises:
        GraphError: a needed shape or dtype is unknown, or a node multiplies matrices in a way that has no rule here.
    """
    where = f"{kind} {bucket.name}"
    constants = _constants(model.graph)
    flops_by_part = dict.fromkeys(PARTS, 0)
    kv_bytes = 0
    for node in model.graph:
        if node.domain not in ("", "ai.onnx") or node.op_type in NO_RULE:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise GraphError(
                f"{where}: node {node.name}: FLOPs of {name} cannot be counted; only MatMul, Gemm and Attention of "
                "standard ONNX have a rule. Count the portable graph, or express the product as MatMul"
            )
        if node.op_type == "Attention":
            flops_by_part["attention"] += _attention_flops(node, where)
            kv_bytes += sum(_bytes(value, where) for value in _keys_and_values(node))
        elif node.op_type in ("MatMul", "Gemm"):
            part = _part(node, constants)
            flops_by_part[part] += _product_flops(node, where)
            kv_bytes += _bytes(_input(node, 1), where) if part == "attention" else 0
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        weight_bytes=_weight_bytes(model.graph),
        activation_bytes=sum(_bytes(value, where) for value in _computed(model.graph) if value not in constants),
        kv_bytes=kv_bytes,
    )


def _computed(graph: ir.Graph) -> Iterator[ir.Value]:
    # An optional output that nobody asked for has an empty name.
    return (value for node in graph for value in node.outputs if value.name)


def _constants(graph: ir.Graph) -> Set[ir.Value]:
    """Initializers and what follows from them alone, such as transposed weights: runtimes fold it while loading."""
    constants = set(graph.initializers.values())
    for node in graph:
        if all(value is None or value in constants for value in node.inputs) and not node.op_type.startswith("Random"):
            constants.update(node.outputs)
    return constants


def _product_flops(node: ir.Node, where: str) -> int:
    """2 M N K for every matrix of the broadcast batch (ONNX MatMul follows numpy.matmul)."""
    left, right = _shape(_input(node, 0), where), _shape(_input(node, 1), where)
    if node.op_type == "Gemm":
        rows, inner = reversed(left) if node.attributes.get_int("transA", 0) else left
        columns = right[0] if node.attributes.get_int("transB", 0) else right[1]
        return 2 * rows * columns * inner
    rows, inner = (1, left[0]) if len(left) == 1 else left[-2:]
    columns = 1 if len(right) == 1 else right[-1]
    return 2 * math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns * inner


def _attention_flops(node: ir.Node, where: str) -> int:
    """Queries times keys and scores times values, of every query head: 4 B H Tq Tk E where both heads have width E.

    The operator (ONNX opset 23) takes (B, heads, T, E), or (B, T, heads * E) with the number of heads as attributes.
    """
    query, key, value = (_shape(_input(node, index), where) for index in range(3))
    if len(query) == 4:
        batch, heads, num_queries, width = query
        num_keys, value_width = key[2], value[3]
    else:
        batch, num_queries, hidden = query
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width, num_keys, value_width = hidden // heads, key[1], value[2] // kv_heads
    past = node.inputs[4] if len(node.inputs) > 4 else None
    num_keys += 0 if past is None else _shape(past, where)[2]
    return 2 * batch * heads * num_queries * num_keys * (width + value_width)


def _keys_and_values(node: ir.Node) -> list[ir.Value]:
    """K and V of an Attention node, and the past ones where there are some."""
    wanted = [*node.inputs[1:3], *node.inputs[4:6]]
    return [value for value in wanted if value is not None]


def _part(node: ir.Node, constants: Set[ir.Value]) -> str:
    weights = [value for value in node.inputs[:2] if value in constants]
    if not weights:
        return "attention"
    components = {component for name in _source_names(weights) for component in name.split(".")}
    return next((part for part, names in PARTS.items() if names & components), "other")


def _source_names(values: Sequence[ir.Value | None]) -> Iterator[str]:
    """Names of the initializers that constant values come from, through transposes and whatever else is folded."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        producer = None if value is None else value.producer()
        if producer is not None:
            waiting += producer.inputs
        elif value is not None and value.name:
            yield value.name


def _weight_bytes(graph: ir.Graph) -> int:
    # A build folder is benchmarked and reported on where no ONNX tools are installed, with rows counted elsewhere.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: onnx.checker lets no graph through whose required input {index} is missing"
    return value


def _shape(value: ir.Value, where: str) -> tuple[int, ...]:
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        found = "none" if shape is None else str(shape)
        raise GraphError(
            f"{where}: the shape of value {value.name} must be known and static to count its cost, got {found}; "
            "export with fixed shapes and store ONNX shape inference in the graph"
        )
    return cast("tuple[int, ...]", tuple(shape))


def _bytes(value: ir.Value, where: str) -> int:
    if value.dtype is None:
        raise GraphError(
            f"{where}: the dtype of value {value.name} must be known to count its bytes; "
            "store ONNX shape inference in the graph"
        )
    return math.ceil(math.prod(_shape(value, where)) * value.dtype.bitwidth / 8)
