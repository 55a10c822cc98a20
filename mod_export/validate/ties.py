"""Who gets a slot when scores are exactly equal: the earlier token, in every engine.

Equal tokens seldom have bit-equal scores, because kernels sum different rows in different orders. What makes scores
equal everywhere is a router whose weights are all zero: then every routed layer must take the first k real tokens of
its row, whatever the text; and where tokens choose, who is chosen follows from the rule for ties alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.sources.protocol import LoadedModel
from mod_export.types import Site, is_expert, routed_output
from mod_export.validate.compare import Judged, selected
from mod_export.validate.inputs import Batch
from mod_export.validate.reference import Reference

__all__ = ["judged_without_routers", "ties_of_runs", "zeroed_experts", "zeroed_routers"]


def zeroed_routers(loaded: LoadedModel, seq: int) -> dict[str, np.ndarray]:
    """Zeros, float32, for every weight of a router that takes tokens out of `seq`: an idle one is in no graph."""
    active = {site for site, k in loaded.k_by_layer(seq).items() if k}
    deciding = {name: sites for name, sites in loaded.router_weights().items() if active.intersection(sites)}
    return {name: np.zeros(tuple(loaded.weights[name].shape), np.float32) for name in deciding}


def zeroed_experts(loaded: LoadedModel, zeros: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of experts' routers, if there are others too: zeros in front of experts may let no token reach them."""
    sites = loaded.router_weights()
    found = {name: array for name, array in zeros.items() if all(map(is_expert, sites[name]))}
    return found if len(found) < len(zeros) else {}


def judged_without_routers(
    reference: Reference, zeros: Mapping[str, np.ndarray], batches: Sequence[Batch]
) -> list[Mapping[Site, Judged]]:
    """What every selection is judged by in a model whose routers are zeros, for each batch."""
    silent = reference.with_weights(zeros)
    return [silent.free(batch).judged for batch in batches]


def ties_of_runs(
    outputs: Sequence[Mapping[str, np.ndarray]], batches: Sequence[Batch], judged: Sequence[Mapping[Site, Judged]]
) -> list[str]:
    """Reasons why runs with equal scores did not choose by the rule for ties."""
    reasons = []
    for found, batch, expected in zip(outputs, batches, judged, strict=True):
        for site, one in expected.items():
            index_BK = found.get(routed_output(site))
            wrong = 0 if index_BK is None else _wrong(index_BK, one)
            if wrong:
                reasons.append(
                    f"{batch.kind}: layer {site} routing: {wrong} slots do not go to the earlier of tokens with "
                    "equal scores"
                )
    return list(dict.fromkeys(reasons))


def _wrong(index_BK: np.ndarray, judged: Judged) -> int:
    """Slots that hold another token than the definition says."""
    wrong = 0
    for row_K, score_S, open_S in zip(index_BK, judged.score_BS, judged.open_BS, strict=True):
        open_L = np.flatnonzero(open_S)
        wanted_W = open_L[selected(judged.rule, score_S[open_L], len(row_K))]
        wrong += int(np.sum(row_K[: len(wanted_W)] != wanted_W))
        wrong += int(np.isin(row_K[len(wanted_W) :], open_L).sum())
    return wrong
