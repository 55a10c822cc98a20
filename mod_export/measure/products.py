"""Which operators multiply matrices, and how many FLOPs they take: two for each multiply-add, counted exactly.

The rules follow the definitions of the operators (https://onnx.ai/onnx/operators):

    MatMul, Gemm            2 M N K for every matrix of the broadcast batch
    Conv, DeformConv        one multiply-add per output and weight of its filter; padding counts
    ConvTranspose           one multiply-add per input and weight of its filter, even if `pads` cuts the result off
    RNN, GRU, LSTM          both weight matrices of every direction, in every step, for every row
    Einsum                  operand after operand, from the left: one multiply-add per combination of the labels of both
                            operands, if at least one label that both have is summed away. A label that only one of them
                            has and that is not needed later is summed before. Other cases only move, add or scale.

Integer operations count like float operations. Work besides the products (biases, activations, the interpolation of
DeformConv, zero points) is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

Shape = tuple[int, ...]
MICROSOFT = "com.microsoft"
OPERANDS: dict[tuple[str, str], tuple[int, ...]] = {
    **{("", name): (0, 1) for name in ("Conv", "ConvInteger", "ConvTranspose", "DeformConv")},
    **{("", name): (0, 1) for name in ("Gemm", "MatMul", "MatMulInteger")},
    **{("", name): (0, 3) for name in ("QLinearConv", "QLinearMatMul")},
    **{("", name): (0, 1, 2) for name in ("GRU", "LSTM", "RNN")},
    **{(MICROSOFT, name): (0, 1) for name in ("FusedMatMul", "MatMulIntegerToFloat", "MatMulNBits")},
}
"""(domain, operator) -> the inputs that are multiplied, activations first. An Einsum multiplies all its inputs."""
NO_RULE = frozenset(
    {
        "CausalConvWithState", "LinearAttention",
        "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
        "SequenceLength", "SplitToSequence",
    }
)  # fmt: skip
"""Standard operators without a rule: they multiply matrices in a way of their own, or the graph does not say how many
tensors pass through them. Operators that hold graphs (If, Loop, Scan, SequenceMap) have no rule either.
"""


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies matrices and does no other significant work."""
    key = _key(node)
    return any(labels for _, labels in _contractions(node)) if key == ("", "Einsum") else key in OPERANDS


def is_countable(node: ir.Node) -> bool:
    """Whether the FLOPs of a node are known: it has a rule, or is an operator of standard ONNX that multiplies no
    matrices. A node that holds graphs is not counted, because how often these run is decided at run time.
    """
    if is_product(node):
        return True
    domain, name = _key(node)
    return not domain and name not in NO_RULE and not holds_graphs(node)


def holds_graphs(node: ir.Node) -> bool:
    """Whether a node runs graphs of its own: If, Loop, Scan, SequenceMap."""
    return any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in node.attributes.values())


def operator_of(node: ir.Node) -> str:
    """Returns the name of a node's operator, with the domain if that is not the standard one."""
    domain, name = _key(node)
    return f"{domain}.{name}" if domain else name


def operands_of(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a product multiplies, activations first."""
    inputs = list(node.inputs)
    chosen = inputs if _key(node) == ("", "Einsum") else [inputs[index] for index in OPERANDS[_key(node)]]
    return [value for value in chosen if value is not None]


def flops_of_product(node: ir.Node, shape_of: Callable[[ir.Value], Shape]) -> int:
    """Returns the FLOPs of one run of a product; `shape_of` returns the static shape of a value, or raises an error."""
    shapes = [shape_of(value) for value in operands_of(node)]
    match node.op_type:
        case "Einsum":
            return _einsum(node, shapes)
        case "GRU" | "LSTM" | "RNN":  # (steps, rows, inputs) or (rows, steps, inputs), and weights of every direction.
            steps_and_rows = math.prod(shapes[0][:2])
            return 2 * steps_and_rows * sum(math.prod(weights) for weights in shapes[1:])
        case "Conv" | "ConvInteger" | "DeformConv" | "QLinearConv":  # Filters: (outputs, inputs of a group, *kernel).
            return 2 * math.prod(shape_of(node.outputs[0])) * math.prod(shapes[1][1:])
        case "ConvTranspose":  # Filters: (inputs, outputs of a group, *kernel).
            return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
        case "MatMulNBits":  # Weights are packed; their sizes are attributes.
            return 2 * math.prod(shapes[0]) * node.attributes["N"].as_int()
        case "Gemm":
            left, right = shapes
            rows, inner = reversed(left) if node.attributes.get_int("transA", 0) else left
            return 2 * rows * inner * (right[0] if node.attributes.get_int("transB", 0) else right[1])
    left, right = shapes
    if node.op_type == "FusedMatMul" and node.attributes.get_int("transB", 0) == 1:
        right = (*right[:-2], right[-1], right[-2])
    rows, inner = (1, left[0]) if len(left) == 1 else left[-2:]
    columns = 1 if len(right) == 1 else right[-1]
    return 2 * math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns * inner


def _key(node: ir.Node) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def _terms(node: ir.Node) -> tuple[list[str], str]:
    """Returns the terms of an Einsum: the labels of every operand, and the labels of the result, as text."""
    left, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:  # Labels that occur once, in alphabetical order, after the dots.
        plain = left.replace("...", "").replace(",", "")
        once = sorted(label for label in set(plain) if plain.count(label) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    return terms, result


def _contractions(node: ir.Node) -> Iterator[tuple[Set[str], Set[str]]]:
    """Yields for each operand after the first the labels that are looped over to multiply it with the product so far,
    and those of them that are summed away. The dots are one label here.
    """
    terms, result = _terms(node)
    labels = [frozenset(_labels(term)) for term in terms]
    so_far = labels[0]
    for index, operand in enumerate(labels[1:], 1):
        later = frozenset(_labels(result)).union(*labels[index + 1 :])
        both = so_far & operand
        yield both | ((so_far | operand) & later), both - later
        so_far = (so_far | operand) & later


def _labels(term: str) -> list[str]:
    """Returns one entry for each label, `...` for the dots."""
    before, dots, after = term.partition("...")
    return [*before, *([dots] if dots else []), *after]


def _einsum(node: ir.Node, shapes: Sequence[Shape]) -> int:
    terms, _ = _terms(node)
    sizes: dict[str, int] = {}
    dotted: list[Shape] = [()]
    for term, shape in zip(terms, shapes, strict=True):
        labels = _labels(term)
        if "..." in labels:
            at, width = labels.index("..."), len(shape) - len(labels) + 1
            dotted.append(shape[at : at + width])
            shape = (*shape[:at], 1, *shape[at + width :])
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    sizes["..."] = math.prod(np.broadcast_shapes(*dotted))
    return sum(2 * math.prod(sizes[label] for label in every) for every, summed in _contractions(node) if summed)
