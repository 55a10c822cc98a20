"""What a candidate returns beside its routing, turned into logits so that all kinds are judged by the same numbers.

`logits` are those of every token, `last` of each row's last real token alone. `none` are hidden states after the final
norm: the reference's own head makes logits of them, so that an error counts by what it does to the next token.

Shape legend: B batch, S sequence, V vocabulary, D model width, N the tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.artifacts import PRIMARY, Outputs
from mod_export.inputs import Batch
from mod_export.protocols import LoadedModel

__all__ = ["compared_tokens", "logits_of", "primary_shape"]


def compared_tokens(outputs: Outputs, batch: Batch) -> np.ndarray:
    """Bool (B, S): the tokens whose logits a candidate gives, padding left out."""
    position_S = np.arange(batch.ids_BS.shape[1])
    if outputs != "last":
        given_BS: np.ndarray = batch.real_BS & (position_S >= batch.judged_from)
        return given_BS
    last_BS: np.ndarray = position_S == batch.lengths_B[:, None] - 1
    return last_BS


def primary_shape(outputs: Outputs, logits_shape: Sequence[int], loaded: LoadedModel) -> tuple[int, ...]:
    """The shape of a candidate's first output, where the logits of every token are `logits_shape` (B, S, V)."""
    B, S, V = logits_shape
    shapes: dict[Outputs, tuple[int, ...]] = {"logits": (B, S, V), "last": (B, V), "none": (B, S, loaded.d_model)}
    return shapes[outputs]


def logits_of(
    found: Mapping[str, np.ndarray], outputs: Outputs, batch: Batch, vocab_size: int, loaded: LoadedModel
) -> np.ndarray:
    """The logits (N, V) of the tokens that `compared_tokens` names; NaN where the candidate gives nothing usable."""
    B, S = batch.ids_BS.shape
    tokens_BS = compared_tokens(outputs, batch)
    array = found.get(PRIMARY[outputs], np.empty(0))
    if array.shape != primary_shape(outputs, (B, S, vocab_size), loaded):
        return np.full((int(tokens_BS.sum()), vocab_size), np.nan, np.float32)
    if outputs == "last":
        return array
    return array[tokens_BS] if outputs == "logits" else loaded.head(array[tokens_BS])
