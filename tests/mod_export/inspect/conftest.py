"""Models of several kinds, as `inspect` loads them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest

from mod_export.inspect.layers import Layers, layers_of
from mod_export.model.checkpoint import model_from_weights
from mod_export.model.model import Model, Origin
from mod_export.types import Bucket
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RoutingSpec

BUCKETS = (Bucket(1, 128), Bucket(1, 256))
Loaded = Callable[[str], Model]

KINDS = {
    "routed": RoutingSpec(),
    "routed apart": RoutingSpec(parts="separate"),
    "threshold": RoutingSpec(selection="threshold", gate="sigmoid"),
}


@pytest.fixture(scope="session")
def loaded(tiny_spec: ModelSpec) -> Loaded:
    """Loads a model with initial weights: a name in KINDS, `dense`, `experts`, `staged MoDE`, or else a routed one."""

    @functools.cache
    def load(kind: str) -> Model:
        experts = ExpertsSpec(n_experts=3, top_k=2, layers=EveryNth(every=1, offset=0))
        spec = dataclasses.replace(
            tiny_spec,
            routing=None if kind in ("dense", "experts") else KINDS.get(kind, RoutingSpec(capacity=0.5)),
            experts=experts if kind in ("experts", "staged MoDE") else None,
        )
        weights = random_checkpoint(spec, 0).weights
        model = model_from_weights("mod_transformer", spec.to_dict(), weights)
        model.origin = Origin(name=kind, architecture="mod_transformer", checkpoint_sha256="0" * 64)
        return model

    return load


@pytest.fixture(scope="session")
def layers(loaded: Loaded) -> Callable[[str], Layers]:
    """Layers of the same model at 128 and 256 tokens."""
    return functools.cache(lambda kind: layers_of(loaded(kind), BUCKETS))
