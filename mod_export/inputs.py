"""What engines are fed: seeded, and of five kinds, because each finds other faults.

`text` is what the model was trained for; `random` reaches ids and scores that text does not; `padded` has rows that are
shorter than the bucket, and shorter than k, and exactly k; `ties` repeats one token, so that the scores of
whole stretches are equal or nearly so and the rule for ties has to decide; `near_ties` are random rows chosen, by
whoever has a reference to ask, for how close the scores on either side of the selection's edge are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from mod_export.artifacts import Bucket
from mod_export.protocols import LoadedModel

__all__ = ["KINDS", "Batch", "affordable_tokens", "parity_batches", "timing_batch"]

MOST_LENGTHS = 16
MOST_RANDOM_BATCHES = 8
MOST_RANDOM_TOKENS = 2**13
MOST_FLOPS = 2e12
"""Of one kind of input that is there to be many: 20 seconds of a slow processor. It counts from 60 M parameters on."""
KINDS = ("text", "random", "padded", "ties", "near_ties")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch: ids int64 (B, S), and lengths int64 (B,) of real tokens; kind is one of KINDS. Logits of tokens before
    position `judged_from` are nobody's answer.
    """

    kind: str
    ids_BS: np.ndarray
    lengths_B: np.ndarray
    judged_from: int = 0

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """By the names of the graph's inputs."""
        return {"input_ids": self.ids_BS, "lengths": self.lengths_B}

    @property
    def real_BS(self) -> np.ndarray:
        """Bool (B, S): True for real tokens."""
        return np.arange(self.ids_BS.shape[1]) < self.lengths_B[:, None]


def parity_batches(loaded: LoadedModel, bucket: Bucket, seed: int, per_kind: int, texts: int = 1) -> list[Batch]:
    """Batches of every kind; `text` is left out when the model's vocabulary has no text here.

    Args:
        loaded: the model.
        bucket: the shape.
        seed: of everything.
        per_kind: batches of each kind.
        texts: least number of batches of text, which perplexity is averaged over.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for i in range(per_kind, texts):
        text_BS = loaded.sample_ids(bucket.batch, bucket.seq, seed + i)
        if text_BS is not None:
            batches.append(Batch("text", text_BS, np.full(bucket.batch, bucket.seq, dtype=np.int64)))
    for i in range(per_kind):
        random_BS = rng.integers(0, loaded.vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
        text_BS = loaded.sample_ids(bucket.batch, bucket.seq, seed + i)
        full_B = np.full(bucket.batch, bucket.seq, dtype=np.int64)
        if text_BS is not None:
            batches.append(Batch("text", text_BS, full_B))
        batches += [Batch("random", ids_BS, full_B) for ids_BS in _every_id(rng, bucket, loaded)]
        for lengths_B in _lengths(rng, bucket, set(loaded.k_by_layer(bucket.seq).values())):
            batches.append(Batch("padded", random_BS if text_BS is None else text_BS, lengths_B))
        token_B1 = rng.integers(0, loaded.vocab_size, (bucket.batch, 1), dtype=np.int64)
        batches.append(Batch("ties", np.repeat(token_B1, bucket.seq, axis=1), full_B))
    return batches


def affordable_tokens(loaded: LoadedModel) -> int:
    """Tokens that a search through many inputs may run through a model, two FLOPs for each parameter."""
    return int(MOST_FLOPS / (2 * sum(tensor.numel() for tensor in loaded.weights.values())))


def timing_batch(bucket: Bucket, vocab_size: int, seed: int) -> Batch:
    """A full bucket of random ids. The graph is static, so its time does not depend on which ids they are."""
    rng = np.random.default_rng(seed)
    ids_BS = rng.integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
    return Batch("random", ids_BS, np.full(bucket.batch, bucket.seq, dtype=np.int64))


def _every_id(rng: np.random.Generator, bucket: Bucket, loaded: LoadedModel) -> list[np.ndarray]:
    """Batches in which every id stands once, in any order, and others; of a large vocabulary or model a part of it."""
    size, vocab_size = bucket.batch * bucket.seq, loaded.vocab_size
    most = min(MOST_RANDOM_TOKENS, affordable_tokens(loaded))
    count = max(1, min(-(-vocab_size // size), most // size, MOST_RANDOM_BATCHES))
    ids_N = rng.permutation(vocab_size)[: count * size]
    more_N = rng.integers(0, vocab_size, count * size - len(ids_N))
    return list(np.concatenate([ids_N, more_N]).astype(np.int64).reshape(count, bucket.batch, bucket.seq))


def _lengths(rng: np.random.Generator, bucket: Bucket, ks: Collection[int]) -> list[np.ndarray]:
    """Lengths at which a selection of k places changes its nature, and some others, in batches of the bucket's size.

    One token; one less than k, k, and one more; a sixteenth and half of the bucket; all but one; and two at random.
    """
    S = bucket.seq
    edges = {1, S // 16, S // 2, S - 1, *(k + step for k in ks for step in (-1, 0, 1))}
    lengths = sorted(length for length in edges if 1 <= length <= S)
    if len(lengths) > MOST_LENGTHS:
        lengths = [int(length) for length in rng.choice(lengths, MOST_LENGTHS, replace=False)]
    count = -(-(len(lengths) + 2) // bucket.batch) * bucket.batch
    others = rng.integers(max(1, S // 2), S + 1, count - len(lengths))
    # In any order, so that no row of the batch has the short ones to itself.
    return list(rng.permutation([*lengths, *others]).astype(np.int64).reshape(-1, bucket.batch))
