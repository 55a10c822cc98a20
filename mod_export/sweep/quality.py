"""Perplexity of the eager model on held-out text: what a capacity costs in quality, whatever engine runs it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mod_export.protocols import LoadedModel
from mod_export.sweep.schema import Quality

if TYPE_CHECKING:
    import torch

__all__ = ["TOKENS", "quality_of"]

TOKENS = 8192
"""Predicted tokens, at least. On the shipped model the figure then moves by about 1 % from seed to seed."""
LOGITS_BYTES = 2**26
"""Of one run; longer rows are run one by one."""


def quality_of(loaded: LoadedModel, seq: int, seed: int) -> Quality | None:
    """Perplexity of a model and of its dense twin, on the same rows of `seq` tokens.

    Every position predicts its next token, with the routing that the model has for a row of this length. None when the
    model's vocabulary has no text here.
    """
    rows = math.ceil(TOKENS / seq)
    ids_RT = loaded.sample_ids(rows, seq + 1, seed)
    if ids_RT is None:
        return None
    at_once = max(1, LOGITS_BYTES // (4 * seq * loaded.vocab_size))
    return Quality(
        tokens=rows * seq,
        perplexity=_perplexity(loaded, ids_RT, at_once),
        dense_perplexity=_perplexity(loaded.dense(), ids_RT, at_once),
    )


def _perplexity(loaded: LoadedModel, ids_RT: np.ndarray, at_once: int) -> float:
    import torch

    module, text_RT = loaded.module(), torch.from_numpy(ids_RT)
    with torch.no_grad():
        nats = math.fsum(
            _nats(loaded, module, text_RT[first : first + at_once]) for first in range(0, len(text_RT), at_once)
        )
    mean = nats / (text_RT.shape[0] * (text_RT.shape[1] - 1))
    # What exp() cannot hold is no quality at all.
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


def _nats(loaded: LoadedModel, module: torch.nn.Module, text_BT: torch.Tensor) -> float:
    import torch

    ids_BS, next_BS = text_BT[:, :-1], text_BT[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    logits_BSV, _ = loaded.trace(module, ids_BS, lengths_B, None)
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1).double(), next_BS.flatten(), reduction="sum")
    return float(loss)
