"""The operators of a graph that multiply matrices: what each multiplies with what, and how many FLOPs that is.

The rules follow the definitions of the operators (https://onnx.ai/onnx/operators), two FLOPs for each multiply-add:

    MatMul, Gemm            2 M N K for every matrix of the broadcast batch
    Conv, DeformConv        as many multiply-adds for each output as its filter has weights; padding counts
    ConvTranspose           as many for each input as its filter has weights, whatever `pads` cuts off again
    RNN, GRU, LSTM          both weight matrices of every direction, in every step, for every row
    Einsum                  operand after operand, from the left: every combination of the labels that the two have,
                            where at least one label of both is summed away; what only one of them has and nobody needs
                            later is added up before. All others only move, add up or scale numbers.

Operations on whole numbers count as those on floats do. What stands beside the products (biases, activations, the
interpolation of DeformConv, zero points) is not counted.
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
"""(domain, operator) -> the inputs that are multiplied, activations first. Of Einsum it is all of them."""
NO_RULE = frozenset(
    {
        "CausalConvWithState", "LinearAttention",
        "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
        "SequenceLength", "SplitToSequence",
    }
)  # fmt: skip
"""Standard operators without a rule: they multiply matrices in a way of their own, or how many tensors pass through
them is not in the graph. Those that hold graphs (If, Loop, Scan, SequenceMap) have none either.
"""


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies matrices and does nothing else of weight."""
    key = _key(node)
    return any(labels for _, labels in _contractions(node)) if key == ("", "Einsum") else key in OPERANDS


def is_countable(node: ir.Node) -> bool:
    """Whether the FLOPs of a node are known: it has a rule, or is an operator of standard ONNX that multiplies no
    matrices. A node that holds graphs is not counted: how often they run is decided while they run.
    """
    if is_product(node):
        return True
    domain, name = _key(node)
    return not domain and name not in NO_RULE and not holds_graphs(node)


def holds_graphs(node: ir.Node) -> bool:
    """Whether a node runs graphs of its own: If, Loop, Scan, SequenceMap."""
    return any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in node.attributes.values())


def operator_of(node: ir.Node) -> str:
    """The name of its operator, with the domain where that is not the standard one."""
    domain, name = _key(node)
    return f"{domain}.{name}" if domain else name


def operands_of(node: ir.Node) -> list[ir.Value]:
    """What a product multiplies, activations first."""
    inputs = list(node.inputs)
    chosen = inputs if _key(node) == ("", "Einsum") else [inputs[index] for index in OPERANDS[_key(node)]]
    return [value for value in chosen if value is not None]


def flops_of_product(node: ir.Node, shape_of: Callable[[ir.Value], Shape]) -> int:
    """FLOPs of one run of a product; `shape_of` gives the static shape of a value, or raises what it likes."""
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
        case "MatMulNBits":  # Its weights are packed; the sizes are attributes.
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
    """The labels of every operand of an Einsum, and those of its result, as the equation has them."""
    left, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:  # Labels that occur once, in alphabetical order, behind the dots.
        plain = left.replace("...", "").replace(",", "")
        once = sorted(label for label in set(plain) if plain.count(label) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    return terms, result


def _contractions(node: ir.Node) -> Iterator[tuple[Set[str], Set[str]]]:
    """Operand after operand, from the left: the labels that are looped over to multiply the next operand with what was
    multiplied so far, and those of them that are summed away. The dots are one label here.
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
    """One entry for each label, `...` for the dots."""
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
