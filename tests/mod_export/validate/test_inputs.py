from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.sources.checkpoint import Model
from mod_export.types import Bucket
from mod_export.validate import inputs
from mod_export.validate.inputs import KINDS, Batch, parity_batches
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec

buckets = st.builds(Bucket, st.integers(1, 4), st.integers(1, 200))


@given(bucket=buckets, seed=st.integers(0, 2**31 - 1), per_kind=st.integers(1, 3))
def test_batches_are_sound(model: Model, bucket: Bucket, seed: int, per_kind: int) -> None:
    batches = parity_batches(model.loaded, bucket, seed, per_kind)
    # Rows with near-ties can only be told by a reference: `validate.near_ties` makes them.
    assert {batch.kind for batch in batches} == set(KINDS) - {"near_ties"}
    assert sum(batch.kind in ("text", "ties") for batch in batches) == 2 * per_kind
    for batch in batches:
        assert batch.ids_BS.shape == (bucket.batch, bucket.seq)
        assert batch.lengths_B.shape == (bucket.batch,)
        assert batch.ids_BS.dtype == batch.lengths_B.dtype == np.int64
        assert batch.ids_BS.min() >= 0
        assert batch.ids_BS.max() < model.loaded.vocab_size
        assert batch.lengths_B.min() >= 1
        assert batch.lengths_B.max() <= bucket.seq


def test_the_same_seed_gives_the_same_batches_and_another_gives_others(model: Model) -> None:
    def ids(seed: int) -> np.ndarray:
        return np.stack([batch.ids_BS for batch in parity_batches(model.loaded, Bucket(2, 64), seed, 2)])

    assert np.array_equal(ids(1), ids(1))
    assert not np.array_equal(ids(1), ids(2))


@pytest.mark.parametrize(("per_kind", "texts", "expected"), [(1, 4, 4), (2, 4, 4), (3, 2, 3), (1, 0, 1)])
def test_perplexity_gets_its_text(model: Model, per_kind: int, texts: int, expected: int) -> None:
    batches = parity_batches(model.loaded, Bucket(1, 32), 0, per_kind, texts)
    found = [batch.ids_BS for batch in batches if batch.kind == "text"]
    assert len(found) == expected
    assert len({ids_BS.tobytes() for ids_BS in found}) == expected
    assert batches[0].kind == "text"


def test_a_vocabulary_without_text_gets_none_of_it(tiny_spec: ModelSpec) -> None:
    spec = ModelSpec.from_dict({**tiny_spec.to_dict(), "vocab_size": 100})
    batches = parity_batches(LoadedTransformer(random_checkpoint(spec, 0)), Bucket(1, 32), 0, 1, 4)
    assert "text" not in {batch.kind for batch in batches}


def test_each_kind_is_what_it_says(model: Model) -> None:
    text, random, other, *padded, ties = parity_batches(model.loaded, Bucket(3, 64), 0, 1)
    assert [batch.kind for batch in (text, random, other, ties)] == ["text", "random", "random", "ties"]
    # Every id of the vocabulary stands somewhere.
    assert set(np.concatenate([random.ids_BS, other.ids_BS]).ravel().tolist()) == set(range(256))
    assert {batch.kind for batch in padded} == {"padded"}
    assert np.isin(text.ids_BS, list(range(9, 127))).mean() > 0.9  # Python source is nearly all ASCII.
    assert (random.ids_BS >= 127).mean() > 0.3
    for full in (text, random, ties):
        assert full.lengths_B.tolist() == [64, 64, 64]
    assert (ties.ids_BS == ties.ids_BS[:, :1]).all()


def test_a_vocabulary_without_text_gets_random_ids_only(tiny_spec: ModelSpec) -> None:
    spec = ModelSpec.from_dict({**tiny_spec.to_dict(), "vocab_size": 100})
    loaded = LoadedTransformer(random_checkpoint(spec, 0))
    batches = parity_batches(loaded, Bucket(1, 32), 0, 1)
    assert {batch.kind for batch in batches} == {"random", "padded", "ties"}
    assert max(batch.ids_BS.max() for batch in batches) < 100


def test_feeds_have_the_names_of_the_graph() -> None:
    batch = Batch("random", np.zeros((2, 4), dtype=np.int64), np.array([1, 3]))
    assert list(batch.feeds) == ["input_ids", "lengths"]
    assert batch.feeds["input_ids"] is batch.ids_BS
    assert batch.real_BS.tolist() == [[True, False, False, False], [True, True, True, False]]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_padded_rows_have_the_lengths_at_which_selection_changes(model: Model, batch: int) -> None:
    # k is 8 of 64.
    shortest = set()
    for seed in range(4):
        batches = parity_batches(model.loaded, Bucket(batch, 64), seed, 1)
        found = [one.lengths_B for one in batches if one.kind == "padded"]
        lengths = np.concatenate(found).tolist()
        assert {1, 4, 7, 8, 9, 32, 63} <= set(lengths)
        assert len(lengths) <= 9 + batch
        shortest |= {int(np.argmin(lengths_B)) for lengths_B in found}
    # No row of the batch has the short ones to itself.
    assert len(shortest) > 1 or batch == 1


def test_a_large_model_is_run_on_fewer_inputs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(1, 64)
    usual = Counter(batch.kind for batch in parity_batches(model.loaded, bucket, 0, 1))
    monkeypatch.setattr(inputs, "MOST_FLOPS", 1.0)
    batches = parity_batches(model.loaded, bucket, 0, 1)
    few = Counter(batch.kind for batch in batches)
    assert few == {"text": 1, "random": 1, "padded": inputs.LEAST_LENGTHS, "ties": 1}
    assert few < usual
    # k is 8: the lengths that matter most are left.
    assert sorted(int(batch.lengths_B[0]) for batch in batches if batch.kind == "padded") == [1, 7, 9, 63]


def test_a_schedule_of_many_capacities_does_not_take_forever(tiny_spec: ModelSpec) -> None:
    routing = {**tiny_spec.to_dict()["routing"], "layers": [0, 1, 2, 3], "capacity": [0.1, 0.3, 0.5, 0.7]}
    loaded = LoadedTransformer(random_checkpoint(ModelSpec.from_dict({**tiny_spec.to_dict(), "routing": routing}), 0))
    batches = parity_batches(loaded, Bucket(1, 200), 0, 1)
    assert 10 < sum(batch.kind == "padded" for batch in batches) <= 18
