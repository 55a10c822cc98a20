"""Converts matrix products and attention of a captured float32 program to 16 bits, and nothing else.

Products take most of a model's time, and weights are most of what it reads. Everything between products stays in
float32, the residual stream too: a compiler that fuses it with the casts reads and writes no more bytes. Products that
lead to a selection stay in float32 as well, because rounded scores select other tokens. So do products of integers,
buffers and constants alone, such as rotary angles, because bfloat16 represents not every position above 256.

A weight that only converted products and embeddings read is stored in 16 bits. Any other operand is cast where it is
multiplied. A mask that is added to scores is clamped to the range of the 16 bits, because a row of nothing but minus
infinity has no softmax. No value between products changes its dtype, so the rest of the program stays as it is.
Products in the branches of conditions stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mod_export.graph.program_nodes import add_node, argument_of, infer
from mod_export.graph.sites import Marked, with_graph
from mod_export.graph.weights import beyond_range
from mod_export.marker import MARKER
from mod_export.types import DType

aten = torch.ops.aten
NARROW: Mapping[DType, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PRODUCTS = frozenset(
    {
        aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
        aten.baddbmm.default, aten.einsum.default, aten.conv1d.default, aten.conv2d.default,
        aten.scaled_dot_product_attention.default,
    }
)  # fmt: skip
VIEWS = frozenset(
    {
        aten.t.default, aten.transpose.int, aten.permute.default, aten.reshape.default, aten.view.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.select.int, aten.slice.Tensor,
        aten.contiguous.default, aten.numpy_T.default,
    }
)  # fmt: skip
"""The operators that may stand between a weight and the product that reads it."""
TABLES = frozenset({aten.embedding.default})
MOST_SCORES = 256
"""The most numbers per token that a router computes; a wider product computes vectors of the residual stream."""


def narrowed(program: ExportedProgram, dtype: DType) -> ExportedProgram:
    """Returns a copy of a program with markers whose products are in `dtype`; inputs, outputs and weight names stay.

    Raises:
        LimitError: a weight exceeds the range of `dtype`.
    """
    wanted = NARROW[dtype]
    module = copy.deepcopy(program.graph_module)
    graph, state = module.graph, dict(program.state_dict)
    for node in [node for node in graph.nodes if node.target is aten._assert_tensor_metadata.default]:
        graph.erase_node(node)
    weights = {
        spec.arg.name: str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER
    }
    wide = _deciding(graph, weights) | _from_integers(program, graph)
    products = [node for node in graph.nodes if node.target in PRODUCTS and node not in wide and _is_float32(node)]
    readers = {*products, *(node for node in graph.nodes if node.target in TABLES)}
    stored = [
        node for node in graph.nodes if node.name in weights and _is_float32(node) and _only_read_by(node, readers)
    ]
    for node in stored:
        name = weights[node.name]
        node.meta["val"] = node.meta["val"].to(wanted)
        state[name] = torch.nn.Parameter(_narrow_weight(name, state[name].detach(), wanted), requires_grad=False)
    _infer_views(graph, stored)
    for node in graph.nodes:
        if node.target in TABLES and not _is_float32(node.args[0]):
            _computed(graph, node)
    casts: dict[fx.Node, fx.Node] = {}
    for node in products:
        with graph.inserting_before(node):
            _limit_mask(graph, node, wanted)
            cast = _cast_by(graph, casts, wanted)
            node.args = fx.map_arg(node.args, cast)
            node.kwargs = fx.map_arg(node.kwargs, cast)
        _computed(graph, node)
    module.recompile()
    return with_graph(program, module, state)


def _narrow_weight(name: str, tensor: Tensor, wanted: torch.dtype) -> Tensor:
    narrow = tensor.to(wanted)
    if isinstance(tensor, FakeTensor):
        return narrow
    lost = tensor.isfinite() & ~narrow.isfinite()
    if bool(lost.any()):
        kind, largest = str(wanted).removeprefix("torch."), torch.finfo(wanted).max
        raise beyond_range(name, tensor[lost][0].item(), kind, largest)
    return narrow


def _limit_mask(graph: fx.Graph, node: fx.Node, wanted: torch.dtype) -> None:
    mask = argument_of(node, "attn_mask")
    if isinstance(mask, fx.Node) and _is_float32(mask):
        limits = torch.finfo(wanted)
        node.replace_input_with(mask, add_node(graph, node, aten.clamp.default, mask, limits.min, limits.max))


def _is_float32(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _read_by(product: fx.Node) -> set[fx.Node]:
    """The operands of a product, before any cast."""
    return {node.all_input_nodes[0] if node.target is aten.to.dtype else node for node in product.all_input_nodes}


def _deciding(graph: fx.Graph, weights: Collection[str]) -> set[fx.Node]:
    """The nodes that lead to nothing but selections, and the nearest products that scores are computed from, if they
    compute at most MOST_SCORES numbers per token; also products that read the same router weights again.

    `weights` are the names of the placeholders that hold weights.
    """
    deciding: set[fx.Node] = set()
    above = [Marked(*node.args).scores for node in graph.nodes if node.target is MARKER]
    seen: set[fx.Node] = set()
    while above:
        node = above.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.target not in PRODUCTS:
            above += node.all_input_nodes
        elif node.meta["val"].shape[-1] <= MOST_SCORES:
            deciding.add(node)
    # A router that runs again, for a gate, must give the same numbers.
    routers = {operand for node in deciding for operand in _read_by(node) if operand.name in weights}
    deciding |= {node for node in graph.nodes if node.target in PRODUCTS and not routers.isdisjoint(_read_by(node))}
    for node in reversed(graph.nodes):
        if node.users and all(user in deciding or user.target is MARKER for user in node.users):
            deciding.add(node)
    return deciding


def _from_integers(program: ExportedProgram, graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a copy of the program's graph that depend on integers, buffers and constants alone.

    Ids of tokens are integers, but rows that are looked up in a table are vectors of the residual stream.
    """
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            value, kind = node.meta.get("val"), kinds[node.name]
            is_float = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            if kind is not InputKind.PARAMETER and not (kind is InputKind.USER_INPUT and is_float):
                found.add(node)
        elif node.target not in TABLES and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _only_read_by(node: fx.Node, readers: set[fx.Node]) -> bool:
    return bool(node.users) and all(
        user in readers or (user.target in VIEWS and _only_read_by(user, readers)) for user in node.users
    )


def _infer_views(graph: fx.Graph, stored: list[fx.Node]) -> None:
    changed = set(stored)
    for node in graph.nodes:
        if node.target in VIEWS and node.args[0] in changed:
            changed.add(node)
            infer(node)


def _computed(graph: fx.Graph, node: fx.Node) -> None:
    """Updates a node whose operands changed their dtype, and casts its result to float32 for all readers."""
    infer(node)
    with graph.inserting_after(node):
        wide = add_node(graph, node, aten.to.dtype, node, torch.float32)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _cast_by(graph: fx.Graph, casts: dict[fx.Node, fx.Node], wanted: torch.dtype) -> Callable[[fx.Node], fx.Node]:
    """Returns a function that casts each value once, before the first product that reads it."""

    def cast(node: fx.Node) -> fx.Node:
        if not _is_float32(node):
            return node
        if node not in casts:
            casts[node] = add_node(graph, node, aten.to.dtype, node, wanted)
        return casts[node]

    return cast
