"""The cost of a graph: FLOPs and bytes, counted from the static ONNX graph that is deployed, in total and node by node,
and the part of the model that each node and each kernel belongs to.

**FLOPs** are the multiply-adds of matrix products, two FLOPs each, counted exactly. Norms, activations, rotations,
softmax, top-k, gathers and scatters have none: they are bound by memory, not by arithmetic. Nodes without a rule
(operators of vendors, and those that hold graphs, such as Loop) and nodes without a static shape count as nothing and
are named. The totals are then too low, and nothing may be predicted from them. In the totals, attention counts as the
full square of queries and keys even if it is causal, because that is what the portable graph says and what
`torch.utils.flop_counter` reports; `needed_flops` leaves out the scores that the mask hides. The rules follow the
definitions of the operators (https://onnx.ai/onnx/operators):

    MatMul, Gemm            2 M N K for every matrix of the broadcast batch
    Conv, DeformConv        one multiply-add per output and weight of its filter; padding counts
    ConvTranspose           one multiply-add per input and weight of its filter, even if `pads` cuts the result off
    RNN, GRU, LSTM          both weight matrices of every direction, in every step, for every row
    Einsum                  operand after operand, from the left: one multiply-add per combination of the labels of both
                            operands, if at least one label that both have is summed away. A label that only one of them
                            has and that is not needed later is summed before. Other cases only move, add or scale.

Integer operations count like float operations. Work besides the products (biases, activations, the interpolation of
DeformConv, zero points) is not counted.

**The bytes** of a node are those that must pass between memory and processor: its inputs, weights included, and its
outputs, each value once. Constants that a runtime folds while loading cost nothing. Some operators have kernels that
move less or more than that:

    views (Reshape, Squeeze ...)    move nothing
    Gather, GatherElements, Slice   read only the data that they gather
    Expand                          only writes its result
    Attention                       counts as a product, a softmax and a product, as ONNX defines it: the first writes
                                    the scores, the second reads and writes them, and the third reads them. For engines
                                    that never hold all scores it is one product over queries, keys and values, without
                                    the half of the scores that a causal mask hides.

**The part** of a product of matrices is the part of the model that its weight is named after:

    layers.3.router.projection.weight    routing
    layers.3.attention.q_proj.weight     attention_projections
    (a product without a weight)         attention: scores, and scores times values
    layers.3.experts.up_proj             experts: a batched product, one matrix for each expert
    layers.3.mlp.up_proj.weight          mlp
    head.weight, embedding.weight        head (a tied weight is used as a matrix only there)
    anything else                        other

Other nodes are assigned by what they do and where their inputs come from:

    norms        normalization operators
    embedding    lookup of the rows of a table of weights by input ids
    routing      selection and movement of tokens (TopK, Gather, Scatter ...), computation of ids and masks, and
                 application of scores, masks and gates to the selected tokens
    attention    softmax, scale and mask of the scores, where attention is written out
    (a view)     the part that computed the value that it views (Reshape ...)
    elementwise  everything else: residuals, activations, rotations, transposes, casts

Runtimes rename the nodes that they fuse, so a kernel is looked up in this order: a node of the same name; the weights
that the kernel is known to read; the longest node name that is a beginning of its own name; an operator that belongs to
one part only; the words of its name, which a compiler made from the operators that it fused. A generated kernel often
holds several parts. All of it counts for the first of attention, routing, norms, embedding and elementwise that it has.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from mod_export.errors import GraphError
from mod_export.rows.cost import CostRow, Work
from mod_export.types import Bucket, Kernel, ModelKind, Profile

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
PARTS: dict[str, frozenset[str]] = {
    "routing": frozenset({"router", "predictor", "mlp_router", "mlp_predictor"}),
    "attention_projections": frozenset({"attention", "attn", "self_attn"}),
    "attention": frozenset(),
    "experts": frozenset({"experts"}),
    "mlp": frozenset({"mlp", "feed_forward", "ffn"}),
    "adapter": frozenset({"adapter"}),
    "head": frozenset({"head", "lm_head", "embedding", "embed_tokens"}),
    "other": frozenset(),
}
"""Part -> the components of a state_dict name that identify it. The first part that matches counts:
a router of experts is routing, and experts inside a module that is called mlp are experts."""
NODE_PARTS = (*(part for part in PARTS if part != "other"), "norms", "elementwise", "embedding", "other")
"""Every part that a node or a kernel can belong to, in the order of tables."""
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"})
"""Operators that move no data."""
SELECTION = frozenset(
    {
        "ArgMax", "ArgMin", "Compress", "CumSum", "Gather", "GatherElements", "GatherND", "NonZero", "OneHot",
        "ScatterElements", "ScatterND", "TopK", "Unique",
    }
)  # fmt: skip
ROUNDS = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
"""Operators that quantize floats."""
ON_SCORES = frozenset(
    {"Add", "Cast", "Div", "Exp", "Max", "Mul", "ReduceMax", "ReduceSum", "Softmax", "Sub", "Tanh", "Where"}
)
GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def cost_row(model: ir.Model, kind: ModelKind, bucket: Bucket) -> CostRow:
    """Counts the cost of a graph whose shapes are static and stored in it, as ONNX shape inference leaves them.

    A node that cannot be counted adds nothing to the numbers, and its operator is named in `not_counted`.
    """
    where = f"{kind} {bucket.name}"
    constants = constants_of(model.graph)
    flops_by_part = dict.fromkeys(PARTS, 0)
    kv_bytes = hidden = activation_bytes = 0
    not_counted = Counter[str]()
    for node in model.graph:
        cost = _cost_of(node, constants, where)
        if cost is None:
            not_counted[operator_of(node)] += 1
            continue
        flops_by_part[cost.part] += cost.flops
        hidden += cost.hidden
        kv_bytes += cost.kv_bytes
        activation_bytes += cost.activation_bytes
    return CostRow(
        model=kind,
        bucket=bucket.name,
        flops=sum(flops_by_part.values()),
        flops_by_part=flops_by_part,
        needed_flops=sum(flops_by_part.values()) - hidden,
        weight_bytes=_stored(model.graph),
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        not_counted=dict(sorted(not_counted.items())),
    )


class _NodeCost(NamedTuple):
    """Cost of a node: its FLOPs count for `part`, and `hidden` are the FLOPs of scores that a causal mask hides."""

    part: str
    flops: int
    hidden: int
    kv_bytes: int
    activation_bytes: int


def _cost_of(node: ir.Node, constants: Set[ir.Value], where: str) -> _NodeCost | None:
    """Counts the cost of one node; None if there is no rule for it, or if a shape that the rule needs is not known."""
    # An optional output that is not used has an empty name.
    computed = [value for value in node.outputs if value.name and value not in constants]
    if not computed:
        return _NodeCost("other", 0, 0, 0, 0)  # A runtime folds it away while loading.
    if not is_countable(node):
        return None
    try:
        size = sum(bytes_of_value(value, where) for value in computed)
        if is_attention(node):
            sizes = attention_sizes(node, where)
            flops, hidden = (2 * scores * sizes.widths for scores in (sizes.scores, sizes.scores - sizes.needed))
            # Keys and values, and those of the past if there are any.
            read = (*node.inputs[1:3], *node.inputs[4:6])
            kv_bytes = sum(bytes_of_value(value, where) for value in read if value is not None)
            return _NodeCost("attention", flops, hidden, kv_bytes, size)
        if is_product(node):
            part = part_of_product(node, constants)
            flops = flops_of_product(node, lambda value: _shape(value, where))
            kv_bytes = bytes_of_value(operands_of(node)[1], where) if part == "attention" else 0
            return _NodeCost(part, flops, 0, kv_bytes, size)
    except GraphError:
        return None
    return _NodeCost("other", 0, 0, 0, size)


def is_attention(node: ir.Node) -> bool:
    """Says whether a node is attention as one operator."""
    return operator_of(node) == "Attention"


def _stored(graph: ir.Graph) -> int:
    # Imported here, because build folders are also benchmarked and reported on where no ONNX tools are installed.
    import onnx_ir as ir

    stored = {
        (str(tensor.path), tensor.offset): tensor.nbytes
        for tensor in (value.const_value for value in graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    return sum(stored.values())


def flops_of(work: Iterable[Work]) -> int | None:
    """Returns the FLOPs of one run of a graph; None if some of its work was not counted."""
    listed = list(work)
    return sum(item.flops * len(item.nodes) for item in listed) if all(item.counted for item in listed) else None


def work_of_graph(model: ir.Model, where: str, *, whole_scores: bool) -> tuple[Work, ...]:
    """Counts the work in a graph whose shapes are static and stored in it, as ONNX shape inference leaves them.

    Args:
        model: the graph as it is deployed.
        where: the name of the graph in messages.
        whole_scores: whether the engine holds all scores of an attention in memory (`TargetLimits.whole_scores`).

    Returns:
        Groups of nodes with equal work, in the order of the graph. Nodes that cannot be counted have 0 FLOPs and bytes.
    """
    nodes: dict[tuple[str, int, int, int, bool], list[str]] = defaultdict(list)
    for node, part in parts_of_nodes(model.graph).items():
        phases = _phases_of(node, where, whole_scores)
        for phase, (flops, size) in enumerate(phases or [(0, 0)]):
            nodes[part, flops, size, phase, phases is not None].append(node.name or "")
    return tuple(
        Work(part=part, flops=flops, bytes=size, nodes=tuple(names), counted=counted)
        for (part, flops, size, _, counted), names in nodes.items()
    )


def _phases_of(node: ir.Node, where: str, whole_scores: bool) -> list[tuple[int, int]] | None:
    """Returns (FLOPs, bytes) of the successive phases of a node; None if they cannot be counted."""
    if not is_countable(node):
        return None
    try:
        if is_attention(node):
            return list(_attention_phases(node, where, whole_scores))
        flops = flops_of_product(node, lambda value: _shape(value, where)) if is_product(node) else 0
        return [(flops, _traffic(node, where))]
    except GraphError:
        return None


def _attention_phases(node: ir.Node, where: str, whole_scores: bool) -> Iterator[tuple[int, int]]:
    sizes = attention_sizes(node, where)
    traffic = _traffic(node, where)
    if not whole_scores:
        yield 2 * sizes.needed * sizes.widths, traffic
        return
    flops = 2 * sizes.scores * sizes.widths
    query = _input(node, 0)
    assert query.dtype is not None, f"{node.name}: the traffic of its inputs has been counted"
    scores = sizes.scores * query.dtype.bitwidth // 8
    values = bytes_of_value(_input(node, 2), where) + bytes_of_value(node.outputs[0], where)
    second = flops // 2
    yield flops - second, traffic - values + scores
    yield 0, 2 * scores
    yield second, values + scores


def _traffic(node: ir.Node, where: str) -> int:
    written = sum(bytes_of_value(value, where) for value in node.outputs if value.name)
    if node.op_type in VIEWS:
        return 0
    if node.op_type == "Expand":
        return written
    read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
    if node.op_type in GATHERS:
        return 2 * written + sum(bytes_of_value(value, where) for value in read[1:])
    return written + sum(bytes_of_value(value, where) for value in read)


class AttentionSizes(NamedTuple):
    """Sizes of an Attention node. FLOPs are 2 x scores x widths: queries x keys and scores x values of all heads."""

    scores: int
    """B H Tq Tk, with the keys of the past."""
    needed: int
    """Scores that a causal mask does not hide: for T queries and T keys, T (T + 1) / 2 of T T in each head of a row."""
    widths: int
    """Width of a query's head plus that of a value's head."""


def attention_sizes(node: ir.Node, where: str) -> AttentionSizes:
    """Returns the sizes of an Attention node (ONNX opset 23), which takes (B, heads, T, E), or (B, T, heads * E) with
    the numbers of heads as attributes. Under a causal mask, query i sees the keys up to its own and those of the past.
    A mask given as a tensor hides nothing here, because its values are not read.

    Raises:
        GraphError: a shape is unknown.
    """
    query, key, value = (_shape(_input(node, index), where) for index in range(3))
    if len(query) == 4:
        batch, heads, num_queries, width = query
        num_keys, value_width = key[2], value[3]
    else:
        batch, num_queries, hidden = query
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width, num_keys, value_width = hidden // heads, key[1], value[2] // kv_heads
    past_value = node.inputs[4] if len(node.inputs) > 4 else None
    past = 0 if past_value is None else _shape(past_value, where)[2]
    num_keys += past
    visible = num_queries * num_keys
    if node.attributes.get_int("is_causal", 0):
        visible = sum(min(num_keys, past + query + 1) for query in range(num_queries))
    rows = batch * heads
    return AttentionSizes(rows * num_queries * num_keys, rows * visible, width + value_width)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name}: onnx.checker lets no graph through whose required input {index} is missing"
    return value


def _shape(value: ir.Value, where: str) -> tuple[int, ...]:
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise _unknown(value, where, "none" if shape is None else str(shape))
    return cast("tuple[int, ...]", tuple(shape))


def bytes_of_value(value: ir.Value, where: str) -> int:
    """Returns the bytes of a value; raises GraphError, with `where` in its message, if shape or dtype is unknown."""
    if value.dtype is None:
        raise _unknown(value, where, "no dtype")
    return math.ceil(math.prod(_shape(value, where)) * value.dtype.bitwidth / 8)


def _unknown(value: ir.Value, where: str, actual: str) -> GraphError:
    return GraphError(
        f"{where}: the shape and dtype of value {value.name} must be known and static to count its cost, got {actual}; "
        "export with fixed shapes and store ONNX shape inference in the graph"
    )


# Products of matrices


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


# Parts of the model


def constants_of(graph: ir.Graph) -> Set[ir.Value]:
    """Returns initializers and the values that follow from them alone, such as transposed weights: runtimes fold these
    while loading. Outputs of a node that holds graphs do not count: its graphs can read any value around them.
    """
    constants = set(graph.initializers.values())
    for node in graph:
        is_fixed = all(value is None or value in constants for value in node.inputs)
        if is_fixed and not node.op_type.startswith("Random") and not holds_graphs(node):
            constants.update(node.outputs)
    return constants


def part_of_product(node: ir.Node, constants: Set[ir.Value]) -> str:
    """Returns the part that a product belongs to, one of PARTS."""
    weights = [value for value in operands_of(node) if value in constants]
    return _part_of_weight(_source_names(weights)) if weights else "attention"


def _part_of_weight(names: Iterable[str]) -> str:
    """Returns the part that state_dict names stand for, one of PARTS."""
    components = {component for name in names for component in name.split(".")}
    return next((part for part, known in PARTS.items() if known & components), "other")


def _source_names(values: Sequence[ir.Value | None]) -> Iterator[str]:
    """Yields the names of initializers that constant values come from, through transposes and other folded nodes."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        producer = None if value is None else value.producer()
        if producer is not None:
            waiting += producer.inputs
        elif value is not None and value.name:
            yield value.name


def parts_of_nodes(graph: ir.Graph) -> dict[ir.Node, str]:
    """Maps each node to its part, except the nodes that a runtime folds away while loading."""
    constants = constants_of(graph)
    parts: dict[ir.Node, str] = {}
    part_of_value: dict[ir.Value, str] = {}
    for node in graph:
        if node.outputs[0] in constants:
            continue
        parts[node] = _part(node, constants, part_of_value)
        part_of_value.update(dict.fromkeys(node.outputs, parts[node]))
    return parts


def part_of_operator(op_type: str) -> str | None:
    """Returns the part of an operator that can belong to only one part; None for any other operator."""
    if op_type.endswith("Normalization"):
        return "norms"
    if op_type.endswith("Attention"):
        return "attention"
    return "routing" if op_type in SELECTION - {"Gather"} else None


def _part(node: ir.Node, constants: Set[ir.Value], made: Mapping[ir.Value, str]) -> str:
    if is_product(node):
        return part_of_product(node, constants)
    if node.op_type == "Gather" and _is_embedding(node, constants, made):
        return "embedding"
    by_operator = part_of_operator(node.op_type)
    if by_operator or node.op_type == "Gather":
        return by_operator or "routing"
    computed = [value for value in node.inputs if value is not None and value not in constants]
    makers = {made.get(value) for value in computed}
    if node.op_type in VIEWS:
        return made.get(computed[0]) or _of_dtype(node)
    if makers == {"routing"} or any(made.get(value) == "routing" and _per_token(value, node) for value in computed):
        return "routing"
    if node.op_type == "Softmax" or (makers == {"attention"} and node.op_type in ON_SCORES):
        return "attention"
    return _of_dtype(node)


def _is_embedding(node: ir.Node, constants: Set[ir.Value], made: Mapping[ir.Value, str]) -> bool:
    # Routed layers also gather from tables (rotary angles), but at the positions of selected tokens.
    table, ids = node.inputs[0], node.inputs[1]
    return table in constants and ids is not None and made.get(ids) != "routing"


def _per_token(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value holds one number for each token of what the node computes: a score, a gate or a mask."""
    if value.dtype is not None and not value.dtype.is_floating_point():
        return True
    shape, whole = value.shape, node.outputs[0].shape
    return bool(shape and whole and shape[-1] == 1 and whole[-1] != 1)


def _of_dtype(node: ir.Node) -> str:
    # Of the remaining nodes, only routing computes with integers and booleans.
    dtype = node.outputs[0].dtype
    computes_floats = dtype is None or dtype.is_floating_point() or node.op_type in ROUNDS
    return "elementwise" if computes_floats else "routing"


GENERATED = "cpp_fused_"
WORDS: Mapping[str, frozenset[str]] = {
    "attention": frozenset({"attention", "bmm", "softmax"}),
    "routing": frozenset(
        {"cumsum", "gather", "index", "lt", "nonzero", "scatter", "sort", "topk", "where"},
    ),
    "norms": frozenset({"norm", "rsqrt"}),
    "embedding": frozenset({"embedding"}),
}


def ms_by_part(profile: Profile, part_of_node: Mapping[str, str]) -> dict[str, float]:
    """Sums the milliseconds of kernels by part; `part_of_node` maps the names of the nodes of the graph to parts."""
    ms: dict[str, float] = defaultdict(float)
    for kernel in profile.kernels:
        ms[part_of_kernel(kernel, part_of_node)] += kernel.ms
    return dict(ms)


def part_of_kernel(kernel: Kernel, part_of_node: Mapping[str, str]) -> str:
    """Returns the part of one kernel; `other` if nothing identifies it."""
    if kernel.name in part_of_node:
        return part_of_node[kernel.name]
    # A generated kernel reads the weights of norms and tables, which do not identify it.
    if kernel.weights and not kernel.name.startswith(GENERATED):
        return _part_of_weight(kernel.weights)
    # Node names with which the name of a fused node may begin, longest first: a/b for `a/b/Fusion/`, a for `fused a`.
    # ONNX Runtime adds a suffix to the name of a Reshape that absorbs the reshapes after it.
    words = kernel.name.removeprefix("fused ").removesuffix("_new_reshape").strip("/").split("/")
    for length in range(len(words), 0, -1):
        if "/".join(words[:length]) in part_of_node:
            return part_of_node["/".join(words[:length])]
    return part_of_operator(kernel.operator) or _part_of_words(kernel.name)


def _part_of_words(name: str) -> str:
    words = set(re.split(r"[^a-z]+", name))
    by_word = next((part for part, known in WORDS.items() if words & known), None)
    return by_word or ("elementwise" if name.startswith(GENERATED) else "other")
