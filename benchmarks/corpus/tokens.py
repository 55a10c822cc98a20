"""Gathers a block's arguments at the selected tokens: masks, rotary tables, positions, all with a token dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def at_tokens(given: Any, index_BK: Tensor, seq: int, dims: tuple[int, ...] | None = None) -> Any:
    """Returns `given` with every tensor gathered along its dimensions of size `seq`.

    A mask (B, H, S, S) becomes (B, H, K, K). The first dimension is the batch: B, 1 (broadcast) or B times the heads.
    A table without a batch dimension, (S,) or (S, E), gets one.

    Args:
        given: tensors, and tuples, lists and dictionaries of them; anything else is returned unchanged.
        index_BK: int64, indices of the selected tokens.
        seq: S, the number of tokens that were selected from.
        dims: gathers only along these dimensions of size S, counted from the end; by default along all of them.
    """
    if isinstance(given, Tensor):
        return _gathered(given, index_BK, seq, dims)
    if isinstance(given, dict):
        return {name: at_tokens(value, index_BK, seq, dims) for name, value in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)(at_tokens(value, index_BK, seq, dims) for value in given)
    return given


def _gathered(tensor: Tensor, index_BK: Tensor, seq: int, dims: tuple[int, ...] | None) -> Tensor:
    token_dims = [dim - tensor.dim() for dim, size in enumerate(tensor.shape) if size == seq]
    for dim in token_dims if dims is None else [dim for dim in token_dims if dim in dims]:
        tensor = _along(tensor, index_BK, dim)
    return tensor


def _along(tensor: Tensor, index_BK: Tensor, dim: int) -> Tensor:
    """`dim` is counted from the end, so that it stays valid when a batch dimension is put in front."""
    B = index_BK.shape[0]
    if tensor.dim() + dim == 0:
        tensor = tensor[None]
    if tensor.shape[0] == 1:
        tensor = tensor.expand(B, *tensor.shape[1:])
    index = index_BK.repeat_interleave(tensor.shape[0] // B, dim=0) if tensor.shape[0] > B else index_BK
    shape = [index.shape[0], *[1] * (tensor.dim() - 1)]
    shape[dim] = index.shape[1]
    wide = list(tensor.shape)
    wide[dim] = index.shape[1]
    return torch.gather(tensor, dim, index.reshape(shape).expand(wide))
