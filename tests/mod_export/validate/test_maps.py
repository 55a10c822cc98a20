from __future__ import annotations

import numpy as np
import pytest

from mod_export.types import Bucket
from mod_export.validate import maps
from mod_export.validate.inputs import Batch, parity_batches
from mod_export.validate.maps import routing_map
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer


def test_a_map_shows_which_token_went_through_which_layer(
    reference: Reference, bucket: Bucket, batches: list[Batch]
) -> None:
    found = routing_map(reference, bucket, batches)
    assert found is not None
    (text, *_) = [batch for batch in batches if batch.kind == "text"]
    assert found.bucket == "b2s16"
    assert "".join(found.tokens).encode("latin-1") == bytes(text.ids_BS[0].astype(np.uint8))
    traced = reference.free(text)
    assert [layer.layer for layer in found.layers] == [0, 1]
    for layer in found.layers:
        scores = traced.scores[layer.layer][0]
        assert layer.routed == tuple(sorted(np.argsort(-scores, kind="stable")[:4].tolist()))
        assert layer.k == 4
        np.testing.assert_allclose(np.array(layer.scores), scores, rtol=1e-3)


def test_tokens_that_are_no_text_are_shown_as_numbers(
    reference: Reference, bucket: Bucket, batches: list[Batch]
) -> None:
    others = [batch for batch in batches if batch.kind != "text"]
    found = routing_map(reference, bucket, others)
    assert found is not None
    assert found.tokens == tuple(map(str, others[0].ids_BS[0]))


def test_nothing_to_draw(loaded: LoadedTransformer, reference: Reference, bucket: Bucket, batches: list[Batch]) -> None:
    dense = Reference(loaded.dense())
    assert routing_map(dense, bucket, parity_batches(dense.loaded, bucket, 0, 1)) is None
    assert routing_map(reference, bucket, []) is None


def test_a_row_too_long_to_be_read_is_not_drawn(
    reference: Reference, bucket: Bucket, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "MOST_TOKENS", 16)
    assert routing_map(reference, bucket, batches) is not None
    monkeypatch.setattr(maps, "MOST_TOKENS", 15)
    assert routing_map(reference, bucket, batches) is None
