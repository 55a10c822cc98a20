"""A model next to `loop_reference`, which shares no code with it: routing, scores and logits."""

import numpy as np
import torch
from loop_reference import RowTrace, reference
from observing import observed
from tiny_models import distinct_ids, lively_checkpoint

from mod_models.spec import ModelSpec

TOLERANCE = 2e-5
SEQ = 8
LENGTHS = (8, 5, 2, 1)  # k is 3: two rows have fewer real tokens than that


def assert_equals_reference(
    spec: ModelSpec, seq: int = SEQ, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float64,
    tolerance: float = TOLERANCE, *, seed: int = 0, training: bool = False,
) -> list[RowTrace]:  # fmt: skip
    """Returns what the reference found, for tests that want certain things to happen in it."""
    checkpoint = lively_checkpoint(spec, seed)
    ids_BS = distinct_ids(spec, len(lengths), seq)
    with torch.no_grad():
        logits_BSV, decided = observed(checkpoint.module().to(dtype).train(training), ids_BS, torch.tensor(lengths))
    weights = {name: tensor.numpy() for name, tensor in checkpoint.weights.items()}
    rows = reference(spec.to_dict(), weights, ids_BS.tolist(), list(lengths), training=training)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        assert row.margin > 1e-4, "scores too close for float32 and float64 to agree on the choice; use another seed"
        assert list(decided) == list(row.chosen)
        for site, routing in decided.items():
            assert routing.index_BK[b][routing.live_BK[b]].tolist() == row.chosen[site]
            scores = row.scores[site]
            assert routing.open_BS[b].nonzero().flatten().tolist() == list(scores)
            found = routing.score_BS[b, list(scores)].double().numpy()
            np.testing.assert_allclose(found, list(scores.values()), rtol=0, atol=tolerance)
        found = logits_BSV[b, :length].double().numpy()
        np.testing.assert_allclose(found, np.array(row.logits), rtol=0, atol=tolerance)
    return rows
