"""Writes flex_attention out as products and a softmax, because no exporter takes it.

Its scores are changed by a function of one score and its place (`score_mod`), and left out by a function of the place
(`mask_mod`), which a captured program holds as graphs of their own
(https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html). Both are mapped over all places.

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
    """Changes the graph of a captured program in place."""
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
    """The result (B, H, T, E) in the dtype of the queries, and of each row the base-2 logarithm of the sum of the
    exponentials of its scores, and the largest score, divided by log(2) as well (B, H, T).
    """
    shared = query_BHTE.shape[1] // key_BGLE.shape[1]
    key_BHLE, value_BHLE = (one.repeat_interleave(shared, 1) for one in (key_BGLE, value_BGLE))
    scores_BHTL = (query_BHTE.float() @ key_BHLE.float().transpose(-2, -1)) * scale
    places = [torch.arange(size, device=scores_BHTL.device) for size in scores_BHTL.shape]
    changed_BHTL = _at_every_place(score_mod, (0,), score_buffers)(scores_BHTL, *places, *score_buffers)
    seen_BHTL = _at_every_place(block_mask[-1], (), mask_buffers)(*places, *mask_buffers)
    changed_BHTL = torch.where(seen_BHTL, changed_BHTL, -torch.inf)
    largest_BHT = changed_BHTL.amax(-1)
    # A query that sees no key has the result 0.
    blind_BHT1 = (largest_BHT == -torch.inf)[..., None]
    shares_BHTL = torch.where(blind_BHT1, 0.0, torch.where(blind_BHT1, 0.0, changed_BHTL).softmax(-1))
    found_BHTE = shares_BHTL.to(query_BHTE.dtype) @ value_BHLE.to(query_BHTE.dtype)
    per_bit = 1 / math.log(2)
    return found_BHTE, changed_BHTL.logsumexp(-1) * per_bit, largest_BHT * per_bit


def _at_every_place(
    function: Callable[..., Any], before: tuple[int, ...], buffers: Sequence[Any]
) -> Callable[..., Any]:
    """A function of one place (row, head, query, key) as one of all of them; `before` are arguments with a value for
    each place, `buffers` those that are the same for all.
    """
    same = (None,) * len(buffers)
    for dim in (3, 2, 1, 0):
        own = tuple(0 if n == dim else None for n in range(4))
        function = torch.vmap(function, in_dims=(*before, *own, *same))
    return function
