"""Selection, gather and scatter for routed blocks of fixed capacity, in any model.

The functions need only torch, and each can be copied into another project. Their graphs are static, with one plain
Gather and one plain Scatter of distinct rows, which every runtime supports. docs/models.md shows how to use them.

Shape legend: B rows, S tokens of a row, K slots, D model width, N = B * K. `...` is (B,) or more leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_tokens(scores: Tensor, k: int) -> Tensor:
    """Selects the k tokens with the largest scores; ties go to the earlier token.

    `torch.topk` does not define the order of ties, and its CPU and CUDA kernels differ, so a stable sort ranks the
    tokens. Exporters turn "stable descending sort, first k" into one TopK, which ONNX defines with the same tie rule.

    Args:
        scores: (..., S) of a floating dtype; -inf for tokens to select last, such as padding.
        k: a Python integer, 1 <= k <= S.

    Returns:
        int64 (..., k) positions, ascending, so that attention among the selected tokens stays causal.
    """
    rank = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return torch.sort(rank[..., :k], dim=-1).values


def select_chosen(chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Gives the first k chosen tokens a slot, and later ones none. A threshold or a predictor made the choice.

    Args:
        chosen: bool (..., S), False for padding.
        k: number of slots, a Python integer, 1 <= k <= S.

    Returns:
        index int64 (..., k): positions of the first k chosen tokens, ascending, then the first tokens not chosen;
        live bool (..., k): False in the slots of tokens not chosen, whose results must not be written back.
    """
    seq = chosen.shape[-1]
    position = torch.arange(seq, device=chosen.device)
    # All keys differ, so the tie rule of a TopK does not matter. They are exact in float32 for S up to 2 ** 23.
    key = torch.where(chosen, 2 * seq - position, seq - position).to(torch.float32)
    index = torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]
    return index, torch.gather(chosen, -1, index)


def forced_scores(scores: Tensor, forced: Tensor) -> Tensor:
    """Raises the scores of forced tokens, so that `select_tokens` takes them first, in the order of positions.

    Compute gates from the original scores, not from these.

    Args:
        scores: (..., S) of a floating dtype.
        forced: bool (..., S), or a shape that broadcasts to it.

    Returns:
        (..., S), +inf for forced tokens.
    """
    return torch.where(forced, torch.inf, scores)


def token_rows(index_BK: Tensor, seq: int) -> Tensor:
    """Converts positions (B, K) in rows of `seq` tokens to row numbers (N,) of the flattened (B * S, D) stream."""
    return (index_BK + seq * torch.arange(index_BK.shape[0], device=index_BK.device)[:, None]).reshape(-1)


def gather_tokens(x_BSD: Tensor, index_BK: Tensor) -> Tensor:
    """Returns the tokens at these positions, (B, K, D)."""
    B, S, D = x_BSD.shape
    return torch.index_select(x_BSD.reshape(B * S, D), 0, token_rows(index_BK, S)).reshape(B, -1, D)


def scatter_tokens(x_BSD: Tensor, index_BK: Tensor, update_BKD: Tensor) -> Tensor:
    """Returns x_BSD with `update_BKD` at these positions, which must differ within a row; other tokens do not change.

    To add to the stream, as `scatter_add` does, pass `gather_tokens(x_BSD, index_BK) + update_BKD`.
    """
    B, S, D = x_BSD.shape
    row_N = token_rows(index_BK, S)
    return x_BSD.reshape(B * S, D).index_put((row_N,), update_BKD.reshape(-1, D)).reshape(B, S, D)
