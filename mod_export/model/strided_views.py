"""Writes `as_strided` out as a selection of elements, because later code knows only shapes, not memory.

`as_strided` reads the whole memory of a tensor, even elements that the tensor itself does not show. Elements are
therefore numbered by their order in memory, in the nearest source tensor that fills its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.errors import CaptureError
from mod_export.graph.probing import is_view
from mod_export.graph.program_nodes import argument_of, replace_by
from mod_export.graph.refusals import place_of

AS_STRIDED = {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default}


def write_out_strided_views(graph: fx.Graph, where: str) -> None:
    """Replaces `as_strided` in the graph of a captured program, in place.

    Args:
        graph: a graph without operators that write into a tensor; `meta["val"]` has the strides of the running model.
        where: name of the program in messages.

    Raises:
        CaptureError: an operator reads memory about which nothing is known.
    """
    for node in [n for n in graph.nodes if n.target in AS_STRIDED]:
        source: Any = node.args[0]
        offset = argument_of(node, "storage_offset")
        offset = source.meta["val"].storage_offset() if offset is None else offset
        while not _fills_its_memory(source.meta["val"]) and is_view(source):
            source = source.args[0]
        value = source.meta["val"]
        size, stride = argument_of(node, "size"), argument_of(node, "stride")
        offset -= value.storage_offset()
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if not _fills_its_memory(value) or offset < 0 or (math.prod(size) and last >= value.numel()):
            raise CaptureError(
                f"{where}: calls aten.as_strided,{place_of(node)}\nwhich reads memory that is none of its tensor's; "
                "give it a tensor that is contiguous, or write it with unfold, reshape and slices"
            )
        node.args, node.kwargs = (source, size, stride, offset), {}
        replace_by(graph, node, _selected)


def _fills_its_memory(value: Tensor) -> bool:
    return value.permute(_in_memory(value)).is_contiguous()


def _in_memory(value: Tensor) -> list[int]:
    """Returns the dimensions, the one with the largest stride first."""
    return sorted(range(value.dim()), key=value.stride, reverse=True)


def _selected(source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    index = torch.full((), offset, device=source.device)
    for length, step in zip(size, stride, strict=True):
        index = index[..., None] + torch.arange(length, device=source.device) * step
    elements = source.permute(_in_memory(source)).reshape(-1)
    return elements.index_select(0, index.reshape(-1)).reshape(list(size))
