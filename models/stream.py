"""The tokens that a block is given: all of a row, or the selected ones, with what attention must know of them.

Shape legend: B batch, S positions of a row, T tokens given, K of them selected, D model width, E half a head's width,
R = B * T rows of the flattened stream, N = B * K rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mod_export.marker import mark_selection
from mod_models.routing import Decisions, Routing
from mod_models.selection import Rule
from mod_models.spec import Site

__all__ = ["Tokens", "selected_at"]


class Tokens(NamedTuple):
    """T tokens of each row, the live ones first and in the order of the sequence.

    Attributes:
        x_BTD: the residual stream.
        live_BT: bool; False for padding, and for skipped tokens in empty slots.
        cos: rotary cosines, (T, E) of a whole row, (B, 1, T, E) of selected tokens.
        sin: the sines.
        index_BT: int64 positions in the row; None when all S tokens are here.
        seq: S.
    """

    x_BTD: Tensor
    live_BT: Tensor
    cos: Tensor
    sin: Tensor
    index_BT: Tensor | None
    seq: int

    def rows(self, index_BK: Tensor) -> Tensor:
        """Numbers among the T tokens as rows (N,) of the flattened (B * T, D) stream.

        One plain Gather and one plain Scatter with unique rows are the cheapest form in every runtime and the only one
        that TensorRT takes without a plugin.
        """
        B, T, _ = self.x_BTD.shape
        return (index_BK + T * torch.arange(B, device=index_BK.device)[:, None]).reshape(-1)

    def at(self, row_N: Tensor, index_BK: Tensor, live_BK: Tensor, positions: str) -> Tokens:
        """The tokens with these numbers, with the rotary angles that `positions` (see RoutingSpec) says."""
        B, T, D = self.x_BTD.shape
        k = index_BK.shape[1]
        x_BKD = torch.index_select(self.x_BTD.reshape(B * T, D), 0, row_N).reshape(B, k, D)
        if positions == "compact":
            cos, sin = self.cos[:k], self.sin[:k]
        elif self.index_BT is None:
            position_N = index_BK.reshape(-1)
            cos = torch.index_select(self.cos, 0, position_N).reshape(B, 1, k, -1)
            sin = torch.index_select(self.sin, 0, position_N).reshape(B, 1, k, -1)
        else:
            cos = torch.index_select(self.cos.reshape(B * T, -1), 0, row_N).reshape(B, 1, k, -1)
            sin = torch.index_select(self.sin.reshape(B * T, -1), 0, row_N).reshape(B, 1, k, -1)
        return Tokens(x_BKD, live_BK, cos, sin, self.positions(index_BK), self.seq)

    def put(self, row_N: Tensor, new_BKD: Tensor) -> Tensor:
        """The stream x_BTD with new values in these rows."""
        B, T, D = self.x_BTD.shape
        return self.x_BTD.reshape(B * T, D).index_put((row_N,), new_BKD.reshape(-1, D)).reshape(B, T, D)

    def positions(self, index_BK: Tensor) -> Tensor:
        """Numbers among the T tokens as positions in the row."""
        return index_BK if self.index_BT is None else torch.gather(self.index_BT, 1, index_BK)


def selected_at(
    sites: Sequence[Site],
    tokens: Tokens,
    decisions: Decisions,
    index: Tensor,
    live: Tensor,
    score: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Marks a selection as a routing site, where an exporter can observe and replace it, and notes it in `decisions`.

    Args:
        sites: the name of the site; or N names, of sites that select at once.
        tokens: that can be selected.
        decisions: gets a Routing for each site.
        index: int64 (B, K), or (B, N, K), numbers among the T tokens.
        live: bool, of the same shape.
        score: float32 (B, T), or (B, N, T).
        rule: `RANK` or `FIRST_COME`.

    Returns:
        Index and live, which must be used instead of those that were given.
    """
    index, live = mark_selection(
        index,
        score,
        live=live,
        available=tokens.live_BT,
        positions=tokens.index_BT,
        name=list(map(str, sites)),
        rule=rule,
    )
    for n, site in enumerate(sites):
        one = (index, live, score) if index.dim() == 2 else (index[:, n], live[:, n], score[:, n])
        decisions.made[site] = Routing(tokens.positions(one[0]), *one[1:], tokens.live_BT, rule)
    return index, live
