"""Whether the logits of a token depend on what comes after it: asked of the engine itself, as a black box.

The end of a text is replaced, and the logits before the replaced part are compared. A model that generates one token
at a time must not change them. Top-k over a whole sequence does, by construction: a later token can take the place of
an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Runner
from mod_export.results.base import setting_fields
from mod_export.results.structure import CausalityRow
from mod_export.sources.protocol import DeclaredRouting
from mod_export.types import PRIMARY, Setting
from mod_export.validate.candidates import Candidate
from mod_export.validate.inputs import Batch, parity_batches
from mod_export.validate.reference import Reference

LAST = (
    "only the last token's logits are returned, and nothing comes after it; each further token needs the whole text "
    "again, because what was computed for earlier ones may change with it"
)


def causality_of(
    root: Path, candidate: Candidate, reference: Reference, config: BuildConfig, tolerance: float
) -> CausalityRow:
    """Asks a candidate whether its logits depend on what comes later; `tolerance` is the largest error of a logit that
    its parity allows.

    Raises:
        BuildError: it cannot be run.
    """
    if reference.outputs == "last":
        return _unprobed(LAST, candidate.setting)
    bucket = candidate.setting.bucket
    batch = parity_batches(reference.loaded, bucket, reference.k_by_layer(bucket).values(), config.seed, 1)[0]
    name = PRIMARY[reference.outputs]
    with candidate.open(root, config) as runner:
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
    """Where texts are cut: `count` positions spread over the sequence, the last token alone among them."""
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
    """Replaces several endings of a batch of full rows by random tokens.

    Args:
        runner: the engine.
        reference: makes logits of what it returns.
        batch: full rows of the bucket.
        setting: of the engine.
        suffixes: endings to try; fewer where the bucket is short.
        tolerance: change of a logit that rounding can explain.
        seed: of the endings.

    Raises:
        EngineError: the engine cannot be run.
    """
    rng, vocab_size = np.random.default_rng(seed), reference.loaded.vocab_size
    base_BSV = _logits(runner, reference, batch.ids_BS, batch.lengths_B)
    # With a single token in the vocabulary no ending is another one.
    tried: Sequence[int] = cuts(batch.ids_BS.shape[1], suffixes) if vocab_size > 1 else []
    earliest: int | None = None
    largest = 0.0
    for cut in tried:
        ids_BS = batch.ids_BS.copy()
        # Adding 1 to V - 1 modulo V: every token of the ending is another one.
        ids_BS[:, cut:] = (ids_BS[:, cut:] + rng.integers(1, vocab_size, ids_BS[:, cut:].shape)) % vocab_size
        with np.errstate(invalid="ignore"):  # Infinity minus infinity is NaN, which is no causal answer either.
            change_BC = np.abs(_logits(runner, reference, ids_BS, batch.lengths_B)[:, :cut] - base_BSV[:, :cut]).max(-1)
        largest = float(np.maximum(largest, change_BC.max()))
        moved_C = ~(change_BC <= tolerance).all(0)
        if moved_C.any():
            position = int(moved_C.argmax())
            earliest = position if earliest is None else min(earliest, position)
    return CausalityRow(
        **setting_fields(setting),
        suffixes=len(tried),
        causal=earliest is None,
        earliest_change=earliest,
        largest_change=largest,
        statement=_statement(earliest, len(tried), largest),
        declared=isinstance(reference.loaded, DeclaredRouting) and not reference.loaded.looks_ahead,
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


def _logits(runner: Runner, reference: Reference, ids_BS: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    batch = Batch("text", ids_BS, lengths_B)
    name = PRIMARY[reference.outputs]
    found = runner.run({name: array for name, array in batch.feeds.items() if name in runner.inputs}, [name])
    if name == "logits":
        return found[name]
    return reference.output_head.head(found[name].reshape(ids_BS.size, -1)).reshape(*ids_BS.shape, -1)
