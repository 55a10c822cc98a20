from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mod_export.types import Bucket
from mod_export.validate import reference as reference_module
from mod_export.validate.inputs import Batch
from mod_export.validate.near_ties import MOST_BATCHES, near_tie_batches
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer


def gap(score_S: np.ndarray, k: int) -> float:
    """From the k-th score to the next, as a share of it; infinite where the earlier of the two tokens has the place
    already, so that making the scores equal would change nothing.
    """
    last, following = sorted(range(len(score_S)), key=lambda i: (-score_S[i], i))[k - 1 : k + 1]
    if following > last or score_S[last] == score_S[following]:
        return math.inf
    return float((score_S[last] - score_S[following]) / abs(score_S[last]))


def closest(reference: Reference, batches: list[Batch]) -> dict[int, float]:
    """The smallest gap of each layer."""
    gaps: dict[int, list[float]] = {}
    for batch in batches:
        for layer, score_BS in reference.free(batch).scores.items():
            gaps.setdefault(layer, []).extend(gap(score_S, 4) for score_S in score_BS.astype(np.float64))
    return {layer: min(found) for layer, found in gaps.items()}


def test_rows_are_full_and_closer_than_others(reference: Reference, bucket: Bucket) -> None:
    batches = near_tie_batches(reference, bucket, 0)
    assert len(batches) == MOST_BATCHES
    rng = np.random.default_rng(1)
    for batch in batches:
        assert batch.kind == "near_ties"
        assert batch.ids_BS.shape == (2, 16)
        assert batch.lengths_B.tolist() == [16, 16]
    others = [Batch("random", rng.integers(0, 256, (2, 16)), batches[0].lengths_B) for _ in batches]
    near, usual = closest(reference, batches), closest(reference, others)
    assert near.keys() == usual.keys() == {0, 1}
    assert all(near[layer] < usual[layer] for layer in near)


def test_rounding_scores_to_a_shorter_float_takes_other_tokens(reference: Reference, bucket: Bucket) -> None:
    """What the rows are for: a router in bfloat16 must not pass unseen."""
    flipped = set()
    for batch in near_tie_batches(reference, bucket, 0):
        traced = reference.free(batch)
        for layer, index_BK in traced.routed.items():
            coarse_BS = torch.from_numpy(traced.scores[layer]).bfloat16().double().numpy()
            chosen_BK = np.sort(np.argsort(-coarse_BS, axis=1, kind="stable")[:, : index_BK.shape[1]], axis=1)
            if not np.array_equal(chosen_BK, index_BK):
                flipped.add(layer)
    # In the first layer a score depends on its token alone, and no two of 256 tokens may be that close.
    assert 1 in flipped


def test_the_same_seed_gives_the_same_rows(reference: Reference, bucket: Bucket) -> None:
    one, again, other = (
        np.concatenate([batch.ids_BS for batch in near_tie_batches(reference, bucket, seed)]) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_a_dense_model_has_none(loaded: LoadedTransformer, bucket: Bucket) -> None:
    assert near_tie_batches(Reference(loaded.dense()), bucket, 0) == []


def test_the_rows_that_were_looked_at_are_not_kept(
    loaded: LoadedTransformer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = Reference(loaded)
    (batch, *_) = near_tie_batches(searched, bucket, 0)
    monkeypatch.setattr(reference_module, "KEPT_BYTES", batch.ids_BS.size * 256 * 4)
    assert searched.free(batch) is searched.free(batch)


@pytest.mark.parametrize("batch", [1, 5])
def test_batches_of_any_size(reference: Reference, batch: int) -> None:
    batches = near_tie_batches(reference, Bucket(batch, 4), 0)
    assert batches
    assert all(one.ids_BS.shape == (batch, 4) for one in batches)


def test_where_every_token_is_routed_nothing_can_be_swapped(loaded: LoadedTransformer, bucket: Bucket) -> None:
    """No token is left out, so that any rows do: they are a test like any other random rows."""
    batches = near_tie_batches(Reference(loaded.with_capacity(1.0)), bucket, 0)
    assert len(batches) == MOST_BATCHES
