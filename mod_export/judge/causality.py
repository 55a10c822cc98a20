"""Tests whether the logits of a token depend on later tokens, with the engine as a black box.

The end of a text is replaced by that of another text, and the logits before the replaced part are compared. They must
not change in a model that generates one token at a time. Top-k over a whole sequence changes them by construction: a
later token can take the slot of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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


def causality_of(
    root: Path, candidate: Candidate, reference: Reference, config: BuildConfig, tolerance: float
) -> CausalityRow:
    """Tests whether the first output of a candidate depends on later tokens; `tolerance` is the largest error of this
    output that parity allows.

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
        name = reference.output_names[0]
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
    """Replaces several endings of a batch of full rows by those of other inputs.

    Args:
        runner: the engine.
        reference: turns the output of the engine into logits.
        batch: full rows of the bucket.
        setting: setting of the engine.
        suffixes: endings to try; fewer if the bucket is short.
        tolerance: change of a logit that rounding can explain.
        seed: seed of the other inputs.

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


def _with_ending(batch: Batch, other: Mapping[str, np.ndarray], cut: int) -> Batch:
    feeds = dict(batch.feeds)
    for name in per_token(feeds, batch.bucket):
        feeds[name] = np.concatenate([feeds[name][:, :cut], other[name][:, cut:]], axis=1)
    return replace(batch, feeds=feeds)


def _output(runner: Runner, reference: Reference, batch: Batch) -> np.ndarray:
    """Returns the first output; hidden states are turned into logits by the model's head."""
    name = reference.output_names[0]
    output = runner.run(batch.read_by(runner.inputs), [name])[name]
    if reference.outputs != "none":
        return output.astype(np.float64) if output.dtype == bool else output
    B, S = batch.bucket.batch, batch.bucket.seq
    return reference.logits_of(output.reshape(B * S, -1)).reshape(B, S, -1)
