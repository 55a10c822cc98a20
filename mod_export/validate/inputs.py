"""The inputs of a validation: seeded, and of several kinds, because each kind finds other faults.

Of a model of token ids, `text` is what it was trained for. `random` reaches ids and scores that text does not. `padded`
has rows that are shorter than the bucket, shorter than k, and exactly k long. Of a model of any other inputs, `sample`
is what it was given as inputs, or what resembles them. `ties` repeats one token, so that many scores are equal or
nearly so and the rule for ties decides. `near_ties` are rows in which the last selected and the first skipped token
have the closest scores: close enough for the rounding of a shorter float to swap them, and too far apart for that of
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import BuildConfig
from mod_export.sources.model import sample_of, token_ids
from mod_export.sources.protocol import ExportableModel, SampledInputs, Text
from mod_export.types import TOKEN_INPUTS, Bucket, Site
from mod_export.validate.compare import FIRST_COME, Judged

if TYPE_CHECKING:
    from mod_export.validate.reference import Reference

MOST_LENGTHS = 16
MOST_RANDOM_BATCHES = 8
MOST_RANDOM_TOKENS = 2**13
MOST_SAMPLES = 4
MOST_FLOPS = 100 * 10**9
"""Of the inputs of one kind: one to three seconds of one core. It limits models of more than 3 M parameters."""
LEAST_LENGTHS = 4
"""Lengths of padded rows that are tried however large the model is."""
SEARCHED_TOKENS = 2**14
SEARCHED_ROWS = 256
NEAR_TIE_BATCHES = 4
FAR = 2.0**-17
"""A hundred times the unit roundoff of float32: margins below it can be swapped by rounding alone."""
KINDS = ("text", "random", "padded", "sample", "ties", "near_ties")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch.

    Attributes:
        kind: one of KINDS.
        bucket: its shape.
        feeds: by the names of the graph's inputs, in the order of the module's arguments.
        judged_from: logits before this position are ignored.
    """

    kind: str
    bucket: Bucket
    feeds: Mapping[str, np.ndarray]
    judged_from: int = 0

    @classmethod
    def of_tokens(cls, kind: str, ids_BS: np.ndarray, lengths_B: np.ndarray) -> Batch:
        """Token ids int64 (B, S), and the number int64 (B,) of real tokens of each row."""
        return cls(kind, Bucket(*ids_BS.shape), dict(zip(TOKEN_INPUTS, (ids_BS, lengths_B), strict=True)))

    @property
    def ids_BS(self) -> np.ndarray:
        """The ids of a batch of tokens."""
        return self.feeds[TOKEN_INPUTS[0]]

    @property
    def lengths_B(self) -> np.ndarray:
        """The real tokens of its rows."""
        return self.feeds[TOKEN_INPUTS[1]]

    @property
    def real_BS(self) -> np.ndarray:
        """Bool (B, S): True for real tokens."""
        return np.arange(self.bucket.seq) < self.lengths_B[:, None]

    def read_by(self, inputs: Iterable[str]) -> dict[str, np.ndarray]:
        """The feeds that an engine has inputs for: some builders drop an input that nothing reads."""
        return {name: array for name, array in self.feeds.items() if name in inputs}


def batches_of(reference: Reference, bucket: Bucket, config: BuildConfig) -> list[Batch]:
    """All inputs of a bucket, of every kind."""
    parity = config.parity
    ks = reference.k_by_layer(bucket).values()
    batches = parity_batches(reference.loaded, bucket, ks, config.seed, parity.batches_per_kind, parity.text_batches)
    return batches + reference.remembered(
        f"near-ties of {bucket.name}, seed {config.seed}", lambda: near_tie_batches(reference, bucket, config.seed)
    )


def parity_batches(
    model: ExportableModel, bucket: Bucket, ks: Iterable[int], seed: int, per_kind: int, texts: int = 1
) -> list[Batch]:
    """Batches of every kind but near-ties; `text` is left out where the model has no text.

    Args:
        model: that they are for.
        bucket: the shape.
        ks: slots of its routing sites at this shape.
        seed: of everything.
        per_kind: batches of each kind.
        texts: least number of batches of text, which perplexity is averaged over.
    """
    if isinstance(model, SampledInputs):
        return _samples(model, bucket, seed, per_kind)
    rng, ks, vocab_size = np.random.default_rng(seed), sorted(set(ks)), token_ids(model).vocab_size
    full_B = np.full(bucket.batch, bucket.seq, dtype=np.int64)
    batches = []
    for i in range(per_kind, texts):
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i)
        if text_BS is not None:
            batches.append(Batch.of_tokens("text", text_BS, full_B))
    for i in range(per_kind):
        random_BS = rng.integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i)
        if text_BS is not None:
            batches.append(Batch.of_tokens("text", text_BS, full_B))
        batches += [Batch.of_tokens("random", ids_BS, full_B) for ids_BS in _every_id(rng, bucket, model)]
        for lengths_B in _lengths(rng, bucket, ks, model):
            batches.append(Batch.of_tokens("padded", random_BS if text_BS is None else text_BS, lengths_B))
        token_B1 = rng.integers(0, vocab_size, (bucket.batch, 1), dtype=np.int64)
        batches.append(Batch.of_tokens("ties", np.repeat(token_B1, bucket.seq, axis=1), full_B))
    return batches


def _samples(model: ExportableModel, bucket: Bucket, seed: int, per_kind: int) -> list[Batch]:
    """Samples, and one of them with its first token everywhere, where an input has a place for each token."""
    count = per_kind * max(1, min(MOST_SAMPLES, affordable_tokens(model) // (bucket.batch * bucket.seq)))
    batches = [Batch("sample", bucket, sample_of(model, bucket, seed + i)) for i in range(count)]
    feeds = batches[0].feeds
    rows = per_token(feeds, bucket)
    if rows:
        repeated = {name: np.repeat(feeds[name][:, :1], bucket.seq, axis=1) for name in rows}
        batches.append(Batch("ties", bucket, {**feeds, **repeated}))
    return batches


def per_token(arrays: Mapping[str, np.ndarray], bucket: Bucket) -> list[str]:
    """Names of those that have a value, or a vector, for each token: (B, S, ...)."""
    return [name for name, array in arrays.items() if array.shape[:2] == (bucket.batch, bucket.seq)]


def one_of_each_kind(batches: Iterable[Batch]) -> list[Batch]:
    """The first batch of every kind."""
    found: dict[str, Batch] = {}
    for batch in batches:
        found.setdefault(batch.kind, batch)
    return list(found.values())


def text_ids(model: object, rows: int, length: int, seed: int) -> np.ndarray | None:
    """Held-out text, int64 (rows, length); None where the model has no text, or none of that length."""
    return model.sample_ids(rows, length, seed) if isinstance(model, Text) else None


def prompts_of(model: ExportableModel | None, vocab_size: int, rows: int, length: int, seed: int) -> np.ndarray:
    """Beginnings of held-out text where the model has text, else random ids: int64 (rows, length)."""
    ids_BS = text_ids(model, rows, length, seed)
    if ids_BS is not None:
        return ids_BS
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), dtype=np.int64)


def affordable_tokens(model: ExportableModel) -> int:
    """Tokens of one kind of input that a model may be run on, at two FLOPs for each parameter and token."""
    return int(MOST_FLOPS / (2 * sum(tensor.numel() for tensor in model.weights.values())))


def _every_id(rng: np.random.Generator, bucket: Bucket, model: ExportableModel) -> list[np.ndarray]:
    """Batches in which every id stands once, in any order, and others; of a large vocabulary or model a part of it."""
    size, vocab_size = bucket.batch * bucket.seq, token_ids(model).vocab_size
    most = min(MOST_RANDOM_TOKENS, affordable_tokens(model))
    count = max(1, min(-(-vocab_size // size), most // size, MOST_RANDOM_BATCHES))
    ids_N = rng.permutation(vocab_size)[: count * size]
    more_N = rng.integers(0, vocab_size, count * size - len(ids_N))
    return list(np.concatenate([ids_N, more_N]).astype(np.int64).reshape(count, bucket.batch, bucket.seq))


def _lengths(rng: np.random.Generator, bucket: Bucket, ks: Sequence[int], model: ExportableModel) -> list[np.ndarray]:
    """Lengths at which a selection of k tokens changes its nature, and some others, in batches of the bucket's size.

    One less than k, and one more; one token; all but one; k; a sixteenth and half of the bucket; and two at random. Of
    a large model the first of these.
    """
    S = bucket.seq
    ks = rng.permutation(ks).tolist()
    edges = [*(k + step for step in (-1, 1) for k in ks), 1, S - 1, *ks, S // 2, S // 16]
    others = rng.integers(max(1, S // 2), S + 1, 2 + bucket.batch).tolist()
    lengths = [length for length in dict.fromkeys(edges) if 1 <= length <= S][:MOST_LENGTHS]
    most = max(LEAST_LENGTHS, affordable_tokens(model) // S)
    count = -(-min(len(lengths) + 2, most) // bucket.batch) * bucket.batch
    # In any order, so that no row of the batch has the short ones to itself.
    return list(rng.permutation([*lengths, *others][:count]).astype(np.int64).reshape(-1, bucket.batch))


def near_tie_batches(reference: Reference, bucket: Bucket, seed: int) -> list[Batch]:
    """Of random rows those with the smallest margins at each routing site; none where nothing is routed.

    Costs one run of the reference for up to SEARCHED_TOKENS tokens, fewer of a large model.
    """
    # These runs are not needed again.
    passing = reference.with_weights({})
    tokens = min(SEARCHED_TOKENS, affordable_tokens(reference.loaded))
    # In batches of the bucket's own shape, because another shape would have to be captured first.
    count = max(2, min(SEARCHED_ROWS, tokens // bucket.seq) // bucket.batch)
    samples = [sample_of(reference.loaded, bucket, seed * SEARCHED_ROWS + i) for i in range(count)]
    margins: dict[Site, list[float]] = {}
    for feeds in samples:
        traced = passing.free(Batch("near_ties", bucket, feeds))
        if not traced.routed:
            return []
        for site, index_BK in traced.routed.items():
            margins.setdefault(site, []).extend(_margins(traced.judged[site], index_BK.shape[1]))
    of_rows = all(len(found) == count * bucket.batch for found in margins.values())
    if not of_rows:  # The model makes one row of a batch, or several of each row, so that only samples are told apart.
        margins = {site: np.reshape(found, (count, -1)).min(1).tolist() for site, found in margins.items()}
    # The best row of every site, then the second best: several, because a swap is likely and not certain.
    ranked = list(dict.fromkeys(np.argsort(list(margins.values()), axis=1).T.ravel().tolist()))
    if of_rows:
        chosen = [_batch_of_rows(samples, ranked[i : i + bucket.batch]) for i in range(0, len(ranked), bucket.batch)]
    else:
        chosen = [samples[i] for i in ranked]
    return [Batch("near_ties", bucket, feeds) for feeds in chosen[: min(NEAR_TIE_BATCHES, count // 2)]]


def _batch_of_rows(samples: Sequence[Mapping[str, np.ndarray]], rows: Sequence[int]) -> Mapping[str, np.ndarray]:
    """Rows of several samples, numbered through all of them, as one batch. An input that all rows of a batch share is
    that of the first row's sample.
    """
    batch = len(rows)
    return {
        name: np.stack([samples[row // batch][name][row % batch] for row in rows])
        if array.shape[:1] == (batch,)
        else array
        for name, array in samples[rows[0] // batch].items()
    }


def _margins(judged: Judged, k: int) -> list[float]:
    """(k-th score - next score) / |k-th score| of each row; infinite where a coarser float would not swap the two.

    Where the first k tokens above 0 are selected, the smallest |score| of a row, as a share of their root mean square.

    Rounding keeps the order of scores or makes them equal, and equal scores go to the earlier token. So only a token
    that is left out and stands before the k-th one tells a coarse router from an exact one.
    """
    rows = zip(judged.score_BS.astype(np.float64), judged.open_BS, strict=True)
    if judged.rule == FIRST_COME:
        return [_nearest_to_zero(score_S[open_S]) for score_S, open_S in rows]
    return [_gap(score_S[open_S], k) for score_S, open_S in rows]


def _gap(score_L: np.ndarray, k: int) -> float:
    if k >= len(score_L):
        return np.inf
    order_L = np.argsort(-score_L, kind="stable")
    last, following = float(score_L[order_L[k - 1]]), float(score_L[order_L[k]])
    rms = _rms(score_L)
    if not (last - following > FAR * rms and order_L[k] < order_L[k - 1]):
        return np.inf
    if np.isinf(last):
        return np.inf
    # The distance between neighbouring floats grows with their size.
    return (last - following) / max(abs(last), FAR * rms)


def _nearest_to_zero(score_L: np.ndarray) -> float:
    """Of the scores that rounding alone does not bring to the other side."""
    rms = _rms(score_L)
    far_L = np.abs(score_L)[np.abs(score_L) > FAR * rms]
    return float(far_L.min()) / rms if len(far_L) else np.inf


def _rms(score_L: np.ndarray) -> float:
    """Of the finite scores: a model may give tokens that it always or never selects an infinite one."""
    finite_L = score_L[~np.isinf(score_L)]
    return float(np.sqrt(np.mean(finite_L**2))) if len(finite_L) else 0.0
