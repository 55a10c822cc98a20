"""Who gets a place when scores are exactly equal: the earlier token, in every engine.

Equal tokens seldom have bit-equal scores, because kernels sum different rows in different orders. What makes scores
equal everywhere is a router whose weights are all zero: then every routed layer must take the first k real tokens of
its row, whatever the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.graph.places import numbered_layer
from mod_export.inputs import Batch
from mod_export.protocols import LoadedModel

__all__ = ["ties_of_runs", "zeroed_routers"]


def zeroed_routers(loaded: LoadedModel, seq: int) -> dict[str, np.ndarray]:
    """Zeros, float32, for every weight of a router that takes tokens out of `seq`: an idle one is in no graph."""
    idle = {layer for layer, k in loaded.k_by_layer(seq).items() if not k}
    layers = {name: numbered_layer(name) for name in loaded.router_weights()}
    return {
        name: np.zeros(tuple(loaded.weights[name].shape), np.float32)
        for name, layer in layers.items()
        if layer is None or layer[0] not in idle
    }


def ties_of_runs(outputs: Sequence[Mapping[str, np.ndarray]], batches: Sequence[Batch]) -> list[str]:
    """Reasons why runs with equal scores did not take the first real tokens of each row."""
    reasons = []
    for found, batch in zip(outputs, batches, strict=True):
        for name, index_BK in found.items():
            if not name.startswith("routed_"):
                continue
            first_BK = np.broadcast_to(np.arange(index_BK.shape[1]), index_BK.shape)
            wrong = int(np.sum((index_BK != first_BK) & (first_BK < batch.lengths_B[:, None])))
            if wrong:
                layer = name.removeprefix("routed_")
                reasons.append(
                    f"{batch.kind}: layer {layer} routing: {wrong} places do not go to the earlier of tokens with "
                    "equal scores"
                )
    return list(dict.fromkeys(reasons))
