"""mypy checks here that the one implementation conforms to the protocols: neither package imports the other."""

from __future__ import annotations

from mod_export.sources import protocol
from mod_models.architecture import MOD_TRANSFORMER, GeneratingTransformer, LoadedTransformer

ARCHITECTURE: protocol.Architecture = MOD_TRANSFORMER


def as_model(loaded: LoadedTransformer) -> protocol.LoadedModel:
    return loaded


def as_generating_model(writer: GeneratingTransformer) -> protocol.GeneratingModel:
    return writer
