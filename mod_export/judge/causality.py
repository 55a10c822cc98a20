"""Which tokens an output depends on: whether on later ones, and whether on those that an input declares to be padding.

**Causality**, with the engine as a black box. The end of a text is replaced by that of another text, and the logits
before the replaced part are compared. They must not change in a model that generates one token at a time. Top-k over a
whole sequence changes them by construction: a later token can take the slot of an earlier one.

**Padding**, in models of other inputs than token ids. The content of a padded position is meaningless, and engines may
differ there. With an additive mask of the smallest number, for example, a whole row may be masked; its softmax is then
uniform in one dtype and NaN in another. A mask alone proves nothing. So a position counts as padding only if all of
this holds for the batch, on the reference:

* an input says so: it has exactly two values, one for tokens that count and one for the others; if it has a row for
  each query, it hides the position from every query;
* the content of the position does not matter: with other content there and the same routing, every other row of every
  output keeps its bits;
* the mask is the cause: if it says that these positions count, other content there changes other rows.

Only outputs with a row for each token have rows to leave out. A pooled output is compared whole.

Shape legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Runner
from mod_export.judge.candidates import Candidate
from mod_export.judge.inputs import Batch, parity_batches, per_token
from mod_export.judge.reference import Reference
from mod_export.rows.base import setting_fields
from mod_export.rows.correctness import CausalityRow
from mod_export.types import Setting

TRIES = 20
"""Seeds below this offset are tried to find a sample with a different last token."""
LAST = (
    "only the last token's logits are returned, so there are none before a changed end; with these engines each "
    "further token needs the whole text again"
)
HIDDEN = -10_000
"""Values of an additive mask at or below this one hide a position: their exp is zero in every dtype."""
OTHER = 10_007
"""Seed of a sample that is in no batch."""


def causality_of(
    root: Path, candidate: Candidate, reference: Reference, config: BuildConfig, tolerance: float
) -> CausalityRow:
    """Tests whether the candidate's first output that is no constant depends on later tokens. `tolerance` is the
    largest error of this output that parity allows.

    Raises:
        BuildError: the candidate cannot be run.
    """
    if reference.outputs == "last":
        return _unprobed(LAST, candidate.setting)
    bucket = candidate.setting.bucket
    batch = parity_batches(reference.model, bucket, reference.k_by_layer(bucket).values(), config.seed, 1)[0]
    if not per_token(batch.feeds, bucket):
        return _unprobed("no input has a place for each token", candidate.setting)
    with candidate.open(root, config) as runner:
        name = reference.first_output
        if name not in runner.outputs:
            return _unprobed(f"the engine gives no {name}", candidate.setting)
        return probe_causality(
            runner, reference, batch, candidate.setting,
            suffixes=config.parity.suffixes, tolerance=tolerance, seed=config.seed,
        )  # fmt: skip


def _unprobed(reason: str, setting: Setting) -> CausalityRow:
    return CausalityRow(
        **setting_fields(setting),
        suffixes=0,
        causal=True,
        earliest_change=None,
        largest_change=0.0,
        statement=f"not probed: {reason}",
    )


def cuts(seq: int, count: int) -> list[int]:
    """Returns up to `count` positions to cut texts at, from a quarter of the sequence to its last token."""
    return sorted({int(cut) for cut in np.linspace(max(1, seq // 4), seq - 1, count)}) if seq > 1 else []


def probe_causality(
    runner: Runner,
    reference: Reference,
    batch: Batch,
    setting: Setting,
    *,
    suffixes: int,
    tolerance: float,
    seed: int,
) -> CausalityRow:
    """Replaces the ends of full rows by those of another input, from several positions on, and reports whether the
    output before them changes.

    Args:
        runner: the engine.
        reference: turns the output of the engine into logits.
        batch: full rows of the bucket.
        setting: setting of the engine.
        suffixes: endings to try; fewer if the bucket is short.
        tolerance: change of a logit that rounding can explain.
        seed: the seeds after this one are tried for the other input.

    Raises:
        EngineError: the engine cannot be run.
    """
    bucket = batch.bucket
    base = _output(runner, reference, batch)
    if not per_token({"": base}, bucket):
        return _unprobed("its first output has no place for each token", setting)
    # With a single token in the vocabulary, no ending differs.
    other_feeds = next(
        (sample for n in range(1, TRIES) if _differs(sample := reference.model.sample(bucket, seed + n), batch)),
        None,
    )
    positions: Sequence[int] = cuts(bucket.seq, suffixes) if other_feeds is not None else []
    earliest: int | None = None
    largest = 0.0
    for cut in positions:
        assert other_feeds is not None
        changed = _output(runner, reference, _with_ending(batch, other_feeds, cut))
        with np.errstate(invalid="ignore"):  # Infinity minus infinity is NaN, which counts as a change.
            change = np.abs(changed[:, :cut] - base[:, :cut])
        change_BC = change.reshape(*change.shape[:2], -1).max(-1)
        largest = float(np.maximum(largest, change_BC.max()))
        moved_C = ~(change_BC <= tolerance).all(0)
        if moved_C.any():
            position = int(moved_C.argmax())
            earliest = position if earliest is None else min(earliest, position)
    return CausalityRow(
        **setting_fields(setting),
        suffixes=len(positions),
        causal=earliest is None,
        earliest_change=earliest,
        largest_change=largest,
        statement=_statement(earliest, len(positions), largest),
        declared=reference.model.looks_ahead is not None and not reference.model.looks_ahead,
    )


def _statement(earliest: int | None, suffixes: int, largest: float) -> str:
    if earliest is not None:
        return (
            f"must not be used for autoregressive sampling: changing the end of a text changed logits from position "
            f"{earliest} on before the change, by up to {largest:.2g}; it scores whole texts"
        )
    if not suffixes:
        return "not probed: with a single token there is nothing before a change; ask a longer bucket"
    return f"no logit before the change moved in {suffixes} tries: nothing speaks against autoregressive sampling"


def _differs(feeds: Mapping[str, np.ndarray], batch: Batch) -> bool:
    """Whether `feeds` have a different last token than the batch."""
    names = per_token(batch.feeds, batch.bucket)
    return any(not np.array_equal(feeds[name][:, -1], batch.feeds[name][:, -1]) for name in names)


def _with_ending(batch: Batch, ending: Mapping[str, np.ndarray], cut: int) -> Batch:
    feeds = dict(batch.feeds)
    for name in per_token(feeds, batch.bucket):
        feeds[name] = np.concatenate([feeds[name][:, :cut], ending[name][:, cut:]], axis=1)
    return replace(batch, feeds=feeds)


def _output(runner: Runner, reference: Reference, batch: Batch) -> np.ndarray:
    """Returns the first output that depends on the inputs; hidden states are turned into logits by the model's head."""
    name = reference.first_output
    output = runner.run(batch.read_by(runner.inputs), [name])[name]
    if reference.outputs != "none":
        return output.astype(np.float64) if output.dtype == bool else output
    B, S = batch.bucket.batch, batch.bucket.seq
    return reference.logits_of(output.reshape(B * S, -1)).reshape(B, S, -1)


# Padding


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
    """Yields for each possible reading of a mask: bool (B, S), True for tokens that count, and the mask as it would be
    if all tokens counted.

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


def _same_elsewhere(reference: Reference, batch: Batch, changed_batch: Batch, real_BS: np.ndarray) -> bool:
    """Whether both batches give the same bits outside padded rows, given the same routing. The routing is fixed because
    candidates are compared given the same routing, and a router that does not see the mask selects padding too.
    """
    run = reference.free(batch)
    pairs = zip(run.outputs, reference.forced(changed_batch, run.routed).outputs, strict=True)
    return all(_same(before, after, real_BS) for before, after in pairs)


def _same(before: np.ndarray, after: np.ndarray, real_BS: np.ndarray) -> bool:
    if before.shape[:2] == real_BS.shape:
        before, after = before[real_BS], after[real_BS]
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
