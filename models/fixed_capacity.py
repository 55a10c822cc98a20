"""What a routed block of fixed capacity is written with, in any model: selection, gather, scatter.

The functions need nothing but torch, and each can be copied into another project. Their graphs are static, with one
plain Gather and one plain Scatter with rows that differ, which every runtime takes. docs/porting.md shows them in use.

Shape legend: B rows, S tokens of a row, K slots, D model width, N = B * K. `...` is (B,) for tokens, and may be more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_tokens(scores: Tensor, k: int) -> Tensor:
    """The k tokens with the largest scores, of equal ones the earlier.

    `torch.topk` promises nothing about ties and its CPU and CUDA kernels differ, so the order comes from a stable
    sort. Exporters turn "stable descending sort, first k" into one TopK, whose ONNX definition breaks ties likewise.

    Args:
        scores: (..., S) of a floating dtype; -inf for tokens that are to be selected last, such as padding.
        k: a Python number, 1 <= k <= S.

    Returns:
        int64 (..., k), in the order of positions, so that causal attention among the selected tokens is causal.
    """
    rank = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return torch.sort(rank[..., :k], dim=-1).values


def select_chosen(chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k tokens of those that are chosen one by one, by a threshold or a predictor; later ones find no slot.

    Args:
        chosen: bool (..., S), False for padding.
        k: the slots, a Python number, 1 <= k <= S.

    Returns:
        index int64 (..., k): the positions of the chosen tokens, ascending, then the first ones that were not chosen;
        live bool (..., k): False in those last slots, whose results must not be written back.
    """
    seq = chosen.shape[-1]
    position = torch.arange(seq, device=chosen.device)
    # All keys differ, so the order does not depend on how a TopK treats ties; they are exact in float32 below 2 ** 23.
    key = torch.where(chosen, 2 * seq - position, seq - position).to(torch.float32)
    index = torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]
    return index, torch.gather(chosen, -1, index)


def forced_scores(scores: Tensor, forced: Tensor) -> Tensor:
    """Scores with which `select_tokens` takes the forced tokens before all others, the earlier of them first.

    Weigh with the scores as they were, not with these.

    Args:
        scores: (..., S) of a floating dtype.
        forced: bool (..., S), or anything that broadcasts to it.

    Returns:
        (..., S), +inf for forced tokens.
    """
    return torch.where(forced, torch.inf, scores)


def token_rows(index_BK: Tensor, seq: int) -> Tensor:
    """Positions (B, K) in rows of `seq` tokens as numbers (N,) of the rows of the flattened (B * S, D) stream."""
    return (index_BK + seq * torch.arange(index_BK.shape[0], device=index_BK.device)[:, None]).reshape(-1)


def gather_tokens(x_BSD: Tensor, index_BK: Tensor) -> Tensor:
    """The tokens at these positions, (B, K, D)."""
    B, S, D = x_BSD.shape
    return torch.index_select(x_BSD.reshape(B * S, D), 0, token_rows(index_BK, S)).reshape(B, -1, D)


def scatter_tokens(x_BSD: Tensor, index_BK: Tensor, update_BKD: Tensor) -> Tensor:
    """x_BSD with other tokens at these positions, which differ within each row; all others stay bit for bit.

    To add to the stream, as `scatter_add` does, give `gather_tokens(x_BSD, index_BK) + update_BKD`.
    """
    B, S, D = x_BSD.shape
    row_N = token_rows(index_BK, S)
    return x_BSD.reshape(B * S, D).index_put((row_N,), update_BKD.reshape(-1, D)).reshape(B, S, D)
