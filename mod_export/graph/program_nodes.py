"""Reads the nodes of a captured program, and adds nodes with the metadata that exporters look for."""

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
"""The metadata from which messages name the module and the line."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Returns the static shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def argument_of(node: fx.Node, *names: str) -> Any:
    """Returns the argument with one of these names, or its default; None if the operator has no such argument."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # An operator has one.
        if argument.name in names:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(argument.name, argument.default_value)
    return None


def behind(node: fx.Node) -> set[fx.Node]:
    """Returns a node and all nodes that depend on it."""
    dependents, waiting = {node}, [node]
    while waiting:
        new = [use for use in waiting.pop().users if use not in dependents]
        dependents.update(new)
        waiting += new
    return dependents


def behind_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Returns the inputs of a program and all nodes that depend on at least one of them."""
    dependents = {
        node
        for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
        if spec.kind is InputKind.USER_INPUT
    }
    for node in program.graph.nodes:
        if any(source in dependents for source in node.all_input_nodes):
            dependents.add(node)
    return dependents


def module_path(node: fx.Node) -> str:
    """Returns the path of the module whose forward pass the node belongs to; `model` for the outermost one."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack and stack[-1][0] else "model"


def add_node(graph: fx.Graph, beside: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Adds a call at the graph's insertion point. It gets the module and line of `beside`, which messages name."""
    node = graph.call_function(target, args)
    node.meta = {key: beside.meta[key] for key in METADATA if key in beside.meta}
    infer(node)
    return node


def infer(node: fx.Node) -> None:
    """Gives a call the result, a tensor without values, that torch infers from its inputs."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    mode = detect_fake_mode([source.meta["val"] for source in node.all_input_nodes])
    assert mode is not None
    with mode:
        node.meta["val"] = target(*args, **kwargs)


def replace_by(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *, whole: bool = True) -> None:
    """Replaces a node by the operators that a function calls on the node's arguments.

    Args:
        graph: the graph that contains the node.
        node: a node that returns one tensor or several.
        function: a function that returns as many tensors.
        whole: whether attention and matmul stay one operator each. If not, they become the operators that they call,
            and a vmap becomes operators on all rows.
    """
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    leaves = [_called(leaf) for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def call(*tensors: torch.Tensor) -> Any:
        arguments = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        args, kwargs = pytree.tree_unflatten(arguments, structure)
        return function(*args, **kwargs)

    values = [leaves[place].meta["val"] for place in places]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        inner = make_fx(call, pre_dispatch=whole)(*values).graph
    inputs = dict(zip(inner.find_nodes(op="placeholder"), (leaves[place] for place in places), strict=True))
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(inner, inputs)
    for copied in set(inputs.values()) - {leaves[place] for place in places}:
        # Nodes of an inner graph keep their own metadata. The others get the node's, not that of the tracing code.
        origin = copied.meta if "nn_module_stack" in copied.meta else node.meta
        copied.meta = {"val": copied.meta["val"], **{key: origin[key] for key in METADATA if key in origin}}
    if isinstance(result, (tuple, list)):
        for use in list(node.users):
            number: Any = use.args[1]
            use.replace_all_uses_with(result[number])
            graph.erase_node(use)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)


def _called(argument: Any) -> Any:
    """Replaces an inner graph by a function that runs it node by node, so that each node keeps its module and line."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return argument
    module: Any = argument.graph.owning_module
    for name in str(argument.target).split("."):
        module = getattr(module, name)
    return fx.Interpreter(module).run if isinstance(module, fx.GraphModule) else argument


def inferred_values(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
    """Yields each operation of a graph and the result that torch infers for it from inputs without values.

    Each step runs one operation, so that the caller can look at the inputs of an operation before it runs.
    """
    mode = detect_fake_mode(list(inputs))
    remaining = iter(inputs)
    values: dict[fx.Node, Any] = {}
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.env = values
    for node in module.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            values[node] = next(remaining)
            continue
        with torch.no_grad(), mode or contextlib.nullcontext():
            values[node] = interpreter.run_node(node)
        yield node, values[node]


def with_arguments(module: fx.GraphModule, replacements: Mapping[Any, Any]) -> fx.GraphModule:
    """Returns a copy in which dtype and device arguments of operations are replaced, in inner graphs too."""
    result = copy.deepcopy(module)
    for inner in result.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs),
                    lambda item: (
                        replacements.get(item, item) if isinstance(item, (torch.dtype, torch.device)) else item
                    ),
                )
        inner.recompile()
    return result
