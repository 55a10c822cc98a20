"""Replaces LayerNorm and RMSNorm in primitive operators by LayerNormalization or RMSNormalization, which compute in
float32 in every graph.

In primitive operators, a norm is up to nine nodes that each read and write the whole tensor, and ONNX Runtime fuses
only some forms of them. In float16, the square of 256 is infinite, and the norm of a token with such a number is 0. The
operators LayerNormalization and RMSNormalization compute mean and variance in float32 (`stash_type`), as PyTorch does.

(x - mean) / sqrt(var + eps) * weight + bias: Ba et al., arXiv 1607.06450. x / sqrt(mean(x^2) + eps) * weight: Zhang and
Sennrich, arXiv 1910.07467.

Shape legend: D features, the last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    NodeWriter,
    base_of_square,
    before_views,
    constant_integers,
    constant_number,
    graph_around,
    is_standard,
    label_of,
    made_by,
    nodes_from_opset,
    only_reader,
    static_shape,
    substitute,
)
from mod_export.types import DType, TargetLimits

FIRST_OPSET = 23
"""The first opset with the operator RMSNormalization."""
FLOAT = ir.DataType.FLOAT
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")


class NormOperator:
    """Replaces mean, variance, root and quotient over the last dimension by LayerNormalization or RMSNormalization."""

    name: ClassVar[str] = "norm_operator"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return True

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        count = 0
        for norm in _written_out(model):
            # Each norm is replaced at once, because the next one may read its result.
            count += 1
            writer, y = NodeWriter(graph_around(norm.nodes[0]), norm.nodes[0], "operator"), norm.nodes[0].outputs[0]
            D = (static_shape(norm.x) or (0,))[-1]
            scale = writer.constant(np.ones(D, np.float32)) if norm.weight is None else norm.weight
            name = "LayerNormalization" if norm.centred else "RMSNormalization"
            read = [norm.x, scale] if norm.bias is None else [norm.x, scale, norm.bias]
            result = writer.op(name, *read, like=y, axis=-1, epsilon=norm.epsilon, stash_type=int(FLOAT))
            substitute(y, result, *norm.nodes)
        return count

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        return [f"{label_of(norm.nodes[0])} still writes a norm out" for norm in _written_out(model)]


class _Norm(NamedTuple):
    """A norm of x (..., D) with weight and bias (D,) or None, and the nodes behind the square root, from the last to
    the first.

    If it is `centred` by its mean, it is a LayerNorm.
    """

    x: ir.Value
    weight: ir.Value | None
    bias: ir.Value | None
    epsilon: float
    centred: bool
    nodes: tuple[ir.Node, ...]


def _written_out(model: ir.Model) -> Iterator[_Norm]:
    for node in nodes_from_opset(model, FIRST_OPSET):
        for over, root in _quotient(node):
            norm = _norm(node, over, root)
            if norm is not None:
                yield norm
                break


def _quotient(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields (value, radicand) if a node divides a value by the root of another; at most one of the pairs is a norm."""
    if not is_standard(node, "Div", "Mul"):
        return
    a, b = node.inputs
    for value, divisor in ((a, b),) if node.op_type == "Div" else ((a, b), (b, a)):
        root = _root(divisor) if node.op_type == "Div" else _inverse_root(divisor)
        if value is not None and root is not None:
            yield value, root


def _root(value: ir.Value | None) -> ir.Value | None:
    """The radicand of a value that is a root; None for any other value."""
    node = made_by(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and constant_number(node.inputs[1]) != 0.5):
        return None
    return node.inputs[0]


def _inverse_root(value: ir.Value | None) -> ir.Value | None:
    """The radicand of a value that is one over a root; None for any other value."""
    node = made_by(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Reciprocal":
        return _root(node.inputs[0])
    if node.op_type == "Div":
        return _root(node.inputs[1]) if constant_number(node.inputs[0]) == 1 else None
    return node.inputs[0] if constant_number(node.inputs[1]) == -0.5 else None


def _norm(node: ir.Node, over: ir.Value, radicand: ir.Value) -> _Norm | None:
    """The norm that divides `over` by the root of `radicand`, with weight and bias if there are any."""
    added = made_by(radicand, "Add")
    terms = () if added is None else ((added.inputs[0], added.inputs[1]), (added.inputs[1], added.inputs[0]))
    for variance, number in terms:
        # The variance is the mean of squares, in any view of the same numbers.
        epsilon, squared = constant_number(number), base_of_square(_averaged(before_views(variance, *VIEWS)))
        if epsilon is None or not epsilon > 0 or squared is None:
            continue
        # The root has one number for each row of x, not for each column.
        sizes = static_shape(squared)
        if sizes is None or static_shape(radicand) != (*sizes[:-1], 1) or squared.dtype != FLOAT:
            return None
        x: ir.Value | None = over
        weight, bias, nodes = None, None, [node]
        if not _same(over, squared) and (product := made_by(over, "Mul")) is not None:
            weight, x = _with_vector(product, sizes[-1])
        if x is None or not _same(x, squared):
            return None
        if weight is None:
            weight = _followed_by("Mul", nodes, sizes[-1])
        centre = _centred(squared)
        if centre is not None:
            bias = _followed_by("Add", nodes, sizes[-1])
        x = squared if centre is None else centre
        return _Norm(x, weight, bias, epsilon, centre is not None, tuple(nodes))
    return None


def _averaged(value: ir.Value | None) -> ir.Value | None:
    """x, if a value is the mean of x over the last dimension."""
    node = made_by(value, "ReduceMean")
    if node is None or node.inputs[0] is None:
        return None
    sizes = static_shape(node.inputs[0])
    return node.inputs[0] if sizes and constant_integers(node, 1) in ([-1], [len(sizes) - 1]) else None


def _centred(value: ir.Value) -> ir.Value | None:
    """x, if a value is x minus the mean of x over the last dimension."""
    node = made_by(value, "Sub")
    if node is None or node.inputs[0] is None:
        return None
    x, mean = node.inputs
    sizes = static_shape(x)
    one_for_each_row = sizes is not None and static_shape(mean) == (*sizes[:-1], 1)
    return x if one_for_each_row and _averaged(mean) is x else None


def _same(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are equal: they are one value, or both are the same value minus its mean."""
    return a is b or ((centre := _centred(a)) is not None and centre is _centred(b))


def _with_vector(node: ir.Node, D: int) -> tuple[ir.Value | None, ir.Value | None]:
    """(vector, other input) of a node with one input (D,) and one of another shape."""
    a, b = node.inputs
    for vector, tensor in ((a, b), (b, a)):
        fits = static_shape(vector) == (D,) and static_shape(tensor) != (D,)
        if vector is not None and vector.dtype == FLOAT and fits:
            return vector, tensor
    return None, None


def _followed_by(op_type: str, nodes: list[ir.Node], D: int) -> ir.Value | None:
    """The vector (D,) that the only reader of the first node's result multiplies it by, or adds to it; None if there is
    none. If there is one, the reader is inserted at the front of `nodes`.
    """
    reader = only_reader(nodes[0].outputs[0])
    if reader is None or not is_standard(reader, op_type):
        return None
    vector, normed = _with_vector(reader, D)
    if normed is nodes[0].outputs[0]:
        nodes.insert(0, reader)
    return vector if nodes[0] is reader else None
