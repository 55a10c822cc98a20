"""The inputs of a validation: seeded, and of five kinds, because each kind finds other faults.

`text` is what the model was trained for. `random` reaches ids and scores that text does not. `padded` has rows that are
shorter than the bucket, shorter than k, and exactly k long. `ties` repeats one token, so that many scores are equal or
nearly so and the rule for ties decides. `near_ties` are random rows in which the last selected and the first skipped
token have the closest scores; `near_ties.py` finds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mod_export.sources.protocol import LoadedModel
from mod_export.types import Bucket

__all__ = ["KINDS", "Batch", "affordable_tokens", "one_of_each_kind", "parity_batches"]

MOST_LENGTHS = 16
MOST_RANDOM_BATCHES = 8
MOST_RANDOM_TOKENS = 2**13
MOST_FLOPS = 200 * 10**9
"""Of the inputs of one kind: about two seconds of one core. It limits models of more than 6 M parameters."""
LEAST_LENGTHS = 4
"""Lengths of padded rows that are tried however large the model is."""
KINDS = ("text", "random", "padded", "ties", "near_ties")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch: ids int64 (B, S), and lengths int64 (B,) of real tokens; kind is one of KINDS. Logits before position
    `judged_from` are ignored.
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
        for lengths_B in _lengths(rng, bucket, loaded):
            batches.append(Batch("padded", random_BS if text_BS is None else text_BS, lengths_B))
        token_B1 = rng.integers(0, loaded.vocab_size, (bucket.batch, 1), dtype=np.int64)
        batches.append(Batch("ties", np.repeat(token_B1, bucket.seq, axis=1), full_B))
    return batches


def one_of_each_kind(batches: Iterable[Batch]) -> list[Batch]:
    """The first batch of every kind."""
    found: dict[str, Batch] = {}
    for batch in batches:
        found.setdefault(batch.kind, batch)
    return list(found.values())


def affordable_tokens(loaded: LoadedModel) -> int:
    """Tokens of one kind of input that a model may be run on, at two FLOPs for each parameter and token."""
    return int(MOST_FLOPS / (2 * sum(tensor.numel() for tensor in loaded.weights.values())))


def _every_id(rng: np.random.Generator, bucket: Bucket, loaded: LoadedModel) -> list[np.ndarray]:
    """Batches in which every id stands once, in any order, and others; of a large vocabulary or model a part of it."""
    size, vocab_size = bucket.batch * bucket.seq, loaded.vocab_size
    most = min(MOST_RANDOM_TOKENS, affordable_tokens(loaded))
    count = max(1, min(-(-vocab_size // size), most // size, MOST_RANDOM_BATCHES))
    ids_N = rng.permutation(vocab_size)[: count * size]
    more_N = rng.integers(0, vocab_size, count * size - len(ids_N))
    return list(np.concatenate([ids_N, more_N]).astype(np.int64).reshape(count, bucket.batch, bucket.seq))


def _lengths(rng: np.random.Generator, bucket: Bucket, loaded: LoadedModel) -> list[np.ndarray]:
    """Lengths at which a selection of k tokens changes its nature, and some others, in batches of the bucket's size.

    One less than k, and one more; one token; all but one; k; a sixteenth and half of the bucket; and two at random. Of
    a large model the first of these.
    """
    S = bucket.seq
    ks = rng.permutation(sorted(set(loaded.k_by_layer(S).values()))).tolist()
    edges = [*(k + step for step in (-1, 1) for k in ks), 1, S - 1, *ks, S // 2, S // 16]
    others = rng.integers(max(1, S // 2), S + 1, 2 + bucket.batch).tolist()
    lengths = [length for length in dict.fromkeys(edges) if 1 <= length <= S][:MOST_LENGTHS]
    most = max(LEAST_LENGTHS, affordable_tokens(loaded) // S)
    count = -(-min(len(lengths) + 2, most) // bucket.batch) * bucket.batch
    # In any order, so that no row of the batch has the short ones to itself.
    return list(rng.permutation([*lengths, *others][:count]).astype(np.int64).reshape(-1, bucket.batch))
