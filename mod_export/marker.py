"""The marker of a routing site: an identity operation that a model calls on its selection of tokens.

A marker changes nothing in eager mode, in training, in `torch.onnx.export` or in any engine. Capture finds it in the
exported program, reads from it which tokens the site selects, can select other tokens in their place, and erases it
(`graph/sites.py`). This module imports only torch, so that a model can use it without the exporter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def mark_selection(
    index: Tensor,
    scores: Tensor,
    *,
    live: Tensor | None = None,
    available: Tensor | None = None,
    positions: Tensor | None = None,
    name: str | Sequence[str] = "",
    rule: Literal["rank", "first_come"] = "rank",
) -> tuple[Tensor, Tensor]:
    """Marks a selection and returns it. Use the returned tensors: otherwise it can be observed, but not changed.

    Shape legend: B rows, T tokens that can be selected, K slots. Several selections that are made at once (of N
    experts, say) are marked at once: `index`, `live` and `scores` then have a dimension N after B, and `name` is a
    sequence of N names.

    Args:
        index: int64 (B, K), the selected tokens as numbers from 0 to T - 1, each at most once in a row: first those of
            the live slots in ascending order, then any others.
        scores: (B, T), the scores that decide; higher is preferred.
        live: bool (B, K), False in slots that stay empty; by default all slots are live.
        available: bool (B, T), the tokens that can be selected at all (no padding); by default all tokens.
        positions: int64 (B, T), the positions of the T tokens in their rows; by default T is the whole row.
        name: name of the site, such as "3" or "3.mlp", different for every site of a model. By default it is the path
            of the module that calls this, followed by a number if one module marks several sites.
        rule: `rank`, the K largest scores, ties to the earlier token; `first_come`, the first K tokens whose score is
            above 0.

    Returns:
        `index` and `live`, as new tensors.
    """
    if live is None:
        live = torch.ones_like(index, dtype=torch.bool)
    if available is None:
        # Sites that are marked together select from the same tokens.
        available = torch.ones_like(scores if scores.dim() == 2 else scores[:, 0], dtype=torch.bool)
    names = name if isinstance(name, str) else ",".join(name)
    marked: tuple[Tensor, Tensor] = MARKER(index, live, scores.detach(), available, positions, names, rule)
    return marked


@torch.library.custom_op("mod_export::mark_selection", mutates_args=())
def _mark_selection(
    index: Tensor, live: Tensor, scores: Tensor, available: Tensor, positions: Tensor | None, names: str, rule: str
) -> tuple[Tensor, Tensor]:
    # A custom operator may not return its arguments, so both are copied; they are small.
    return index.clone(), live.clone()


@_mark_selection.register_fake
def _(
    index: Tensor, live: Tensor, scores: Tensor, available: Tensor, positions: Tensor | None, names: str, rule: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(index), torch.empty_like(live)


MARKER = torch.ops.mod_export.mark_selection.default
"""The operator of a marker, as it appears in an exported program."""


@MARKER.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)
def _decomposed(index: Tensor, live: Tensor, *_described: object) -> tuple[Tensor, Tensor]:
    # An exported program keeps its markers. Only code that takes the model as it is sees these copies: torch.compile,
    # and `torch.onnx.export`, which decomposes the marker because ONNX has no operator for it.
    return index.clone(), live.clone()


@torch.library.custom_op("mod_export::reordered", mutates_args=())
def _reordered(order: Tensor, index: Tensor, dim: int, first: bool) -> Tensor:
    """Returns an order of all tokens with those of `index` at one end, first or last. The others keep their order."""
    chosen = torch.zeros_like(order).scatter(dim, index, 1).gather(dim, order)
    places = chosen.argsort(dim=dim, stable=True)
    rest = order.gather(dim, places.narrow(dim, 0, order.shape[dim] - index.shape[dim]))
    return torch.cat([index, rest] if first else [rest, index], dim)


@_reordered.register_fake
def _(order: Tensor, index: Tensor, dim: int, first: bool) -> Tensor:
    return torch.empty_like(order)


REORDERED = torch.ops.mod_export.reordered.default
"""Operator that adapts an order of all tokens to another selection. Capture adds it beside a marker and erases both."""
