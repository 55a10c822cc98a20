"""Positions that an input declares to be padding, where a model reads inputs of its own.

What stands at a padded position is meaningless, and engines differ there freely: under an additive mask of the smallest
number a row may be masked as a whole, and is uniform in one dtype and NaN in another. A mask alone proves nothing, so a
position is padding only if all of this holds for the batch at hand, on the reference:

* an input says so: it has two values for each token, one for tokens that count and one for those that do not, or masks
  the position for every query;
* what stands there does not matter: with other contents at these positions and the same routing, every other row of
  every output keeps its bits;
* it is the mask that hides them: once it says that they count, other contents there do change the other rows.

Only outputs with a row for each token have rows to leave out. A pooled output is compared whole.

Shape legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mod_export.judge.inputs import Batch, per_token
from mod_export.judge.reference import Reference
from mod_export.model.model import sample_of
from mod_export.model.protocol import SampledInputs

HIDDEN = -10_000
"""An additive mask hides what is below: exp of it is zero in every dtype."""
OTHER = 10_007
"""Seed of a sample that no batch is made of."""


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """The input that declares it, and bool (B, S): True for tokens that count."""

    declared_by: str
    real_BS: np.ndarray

    @property
    def count(self) -> int:
        """Padded positions."""
        return int((~self.real_BS).sum())


def declared_padding(reference: Reference, batch: Batch) -> Padding | None:
    """The padding of a batch; None where nothing is declared, or where what is declared does not hold.

    Costs up to four runs of the reference for each input that is a mask and hides some tokens, and not all of a row.
    """
    if not isinstance(reference.loaded, SampledInputs):
        return None
    for name, array in batch.feeds.items():
        for real_BS, lifted in _readings(array, batch):
            if _holds(reference, batch, name, real_BS, lifted):
                return Padding(name, real_BS)
    return None


def _readings(array: np.ndarray, batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What a mask may say: the tokens that count, bool (B, S), and the mask once all of them do.

    0 and False hide in most masks, and count in some (`key_padding_mask` of torch.nn); both are tried, in this order.
    """
    B, S = batch.bucket.batch, batch.bucket.seq
    if not array.ndim or array.shape[-1] != S or array.shape[0] not in (1, B):
        return
    found = np.unique(array)
    if array.dtype.kind == "f" and len(found) == 2 and found[0] <= HIDDEN and found[1] == 0:
        senses = [(array == found[1], found[1])]
    elif len(found) == 2 and found[0] == 0 and found[1] == 1:
        senses = [(array == one, one) for one in (found[1], found[0])]
    else:
        return
    for counts, value in senses:
        # Of a mask for every query: hidden from all of them.
        real = counts.reshape(counts.shape[0], -1, S).any(1)
        real_BS = np.broadcast_to(real, (B, S))
        if not real_BS.all() and real_BS.any(1).all():
            padded = np.broadcast_to(~real.reshape(real.shape[0], *[1] * (array.ndim - 2), S), array.shape)
            yield real_BS, np.where(padded, value, array).astype(array.dtype)


def _holds(reference: Reference, batch: Batch, mask: str, real_BS: np.ndarray, lifted: np.ndarray) -> bool:
    filled = _filled(reference, batch, mask, real_BS)
    if filled is None or not _have_rows(reference, batch):
        return False
    if not _same_elsewhere(reference, batch, replace(batch, feeds=filled), real_BS):
        return False
    shown = replace(batch, feeds={**batch.feeds, mask: lifted})
    return not _same_elsewhere(reference, shown, replace(batch, feeds={**filled, mask: lifted}), real_BS)


def _filled(reference: Reference, batch: Batch, mask: str, real_BS: np.ndarray) -> Mapping[str, np.ndarray] | None:
    """The inputs with the contents of another sample at padded positions; None where that is no other input."""
    other = sample_of(reference.loaded, batch.bucket, OTHER)
    feeds = dict(batch.feeds)
    for name in per_token(feeds, batch.bucket):
        # A second mask is no content.
        if name != mask and len(np.unique(other[name])) > 2:
            shape = (*real_BS.shape, *[1] * (feeds[name].ndim - 2))
            feeds[name] = np.where(real_BS.reshape(shape), feeds[name], other[name])
    return feeds if any(not np.array_equal(feeds[name], array) for name, array in batch.feeds.items()) else None


def _have_rows(reference: Reference, batch: Batch) -> bool:
    shape = (batch.bucket.batch, batch.bucket.seq)
    return any(array.shape[:2] == shape for array in reference.free(batch).outputs)


def _same_elsewhere(reference: Reference, one: Batch, other: Batch, real_BS: np.ndarray) -> bool:
    """Whether both batches give the same bits but for rows of padding, given the same routing: a router that sees the
    mask not at all selects padding as well, and candidates are compared given the same routing.
    """
    found = reference.free(one)
    pairs = zip(found.outputs, reference.forced(other, found.routed).outputs, strict=True)
    return all(_same(before, after, real_BS) for before, after in pairs)


def _same(before: np.ndarray, after: np.ndarray, real_BS: np.ndarray) -> bool:
    if before.shape[:2] == real_BS.shape:
        before, after = before[real_BS], after[real_BS]
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
