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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.errors import UsageError
from mod_export.model.model import Model, token_ids
from mod_export.types import TOKEN_INPUTS, Bucket

MOST_LENGTHS = 16
MOST_RANDOM_BATCHES = 8
MOST_RANDOM_TOKENS = 2**13
MOST_SAMPLES = 4
MOST_FLOPS = 100 * 10**9
"""Limit for the inputs of one kind: one to three seconds on one core. Models up to 3 M parameters stay below it."""
LEAST_LENGTHS = 4
"""Number of padded lengths that are tried even for the largest model."""
TextOf = Callable[[int, int, int], np.ndarray | None]
"""(rows, length, seed) -> text as int64 (rows, length), None if there is no text of that length."""
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


def parity_batches(
    model: Model,
    bucket: Bucket,
    ks: Iterable[int],
    seed: int,
    per_kind: int,
    texts: int = 1,
    text_of: TextOf | None = None,
) -> list[Batch]:
    """Makes batches of every kind except near-ties; `text` is left out if the model has no text.

    Args:
        model: the model that the batches are for.
        bucket: their shape.
        ks: slots of the model's routing sites at this shape.
        seed: seed of all random choices.
        per_kind: batches of each kind.
        texts: least number of text batches; perplexity is averaged over them.
        text_of: source of text for a model that has none of its own.
    """
    if model.tokens is None:
        return _samples(model, bucket, seed, per_kind)
    rng, ks, vocab_size = np.random.default_rng(seed), sorted(set(ks)), model.tokens.vocab_size
    full_B = np.full(bucket.batch, bucket.seq, dtype=np.int64)
    batches = []
    for i in range(per_kind, texts):
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i, text_of)
        if text_BS is not None:
            batches.append(Batch.of_tokens("text", text_BS, full_B))
    for i in range(per_kind):
        random_BS = rng.integers(0, vocab_size, (bucket.batch, bucket.seq), dtype=np.int64)
        text_BS = text_ids(model, bucket.batch, bucket.seq, seed + i, text_of)
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
    count = per_kind * max(1, min(MOST_SAMPLES, affordable_tokens(model) // (bucket.batch * bucket.seq)))
    batches = [Batch("sample", bucket, model.sample(bucket, seed + i)) for i in range(count)]
    feeds = batches[0].feeds
    rows = [name for name in per_token(feeds, bucket) if len(np.unique(feeds[name])) != 2]
    if rows:
        repeated = {name: np.repeat(feeds[name][:, :1], bucket.seq, axis=1) for name in rows}
        batches.append(Batch("ties", bucket, {**feeds, **repeated}))
    return batches


def per_token(arrays: Mapping[str, np.ndarray], bucket: Bucket) -> list[str]:
    """Returns the names of the arrays that have a value or a vector for each token: (B, S, ...)."""
    return [name for name, array in arrays.items() if array.shape[:2] == (bucket.batch, bucket.seq)]


def one_of_each_kind(batches: Iterable[Batch]) -> list[Batch]:
    """Returns the first batch of every kind."""
    first_of: dict[str, Batch] = {}
    for batch in batches:
        first_of.setdefault(batch.kind, batch)
    return list(first_of.values())


def text_ids(
    model: Model | None, rows: int, length: int, seed: int, text_of: TextOf | None = None
) -> np.ndarray | None:
    """Returns held-out text, int64 (rows, length), or else text from `text_of`; None if neither has that much text."""
    held_out = None if model is None else model.sample_ids(rows, length, seed)
    return text_of(rows, length, seed) if held_out is None and text_of is not None else held_out


def documentation_of(tokens_of: Callable[[str], Sequence[int]], vocab_size: int) -> TextOf:
    """Returns a source of English text for models without held-out text: pieces of Python's own `help()` topics about
    the language, tokenized by the model's tokenizer.
    """
    ids_N = _documentation_ids(tokens_of, vocab_size)

    def text_of(rows: int, length: int, seed: int) -> np.ndarray | None:
        if len(ids_N) <= length:
            return None
        start_R = np.random.default_rng(seed).integers(0, len(ids_N) - length, rows)
        ids_RS: np.ndarray = ids_N[start_R[:, None] + np.arange(length)]
        return ids_RS

    return text_of


def _documentation_ids(tokens_of: Callable[[str], Sequence[int]], vocab_size: int) -> np.ndarray:
    """Returns int64 (N,); empty if the tokenizer or the vocabulary does not fit, or if Python has no documentation."""
    try:
        ids_N = np.array(tokens_of(documentation()), dtype=np.int64)
    except UsageError:
        return np.zeros(0, np.int64)
    return ids_N if ids_N.max(initial=-1) < vocab_size else ids_N[:0]


def documentation() -> str:
    """Returns the `help()` topics about Python as one text; empty if Python was installed without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(topics.values())


def prompts_of(
    model: Model | None, vocab_size: int, rows: int, length: int, seed: int, text_of: TextOf | None = None
) -> np.ndarray:
    """Returns prompts, int64 (rows, length): text of the model or of `text_of` if there is any, else random ids."""
    ids_BS = text_ids(model, rows, length, seed, text_of)
    if ids_BS is not None:
        return ids_BS
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), dtype=np.int64)


def affordable_tokens(model: Model) -> int:
    """Returns how many tokens of one kind of input a model may run on, at two FLOPs per parameter and token."""
    return int(MOST_FLOPS / (2 * sum(tensor.numel() for tensor in model.weights.values())))


def _every_id(rng: np.random.Generator, bucket: Bucket, model: Model) -> list[np.ndarray]:
    """Returns batches of all ids in random order, filled up with random ids; a large vocabulary or model gets fewer."""
    size, vocab_size = bucket.batch * bucket.seq, token_ids(model).vocab_size
    most = min(MOST_RANDOM_TOKENS, affordable_tokens(model))
    count = max(1, min(-(-vocab_size // size), most // size, MOST_RANDOM_BATCHES))
    ids_N = rng.permutation(vocab_size)[: count * size]
    more_N = rng.integers(0, vocab_size, count * size - len(ids_N))
    return list(np.concatenate([ids_N, more_N]).astype(np.int64).reshape(count, bucket.batch, bucket.seq))


def _lengths(rng: np.random.Generator, bucket: Bucket, ks: Sequence[int], model: Model) -> list[np.ndarray]:
    """Returns lengths around which a selection of k tokens behaves differently, and others, in batches of the bucket.

    First k - 1 and k + 1; then one token, all but one, k, half and a sixteenth of the bucket; then at least two random
    lengths. A large model gets only the first of these.
    """
    S = bucket.seq
    ks = rng.permutation(ks).tolist()
    edges = [*(k + step for step in (-1, 1) for k in ks), 1, S - 1, *ks, S // 2, S // 16]
    others = rng.integers(max(1, S // 2), S + 1, 2 + bucket.batch).tolist()
    lengths = [length for length in dict.fromkeys(edges) if 1 <= length <= S][:MOST_LENGTHS]
    most = max(LEAST_LENGTHS, affordable_tokens(model) // S)
    count = -(-min(len(lengths) + 2, most) // bucket.batch) * bucket.batch
    # Shuffled, so that the short lengths do not all fall into the same row of the batch.
    return list(rng.permutation([*lengths, *others][:count]).astype(np.int64).reshape(-1, bucket.batch))
