"""mypy checks here that the one implementation conforms to the protocols, as neither package imports the other."""

from __future__ import annotations

from typing import Protocol

from mod_export.model import protocol
from mod_export.model.programs import ProgramModel
from mod_models.architecture import MOD_TRANSFORMER, GeneratingTransformer, LoadedTransformer

ARCHITECTURE: protocol.Architecture = MOD_TRANSFORMER
CONVERTER: protocol.Converter = MOD_TRANSFORMER


class Everything(
    protocol.ExportableModel,
    protocol.DeclaredRouting,
    protocol.DenseBaseline,
    protocol.OutputHead,
    protocol.LayerCosts,
    protocol.AdjustableCapacity,
    protocol.Text,
    protocol.Generation,
    Protocol,
):
    """A model with every capability."""


def as_model(loaded: LoadedTransformer) -> Everything:
    return loaded


def as_generating_model(writer: GeneratingTransformer) -> protocol.GeneratingModel:
    return writer


class Sampled(protocol.ExportableModel, protocol.SampledInputs, Protocol):
    """A model with arbitrary inputs."""


def as_sampled(loaded: ProgramModel) -> Sampled:
    return loaded
