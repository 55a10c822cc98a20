"""Says to which part of the model each node of a graph belongs, and each kernel of an engine.

The part of a product of matrices is the part of the model that its weight is named after:

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

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from mod_export.measure.products import holds_graphs, is_product, operands_of
from mod_export.types import Kernel, Profile

if TYPE_CHECKING:
    import onnx_ir as ir

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
