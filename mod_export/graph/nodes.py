"""Reads ONNX graphs and writes nodes into them.

All rewrites and checks share these helpers: `made_by`, `only_reader`, `constant_array` and the like read a graph,
`NodeWriter` writes nodes, and `substitute` replaces an old value by a new one.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from mod_export.errors import GraphError
from mod_export.graph.weights import MOST_SIZES

Input = ir.Value | np.ndarray | Sequence[int] | None
"""An input of a node to be written. Arrays, and integers as int64, become constants; None is an omitted input."""

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata key under which the exporter lists the modules that a node came from, outermost first."""
NUMBERED = re.compile(r"((?:[A-Za-z_]\w*\.)+?(\d+))(?!\w)")
REPLACED = "replaced by"
"""The metadata key under which a replaced value keeps its replacement."""
NEWEST_OPSET = 24
"""The newest opset of the operators that rewrites write."""
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
ROWS_THAT_RUN = "rows_that_run"
"""The name of the only axis whose size is known when a graph runs: see graph/rewrites/rows_that_run.py."""
UNNUMBERED = -1
"""The layer number of modules that are not layers: it sorts before the first layer."""


def graph_from_file(path: Path) -> ir.Model:
    """Reads a graph; its external data stays where it is.

    Raises:
        GraphError: not a readable ONNX graph.
    """
    try:
        model = ir.load(path)
    except (DecodeError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GraphError(f"{path}: not a readable ONNX graph ({reason})") from error
    if not len(model.graph):
        raise GraphError(f"{path}: not a readable ONNX graph (no operator in it)")
    return model


def graph_from_bytes(data: bytes) -> ir.Model:
    """Parses a graph that this process has serialized itself."""
    return ir.from_proto(onnx.load_from_string(data))


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is one of these standard ONNX operators."""
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes a value, if it is one of these standard ONNX operators; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_standard(node, *op_types) else None


def is_used(value: ir.Value) -> bool:
    """Whether a node reads the value, or it is an output of its graph."""
    return bool(value.uses()) or value.is_graph_output()


def only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads a value; None if it is read more than once or is a graph output."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant or initializer; None if the value is computed, absent or without data."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_number(value: ir.Value | None) -> float | None:
    """The only element of a constant; None if the value is computed or absent, or holds several elements."""
    array = constant_array(value)
    return array.item() if array is not None and array.size == 1 else None


def constant_integers(node: ir.Node, index: int) -> list[int] | None:
    """The elements of a constant input, such as axes; None if it is computed or absent."""
    array = constant_array(input_of(node, index))
    return None if array is None else [int(item) for item in array.reshape(-1)]


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """An input of a node; None if the node has fewer inputs."""
    return node.inputs[index] if index < len(node.inputs) else None


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """The values of a node's attributes, for another node that keeps them."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def before_views(value: ir.Value | None, *views: str) -> ir.Value | None:
    """The value that a chain of these operators starts from; the value itself if none of them computes it."""
    while (view := made_by(value, *views)) is not None:
        value = view.inputs[0]
    return value


def before_transpose(value: ir.Value | None, order: Sequence[int]) -> ir.Value | None:
    """x, if a value is x with its dimensions in this order."""
    node = made_by(value, "Transpose")
    return node.inputs[0] if node is not None and list(node.attributes.get_ints("perm", [])) == [*order] else None


def base_of_square(value: ir.Value | None) -> ir.Value | None:
    """x, if a value is x * x, written as a product or as a power."""
    node = made_by(value, "Mul", "Pow")
    if node is None:
        return None
    x, second = node.inputs
    return x if (x is second if node.op_type == "Mul" else constant_number(second) == 2) else None


def nodes_from_opset(model: ir.Model, opset: int) -> Iterable[ir.Node]:
    """The nodes of a graph and its branches; none if its opset is below `opset` and lacks the operator to write."""
    return model.graph.all_nodes() if model.opset_imports.get("", 0) >= opset else ()


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape, or None if it or one of its dimensions is unknown."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return value.shape.numpy()


def require_static_shape(value: ir.Value | None, node: ir.Node) -> tuple[int, ...]:
    """The shape of an input or output of `node`.

    Raises:
        GraphError: the shape is unknown or dynamic.
    """
    shape = static_shape(value)
    if shape is None:
        operand = "an absent input" if value is None else f"{value.name} of shape {value.shape}"
        raise GraphError(
            f"{label_of(node)}: {node.op_type} has {operand}, expected a static shape; export with fixed sizes and run "
            "shape inference"
        )
    return shape


def label_of(node: ir.Node) -> str:
    """The name of a node in messages: `layers.3 (node_TopK_12)`, or the node's name alone."""
    name = node.name or node.op_type
    module = _module(node)
    return f"{module} ({name})" if module else name


def module_of(node: ir.Node) -> str:
    """The layer, or else the module, of a node: `layers.3`, `norm`, `head`; if unknown, the node's name."""
    return _module(node) or node.name or node.op_type


def numbered_layer(path: str) -> tuple[int, str] | None:
    """(number, name) of the layer in a module path or in the name of a weight: (3, "layers.3")."""
    match = NUMBERED.search(path)
    return (int(match[2]), match[1]) if match else None


def _module(node: ir.Node) -> str | None:
    """The layer or module of a node, which the exporter only stores for nodes of `forward` methods; None if unknown.

    Any other node gets the latest layer among the nearest nodes that it reads from. If there is none, it gets the only
    layer that reads from it, or else a module that it reads from.
    """
    above = _nearest(node, lambda n: n.predecessors())
    if above and max(above)[0] > UNNUMBERED:
        return max(above)[1]
    below = {layer for layer in _nearest(node, lambda n: n.successors()) if layer[0] > UNNUMBERED}
    if len(below) == 1:
        return below.pop()[1]
    return min(above)[1] if above else None


def _nearest(node: ir.Node, neighbours: Callable[[ir.Node], Iterable[ir.Node]]) -> set[tuple[int, str]]:
    """(number, name) of the nearest layers or modules in one direction; the node's own one ends the search."""
    seen: set[ir.Node] = {node}
    frontier, modules = [node], set()
    while frontier:
        current = frontier.pop()
        module = _noted_module(current)
        if module is not None:
            modules.add(module)
            continue
        for neighbour in neighbours(current):
            if neighbour not in seen:
                seen.add(neighbour)
                frontier.append(neighbour)
    return modules


def _is_tied_table(value: ir.Value | None) -> bool:
    """Whether a value is the transpose of an embedding table, which the head then shares."""
    transpose = made_by(value, "Transpose")
    table = None if transpose is None else transpose.inputs[0]
    return table is not None and any(use.node.op_type == "Gather" for use in table.uses())


def _noted_module(node: ir.Node) -> tuple[int, str] | None:
    """(number, name) of the layer in a node's module path or weight names; if there is none, of another module."""
    weights = [str(value.name) for value in node.inputs if value is not None and value.is_initializer()]
    layer = next(filter(None, map(numbered_layer, [node.metadata_props.get(NAME_SCOPES, ""), *weights])), None)
    if layer is not None:
        return layer
    if any(map(_is_tied_table, node.inputs)):
        return UNNUMBERED, "head"
    module = next((name.rpartition(".")[0] for name in weights if "." in name), None)
    return (UNNUMBERED, module) if module else None


def branches_of(node: ir.Node) -> list[ir.Graph]:
    """The subgraphs of a node: two for an If, none for nearly every other operator."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs


def graph_around(node: ir.Node) -> ir.Graph:
    """The graph that contains a node: the main graph or a branch."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


class Branches:
    """Maps the outputs of branches to the outputs of their If. It is valid until an If is changed.

    A branch reads outer values by name, and returns values only as outputs of the If.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._outside: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
        self._inside: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
        for node in graph.all_nodes():
            for branch in branches_of(node):
                for inner, outer in zip(branch.outputs, node.outputs, strict=True):
                    self._outside[inner].append(outer)
                    self._inside[outer].append(inner)

    def readers(self, value: ir.Value) -> Iterator[ir.Node]:
        """The nodes that read a value; for an output of a branch, also those that read the output of the If."""
        yield from (use.node for use in value.uses())
        for outer in self._outside.get(value, ()):
            yield from self.readers(outer)

    def makers(self, value: ir.Value) -> Iterator[ir.Node | None]:
        """The node that computes a value, or None for an input; for an output of an If, the nodes in its branches."""
        if value not in self._inside:
            yield value.producer()
        for inner in self._inside.get(value, ()):
            yield from self.makers(inner)


class NodeWriter:
    """Inserts typed nodes before `anchor`. They get its metadata, so that messages about them still name the layer."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node, purpose: str) -> None:
        self._graph = graph
        self._anchor = anchor
        self._prefix = f"{anchor.name or anchor.op_type}/{purpose}"
        self._count = 0

    def op(
        self, op_type: str, *inputs: Input, domain: str = "", like: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Writes a node with one output, whose dtype and shape are those of `like`, or else inferred."""
        return self.ops(op_type, 1 if like is None else [like], *inputs, domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, like: int | Sequence[ir.Value], *inputs: Input, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Writes a node with one output for each value in `like`, in the dtype and shape of that value. If `like` is a
        number, writes a standard node with that many outputs, and infers their dtypes and shapes.
        """
        if isinstance(like, int):
            values = self._values(op_type, inputs, domain, attributes, like)
            self._infer(values)
            return values
        values = self._values(op_type, inputs, domain, attributes, len(like))
        for value, model in zip(values, like, strict=True):
            # Nothing is shared with `like`: a rewrite that casts one value would change both.
            assert model.dtype is not None
            value.dtype, value.shape = model.dtype, None if model.shape is None else model.shape.copy()
        return values

    def _values(
        self, op_type: str, inputs: Sequence[Input], domain: str, attributes: dict[str, Any], count: int
    ) -> Sequence[ir.Value]:
        name = f"{self._prefix}_{op_type}_{self._count}"
        self._count += 1
        read = [
            item if item is None else _latest(item) if isinstance(item, ir.Value) else self.constant(np.asarray(item))
            for item in inputs
        ]
        values = [ir.Value(name=f"{name}_{i}") for i in range(count)]
        node = ir.Node(domain, op_type, read, ir.convenience.convert_attributes(attributes), outputs=values, name=name)
        node.metadata_props.update(self._anchor.metadata_props)
        self._graph.insert_before(self._anchor, node)
        return values

    def _infer(self, values: Sequence[ir.Value]) -> None:
        """Infers dtypes and shapes of a standard node's outputs by ONNX's own rules."""
        node = values[0].producer()
        assert node is not None
        opset = self._graph.opset_imports.get("", NEWEST_OPSET)
        read = [value for value in node.inputs if value is not None]
        constants = {str(value.name): value.const_value for value in read if value.const_value is not None}
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opset),
            ir.to_proto(node),
            {str(value.name): ir.to_proto(value).type for value in read},
            {
                name: ir.to_proto(ir.tensor(tensor.numpy(), name=name))
                for name, tensor in constants.items()
                if tensor.size <= MOST_SIZES
            },
            opset_imports=[onnx.helper.make_opsetid("", opset)],
        )
        for value in values:
            value.type = ir.serde.deserialize_type_proto_for_type(types[str(value.name)])
            value.shape = ir.serde.deserialize_type_proto_for_shape(types[str(value.name)])

    def replace(self, value: ir.Value) -> None:
        """Replaces the anchor's only output by a value, and removes the anchor."""
        substitute(self._anchor.outputs[0], value, self._anchor)

    def constant(self, array: np.ndarray) -> ir.Value:
        """Returns the initializer with this content, which all callers share."""
        if array.size <= MOST_SIZES:
            content = "_".join(map(str, array.ravel().tolist()))
        else:
            content = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        # No exporter uses a slash in names, so this name cannot clash.
        name = f"constant/{array.dtype}_{'x'.join(map(str, array.shape))}_{content}"
        if name not in self._graph.initializers:
            tensor = ir.tensor(array, name=name)
            shape = ir.Shape(array.shape)
            self._graph.register_initializer(
                ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
            )
        return self._graph.initializers[name]


def _latest(value: ir.Value) -> ir.Value:
    """The current replacement of a value: a rewrite may still hold a value that it has replaced."""
    while REPLACED in value.meta:
        value = value.meta[REPLACED]
    return value


def substitute(old: ir.Value, new: ir.Value, *computed_by: ir.Node) -> None:
    """Replaces `old` by `new`, which takes over its name, and removes the nodes that computed `old`, readers first."""
    name = old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.meta[REPLACED] = new
    for node in computed_by:
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    new.name = name


def late_zero(writer: NodeWriter, value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    """Writes an integer 0, of a `shape` of ones, that depends on `value`, a float of known rank.

    The 0 is abs(x) < 0 of one element: false for every number and for NaN, but neither an engine builder nor constant
    folding knows that.
    """
    assert value.shape is not None
    assert value.dtype is not None
    rank = len(value.shape)
    element = writer.op("Slice", value, [0] * rank, [1] * rank)
    never = writer.op("Less", writer.op("Abs", element), np.array(0, value.dtype.numpy()))
    return writer.op("Reshape", writer.op("Cast", never, to=dtype), list(shape))
