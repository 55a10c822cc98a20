"""Selection: which tokens of a row get the k slots, by one of two rules, and from which scores.

Shape legend: B batch, T tokens of a row that can be selected, S positions of a row, K slots. `...` is (B,) for tokens,
and (B, N) for the N experts of a block, whose selections are made at once.

Both rules return the slots of selected tokens first, in the order of the sequence, and then empty slots, which hold
skipped tokens. So causal attention among the slots shows no selected token an empty slot or a later token, and all
slots of a row hold different tokens, which lets them be written back by a plain scatter.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor

from mod_models.spec import Site

__all__ = ["FIRST_COME", "NOISE_SIZE", "RANK", "Rule", "noise_of_tokens", "noise_table", "select_first", "select_topk"]

Rule = Literal["rank", "first_come"]
RANK: Final = "rank"
"""The k largest scores, ties to the earlier token. Looks at the whole row."""
FIRST_COME: Final = "first_come"
"""The first k tokens whose score is above 0. Whether a token is selected depends on nothing after it."""
NOISE_SIZE = 2**16
NOISE_STRIDE = 7919
"""A prime, so that the noise of two routing sites is read from different parts of the table."""


def select_topk(score: Tensor, real: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row's real tokens, ties to the earlier token, positions ascending.

    `torch.topk` promises nothing about ties and its CPU and CUDA kernels differ, so the order comes from a stable
    sort. Exporters turn "stable descending sort, first k" into one TopK, whose ONNX definition breaks ties likewise.

    Args:
        score: float32 (..., T).
        real: bool (..., T), False for padding. It comes after every real token of its row, and is ranked last.
        k: how many to take, 1 <= k <= T.

    Returns:
        index int64 (..., k) ascending, live bool (..., k): False in empty slots, which hold padding.
    """
    masked = torch.where(real, score, float("-inf"))
    rank = torch.sort(masked, dim=-1, descending=True, stable=True).indices
    index = torch.sort(rank[..., :k], dim=-1).values
    return index, torch.gather(real, -1, index)


def select_first(chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k chosen tokens of each row; later ones find no slot (overflow).

    Args:
        chosen: bool (..., T), False for padding.
        k: how many to take, 1 <= k <= T.

    Returns:
        index int64 (..., k): the positions selected, ascending, then the first ones that were not chosen; live bool.
    """
    T = chosen.shape[-1]
    position = torch.arange(T, device=chosen.device)
    # All keys differ, so the order does not depend on how a TopK treats ties; they are exact in float32 below 2 ** 23.
    key = torch.where(chosen, 2 * T - position, T - position).to(torch.float32)
    index = torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]
    return index, torch.gather(chosen, -1, index)


@cache
def _quantiles(seed: int) -> Tensor:
    # Ordered by a hash: the same on every machine and in every version, which no library's generator promises.
    order = sorted(range(NOISE_SIZE), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    share = (torch.tensor(order, dtype=torch.float64, device="cpu") + 0.5) / NOISE_SIZE
    noise_N: Tensor = torch.special.ndtri(share).float()
    return noise_N


def noise_table(seed: int) -> Tensor:
    """Standard normal noise, float32 (NOISE_SIZE,): its quantiles, all different, in an order that the seed decides."""
    return _quantiles(seed).clone()


def noise_of_tokens(table_N: Tensor, ids_BS: Tensor, site: Site) -> Tensor:
    """Noise for every token, float32 (B, S), that depends on the text before it, the token itself, and the site.

    A graph has no generator and must give the same answer twice, so noise is read from a table, at the running sum of
    the token ids: other texts, other noise.

    Args:
        table_N: from `noise_table`.
        ids_BS: int64 token ids.
        site: the routing site that uses it.
    """
    # Plain arithmetic on the name: Python's own hash of a string is another one in every process.
    offset = NOISE_STRIDE * (1 + int.from_bytes(str(site).encode(), "big") % NOISE_STRIDE)
    sum_BS = torch.cumsum(ids_BS + 1, dim=1)
    return torch.index_select(table_N, 0, ((sum_BS + offset) % NOISE_SIZE).reshape(-1)).reshape(ids_BS.shape)
