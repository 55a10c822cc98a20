"""The inputs of a validation: seeded, and of several kinds, because each kind finds different faults.

For a model of token ids, `text` is what it was trained for, `random` reaches ids and scores that text does not, and
`padded` has rows that are shorter than the bucket, shorter than k, and exactly k long. For a model of any other inputs,
`sample` holds the inputs that it was given, or inputs that resemble them. `ties` repeats one token, so that many scores
are equal or nearly equal, and the rule for ties decides. `near_ties` are rows in which the last selected and the first
skipped token have the closest scores: close enough that rounding in a shorter float can swap them, and too far apart
for rounding in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import BuildConfig
from mod_export.judge.compare import FIRST_COME, Judged, rms_of_finite
from mod_export.judge.text import TextSource, text_ids
from mod_export.model.model import Model, token_ids
from mod_export.types import TOKEN_INPUTS, Bucket, Site

if TYPE_CHECKING:
    from mod_export.judge.reference import Reference

MOST_LENGTHS = 16
MOST_RANDOM_BATCHES = 8
MOST_RANDOM_TOKENS = 2**13
MOST_SAMPLES = 4
MOST_FLOPS = 100 * 10**9
"""Limit for the inputs of one kind: one to three seconds on one core. Short rows of models up to 3 M parameters stay
below it."""
LEAST_LENGTHS = 4
"""Number of padded lengths that are tried even for the largest model."""
SEARCHED_TOKENS = 2**14
SEARCHED_ROWS = 256
NEAR_TIE_BATCHES = 4
FAR = 2.0**-17
"""About a hundred times the unit roundoff of float32: below this margin, rounding alone can swap two scores."""
KINDS = ("text", "random", "padded", "sample", "ties", "near_ties")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch of inputs.

    Attributes:
        kind: one of KINDS.
        bucket: its shape.
        feeds: arrays by the names of the graph's inputs, in the order of the module's arguments.
        judged_from: logits before this position are ignored.
    """

    kind: str
    bucket: Bucket
    feeds: Mapping[str, np.ndarray]
    judged_from: int = 0

    @classmethod
    def of_tokens(cls, kind: str, ids_BS: np.ndarray, lengths_B: np.ndarray) -> Batch:
        """Makes a batch of token ids, int64 (B, S), with int64 (B,) real tokens in each row."""
        return cls(kind, Bucket(*ids_BS.shape), dict(zip(TOKEN_INPUTS, (ids_BS, lengths_B), strict=True)))

    @property
    def ids_BS(self) -> np.ndarray:
        """Token ids, int64 (B, S), of a batch for a model of token ids."""
        return self.feeds[TOKEN_INPUTS[0]]

    @property
    def lengths_B(self) -> np.ndarray:
        """Number of real tokens in each row, int64 (B,)."""
        return self.feeds[TOKEN_INPUTS[1]]

    @property
    def real_BS(self) -> np.ndarray:
        """Bool (B, S): True for real tokens."""
        return np.arange(self.bucket.seq) < self.lengths_B[:, None]

    @property
    def digest(self) -> str:
        """SHA-256 of its shape and inputs."""
        digest = hashlib.sha256(str(self.bucket).encode())
        for array in self.feeds.values():
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def read_by(self, inputs: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the feeds that an engine has inputs for: some builders drop an input that nothing reads."""
        return {name: array for name, array in self.feeds.items() if name in inputs}


def batches_of(
    reference: Reference, bucket: Bucket, config: BuildConfig, text_source: TextSource | None = None
) -> list[Batch]:
    """Returns all inputs of a bucket, of every kind. `text_source` is as in `text_ids`."""
    per_kind, texts = config.parity.batches_per_kind, config.parity.text_batches
    ks = reference.k_by_layer(bucket).values()
    batches = parity_batches(reference.model, bucket, ks, config.seed, per_kind, texts, text_source)
    return batches + reference.remembered(
        f"near-ties of {bucket.name}, seed {config.seed}", lambda: near_tie_batches(reference, bucket, config.seed)
    )


def parity_batches(
    model: Model,
    bucket: Bucket,
    ks: Iterable[int],
    seed: int,
    per_kind: int,
    texts: int = 1,
    text_source: TextSource | None = None,
) -> list[Batch]:
    """Makes batches of every kind except near-ties; `text` is left out if the model has no text.

    Args:
        model: the model that the batches are for.
        bucket: their shape.
        ks: slots of the model's routing sites at this shape.
        seed: seed of all random choices.
        per_kind: batches of each kind.
        texts: least number of text batches; perplexity is averaged over them.
        text_source: source of text, as in `text_ids`.
    """
    if model.tokens is None:
        return _samples(model, bucket, seed, per_kind)
    rng, ks, vocab_size = np.random.default_rng(seed), sorted(set(ks)), model.tokens.vocab_size
    full_B = np.full(bucket.batch, bucket.seq, dtype=np.int64)
    batches = []
    for i in range(per_kind, texts):
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i, text_source)
        if text_BS is not None:
            batches.append(Batch.of_tokens("text", text_BS, full_B))
    for i in range(per_kind):
        random_BS = rng.integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i, text_source)
        if text_BS is not None:
            batches.append(Batch.of_tokens("text", text_BS, full_B))
        batches += [Batch.of_tokens("random", ids_BS, full_B) for ids_BS in _every_id(rng, bucket, model)]
        for lengths_B in _lengths(rng, bucket, ks, model):
            batches.append(Batch.of_tokens("padded", random_BS if text_BS is None else text_BS, lengths_B))
        token_B1 = rng.integers(0, vocab_size, (bucket.batch, 1), dtype=np.int64)
        batches.append(Batch.of_tokens("ties", np.repeat(token_B1, bucket.seq, axis=1), full_B))
    return batches


def _samples(model: Model, bucket: Bucket, seed: int, per_kind: int) -> list[Batch]:
    """Returns samples, and `ties`, a sample with its first token repeated, if an input has a place for each token. An
    input of two values is not repeated: it may be a mask, which could then hide every token.
    """
    affordable = affordable_tokens(model, bucket.seq) // (bucket.batch * bucket.seq)
    count = per_kind * max(1, min(MOST_SAMPLES, affordable))
    batches = [Batch("sample", bucket, model.sample(bucket, seed + i)) for i in range(count)]
    feeds = batches[0].feeds
    rows = [name for name in per_token(feeds, bucket) if len(np.unique(feeds[name])) != 2]
    if rows:
        repeated = {name: np.repeat(feeds[name][:, :1], bucket.seq, axis=1) for name in rows}
        batches.append(Batch("ties", bucket, {**feeds, **repeated}))
    return batches


def _every_id(rng: np.random.Generator, bucket: Bucket, model: Model) -> list[np.ndarray]:
    """Returns batches of all ids in random order, filled up with random ids; a large vocabulary or model gets fewer."""
    size, vocab_size = bucket.batch * bucket.seq, token_ids(model).vocab_size
    most = min(MOST_RANDOM_TOKENS, affordable_tokens(model, bucket.seq))
    count = max(1, min(-(-vocab_size // size), most // size, MOST_RANDOM_BATCHES))
    ids_N = rng.permutation(vocab_size)[: count * size]
    more_N = rng.integers(0, vocab_size, count * size - len(ids_N))
    return list(np.concatenate([ids_N, more_N]).astype(np.int64).reshape(count, bucket.batch, bucket.seq))


def _lengths(rng: np.random.Generator, bucket: Bucket, ks: Sequence[int], model: Model) -> list[np.ndarray]:
    """Returns lengths around which a selection of k tokens behaves differently, and others: int64 (B,) for each batch.

    The first lengths are k - 1 and k + 1. Then come one token, all but one, k, half and a sixteenth of the bucket, and
    at least two random lengths. A large model gets only the first of these.
    """
    S = bucket.seq
    ks = rng.permutation(ks).tolist()
    edges = [*(k + step for step in (-1, 1) for k in ks), 1, S - 1, *ks, S // 2, S // 16]
    random_lengths = rng.integers(max(1, S // 2), S + 1, 2 + bucket.batch).tolist()
    lengths = [length for length in dict.fromkeys(edges) if 1 <= length <= S][:MOST_LENGTHS]
    most = max(LEAST_LENGTHS, affordable_tokens(model, S) // S)
    count = -(-min(len(lengths) + 2, most) // bucket.batch) * bucket.batch
    # Shuffled, so that the short lengths do not all fall into the same row of the batch.
    return list(rng.permutation([*lengths, *random_lengths][:count]).astype(np.int64).reshape(-1, bucket.batch))


def per_token(arrays: Mapping[str, np.ndarray], bucket: Bucket) -> list[str]:
    """Returns the names of the arrays that have a value or a vector for each token: (B, S, ...)."""
    return [name for name, array in arrays.items() if array.shape[:2] == (bucket.batch, bucket.seq)]


def one_of_each_kind(batches: Iterable[Batch]) -> list[Batch]:
    """Returns the first batch of every kind."""
    first_of: dict[str, Batch] = {}
    for batch in batches:
        first_of.setdefault(batch.kind, batch)
    return list(first_of.values())


def affordable_tokens(model: Model, seq: int) -> int:
    """Returns how many tokens of one kind of input a model may run on, in rows of `seq` tokens.

    A token costs two FLOPs per parameter, and those of the attention that its causal mask leaves, if the model can
    calculate them.
    """
    layers = model.layers(1, seq) or ()
    hidden = sum(sum(layer.flops.values()) - layer.needed_flops for layer in layers)
    attention = sum(layer.flops.get("attention", 0) for layer in layers) - hidden
    return int(MOST_FLOPS / (2 * model.parameters + attention / seq))


# Near-ties, which only a run of the reference can find, because it shows the scores


def near_tie_batches(reference: Reference, bucket: Bucket, seed: int) -> list[Batch]:
    """Returns the random rows with the smallest margins at each routing site; empty if nothing is routed.

    Runs the reference on up to SEARCHED_TOKENS tokens, fewer for a large model.
    """
    # This reference keeps no runs: they are not needed again.
    passing = reference.with_weights({})
    tokens = min(SEARCHED_TOKENS, affordable_tokens(reference.model, bucket.seq))
    # In batches of the bucket's own shape, because another shape would have to be captured first.
    count = max(2, min(SEARCHED_ROWS, tokens // bucket.seq) // bucket.batch)
    samples = [reference.model.sample(bucket, seed * SEARCHED_ROWS + i) for i in range(count)]
    margins: dict[Site, list[float]] = {}
    for feeds in samples:
        traced = passing.free(Batch("near_ties", bucket, feeds))
        if not traced.routed:
            return []
        for site, index_BK in traced.routed.items():
            margins.setdefault(site, []).extend(_margins(traced.judged[site], index_BK.shape[1]))
    of_rows = all(len(values) == count * bucket.batch for values in margins.values())
    if not of_rows:  # The model joins the rows of a batch or splits each of them, so only whole samples can be ranked.
        margins = {site: np.reshape(values, (count, -1)).min(1).tolist() for site, values in margins.items()}
    # The best row of every site, then the second best, and so on: several, because a swap is likely but not certain.
    ranked = list(dict.fromkeys(np.argsort(list(margins.values()), axis=1).T.ravel().tolist()))
    if of_rows:
        chosen = [_batch_of_rows(samples, ranked[i : i + bucket.batch]) for i in range(0, len(ranked), bucket.batch)]
    else:
        chosen = [samples[i] for i in ranked]
    return [Batch("near_ties", bucket, feeds) for feeds in chosen[: min(NEAR_TIE_BATCHES, count // 2)]]


def _batch_of_rows(samples: Sequence[Mapping[str, np.ndarray]], rows: Sequence[int]) -> Mapping[str, np.ndarray]:
    """Joins rows of several samples into one batch; `rows` numbers the rows of all samples consecutively. An input that
    all rows of a batch share is taken from the sample of the first row.
    """
    batch = len(rows)
    return {
        name: np.stack([samples[row // batch][name][row % batch] for row in rows])
        if array.shape[:1] == (batch,)
        else array
        for name, array in samples[rows[0] // batch].items()
    }


def _margins(judged: Judged, k: int) -> list[float]:
    """Returns (k-th score - next score) / |k-th score| of each row, infinite if a coarser float would not swap the two.
    The divisor of a k-th score near 0 is a share of the root mean square.

    If the first k tokens above 0 are selected: the smallest |score| of the row, as a share of its root mean square.

    Rounding keeps the order of scores or makes them equal, and the earlier of two equal scores wins. So only a skipped
    token that stands before the k-th one distinguishes a coarse router from an exact one.
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
    rms = rms_of_finite(score_L)
    if not (last - following > FAR * rms and order_L[k] < order_L[k - 1]):
        return np.inf
    if np.isinf(last):
        return np.inf
    # The distance between neighbouring floats grows with their size.
    return (last - following) / max(abs(last), FAR * rms)


def _nearest_to_zero(score_L: np.ndarray) -> float:
    """Returns the smallest |score| / root mean square of the scores that rounding alone does not move across 0."""
    rms = rms_of_finite(score_L)
    far_L = np.abs(score_L)[np.abs(score_L) > FAR * rms]
    return float(far_L.min()) / rms if len(far_L) else np.inf
