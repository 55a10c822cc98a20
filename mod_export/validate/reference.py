"""The reference: the eager float32 model, as PyTorch runs it, with and without somebody else's routing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.inputs import Batch
from mod_export.protocols import LoadedModel

if TYPE_CHECKING:
    import torch

__all__ = ["Reference", "Traced"]

KEPT_BYTES = 2**30
"""Logits of free runs that are kept for the next target. Longer rows cost more memory than another run costs time."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """One run: logits float32 (B, S, V); layer -> scores float32 (B, S); layer -> positions int64 (B, k)."""

    logits_BSV: np.ndarray
    scores: Mapping[int, np.ndarray]
    routed: Mapping[int, np.ndarray]


class Reference:
    """Runs the eager model. A free run depends on nothing but the batch, so it is kept for the next target."""

    name = "eager float32"

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._module: torch.nn.Module = loaded.module()
        self._free: dict[str, Traced] = {}

    def free(self, batch: Batch) -> Traced:
        """The model's own routing."""
        key = _digest(batch)
        if key not in self._free:
            traced = self.forced(batch, {})
            kept = sum(known.logits_BSV.nbytes for known in self._free.values())
            if kept + traced.logits_BSV.nbytes > KEPT_BYTES:
                return traced
            self._free[key] = traced
        return self._free[key]

    def forced(self, batch: Batch, routing: Mapping[int, np.ndarray]) -> Traced:
        """The given positions in the layers that `routing` names, whatever their scores."""
        import torch

        with torch.no_grad():
            logits_BSV, decided = self._loaded.trace(
                self._module,
                torch.from_numpy(batch.ids_BS),
                torch.from_numpy(batch.lengths_B),
                {layer: torch.from_numpy(index_BK) for layer, index_BK in routing.items()},
            )
        return Traced(
            logits_BSV.numpy(),
            {layer: one.score_BS.numpy() for layer, one in decided.items()},
            {layer: one.index_BK.numpy() for layer, one in decided.items()},
        )


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256(repr(batch.ids_BS.shape).encode())
    digest.update(batch.ids_BS.tobytes())
    digest.update(batch.lengths_B.tobytes())
    return digest.hexdigest()
