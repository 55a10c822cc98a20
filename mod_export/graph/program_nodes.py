"""Nodes of a captured program: read, and added with the metadata that exporters look for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

METADATA = ("nn_module_stack", "stack_trace")
"""What messages name the module and the line by."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The static shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def argument_of(node: fx.Node, *names: str) -> Any:
    """The argument of an operation that has one of these names, or its default; None where it has none of them."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # An operator has one.
        if argument.name in names:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(argument.name, argument.default_value)
    return None


def behind(node: fx.Node) -> set[fx.Node]:
    """Whatever depends on a node."""
    found, waiting = {node}, [node]
    while waiting:
        new = [use for use in waiting.pop().users if use not in found]
        found.update(new)
        waiting += new
    return found


def behind_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Whatever depends on an input of the program, and not on weights and constants alone."""
    found = {
        node
        for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
        if spec.kind is InputKind.USER_INPUT
    }
    for node in program.graph.nodes:
        if any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward pass the node belongs to; `model` for the outermost one."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack and stack[-1][0] else "model"


def add_node(graph: fx.Graph, beside: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call at the graph's insertion point. Messages name the module and the line of a node: those of `beside`."""
    node = graph.call_function(target, args)
    node.meta = {key: beside.meta[key] for key in METADATA if key in beside.meta}
    values = fx.map_arg(args, lambda one: one.meta["val"])
    mode = detect_fake_mode([one.meta["val"] for one in node.all_input_nodes])
    assert mode is not None
    with mode:
        node.meta["val"] = target(*values)
    return node


def replace_by(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *, whole: bool = True) -> None:
    """Puts in the place of a node the operators that a function calls when it is given the node's arguments.

    Args:
        graph: that the node is in.
        node: returns a tensor, or several.
        function: returns as many.
        whole: keeps attention and matmul as one operator each; where not, vmap becomes operators of all rows.
    """
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    leaves = [_called(leaf) for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def call(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, kwargs = pytree.tree_unflatten(given, structure)
        return function(*args, **kwargs)

    values = [leaves[place].meta["val"] for place in places]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        inner = make_fx(call, pre_dispatch=whole)(*values).graph
    inputs = dict(zip(inner.find_nodes(op="placeholder"), (leaves[place] for place in places), strict=True))
    with graph.inserting_before(node):
        found: Any = graph.graph_copy(inner, inputs)
    for copied in set(inputs.values()) - {leaves[place] for place in places}:
        # Where a graph inside the node says it; else that of the node, in place of where it was traced.
        told = copied.meta if "nn_module_stack" in copied.meta else node.meta
        copied.meta = {"val": copied.meta["val"], **{key: told[key] for key in METADATA if key in told}}
    if isinstance(found, (tuple, list)):
        for use in list(node.users):
            number: Any = use.args[1]
            use.replace_all_uses_with(found[number])
            graph.erase_node(use)
    else:
        node.replace_all_uses_with(found)
    graph.erase_node(node)


def _called(argument: Any) -> Any:
    """In place of a graph inside another what runs it, operation by operation: so each keeps its module and line."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return argument
    held: Any = argument.graph.owning_module
    for name in str(argument.target).split("."):
        held = getattr(held, name)
    return fx.Interpreter(held).run if isinstance(held, fx.GraphModule) else argument


def inferred_values(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
    """Runs a graph on what its placeholders hold, tensors without values: each operation, and what torch infers of it.

    Only one operation is run for each step, so that its inputs can be looked at before it is.
    """
    mode = detect_fake_mode(list(inputs))
    given = iter(inputs)
    found: dict[fx.Node, Any] = {}
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.env = found
    for node in module.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            found[node] = next(given)
            continue
        with torch.no_grad(), mode or contextlib.nullcontext():
            found[node] = interpreter.run_node(node)
        yield node, found[node]


def with_arguments(module: fx.GraphModule, replacements: Mapping[Any, Any]) -> fx.GraphModule:
    """A copy, in which operations have other constant arguments, such as dtypes or devices; in inner graphs as well."""
    found = copy.deepcopy(module)
    for inner in found.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs), lambda one: replacements.get(one, one) if _is_constant(one) else one
                )
        inner.recompile()
    return found


def _is_constant(argument: Any) -> bool:
    return isinstance(argument, (torch.dtype, torch.device))
