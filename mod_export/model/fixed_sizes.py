"""Makes selections by a mask static where their size is fixed: by a mask of constants, or by what the model does next.

torch takes the number of true entries of every mask for a number that depends on the data. It does not where the mask
is made of buffers and constants alone, such as every second position; and a model fixes it itself where it goes on with
sizes that only one number fits, such as `x[mask].view(B, k, D)`, which fails for any other.
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
"""Elements of what is computed to know a mask."""


def with_fixed_sizes(program: ExportedProgram, where: str) -> ExportedProgram:
    """The program in which each selection of fixed size names its size, as `nonzero_static` does.

    It is the same program where there is none; where there is, the graph of the one that is given is changed.

    Args:
        program: from `torch.export`, at fixed sizes, with the values of its buffers and constants.
        where: what messages call it.

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
        # torch's own checks of the sizes that were not known.
        if node.target in CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return without_writes(program, where)


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask that it selects by, if it is a selection by one mask."""
    if node.op != "call_function":
        return None
    arguments: Any = node.args
    if node.target in LISTS:
        return arguments[0] if isinstance(arguments[0], fx.Node) else None
    if node.target is ATEN.masked_select.default:
        return arguments[1] if arguments[1].meta["val"].shape == arguments[0].meta["val"].shape else None
    if node.target is not ATEN.index.Tensor:
        return None
    indices = [one for one in arguments[1] if one is not None]
    is_mask = len(indices) == 1 and indices[0].meta["val"].dtype in (torch.bool, torch.uint8)
    return indices[0] if is_mask else None


def _size(node: fx.Node, mask: fx.Node, constants: _Constants) -> int | None:
    """The number of true entries; None where it is not fixed."""
    value = constants.value(mask)
    if value is not None:
        return int(value.count_nonzero())
    found: Any = node.meta["val"]
    found = found[0] if isinstance(found, (tuple, list)) else found
    indices: Any = node.args[1] if node.target is ATEN.index.Tensor else [mask]
    place = next(n for n, one in enumerate(indices) if one is not None)
    size = found.shape[place]
    return int(size) if is_concrete_int(size) else None


def _replace(node: fx.Node, mask: fx.Node, size: int) -> None:
    graph, dims = node.graph, mask.meta["val"].dim()

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {key: node.meta[key] for key in METADATA if key in node.meta}
        return new

    places = add(ATEN.nonzero_static.default, mask, size=size)
    columns = [add(ATEN.select.int, places, 1, dim) for dim in range(dims)]
    arguments: Any = node.args
    if node.target is ATEN.nonzero_numpy.default:
        for use in list(node.users):
            use.replace_all_uses_with(columns[use.args[1]])  # type: ignore[index]  # The number of one of several.
    elif node.target in LISTS:
        node.replace_all_uses_with(places)
    elif node.target is ATEN.index.Tensor:
        before = next(n for n, one in enumerate(arguments[1]) if one is not None)
        node.replace_all_uses_with(add(ATEN.index.Tensor, arguments[0], [None] * before + columns))
    else:
        node.replace_all_uses_with(add(ATEN.index.Tensor, arguments[0], columns))


class _Constants:
    """The values of nodes that are made of buffers and constants alone."""

    def __init__(self, program: ExportedProgram) -> None:
        held: Mapping[str, Any] = {**program.constants, **program.state_dict}
        self._values: dict[fx.Node, Any] = {}
        for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False):
            if spec.kind in STATE and isinstance(held.get(str(spec.target)), Tensor) and not _is_written(node):
                self._values[node] = held[str(spec.target)]

    def value(self, node: fx.Node) -> Any:
        """None where it depends on inputs or weights, or is written to."""
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
        given = {one: self.value(one) for one in node.all_input_nodes}
        if any(one is None for one in given.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        target: Any = node.target
        with torch.no_grad():
            return target(*args, **kwargs)


def _is_written(node: fx.Node) -> bool:
    """Whether an operation writes into it, or into what is a view of it; or is that operation."""
    if any(one.alias_info is not None and one.alias_info.is_write for one in arguments_of(node)):
        return True
    for use in node.users:
        for argument, held in zip(arguments_of(use), use.args, strict=False):
            if held is node and argument.alias_info is not None and (argument.alias_info.is_write or _is_written(use)):
                return True
    return False
