from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from foreign_models import token_ids
from hypothesis import given
from hypothesis import strategies as st
from manner_models import FlatBatch
from mod_dialects import D, Routed
from mod_dialects import Model as Routes

from mod_export.judge import inputs
from mod_export.judge import reference as reference_module
from mod_export.judge.inputs import KINDS, NEAR_TIE_BATCHES, Batch, near_tie_batches, parity_batches
from mod_export.judge.reference import Reference
from mod_export.model.model import Model
from mod_export.model.module import model_from_module
from mod_export.model.transformer import TransformerModel
from mod_export.types import Bucket
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec

buckets = st.builds(Bucket, st.integers(1, 4), st.integers(1, 200))


@given(bucket=buckets, seed=st.integers(0, 2**31 - 1), per_kind=st.integers(1, 3))
def test_batches_are_sound(model: Model, bucket: Bucket, seed: int, per_kind: int) -> None:
    batches = parity_batches(model, bucket, [8], seed, per_kind)
    # Only a reference can find rows with near-ties: `near_tie_batches` makes them.
    assert {batch.kind for batch in batches} == set(KINDS) - {"sample", "near_ties"}
    assert sum(batch.kind in ("text", "ties") for batch in batches) == 2 * per_kind
    for batch in batches:
        assert batch.ids_BS.shape == (bucket.batch, bucket.seq)
        assert batch.lengths_B.shape == (bucket.batch,)
        assert batch.ids_BS.dtype == batch.lengths_B.dtype == np.int64
        assert batch.ids_BS.min() >= 0
        assert batch.ids_BS.max() < model.tokens.vocab_size
        assert batch.lengths_B.min() >= 1
        assert batch.lengths_B.max() <= bucket.seq


def test_the_same_seed_gives_the_same_batches_and_another_gives_others(model: Model) -> None:
    first, again, different = (
        [batch.ids_BS.tolist() for batch in parity_batches(model, Bucket(2, 64), [8], seed, 2)] for seed in (1, 1, 2)
    )
    assert first == again != different


@pytest.mark.parametrize(("per_kind", "texts", "expected"), [(1, 4, 4), (2, 4, 4), (3, 2, 3), (1, 0, 1)])
def test_perplexity_gets_its_text(model: Model, per_kind: int, texts: int, expected: int) -> None:
    batches = parity_batches(model, Bucket(1, 32), [4], 0, per_kind, texts)
    text_ids = [batch.ids_BS for batch in batches if batch.kind == "text"]
    assert len(text_ids) == expected
    assert len({ids_BS.tobytes() for ids_BS in text_ids}) == expected
    assert batches[0].kind == "text"


def test_each_kind_is_what_it_says(model: Model) -> None:
    text, random, second, *padded, ties = parity_batches(model, Bucket(3, 64), [8], 0, 1)
    assert [batch.kind for batch in (text, random, second, ties)] == ["text", "random", "random", "ties"]
    # Every id of the vocabulary occurs.
    assert set(np.concatenate([random.ids_BS, second.ids_BS]).ravel().tolist()) == set(range(256))
    assert {batch.kind for batch in padded} == {"padded"}
    assert np.isin(text.ids_BS, list(range(9, 127))).mean() > 0.9  # Python source is nearly all ASCII.
    assert (random.ids_BS >= 127).mean() > 0.3
    for full in (text, random, ties):
        assert full.lengths_B.tolist() == [64, 64, 64]
    assert (ties.ids_BS == ties.ids_BS[:, :1]).all()


def test_a_vocabulary_without_text_gets_random_ids_only(tiny_spec: ModelSpec) -> None:
    spec = ModelSpec.from_dict({**tiny_spec.to_dict(), "vocab_size": 100})
    loaded = TransformerModel(random_checkpoint(spec, 0))
    batches = parity_batches(loaded, Bucket(1, 32), [4], 0, 1, 4)
    assert {batch.kind for batch in batches} == {"random", "padded", "ties"}
    assert max(batch.ids_BS.max() for batch in batches) < 100


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_padded_rows_have_the_lengths_at_which_selection_changes(model: Model, batch: int) -> None:
    # k is 8 of 64.
    shortest = set()
    for seed in range(4):
        batches = parity_batches(model, Bucket(batch, 64), [8], seed, 1)
        padded = [item.lengths_B for item in batches if item.kind == "padded"]
        lengths = np.concatenate(padded).tolist()
        assert {1, 4, 7, 8, 9, 32, 63} <= set(lengths)
        assert len(lengths) <= 9 + batch
        shortest |= {int(np.argmin(lengths_B)) for lengths_B in padded}
    # The shortest length is not always in the same row of the batch.
    assert len(shortest) > 1 or batch == 1


def test_a_large_model_is_run_on_fewer_inputs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(1, 64)
    usual = Counter(batch.kind for batch in parity_batches(model, bucket, [8], 0, 1))
    monkeypatch.setattr(inputs, "MOST_FLOPS", 1.0)
    batches = parity_batches(model, bucket, [8], 0, 1)
    few = Counter(batch.kind for batch in batches)
    assert few == {"text": 1, "random": 1, "padded": inputs.LEAST_LENGTHS, "ties": 1}
    assert few < usual
    # k is 8: the lengths that matter most remain.
    assert sorted(int(batch.lengths_B[0]) for batch in batches if batch.kind == "padded") == [1, 7, 9, 63]


def test_long_rows_cost_what_their_attention_costs(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two FLOPs per weight, and four for each pair of a query and a key that the causal mask leaves."""
    spec = ModelSpec.from_dict({**tiny_spec.to_dict(), "max_positions": 2**16, "routing": None})
    model = TransformerModel(random_checkpoint(spec, 0))
    monkeypatch.setattr(inputs, "MOST_FLOPS", 1e15)
    for seq in (1, 128, 2**16):
        pairs = spec.n_layers * spec.n_heads * spec.d_head * (seq + 1) / 2
        expected = int(1e15 / (2 * model.parameters + 4 * pairs))
        assert abs(inputs.affordable_tokens(model, seq) - expected) <= 1
    # A model that cannot calculate its costs counts its weights only.
    monkeypatch.setattr(TransformerModel, "layers", lambda *_: None)
    assert inputs.affordable_tokens(model, 2**16) == int(1e15 / (2 * model.parameters))


def test_a_schedule_of_many_capacities_does_not_take_forever(tiny_spec: ModelSpec) -> None:
    routing = {**tiny_spec.to_dict()["routing"], "layers": [0, 1, 2, 3], "capacity": [0.1, 0.3, 0.5, 0.7]}
    loaded = TransformerModel(random_checkpoint(ModelSpec.from_dict({**tiny_spec.to_dict(), "routing": routing}), 0))
    batches = parity_batches(loaded, Bucket(1, 200), loaded.k_by_layer(200).values(), 0, 1)
    assert 10 < sum(batch.kind == "padded" for batch in batches) <= 18


def gap(score_S: np.ndarray, k: int) -> float:
    """Relative distance from the k-th score to the next one.

    It is infinite if the earlier of the two tokens is selected already: then equal scores would change nothing.
    """
    last, following = sorted(range(len(score_S)), key=lambda i: (-score_S[i], i))[k - 1 : k + 1]
    if following > last or score_S[last] == score_S[following]:
        return math.inf
    return float((score_S[last] - score_S[following]) / abs(score_S[last]))


def closest(reference: Reference, batches: list[Batch]) -> dict[int, float]:
    """The smallest gap of each layer."""
    gaps: dict[int, list[float]] = {}
    for batch in batches:
        for layer, judged in reference.free(batch).judged.items():
            gaps.setdefault(layer, []).extend(gap(score_S, 4) for score_S in judged.score_BS.astype(np.float64))
    return {layer: min(layer_gaps) for layer, layer_gaps in gaps.items()}


@pytest.fixture(scope="module")
def near_ties(reference: Reference, bucket: Bucket) -> list[Batch]:
    return near_tie_batches(reference, bucket, 0)


def test_rows_are_full_and_closer_than_others(reference: Reference, bucket: Bucket, near_ties: list[Batch]) -> None:
    batches = near_ties
    assert len(batches) == NEAR_TIE_BATCHES
    rng = np.random.default_rng(1)
    for batch in batches:
        assert batch.kind == "near_ties"
        assert batch.ids_BS.shape == (2, 16)
        assert batch.lengths_B.tolist() == [16, 16]
    others = [Batch.of_tokens("random", rng.integers(0, 256, (2, 16)), batches[0].lengths_B) for _ in batches]
    near, usual = closest(reference, batches), closest(reference, others)
    assert near.keys() == usual.keys() == {0, 1}
    assert all(near[layer] < usual[layer] for layer in near)
    # The rows depend on the seed.
    again, other_seed = (near_tie_batches(reference, bucket, seed) for seed in (0, 4))
    assert [item.ids_BS.tolist() for item in again] == [item.ids_BS.tolist() for item in batches]
    assert [item.ids_BS.tolist() for item in other_seed] != [item.ids_BS.tolist() for item in batches]


def test_rounding_scores_to_a_shorter_float_takes_other_tokens(reference: Reference, near_ties: list[Batch]) -> None:
    """This is the purpose of the rows: they must reveal a router in bfloat16."""
    flipped = set()
    for batch in near_ties:
        traced = reference.free(batch)
        for layer, index_BK in traced.routed.items():
            coarse_BS = torch.from_numpy(traced.judged[layer].score_BS).bfloat16().double().numpy()
            chosen_BK = np.sort(np.argsort(-coarse_BS, axis=1, kind="stable")[:, : index_BK.shape[1]], axis=1)
            if not np.array_equal(chosen_BK, index_BK):
                flipped.add(layer)
    # In the first layer a score depends only on its token, and maybe no two of 256 tokens are that close.
    assert 1 in flipped


def test_the_rows_that_were_looked_at_are_not_kept(
    loaded: TransformerModel, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = Reference(loaded)
    (batch, *_) = near_tie_batches(searched, bucket, 0)
    monkeypatch.setattr(reference_module, "KEPT_BYTES", batch.ids_BS.size * 256 * 4)
    assert searched.free(batch) is searched.free(batch)


class Windows(Routed):
    """Selects a quarter of every 8 tokens, so that a row of the batch is several rows of the site."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.reshape(-1, 8, D)
        index = self.router(windows).squeeze(-1).topk(2).indices.sort().values
        wide = index[..., None].expand(-1, -1, D)
        return windows.scatter_add(1, wide, self.block(windows.gather(1, wide))).view(x.shape)


@pytest.mark.slow
def test_sites_may_have_other_rows_than_the_batch() -> None:
    torch.manual_seed(0)
    module = Routes(Windows)
    module.blocks[3] = FlatBatch()
    loaded = model_from_module(module, token_ids, [Bucket(2, 16)], "mine")
    traced = Reference(loaded)
    batches = near_tie_batches(traced, Bucket(2, 16), 0)
    assert len(batches) == NEAR_TIE_BATCHES
    assert [index_BK.shape for index_BK in traced.free(batches[0]).routed.values()] == [(4, 2), (1, 8)]


@pytest.mark.slow
def test_other_batches_and_models(reference: Reference, loaded: TransformerModel, bucket: Bucket) -> None:
    batches = near_tie_batches(reference, Bucket(5, 4), 0)
    assert batches
    assert all(batch.ids_BS.shape == (5, 4) for batch in batches)
    assert near_tie_batches(Reference(loaded.dense()), bucket, 0) == []
    # Where every token is routed nothing can be swapped, so the rows are like any other random rows.
    assert len(near_tie_batches(Reference(loaded.with_capacity(1.0)), bucket, 0)) == NEAR_TIE_BATCHES
