"""Positions that an input declares to be padding, in models of other inputs than token ids.

The content of a padded position is meaningless, and engines may differ there. Under an additive mask of the smallest
number, for example, a row may be masked as a whole; it is then uniform in one dtype and NaN in another. A mask alone
proves nothing. So a position counts as padding only if all of this holds for the batch, on the reference:

* an input says so: it has two values, one for each token that counts and one for each that does not, or it masks the
  position for every query;
* the content of the position does not matter: with other content there and the same routing, every other row of every
  output keeps its bits;
* the mask is the cause: if it says that these positions count, other content there changes other rows.

Only outputs with a row for each token have rows to leave out. A pooled output is compared whole.

Shape legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mod_export.judge.inputs import Batch, per_token
from mod_export.judge.reference import Reference

HIDDEN = -10_000
"""Values of an additive mask at or below this one hide a position: their exp is zero in every dtype."""
OTHER = 10_007
"""Seed of a sample that is in no batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """Padding of a batch: the input that declares it, and bool (B, S), True for tokens that count."""

    declared_by: str
    real_BS: np.ndarray

    @property
    def count(self) -> int:
        """Number of padded positions."""
        return int((~self.real_BS).sum())


def declared_padding(reference: Reference, batch: Batch) -> Padding | None:
    """Returns the padding of a batch; None if no input declares padding, or if the declaration does not hold.

    Costs up to four runs of the reference for each reading of a mask that hides some tokens, but no whole row.
    """
    if reference.model.tokens is not None:
        return None
    for name, array in batch.feeds.items():
        for real_BS, lifted in _readings(array, batch):
            if _holds(reference, batch, name, real_BS, lifted):
                return Padding(name, real_BS)
    return None


def _readings(array: np.ndarray, batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the possible readings of a mask: bool (B, S), the tokens that count, and the mask if all tokens count.

    0 and False hide tokens in most masks, and keep them in some (`key_padding_mask` of torch.nn). Both readings are
    tried, in this order.
    """
    B, S = batch.bucket.batch, batch.bucket.seq
    if not array.ndim or array.shape[-1] != S or array.shape[0] not in (1, B):
        return
    values = np.unique(array)
    if array.dtype.kind == "f" and len(values) == 2 and values[0] <= HIDDEN and values[1] == 0:
        senses = [(array == values[1], values[1])]
    elif len(values) == 2 and values[0] == 0 and values[1] == 1:
        senses = [(array == counted, counted) for counted in (values[1], values[0])]
    else:
        return
    for counts, value in senses:
        # If the mask has a row for every query, a padded token is hidden from all queries.
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
    """Returns the inputs with the content of another sample at padded positions; None if that changes nothing."""
    sample = reference.model.sample(batch.bucket, OTHER)
    feeds = dict(batch.feeds)
    for name in per_token(feeds, batch.bucket):
        # An input with two values is another mask and not content.
        if name != mask and len(np.unique(sample[name])) > 2:
            shape = (*real_BS.shape, *[1] * (feeds[name].ndim - 2))
            feeds[name] = np.where(real_BS.reshape(shape), feeds[name], sample[name])
    return feeds if any(not np.array_equal(feeds[name], array) for name, array in batch.feeds.items()) else None


def _have_rows(reference: Reference, batch: Batch) -> bool:
    shape = (batch.bucket.batch, batch.bucket.seq)
    return any(array.shape[:2] == shape for array in reference.free(batch).outputs)


def _same_elsewhere(reference: Reference, one: Batch, other: Batch, real_BS: np.ndarray) -> bool:
    """Whether both batches give the same bits outside padded rows, given the same routing. The routing is fixed because
    candidates are compared given the same routing, and a router that does not see the mask selects padding too.
    """
    run = reference.free(one)
    pairs = zip(run.outputs, reference.forced(other, run.routed).outputs, strict=True)
    return all(_same(before, after, real_BS) for before, after in pairs)


def _same(before: np.ndarray, after: np.ndarray, real_BS: np.ndarray) -> bool:
    if before.shape[:2] == real_BS.shape:
        before, after = before[real_BS], after[real_BS]
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
