"""Routing maps: which token of a real text went through which routed layer, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence

from mod_export.results.structure import MapLayer, RoutingMap
from mod_export.types import Bucket
from mod_export.validate.compare import EMPTY, Judged
from mod_export.validate.inputs import Batch
from mod_export.validate.reference import Reference

__all__ = ["MOST_TOKENS", "routing_map"]

MOST_TOKENS = 1024
"""Of one map: more than a person reads."""


def routing_map(reference: Reference, bucket: Bucket, batches: Sequence[Batch]) -> RoutingMap | None:
    """The map of the first batch of text, or of any; None where nothing is routed or the row is too long."""
    if bucket.seq > MOST_TOKENS or not batches:
        return None
    batch = next((one for one in batches if one.kind == "text"), batches[0])
    traced = reference.free(batch)
    if not traced.routed:
        return None
    ids_S = batch.ids_BS[0]
    texts = reference.loaded.token_texts(ids_S) if batch.kind == "text" else None
    return RoutingMap(
        bucket=bucket.name,
        tokens=tuple(map(str, ids_S)) if texts is None else tuple(texts),
        layers=tuple(
            MapLayer(
                layer=layer,
                k=index_BK.shape[1],
                routed=tuple(int(position) for position in index_BK[0] if position != EMPTY),
                scores=_scores(traced.judged[layer]),
            )
            for layer, index_BK in traced.routed.items()
        ),
    )


def _scores(judged: Judged) -> tuple[float | None, ...]:
    """Of the first row; None for tokens that did not get this far."""
    found = zip(judged.score_BS[0], judged.open_BS[0], strict=True)
    return tuple(float(f"{score:.4g}") if is_open else None for score, is_open in found)
