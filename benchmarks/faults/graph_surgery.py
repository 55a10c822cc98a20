"""Tools to plant a fault in an exported graph: they find nodes by layer and insert others between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mod_export.graph.nodes import module_of, static_shape


class Surgery:
    """A graph to damage: one in memory, or a file of a build folder, which `save` writes back."""

    def __init__(self, graph: Path | ir.Model) -> None:
        if isinstance(graph, Path):
            self.path = graph
        self.model = graph if isinstance(graph, ir.Model) else ir.load(graph)
        self.graph = self.model.graph
        self._count = 0

    def save(self) -> None:
        # Weights in external files stay there: the graph has only their location.
        self.path.write_bytes(ir.to_proto(self.model).SerializeToString())

    def nodes(self, layer: int | str | None, op_type: str) -> list[ir.Node]:
        """Returns the nodes of one type, in order, in a layer, in a module (its path), or in the whole graph (None).
        MatMul includes FusedMatMul, which may transpose its weight.
        """
        module = f"layers.{layer}" if isinstance(layer, int) else layer
        types = {op_type, "FusedMatMul"} if op_type == "MatMul" else {op_type}
        return [node for node in self.graph if node.op_type in types and (module is None or module_of(node) == module)]

    def node(self, layer: int | str | None, op_type: str, index: int) -> ir.Node:
        return self.nodes(layer, op_type)[index]

    def take(self, layer: int | str) -> ir.Node:
        """Returns the TopK that selects tokens."""
        return next(node for node in self.nodes(layer, "TopK") if node.attributes.get_int("largest", 1))

    def output(self, name: str) -> ir.Value:
        return next(value for value in self.graph.outputs if value.name == name)

    def constant(self, array: np.ndarray) -> ir.Value:
        self._count += 1
        name = f"planted_{self._count}"
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def op(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | np.ndarray | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        like: ir.Value | None = None,
        outputs: int = 1,
    ) -> ir.Value:
        """Puts a node before another. The result has the shape and dtype of `like`, by default of the first input."""
        values = [self.constant(item) if isinstance(item, np.ndarray) else item for item in inputs]
        self._count += 1
        model = like if like is not None else values[0]
        made = [ir.Value(name=f"planted_{self._count}_{i}") for i in range(outputs)]
        target = (attributes or {}).get("to")
        made[0].dtype, made[0].shape = model.dtype if target is None else ir.DataType(target), model.shape
        node = ir.Node(
            "", op_type, values, ir.convenience.convert_attributes(dict(attributes or {})), outputs=made,
            name=f"planted_{op_type}_{self._count}",
        )  # fmt: skip
        self.graph.insert_before(before, node)
        return made[0]

    def feed(self, node: ir.Node, index: int, op_type: str, *others: np.ndarray, **attributes: Any) -> None:
        """Puts an operation between a node and one of its inputs."""
        value = node.inputs[index]
        node.replace_input_with(index, self.op(node, op_type, [value, *others], attributes))

    def set(self, node: ir.Node, **attributes: Any) -> None:
        """Sets attributes of a node."""
        for attribute in ir.convenience.convert_attributes(attributes):
            node.attributes[attribute.name] = attribute

    def bypass(self, node: ir.Node, index: int) -> None:
        """Makes all readers of a node's output read one of the node's inputs instead."""
        self.replace(node.outputs[0], node.inputs[index])

    def swap_inputs(self, one: ir.Node, other: ir.Node) -> None:
        """Exchanges the second inputs (the weights) of two products."""
        first, second = one.inputs[1], other.inputs[1]
        one.replace_input_with(1, second)
        other.replace_input_with(1, first)

    def rounded(self, value: ir.Value, dtype: ir.DataType) -> None:
        """Casts a value to a shorter float and back."""
        self.after(self.after(value, "Cast", to=int(dtype)), "Cast", to=int(ir.DataType.FLOAT))

    def replace(self, value: ir.Value, other: ir.Value) -> None:
        """Makes all readers of `value` read `other`; a graph output keeps its name."""
        if value.is_graph_output():
            name = value.name
            value.name = f"{name}_before"
            for index, output in enumerate(self.graph.outputs):
                if output is value:
                    self.graph.outputs[index] = other
            other.name = name
        ir.convenience.replace_all_uses_with(value, other)

    def after(self, value: ir.Value, op_type: str, *others: np.ndarray, **attributes: Any) -> ir.Value:
        """Puts an operation between a value and its readers; a graph output keeps its name."""
        producer = value.producer()
        made = self.op(producer, op_type, [value, *others], attributes)
        node = made.producer()
        self.graph.remove(node)
        self.graph.insert_after(producer, node)
        self.replace(value, made)
        node.replace_input_with(0, value)
        return made

    def embed(self, name: str, array: np.ndarray) -> None:
        """Stores a new value for a weight in the graph itself."""
        self.graph.initializers[name].const_value = ir.tensor(np.ascontiguousarray(array), name=name)

    def weight(self, name: str) -> np.ndarray:
        """Returns a copy of a weight's value."""
        tensor = self.graph.initializers[name].const_value
        path = self.path.parents[1] / "graphs" / str(tensor.location)
        if not path.exists():
            path = self.path.parents[2] / "graphs" / str(tensor.location)
        dtype = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}[tensor.dtype]
        # Offset and length are optional in ONNX, but mod-export always writes them.
        data = path.read_bytes()[tensor.offset : tensor.offset + tensor.length]
        return np.frombuffer(data, dtype).reshape(static_shape(self.graph.initializers[name]) or ()).copy()

    def repoint(self, name: str, other: str) -> None:
        """Makes a weight refer to the stored data of another."""
        self.graph.initializers[name].const_value = self.graph.initializers[other].const_value


def plant(path: Path, change: Callable[[Surgery], object]) -> bytes:
    """Changes a graph file, and returns its previous bytes."""
    before = path.read_bytes()
    surgery = Surgery(path)
    change(surgery)
    surgery.save()
    return before
