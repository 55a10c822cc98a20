"""Casts a float32 graph to 16 bits, but keeps routing and sums of squares in float32.

A selection compares scores. Rounded to 16 bits, different scores become equal and other tokens are selected. So nodes
that lead to a selection stay float32, and so do nodes that read the selected scores alone (the gate). Numbers that come
from integers, and counts of booleans, stay float32 too, because not every position above 2,048 has an exact float16.
Arithmetic on constants alone does so as well: positions may be constants. Sums and means of squares, and nodes that
read these alone, such as the root, stay float32 because the square of 256 is infinite in float16. Most norms are
operators (`norm_operator`), which sum squares in float32 anyway. Other norms remain in primitive operators, such as
those that divide by the larger of norm and epsilon.

Branches of If are cast like the graph around them. An output of If has the same type in all its branches.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.graph.nodes import (
    Branches,
    NodeWriter,
    base_of_square,
    branches_of,
    constant_array,
    is_standard,
    label_of,
    made_by,
    static_shape,
)
from mod_export.graph.rewrites.cached_attention import is_cache
from mod_export.graph.weights import beyond_range
from mod_export.types import QUANTIZED, DType, TargetLimits

FLOAT = ir.DataType.FLOAT
NARROW: dict[DType, ir.DataType] = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
GATHERS = ("GatherElements", "Gather", "GatherND")
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
MOVES = (
    *GATHERS, "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
)  # fmt: skip
"""Operators that move numbers and compute none."""
FOLLOWING = (
    *MOVES, *COMPARISONS, "Abs", "Add", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Cos", "CumSum", "Div", "Exp",
    "Floor", "Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Range", "Reciprocal", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "Round", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Sqrt", "Sub",
    "Tanh", "Where",
)  # fmt: skip
"""Operators that stay float32 if all their float inputs are constants or come from float32 nodes."""
GATES = ("Clip", "Exp", "Neg", "Sigmoid", "Softmax", "Tanh")
"""Operators that may read scores beside a selection. None of them reads the residual stream."""
PRODUCTS = ("Conv", "Gemm", "MatMul")
COUNTING = ("CumSum", "ReduceSum")
INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8})
MASK = 1e9
"""A constant at least this large is a mask's value and not a weight; any other large number has the same effect."""


class CastFloats:
    """Casts float32 values, weights and constants to `dtype`, except where float32 is needed.

    Graph inputs and outputs keep their dtype, so a caller always gets float32 logits. Keys and values, recognized by
    their names, are the exception: only the next step reads them, and they are most of its memory. Weights that only
    float32 nodes use stay float32. An initializer keeps its name, and one without data (a weight that is bound to a
    file later) only changes its dtype. In quantized graphs, whose files store other weights in float32, such a weight
    stays float32 and is cast when it is used. Infinite constants stay infinite.

    Operators keep their own precision attributes. RMSNormalization keeps `stash_type` 1 (float32) from the exporter,
    except for targets with `one_type_norms`. Attention gets no `softmax_precision`, because TensorRT's parser refuses
    it and its kernels sum in float32 anyway.
    """

    name: ClassVar[str] = "cast_floats"

    def applies(self, limits: TargetLimits, dtype: DType) -> bool:
        return limits.floats(dtype) in NARROW

    def run(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> int:
        """Returns the number of nodes that now compute in 16 bits.

        Raises:
            GraphError: the graph has a loop, or a value without a type.
            LimitError: a weight exceeds the range of `dtype`.
        """
        graph, narrow = model.graph, NARROW[limits.floats(dtype)]
        _require_typed(graph)
        outputs = [i for i, value in enumerate(graph.outputs) if _is_float(value)]
        island = float32_island(graph)
        files_are_wide = dtype in QUANTIZED
        if files_are_wide:  # The rows that are looked up in a table are cast, and not the whole table.
            island |= {node for node in graph.all_nodes() if is_standard(node, "Gather") and _is_weight(node.inputs[0])}
        for each in (graph, *graph.subgraphs()):
            _narrow_initializers(each, island, narrow, files_are_wide=files_are_wide)
        for value in graph.inputs:
            if value.dtype == FLOAT and is_cache(value.name):
                value.dtype = narrow
        count = _cast_nodes(graph, island, narrow, ChainMap())
        if limits.one_type_norms:
            for node in graph.all_nodes():
                if is_standard(node, "RMSNormalization") and _is_last(node) and node.outputs[0].dtype == narrow:
                    node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(narrow))
        for i in outputs:
            _cast_output(graph, i, narrow if is_cache(graph.outputs[i].name) else FLOAT)
        return count

    def ensures(self, model: ir.Model, limits: TargetLimits, dtype: DType) -> Sequence[str]:
        narrow = NARROW[limits.floats(dtype)]
        problems = [
            f"{kind} {value.name} is {value.dtype}"
            for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs))
            for value in values
            if (value.dtype == FLOAT if is_cache(value.name) else kind == "output" and value.dtype == narrow)
        ]
        deciding = [node for node in model.graph.all_nodes() if is_standard(node, "TopK")]
        for node in (*deciding, *_deciding_comparisons(model.graph, Branches(model.graph))):
            if any(value is not None and value.dtype == narrow for value in node.inputs):
                problems.append(f"{label_of(node)} compares scores in {narrow}")
        squaring = _sums_of_squares(model.graph.all_nodes())
        for node in model.graph.all_nodes():
            if node in squaring and any(value.dtype == narrow for value in node.outputs):
                problems.append(f"{label_of(node)} sums squares in {narrow}")
            kinds = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None and _is_float(value)}
            if len(kinds) > 1 and not is_standard(node, "Cast", "If"):
                problems.append(f"{label_of(node)} mixes float32 and {narrow}")
            for branch in branches_of(node):
                if [value.dtype for value in branch.outputs] != [value.dtype for value in node.outputs]:
                    problems.append(f"{label_of(node)} returns other types than its branch {branch.name}")
        return problems


def _is_last(norm: ir.Node) -> bool:
    """Whether a norm is over the last dimension alone, and has a constant weight."""
    x, weight = norm.inputs
    cast = made_by(weight, "Cast")
    weight = weight if cast is None else cast.inputs[0]
    rank = 0 if x is None or x.shape is None else len(x.shape)
    return norm.attributes.get_int("axis", -1) in (-1, rank - 1) and weight is not None and weight.is_initializer()


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (FLOAT, *NARROW.values())


def _require_typed(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if branches_of(node) and not is_standard(node, "If"):
            raise GraphError(
                f"{label_of(node)}: {node.op_type} contains a graph, which cannot be cast to 16 bit as the branches of "
                "If can; export the model without loops"
            )
        for value in node.outputs:
            if value.dtype is None and value.uses():
                raise GraphError(
                    f"{label_of(node)}: the type of {value.name} is unknown, so whether to cast it is unknown; "
                    "run shape inference before this pass"
                )


def float32_island(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that stay float32, including those in branches: they select, convert integers, count, sum squares, or
    compute with constants alone.

    The search goes upwards from the scores of each selection, and from comparisons that decide: first through nodes
    with as many elements as there are scores, up to the product that makes them, then on to the last value that other
    nodes use too (the residual stream). It goes downwards from values that are gathered from scores, from integers and
    counts, from sums of squares, and from arithmetic on constants, as long as no other float is an input but constants.
    Weights that are only moved, and products that sum over weights, are those of blocks and no such arithmetic.
    """
    branches, nodes = Branches(graph), list(graph.all_nodes())
    island = _selecting(graph, branches) | {node for node in nodes if _is_from_integers(node)}
    island |= _sums_of_squares(nodes) | _casts_to_count(nodes, branches)
    fixed: set[ir.Node | None] = set()  # Nodes that depend on no input.
    moved: set[ir.Node | None] = set()  # Those of them that only move constants.
    for node in nodes:  # Producers come first here, so one walk is enough.
        if not branches_of(node) and all(map(_is_fixed, node.inputs, repeat(fixed))):
            fixed.add(node)
        computed = [value for value in node.inputs if value is not None and _is_computed(value)]
        makers = {maker for value in computed for maker in branches.makers(value)}
        sums = _sums_products(node)
        sources = makers if sums else makers - moved
        if node in fixed and not sources and is_standard(node, *MOVES, "Constant", "ConstantOfShape"):
            moved.add(node)
        elif is_standard(node, *FOLLOWING) and sources <= island and (sources or (node in fixed and not sums)):
            island.add(node)
    for node in reversed(nodes):
        # As with initializers, the float32 numbers stay if nothing in 16 bits reads them.
        users = _users(node, branches)
        if node in moved and users and users <= island:
            island.add(node)
    return island


def _selecting(graph: ir.Graph, branches: Branches) -> set[ir.Node]:
    """The nodes that select, those that lead to nothing else, and those that only compare or gather their scores."""
    nodes = list(graph.all_nodes())
    selecting = {node for node in nodes if is_standard(node, "TopK") and _has_float32(node.inputs)}
    selecting |= _deciding_comparisons(graph, branches)
    sizes = {node: _count(node.inputs[0]) for node in selecting}
    for node in reversed(nodes):  # Readers come before what they read, so one walk is enough.
        if node in selecting or branches_of(node):
            continue
        users = {user for value in node.outputs if value.dtype == FLOAT for user in branches.readers(value)}
        is_read = any(is_standard(user, *PRODUCTS) for user in users & selecting)
        readers = {user for user in users if _only_reads(user, node, is_stream=is_read)}
        beside = {user for user in users if is_standard(user, *GATES)}
        n = _count(node.outputs[0])
        # Scores may also be used as weights (gates).
        is_score = n is not None and any(sizes.get(user) == n for user in users & selecting)
        if is_score or (users & selecting and users <= selecting | readers | beside):
            selecting |= {node} | readers
            if is_score and not is_standard(node, *PRODUCTS):
                sizes[node] = n
    return selecting


def _deciding_comparisons(graph: ir.Graph, branches: Branches) -> set[ir.Node]:
    """The comparisons of floats that decide something through booleans and integers alone.

    They decide a selection, which branch is executed, or an output that is not a float: which token ran where.
    """
    comparisons: set[ir.Node] = set()
    seen: set[ir.Node] = set()
    frontier = [value for value in graph.outputs if not _is_float(value)]
    for node in graph.all_nodes():
        if is_standard(node, "TopK", "If"):
            frontier += [value for value in node.inputs if value is not None]
    while frontier:
        for maker in branches.makers(frontier.pop()):
            if maker is None or maker in seen:
                continue
            seen.add(maker)
            if is_standard(maker, *COMPARISONS) and any(map(_is_float, maker.inputs)):
                comparisons.add(maker)
            elif _is_from_integers(maker) or not any(map(_is_float, maker.outputs)):
                frontier += [value for value in maker.inputs if value is not None]
    return comparisons


def _sums_of_squares(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes that sum or average squares, and the nodes that compute these squares."""
    result: set[ir.Node] = set()
    for node in nodes:
        square = made_by(node.inputs[0], "Mul", "Pow") if is_standard(node, "ReduceMean", "ReduceSum") else None
        if square is not None and base_of_square(node.inputs[0]) is not None:
            result |= {node, square}
        elif is_standard(node, "ReduceL2", "ReduceSumSquare"):
            result.add(node)
    return result


def _count(value: ir.Value | None) -> int | None:
    """The number of elements of a value; None if unknown."""
    shape = static_shape(value)
    return None if shape is None else math.prod(shape)


def _has_float32(values: Iterable[ir.Value | None]) -> bool:
    return any(value is not None and value.dtype == FLOAT for value in values)


def _only_reads(user: ir.Node, node: ir.Node, *, is_stream: bool) -> bool:
    """Whether `user` only compares the node's values, or gathers some of the scores by position.

    Args:
        user: a reader of a result of the node.
        node: a node above the scores.
        is_stream: whether a product computes scores from the result; a gather then gives tokens that a block runs on.
    """
    if not any(map(_is_float, user.outputs)):
        return True
    return not is_stream and is_standard(user, *GATHERS) and user.inputs[0] in node.outputs


def _is_from_integers(node: ir.Node) -> bool:
    return _is_cast_from(node, INTEGERS)


def _is_cast_from(node: ir.Node, dtypes: Collection[ir.DataType]) -> bool:
    source = node.inputs[0] if is_standard(node, "Cast") else None
    return source is not None and source.dtype in dtypes and node.outputs[0].dtype == FLOAT


def _users(node: ir.Node, branches: Branches) -> set[ir.Node]:
    return {user for value in node.outputs for user in branches.readers(value)}


def _casts_to_count(nodes: Sequence[ir.Node], branches: Branches) -> set[ir.Node]:
    """The casts of booleans whose floats are summed: a count above 256 may have no exact bfloat16."""
    counted: set[ir.Node] = set()
    for node in reversed(nodes):
        users = _users(node, branches)
        if is_standard(node, *COUNTING) or (is_standard(node, "Cast", *MOVES) and not counted.isdisjoint(users)):
            counted.add(node)
    return {node for node in counted if _is_cast_from(node, {ir.DataType.BOOL})}


def _is_fixed(value: ir.Value | None, fixed: set[ir.Node | None]) -> bool:
    return value is None or value.is_initializer() or value.producer() in fixed


def _sums_products(node: ir.Node) -> bool:
    """Whether a node is a product of matrices that sums; the product of a column and a row only multiplies."""
    shape = static_shape(node.inputs[0]) if is_standard(node, "MatMul") else (1,)
    return shape is None or shape[-1] != 1


def _is_computed(value: ir.Value) -> bool:
    return _is_float(value) and not value.is_initializer() and made_by(value, "Constant") is None


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a weight that is stored in a weights file, or will be."""
    tensor = None if value is None else value.const_value
    return value is not None and value.is_initializer() and (tensor is None or isinstance(tensor, ir.ExternalTensor))


def _narrow_initializers(graph: ir.Graph, island: set[ir.Node], narrow: ir.DataType, *, files_are_wide: bool) -> None:
    for name, value in list(graph.initializers.items()):
        outside = [use for use in value.uses() if use.node not in island]
        if value.dtype != FLOAT or not outside or (files_are_wide and _is_weight(value)):
            continue
        array = constant_array(value)
        if array is not None and array.size == 1 and len(outside) < len(value.uses()):
            # Both float32 and 16-bit nodes use this number. It is copied, so that the float32 nodes keep the exact
            # number.
            narrow_name = f"{name}/{narrow.name.lower()}"
            value = ir.Value(
                name=narrow_name, type=ir.TensorType(FLOAT), shape=value.shape, const_value=value.const_value
            )
            graph.register_initializer(value)
            for use in outside:
                use.node.replace_input_with(use.idx, value)
        value.dtype = narrow
        if array is not None:
            value.const_value = _narrowed_tensor(value, array, narrow)


def _narrowed_tensor(value: ir.Value, array: np.ndarray, narrow: ir.DataType) -> ir.TensorProtocol:
    name = str(value.name)
    narrowed = _narrowed(name, array, narrow)
    if not isinstance(value.const_value, ir.ExternalTensor):
        return ir.tensor(narrowed, dtype=narrow, name=name)
    # The weight has just been checked to fit. It is converted again when it is needed, so that not all weights are in
    # memory at once. Usually it is bound to the file of this dtype before that.
    shape = ir.Shape(array.shape)
    return ir.LazyTensor(
        lambda: ir.tensor(_narrowed(name, array, narrow), dtype=narrow, name=name), dtype=narrow, shape=shape, name=name
    )


def _narrowed(name: str, array: np.ndarray, narrow: ir.DataType) -> np.ndarray:
    kind = narrow.numpy()
    largest = float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]  # It has no annotations.
    with np.errstate(over="ignore"):
        result = np.asarray(array.astype(kind))
    lost = np.isfinite(array) & ~np.isfinite(result.astype(np.float32))
    if (np.abs(array, where=lost, out=np.full(array.shape, MASK, array.dtype)) < MASK).any():
        worst = array[lost & (np.abs(array) < MASK)].flat[0]
        raise beyond_range(name, worst, narrow.name.lower(), largest)
    result[lost] = np.copysign(largest, array[lost]).astype(kind)
    return result


def _widens(node: ir.Node, narrow: ir.DataType) -> bool:
    """Whether a node is a cast from 16 bits to float32, such as this rewrite inserts before an output."""
    return is_standard(node, "Cast") and node.inputs[0] is not None and node.inputs[0].dtype == narrow


def _cast_nodes(graph: ir.Graph, island: set[ir.Node], narrow: ir.DataType, casts: ChainMap[ir.Value, ir.Value]) -> int:
    """Casts the nodes of a graph in their order; the nodes of branches come before the If that contains them.

    `casts` maps values to their casts in this graph and in those around it; casts inside a branch are not visible
    outside.
    """
    count = 0
    for node in list(graph):
        branches = branches_of(node)
        if branches:
            count += sum(_cast_nodes(branch, island, narrow, casts.new_child()) for branch in branches)
            _match_branches(node, branches, narrow)
            continue
        computes = _has_float32(node.outputs) and not _widens(node, narrow)
        _match_inputs(graph, node, FLOAT if node in island else narrow, casts)
        if node not in island and computes:
            _narrow_node(node, narrow)
            count += 1
    return count


def _match_branches(node: ir.Node, branches: Sequence[ir.Graph], narrow: ir.DataType) -> None:
    """Gives each output of an If the same type in all branches: float32 if one of them has it."""
    for i, value in enumerate(node.outputs):
        if _is_float(value):
            wanted = FLOAT if any(branch.outputs[i].dtype == FLOAT for branch in branches) else narrow
            value.dtype = wanted
            for branch in branches:
                _cast_output(branch, i, wanted)


def _match_inputs(graph: ir.Graph, node: ir.Node, wanted: ir.DataType, casts: ChainMap[ir.Value, ir.Value]) -> None:
    """Casts the float inputs of a node to the type in which it computes; each value is cast once."""
    if is_standard(node, "Cast", "CastLike"):
        return
    for i, value in enumerate(node.inputs):
        if value is None or not _is_float(value) or value.dtype == wanted:
            continue
        if value not in casts:
            writer = NodeWriter(graph, node, f"input{i}")
            within = _within_range(writer, value, wanted) if wanted != FLOAT and _has_masks(value) else value
            casts[value] = writer.op("Cast", within, to=wanted)
        node.replace_input_with(i, casts[value])


def _within_range(writer: NodeWriter, value: ir.Value, narrow: ir.DataType) -> ir.Value:
    largest = np.float32(ml_dtypes.finfo(narrow.numpy()).max)  # type: ignore[no-untyped-call]  # It has no annotations.
    return writer.op("Clip", value, np.array(-largest), np.array(largest))


def _has_masks(value: ir.Value) -> bool:
    """Whether a float32 value may contain a mask's finite value, which a cast would make infinite: a row of nothing but
    minus infinity has no softmax.
    """
    seen, frontier = {value}, [value]
    while frontier:
        node = frontier.pop().producer()
        for each in () if node is None else node.inputs:
            if each is None or each.dtype != FLOAT or each in seen:
                continue
            seen.add(each)
            frontier.append(each)
            array = None if _is_weight(each) else constant_array(each)
            if array is not None and (np.isfinite(array) & (np.abs(array) >= MASK)).any():
                return True
    return False


def _narrow_node(node: ir.Node, narrow: ir.DataType) -> None:
    for value in node.outputs:
        if value.dtype == FLOAT:
            value.dtype = narrow
    for name, attribute in list(node.attributes.items()):
        if name in ("to", "dtype", "output_dtype") and attribute.value == FLOAT:
            node.attributes[name] = ir.AttrInt64(name, narrow)
    if is_standard(node, "Constant", "ConstantOfShape"):
        array = constant_array(node.outputs[0])
        stored = node.attributes.get("value")
        if array is None:
            array = np.zeros(1, np.float32) if stored is None else stored.as_tensor().numpy()
        node.attributes.clear()
        tensor = ir.tensor(_narrowed(str(node.outputs[0].name), array, narrow), dtype=narrow)
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _cast_output(graph: ir.Graph, index: int, wanted: ir.DataType) -> None:
    inner = graph.outputs[index]
    if inner.dtype == wanted:
        return
    name = inner.name
    inner.name = f"{name}/inner"
    cast = ir.node("Cast", [inner], {"to": wanted}, name=f"{name}/cast")
    outer = cast.outputs[0]
    outer.name, outer.dtype, outer.shape = name, wanted, inner.shape
    graph.append(cast)
    graph.outputs[index] = outer
