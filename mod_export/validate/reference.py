"""The reference: the eager float32 model, as PyTorch runs it, with and without somebody else's routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mod_export.inputs import Batch
from mod_export.protocols import LoadedModel

__all__ = ["Reference", "Traced"]


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """One run: logits float32 (B, S, V); layer -> scores float32 (B, S); layer -> positions int64 (B, k)."""

    logits_BSV: np.ndarray
    scores: Mapping[int, np.ndarray]
    routed: Mapping[int, np.ndarray]


class Reference:
    """Runs the eager model. A free run depends on nothing but the batch, so it is computed once for all targets."""

    name = "eager float32"

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._module = loaded.module()
        self._free: dict[int, tuple[Batch, Traced]] = {}

    def free(self, batch: Batch) -> Traced:
        """The model's own routing."""
        # The batch is kept beside its result: an id is only unique while its object lives.
        if id(batch) not in self._free:
            self._free[id(batch)] = (batch, self.forced(batch, {}))
        return self._free[id(batch)][1]

    def forced(self, batch: Batch, routing: Mapping[int, np.ndarray]) -> Traced:
        """The given positions in the layers that `routing` names, whatever their scores."""
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
