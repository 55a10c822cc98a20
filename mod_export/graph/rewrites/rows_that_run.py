"""Lets a routed part of a step compute only the rows that run.

A step of several texts computes all rows of a routed part as soon as one of them runs, and drops what the others give.
Reading the weights takes the same time for one row as for eight, but multiplying them does not: on ONNX Runtime's CPU
kernels eight rows take 1.8 times as long as three in int8, and 1.3 times in float32 (docs/LOG.md). So the rows that run
are gathered before the products and scattered after them. How many they are is known only when the graph runs.

Attention over a cache stays as it is, because the rows of its operands are those of the cache. It gets zeros for rows
that do not run, and nothing reads what it gives for them.

Shape legend: B rows of text, R rows that run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import (
    MICROSOFT,
    ROWS_THAT_RUN,
    NodeWriter,
    before_views,
    branches_of,
    is_standard,
    made_by,
    require_static_shape,
    static_shape,
    substitute,
)
from mod_export.types import DType, TargetLimits

ELEMENTWISE = (
    "Abs", "Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "HardSigmoid", "Mul", "Neg", "Pow", "Relu", "Sigmoid",
    "Sqrt", "Sub", "Tanh",
)  # fmt: skip
ON_THE_LAST_AXIS = ("LayerNormalization", "RMSNormalization", "Split")
PRODUCTS = (("", "MatMul"), (MICROSOFT, "MatMulNBits"), (MICROSOFT, "FusedMatMul"))
ROW_BY_ROW = ((MICROSOFT, "GroupQueryAttention"),)
"""Operators that keep all B rows, whose result in a row depends on no other row of what is gathered."""


class RowsThatRun:
    """Gathers the rows that run before the products of a routed part, and scatters them after it.

    What other operators than attention read, such as experts, is computed for all rows.
    """

    name: ClassVar[str] = "rows_that_run"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.gathered_rows

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        branches = [branch for node in model.graph.all_nodes() for branch in branches_of(node)]
        parts = [part for branch in branches if (part := _part(branch)) is not None]
        for part in parts:
            _gather_rows(part)
        return len(parts)

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> list[str]:
        return []


@dataclass
class _Part:
    """A routed part in a branch.

    Attributes:
        branch: the branch.
        choice: the node that gives rows that run the `result`, and the others what is `left` of the stream.
        result: (B, 1, D).
        left: (B, 1, D).
        mark: which rows run, bool, (B,) or (B, 1).
        gathered: the nodes that can compute R rows, in the order of the graph.
    """

    branch: ir.Graph
    choice: ir.Node
    result: ir.Value
    left: ir.Value
    mark: ir.Value
    gathered: list[ir.Node] = field(default_factory=list)

    @property
    def rows(self) -> int:
        shape = static_shape(self.mark)
        assert shape is not None
        return shape[0]


def _part(branch: ir.Graph) -> _Part | None:
    """Returns the routed part in a branch; None if there is none, or if its rows cannot be gathered."""
    choices = [node for value in branch.outputs if (node := made_by(value, "Where")) is not None]
    if len(choices) != 1 or choices[0].graph is not branch:
        return None
    choice = choices[0]
    mark = before_views(choice.inputs[0], "Unsqueeze", "Reshape")
    result, left = choice.inputs[1:]
    shape = static_shape(mark)
    if mark is None or result is None or left is None or shape is None or shape[1:] not in ((), (1,)) or shape[0] < 2:
        return None
    wanted = {static_shape(value) for value in (result, left, choice.outputs[0])}
    if len(wanted) != 1 or not _has_rows(result, shape[0]) or result.producer() is None:
        return None
    part = _Part(branch, choice, result, left, mark)
    # What is left has to be right in rows that do not run.
    whole = {choice, *_computed_by(branch, left)}
    takes_rows = [node for node in branch if node not in whole and _takes_rows(node, part.rows)]
    part.gathered = _without_those_that_are_mixed(takes_rows, choice)
    products = [node for node in part.gathered if (node.domain, node.op_type) in PRODUCTS]
    return part if products and result.producer() in part.gathered else None


def _computed_by(branch: ir.Graph, value: ir.Value) -> Iterator[ir.Node]:
    """Yields the nodes of a branch that a value depends on."""
    waiting, seen = [value], set()
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node.graph is branch and node not in seen:
            seen.add(node)
            waiting += [read for read in node.inputs if read is not None]
            yield node


def _has_rows(value: ir.Value | None, rows: int) -> bool:
    shape = static_shape(value)
    return shape is not None and len(shape) == 3 and shape[:2] == (rows, 1)


def _takes_rows(node: ir.Node, rows: int) -> bool:
    """Whether a node computes each of its (B, 1, ...) rows from the same row of its inputs."""
    if not all(_has_rows(value, rows) for value in node.outputs):
        return False
    first, *others = node.inputs
    if is_standard(node, *ELEMENTWISE):
        return all(value is None or _has_rows(value, rows) or _is_shared(value) for value in node.inputs)
    if is_standard(node, *ON_THE_LAST_AXIS) and node.attributes.get_int("axis", -1) not in (-1, 2):
        return False
    if not is_standard(node, *ON_THE_LAST_AXIS) and (node.domain, node.op_type) not in PRODUCTS:
        return False
    turned = node.attributes.get_int("transA", 0) or node.attributes.get_int("transBatchA", 0)
    return not turned and _has_rows(first, rows) and all(value is None or value.is_initializer() for value in others)


def _is_shared(value: ir.Value) -> bool:
    """Whether an operand is the same for all rows."""
    shape = static_shape(value)
    return shape is not None and (len(shape) < 3 or shape[0] == 1)


def _without_those_that_are_mixed(nodes: Sequence[ir.Node], choice: ir.Node) -> list[ir.Node]:
    """Leaves out nodes whose results are read by a node that may mix rows, and so on up to the first nodes."""
    gathered = {*nodes}
    for node in reversed(nodes):
        readers = {use.node for value in node.outputs for use in value.uses()} - gathered - {choice}
        row_by_row = all((one.domain, one.op_type) in ROW_BY_ROW and one.graph is choice.graph for one in readers)
        if not row_by_row or any(value.is_graph_output() for value in node.outputs):
            gathered.remove(node)
    return [node for node in nodes if node in gathered]


def _gather_rows(part: _Part) -> None:
    gathered, rows = set(part.gathered), part.rows
    first = NodeWriter(part.branch, part.gathered[0], "rows")
    found_1R = first.op("NonZero", first.op("Reshape", part.mark, [-1]))
    index_R, place_R1 = first.op("Reshape", found_1R, [-1]), first.op("Reshape", found_1R, [-1, 1])
    found_1R.shape = ir.Shape([1, ROWS_THAT_RUN])
    index_R.shape = ir.Shape([ROWS_THAT_RUN])
    place_R1.shape = ir.Shape([ROWS_THAT_RUN, 1])
    narrow: dict[ir.Value, ir.Value] = {}
    for node in part.gathered:
        writer = NodeWriter(part.branch, node, "gathered")
        for number, value in enumerate(node.inputs):
            if value is None or not _has_rows(value, rows) or value.producer() in gathered:
                continue
            if value not in narrow:
                narrow[value] = writer.op("Gather", value, index_R, axis=0)
                narrow[value].shape = ir.Shape([ROWS_THAT_RUN, *require_static_shape(value, node)[1:]])
            node.replace_input_with(number, narrow[value])
    readers = {
        use.node for node in gathered for value in node.outputs for use in value.uses() if use.node is not part.choice
    }
    for reader in readers - gathered:
        writer = NodeWriter(part.branch, reader, "scattered")
        for number, value in enumerate(reader.inputs):
            if value is not None and value.producer() in gathered:
                assert value.dtype is not None
                zeros = np.zeros(require_static_shape(value, reader), value.dtype.numpy())
                reader.replace_input_with(number, writer.op("ScatterND", zeros, place_R1, value))
    writer = NodeWriter(part.branch, part.choice, "rows_that_run")
    combined = writer.op("ScatterND", part.left, place_R1, part.result, like=part.choice.outputs[0])
    for node in part.gathered:
        for value in node.outputs:
            value.shape = ir.Shape([ROWS_THAT_RUN, *require_static_shape(value, node)[1:]])
    substitute(part.choice.outputs[0], combined, part.choice)
