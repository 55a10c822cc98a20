"""What a graph costs on paper: FLOPs and bytes, counted from the static ONNX graph that is deployed.

Counted are the multiplications of matrix products, two FLOPs for each multiply-add, exactly. Norms, activations,
rotations, softmax, top-k, gathers and scatters are not counted: they are bound by memory, not by arithmetic.
Attention counts as the full square of queries and keys even where it is causal, because that is what the portable graph
says and what `torch.utils.flop_counter` reports; `needed_flops` leaves out what the mask hides.
`measure.products` says which part of the model each product belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mod_export.artifacts import Bucket, ModelKind
from mod_export.measure.products import (
    PARTS,
    attention_sizes,
    bytes_of,
    check_countable,
    constants_of,
    input_of,
    is_product,
    needed_scores,
    part_of_product,
    product_flops,
)

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PARTS", "CostRow", "cost_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The cost of one run of one graph.

    Attributes:
        model: `mod` or `dense`.
        bucket: name of the bucket.
        flops: of all matrix products.
        flops_by_part: the same by part of the model, every part of PARTS, zeros included.
        needed_flops: the same without the scores that a causal mask hides: what no kernel can do without.
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
    needed_flops: int | None = None


def cost_row(model: ir.Model, kind: ModelKind, bucket: Bucket) -> CostRow:
    """Counts a graph whose shapes are all static and stored in it, as ONNX shape inference leaves them.

    Raises:
        GraphError: a needed shape or dtype is unknown, or a node multiplies matrices in a way that has no rule here.
    """
    where = f"{kind} {bucket.name}"
    constants = constants_of(model.graph)
    flops_by_part = dict.fromkeys(PARTS, 0)
    kv_bytes = hidden = 0
    for node in model.graph:
        check_countable(node, where)
        if node.op_type == "Attention":
            scores, widths = attention_sizes(node, where)
            flops_by_part["attention"] += 2 * scores * widths
            hidden += 2 * (scores - needed_scores(node, where)) * widths
            kv_bytes += sum(bytes_of(value, where) for value in _keys_and_values(node))
        elif is_product(node):
            part = part_of_product(node, constants)
            flops_by_part[part] += product_flops(node, where)
            kv_bytes += bytes_of(input_of(node, 1), where) if part == "attention" else 0
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        needed_flops=sum(flops_by_part.values()) - hidden,
        weight_bytes=_weight_bytes(model.graph),
        activation_bytes=sum(bytes_of(value, where) for value in _computed(model.graph) if value not in constants),
        kv_bytes=kv_bytes,
    )


def _computed(graph: ir.Graph) -> Iterator[ir.Value]:
    # An optional output that nobody asked for has an empty name.
    return (value for node in graph for value in node.outputs if value.name)


def _keys_and_values(node: ir.Node) -> list[ir.Value]:
    """K and V of an Attention node, and the past ones where there are some."""
    wanted = [*node.inputs[1:3], *node.inputs[4:6]]
    return [value for value in wanted if value is not None]


def _weight_bytes(graph: ir.Graph) -> int:
    # A build folder is benchmarked and reported on where no ONNX tools are installed, with rows counted elsewhere.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())
