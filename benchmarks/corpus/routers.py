"""Routers that wrap a block of a third-party model, one class for each manner of routing in public code.

Each takes the block's arguments, selects a fixed number of tokens, calls the block with those tokens and with every
other argument gathered at the same tokens (`tokens.py`), and puts the results back.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.corpus.tokens import at_tokens

CAPACITY = 0.25
"""Share of the tokens that a routed block computes."""


def tokens_of(seq: int) -> int:
    """Returns k, the number of tokens that a router selects from a row of `seq` tokens."""
    return max(1, int(CAPACITY * seq))


class Routed(nn.Module):
    """Base class of all manners: it calls the block. A manner defines how to select tokens and how to put results back.

    The router copies the block's plain attributes, such as transformers' `attention_type`, because models read them
    from their blocks.
    """

    dim: ClassVar[int] = 1
    """Dimension of the tokens in the tensor that the router selects from."""
    around: ClassVar[str] = "block"
    """Kind of module that the router wraps: a `block` with its residuals, a `part` whose output is added to a residual,
    or `attention`, whose keys and values come from all tokens."""

    def __init__(
        self,
        block: nn.Module,
        width: int,
        dim: int = 1,
        hidden: str = "hidden_states",
        handed_on: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """The arguments after `block` are the attributes of `Entry` with these names (`handed_on`, `hidden`, ...)."""
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)
        self.block, self.router = block, nn.Linear(width, 1)
        self.block_dim, self.hidden, self.handed_on = dim, hidden, handed_on

    @property
    def computes(self) -> nn.Module:
        """The module that is called with the selected tokens."""
        return self.block

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns indices and gates of the selected tokens: (B, K), or (K, B) if tokens are the first dimension."""
        raise NotImplementedError

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        """Returns the stream `x` after the block computed `result` from the selected tokens `chosen`."""
        raise NotImplementedError

    def taken(self, x: Tensor, index: Tensor) -> Tensor:
        """The selected tokens."""
        return x.gather(self.dim, _wide(index, x))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keyword_x = kwargs.pop(self.hidden) if self.hidden in kwargs else None
        x = args[0] if keyword_x is None else keyword_x
        x = x if self.block_dim == self.dim else x.transpose(0, 1)
        index, gate = self.select(x)
        chosen = self.taken(x, index)
        index_BK = index if self.dim == 1 else index.t()
        rest, named = at_tokens((args if keyword_x is not None else args[1:], kwargs), index_BK, x.shape[self.dim])
        inside = chosen if self.block_dim == self.dim else chosen.transpose(0, 1)
        returned = self.call(inside, x, keyword_x is not None, rest, named)
        result = returned[0] if isinstance(returned, (tuple, list)) else returned
        result = result if self.block_dim == self.dim else result.transpose(0, 1)
        out = self.put_back(x, index, gate, chosen, result)
        out = out if self.block_dim == self.dim else out.transpose(0, 1)
        if not isinstance(returned, (tuple, list)):
            return out
        arguments = args if keyword_x is not None else args[1:]
        behind = {place: arguments[argument] for place, argument in self.handed_on}
        return (out, *(behind.get(place, returned[place]) for place in range(1, len(returned))))

    def call(self, chosen: Tensor, x: Tensor, by_name: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.block(*args, **{self.hidden: chosen}, **kwargs) if by_name else self.block(chosen, *args, **kwargs)


def _wide(index: Tensor, x: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, x.shape[-1])


class Paper(Routed):
    """Takes the top k scores of a linear router, in order of position. The raw score weights the block's change."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_BS = self.router(x).squeeze(-1)
        index_BK = torch.topk(scores_BS, tokens_of(x.shape[1]), dim=1).indices.sort(dim=1).values
        return index_BK, scores_BS.gather(1, index_BK)

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return x.scatter_add(1, _wide(index, x), gate[..., None] * (result - chosen))


class SoftmaxGate(Routed):
    """A softmax over the selected scores weights the block's change. The results replace the selected tokens."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_BS1 = self.router(x)
        values, order = torch.topk(scores_BS1, tokens_of(x.shape[1]), dim=1, sorted=False)
        index_BK1, place = order.sort(dim=1)
        return index_BK1.squeeze(-1), values.softmax(dim=1).gather(1, place).squeeze(-1)

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return x.scatter(1, _wide(index, x), chosen + gate[..., None] * (result - chosen))


class ScatterAdd(Routed):
    """The block's whole output, times a sigmoid of the score, is added: its residual counts twice."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = torch.topk(torch.sigmoid(self.router(x)), tokens_of(x.shape[1]), dim=1, sorted=False)
        index, place = order.sort(dim=1)
        return index.squeeze(-1), values.gather(1, place).squeeze(-1)

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return torch.scatter_add(x, 1, _wide(index, x), result * gate[..., None])


class BatchFirst(Routed):
    """Reads `x[rows, index]` in order of score, writes `out[rows, index] = ...`, weighted by a softmax over the row."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate_BK, index_BK = self.router(x).squeeze(-1).softmax(dim=-1).topk(tokens_of(x.shape[1]), dim=-1)
        return index_BK, gate_BK

    def taken(self, x: Tensor, index: Tensor) -> Tensor:
        return x[_rows(index), index]

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        out = x.clone()
        out[_rows(index), index] = gate[..., None] * result + (1 - gate[..., None]) * chosen
        return out


def _rows(index: Tensor) -> Tensor:
    return torch.arange(index.shape[0], device=index.device)[:, None]


class SequenceFirst(Routed):
    """Tokens are the first dimension, as in Megatron. Input and output of a batch-first block are transposed."""

    dim = 0

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_SB = self.router(x).squeeze(-1)
        index_KB = scores_SB.topk(tokens_of(x.shape[0]), dim=0).indices.sort(dim=0).values
        return index_KB, scores_SB.gather(0, index_KB).sigmoid()

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return x.scatter_add(0, _wide(index, x), gate[..., None] * (result - chosen))


class Apart(Routed):
    """Attention and MLP each have a router. Selected tokens get the gated output of a part added, all others zero."""

    around = "part"

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_BS = self.router(x).squeeze(-1)
        index_BK = scores_BS.topk(tokens_of(x.shape[1]), dim=-1).indices.sort(dim=-1).values
        return index_BK, scores_BS.gather(1, index_BK).sigmoid()

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, _wide(index, x), gate[..., None] * result)


class OneHot(Routed):
    """Tokens are dispatched and combined by products with one-hot matrices, as in mixtures of experts."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores_BS = self.router(x).squeeze(-1)
        index_BK = scores_BS.topk(tokens_of(x.shape[1]), dim=-1).indices.sort(dim=-1).values
        return index_BK, scores_BS.gather(1, index_BK).tanh()

    def taken(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.einsum("bks,bsd->bkd", _dispatch(index, x), x)

    def put_back(self, x: Tensor, index: Tensor, gate: Tensor, chosen: Tensor, result: Tensor) -> Tensor:
        return x + torch.einsum("bks,bkd->bsd", _dispatch(index, x), gate[..., None] * (result - chosen))


def _dispatch(index: Tensor, x: Tensor) -> Tensor:
    return nn.functional.one_hot(index, x.shape[1]).to(x.dtype)
