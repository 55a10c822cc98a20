"""Writes flex_attention out as products and a softmax, because no exporter accepts it.

`score_mod` computes a new score from one score and its position, and `mask_mod` says which positions are seen. A
captured program holds both functions as graphs of their own
(https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html). Here both are mapped over all positions.

Shape legend: B rows, H heads of queries, G of keys and values, T queries, L keys, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mod_export.graph.program_nodes import replace_by

FLEX = torch.ops.higher_order.flex_attention


def write_out_flex_attention(module: fx.GraphModule) -> None:
    """Replaces flex_attention in the graph of a captured program, in place."""
    for node in module.graph.find_nodes(op="call_function", target=FLEX):
        replace_by(module.graph, node, _attention, whole=False)
    module.graph.eliminate_dead_code()
    module.recompile()


def _attention(
    query_BHTE: Tensor,
    key_BGLE: Tensor,
    value_BGLE: Tensor,
    score_mod: Callable[..., Any],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Any,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result (B, H, T, E) in the dtype of the queries. Also returns two values (B, H, T) for each query:
    the base-2 logarithm of the sum of the exponentials of its scores, and its largest score divided by log(2).
    """
    shared = query_BHTE.shape[1] // key_BGLE.shape[1]
    key_BHLE, value_BHLE = (tensor.repeat_interleave(shared, 1) for tensor in (key_BGLE, value_BGLE))
    scores_BHTL = (query_BHTE.float() @ key_BHLE.float().transpose(-2, -1)) * scale
    positions = [torch.arange(size, device=scores_BHTL.device) for size in scores_BHTL.shape]
    changed_BHTL = _at_every_place(score_mod, (0,), score_buffers)(scores_BHTL, *positions, *score_buffers)
    seen_BHTL = _at_every_place(block_mask[-1], (), mask_buffers)(*positions, *mask_buffers)
    changed_BHTL = torch.where(seen_BHTL, changed_BHTL, -torch.inf)
    largest_BHT = changed_BHTL.amax(-1)
    # A query that sees no key has the result 0.
    blind_BHT1 = (largest_BHT == -torch.inf)[..., None]
    shares_BHTL = torch.where(blind_BHT1, 0.0, torch.where(blind_BHT1, 0.0, changed_BHTL).softmax(-1))
    result_BHTE = shares_BHTL.to(query_BHTE.dtype) @ value_BHLE.to(query_BHTE.dtype)
    per_bit = 1 / math.log(2)
    return result_BHTE, changed_BHTL.logsumexp(-1) * per_bit, largest_BHT * per_bit


def _at_every_place(
    function: Callable[..., Any], before: tuple[int, ...], buffers: Sequence[Any]
) -> Callable[..., Any]:
    """Maps a function of one position (row, head, query, key) over all positions. `before` holds the vmap dimension of
    each argument that precedes the position and varies with it; `buffers` are the same at all positions.
    """
    same = (None,) * len(buffers)
    for dim in (3, 2, 1, 0):
        dims = tuple(0 if n == dim else None for n in range(4))
        function = torch.vmap(function, in_dims=(*before, *dims, *same))
    return function
