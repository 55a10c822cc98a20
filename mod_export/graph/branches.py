"""How values get out of the branches of If. Into them they get by their names alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["Branches", "branches_of"]


def branches_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds: two of an If, and of nearly every other operator none."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


class Branches:
    """What the branches of a graph hand out, and to whom. Holds as long as no If is changed."""

    def __init__(self, graph: ir.Graph) -> None:
        self._outside: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
        self._inside: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
        for node in graph.all_nodes():
            for branch in branches_of(node):
                for inner, outer in zip(branch.outputs, node.outputs, strict=True):
                    self._outside[inner].append(outer)
                    self._inside[outer].append(inner)

    def readers(self, value: ir.Value) -> Iterator[ir.Node]:
        """The nodes that use a value, where a branch hands it out those that use what the If returns."""
        yield from (use.node for use in value.uses())
        for outer in self._outside.get(value, ()):
            yield from self.readers(outer)

    def makers(self, value: ir.Value) -> Iterator[ir.Node | None]:
        """The node that computes a value, of what an If returns those in its branches; None for an input."""
        if value not in self._inside:
            yield value.producer()
        for inner in self._inside.get(value, ()):
            yield from self.makers(inner)
