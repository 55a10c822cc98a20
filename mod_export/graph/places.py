"""Where a node stands in the model: the layer, or another module, that it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import onnx_ir as ir

__all__ = ["module_of", "numbered_layer", "place_of"]

SCOPES = "pkg.torch.onnx.name_scopes"
NUMBERED = re.compile(r"((?:[A-Za-z_]\w*\.)+?(\d+))(?!\w)")
UNNUMBERED = -1
"""What is no layer counts as before the first one."""


def place_of(node: ir.Node) -> str:
    """For messages: `layers.3 (node_TopK_12)`, or the node's name alone."""
    name = node.name or node.op_type
    place = _place(node)
    return f"{place} ({name})" if place else name


def module_of(node: ir.Node) -> str:
    """The layer or else the module that a node belongs to: `layers.3`, `norm`, `head`; if unknown, its own name."""
    return _place(node) or node.name or node.op_type


def numbered_layer(path: str) -> tuple[int, str] | None:
    """(number, name) of the layer in a module path or in the name of a weight: (3, "layers.3")."""
    match = NUMBERED.search(path)
    return (int(match[2]), match[1]) if match else None


def _place(node: ir.Node) -> str | None:
    """The exporter notes the modules that a node came from, but not for what a module's other methods do.

    Such a node is placed by the latest layer among the nearest ones that it draws on, or, when it draws on none, by the
    only layer that draws on it.
    """
    above = _nearest(node, lambda one: one.predecessors())
    if above and max(above)[0] > UNNUMBERED:
        return max(above)[1]
    below = {found for found in _nearest(node, lambda one: one.successors()) if found[0] > UNNUMBERED}
    if len(below) == 1:
        return below.pop()[1]
    return min(above)[1] if above else None


def _nearest(node: ir.Node, neighbours: Callable[[ir.Node], Iterable[ir.Node]]) -> set[tuple[int, str]]:
    """What the nearest nodes in one direction, itself first, say of where they are."""
    seen: set[ir.Node] = {node}
    frontier, found = [node], set()
    while frontier:
        current = frontier.pop()
        own = _own(current)
        if own is not None:
            found.add(own)
            continue
        for other in neighbours(current):
            if other not in seen:
                seen.add(other)
                frontier.append(other)
    return found


def _is_tied_table(transpose: ir.Node | None) -> bool:
    """Whether a node transposes a table that rows are gathered from: embedding and head in one."""
    table = transpose.inputs[0] if transpose is not None and transpose.op_type == "Transpose" else None
    return table is not None and any(use.node.op_type == "Gather" for use in table.uses())


def _own(node: ir.Node) -> tuple[int, str] | None:
    """(number, name) of the layer in the node's module path or in the names of its weights, or of another module."""
    weights = [str(value.name) for value in node.inputs if value is not None and value.is_initializer()]
    layer = next(filter(None, map(numbered_layer, [node.metadata_props.get(SCOPES, ""), *weights])), None)
    if layer is not None:
        return layer
    if any(_is_tied_table(value.producer()) for value in node.inputs if value is not None):
        return UNNUMBERED, "head"
    module = next((name.rpartition(".")[0] for name in weights if "." in name), None)
    return (UNNUMBERED, module) if module else None
