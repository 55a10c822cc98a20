"""Capabilities of a model can be asked for; that the implementation conforms is checked by mypy (`conformance.py`)."""

from __future__ import annotations

import pytest
from tiny_models import lively_checkpoint, make_spec

from mod_export.sources import protocol
from mod_models.architecture import LoadedTransformer

CAPABILITIES = [
    protocol.DeclaredRouting,
    protocol.DenseBaseline,
    protocol.OutputHead,
    protocol.LayerCosts,
    protocol.AdjustableCapacity,
    protocol.Text,
    protocol.Generation,
]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: one.__name__)
def test_capabilities_can_be_asked_for(capability: type) -> None:
    assert isinstance(LoadedTransformer(lively_checkpoint(make_spec())), capability)
    assert not isinstance(object(), capability)
