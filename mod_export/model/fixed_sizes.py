"""Makes selections by a mask static if the number of selected elements is fixed.

torch assumes that the number of true entries of every mask depends on the data. Two kinds of masks have a fixed number:
masks made of buffers and constants alone, such as every second position, and masks whose selection the model uses with
a shape that only one number fits. `x[mask].view(B, k, D)`, for example, fails for any other number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from mod_export.graph.probing import arguments_of
from mod_export.graph.program_nodes import METADATA
from mod_export.model.functional_programs import without_writes

ATEN = torch.ops.aten
CHECKS = {ATEN._assert_scalar.default, ATEN.sym_constrain_range.default, ATEN.sym_constrain_range_for_size.default}
LISTS = {ATEN.nonzero.default, ATEN.argwhere.default, ATEN.nonzero_numpy.default}
STATE = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
LARGEST = 2**24
"""Values with more elements than this are not computed to find out what a mask holds."""


def with_fixed_sizes(program: ExportedProgram, where: str) -> ExportedProgram:
    """Returns the program with the size of each selection of fixed size written out, as in `nonzero_static`.

    Without such selections this is `program` itself; otherwise the graph of `program` is changed as well.

    Args:
        program: a program of `torch.export` at fixed sizes, with the values of its buffers and constants.
        where: name of the program in messages.

    Raises:
        CaptureError: see `without_writes`.
    """
    graph = program.graph
    constants = _Constants(program)
    selections = {node: mask for node in graph.nodes if (mask := _mask_of(node)) is not None}
    sizes = {node: _size(node, mask, constants) for node, mask in selections.items()}
    if all(size is None for size in sizes.values()):
        return program
    for node, size in sizes.items():
        if size is not None:
            with graph.inserting_before(node):
                _replace(node, selections[node], size)
    for node in reversed(list(graph.nodes)):
        # These nodes are torch's checks of sizes that were unknown.
        if node.target in CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return without_writes(program, where)


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Returns the mask of a node that selects by exactly one mask, else None."""
    if node.op != "call_function":
        return None
    arguments: Any = node.args
    if node.target in LISTS:
        return arguments[0] if isinstance(arguments[0], fx.Node) else None
    if node.target is ATEN.masked_select.default:
        return arguments[1] if arguments[1].meta["val"].shape == arguments[0].meta["val"].shape else None
    if node.target is not ATEN.index.Tensor:
        return None
    indices = [index for index in arguments[1] if index is not None]
    is_mask = len(indices) == 1 and indices[0].meta["val"].dtype in (torch.bool, torch.uint8)
    return indices[0] if is_mask else None


def _size(node: fx.Node, mask: fx.Node, constants: _Constants) -> int | None:
    """Returns the number of true entries; None if it is not fixed."""
    value = constants.value(mask)
    if value is not None:
        return int(value.count_nonzero())
    result: Any = node.meta["val"]
    result = result[0] if isinstance(result, (tuple, list)) else result
    indices: Any = node.args[1] if node.target is ATEN.index.Tensor else [mask]
    position = next(n for n, index in enumerate(indices) if index is not None)
    size = result.shape[position]
    return int(size) if is_concrete_int(size) else None


def _replace(node: fx.Node, mask: fx.Node, size: int) -> None:
    graph, dims = node.graph, mask.meta["val"].dim()

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {key: node.meta[key] for key in METADATA if key in node.meta}
        return new

    positions = add(ATEN.nonzero_static.default, mask, size=size)
    columns = [add(ATEN.select.int, positions, 1, dim) for dim in range(dims)]
    arguments: Any = node.args
    if node.target is ATEN.nonzero_numpy.default:
        for use in list(node.users):
            use.replace_all_uses_with(columns[use.args[1]])  # type: ignore[index]  # The number of one of several.
    elif node.target in LISTS:
        node.replace_all_uses_with(positions)
    elif node.target is ATEN.index.Tensor:
        before = next(n for n, index in enumerate(arguments[1]) if index is not None)
        node.replace_all_uses_with(add(ATEN.index.Tensor, arguments[0], [None] * before + columns))
    else:
        node.replace_all_uses_with(add(ATEN.index.Tensor, arguments[0], columns))


class _Constants:
    """Values of nodes that are computed from buffers and constants alone."""

    def __init__(self, program: ExportedProgram) -> None:
        tensors: Mapping[str, Any] = {**program.constants, **program.state_dict}
        self._values: dict[fx.Node, Any] = {}
        for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False):
            if spec.kind in STATE and isinstance(tensors.get(str(spec.target)), Tensor) and not _is_written(node):
                self._values[node] = tensors[str(spec.target)]

    def value(self, node: fx.Node) -> Any:
        """Returns the value of a node; None if it depends on inputs or weights, or is written to."""
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op != "call_function" or _is_written(node):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        value = node.meta.get("val")
        if isinstance(value, Tensor) and math.prod(size for size in value.shape if isinstance(size, int)) > LARGEST:
            return None
        sources = {source: self.value(source) for source in node.all_input_nodes}
        if any(source is None for source in sources.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
        target: Any = node.target
        with torch.no_grad():
            return target(*args, **kwargs)


def _is_written(node: fx.Node) -> bool:
    """Returns whether the node writes into a tensor, or another node writes into its value or into a view of it."""
    if any(parameter.alias_info is not None and parameter.alias_info.is_write for parameter in arguments_of(node)):
        return True
    for use in node.users:
        for argument, value in zip(arguments_of(use), use.args, strict=False):
            if value is node and argument.alias_info is not None and (argument.alias_info.is_write or _is_written(use)):
                return True
    return False
