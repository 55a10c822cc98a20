"""Every pair of routing declarations against `loop_reference`, which shares no code with the model.

The models run in float64, so that what is left of the difference is what the design fixes in float32: the rotary
tables, the router's scores and the gates made from them. That is a few 1e-7 of each value; `TOLERANCE` allows for the
layers above it to enlarge that, and `test_variants_differ` shows that two declarations never come as close.
"""

import itertools

import numpy as np
import pytest
import torch
from against_reference import SEQ, TOLERANCE, assert_equals_reference
from loop_reference import reference
from observing import observed
from pairs import pairwise
from tiny_models import distinct_ids, lively_checkpoint, make_spec

from mod_models.declarations import COMBINES, GATES, LEARNED_ROUTERS, POSITIONS, ROUTER_INPUTS
from mod_models.spec import CAPACITY_RULES, EveryNth, ModelSpec

SPACE = (LEARNED_ROUTERS, ROUTER_INPUTS, GATES, COMBINES, POSITIONS)


@pytest.mark.parametrize(("router", "router_input", "gate", "combine", "positions"), pairwise(*SPACE))
def test_every_pair_of_declarations(router: str, router_input: str, gate: str, combine: str, positions: str) -> None:
    assert_equals_reference(
        make_spec(router=router, router_input=router_input, gate=gate, combine=combine, positions=positions)
    )


def test_pairwise_leaves_out_no_pair() -> None:
    for (i, one), (j, other) in itertools.combinations(enumerate(SPACE), 2):
        assert {(row[i], row[j]) for row in pairwise(*SPACE)} == set(itertools.product(one, other))


def run(spec: ModelSpec) -> torch.Tensor:
    with torch.no_grad():
        logits_BSV, *_ = lively_checkpoint(spec).module().double()(distinct_ids(spec, 1, SEQ), torch.tensor([SEQ]))
    return logits_BSV


def test_variants_differ() -> None:
    """What the tests above tell apart: two combinations with another meaning are a thousand tolerances apart."""
    logits: dict[tuple[str, ...], torch.Tensor] = {}
    for gate, combine, positions in itertools.product(GATES, COMBINES, POSITIONS):
        # A weight of one is no weight, and an ungated block has none, whatever its gate.
        ungated = combine == "replace_ungated" or (gate == "ones" and combine != "double_residual")
        meaning = (positions, *(("ungated",) if ungated else (gate, combine)))
        found = run(make_spec(gate=gate, combine=combine, positions=positions))
        torch.testing.assert_close(found, logits.setdefault(meaning, found), rtol=0, atol=TOLERANCE)
    assert len(logits) == 2 * (5 * 4 + 1 + 1)
    for router, router_input in itertools.product(LEARNED_ROUTERS, ROUTER_INPUTS):
        logits[router, router_input] = run(make_spec(router=router, router_input=router_input))
    del logits["linear", "raw"]  # the default, which is among the combinations above
    for one, other in itertools.combinations(logits.values(), 2):
        assert (one - other).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("rule", CAPACITY_RULES)
@pytest.mark.parametrize("seq", [1, 2, 7, 11])
def test_capacity_rules(rule: str, seq: int) -> None:
    capacity = 3 if rule == "absolute" else 0.3
    assert_equals_reference(make_spec(capacity_rule=rule, capacity=capacity), seq=seq, lengths=(seq, max(1, seq // 2)))


@pytest.mark.parametrize(
    ("rule", "capacity"),
    [
        ("floor", (0.5, 0.25, 1.0)),
        ("floor_min1", (0.01, 0.6, 1)),
        ("ceil", (0.01, 0.3, 0.99)),
        ("absolute", (1, 99, 4)),
    ],
)
def test_schedules(rule: str, capacity: tuple[float, ...]) -> None:
    assert_equals_reference(make_spec(n_layers=5, layers=(0, 1, 4), capacity_rule=rule, capacity=capacity))


@pytest.mark.parametrize(
    "layers",
    [
        EveryNth(),
        EveryNth(every=1, offset=0),
        EveryNth(every=3, offset=2),
        EveryNth(every=9, offset=3),
        (0,),
        (1, 2, 3),
    ],
    ids=str,
)
def test_layer_patterns(layers: EveryNth | tuple[int, ...]) -> None:
    assert_equals_reference(make_spec(n_layers=4, layers=layers))


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv"
)
def test_heads_and_head(heads: tuple[int, int], tie_embeddings: bool) -> None:
    n_heads, n_kv_heads = heads
    assert_equals_reference(make_spec(n_heads=n_heads, n_kv_heads=n_kv_heads, tie_embeddings=tie_embeddings))


@pytest.mark.parametrize("lengths", [(1,), (8,), (1, 1, 1), (2, 3, 4), (3,), (8, 1, 7, 2, 6)], ids=str)
@pytest.mark.parametrize("gate", ["identity", "softmax_selected"])
def test_lengths(lengths: tuple[int, ...], gate: str) -> None:
    assert_equals_reference(make_spec(gate=gate), lengths=lengths)


def test_other_sizes() -> None:
    """Nothing above depends on the other numbers of a spec having their defaults."""
    assert_equals_reference(
        make_spec(rope_theta=50.0, norm_eps=0.3, d_head=6, d_model=10, router="mlp", router_hidden=7)
    )


def test_dense() -> None:
    assert_equals_reference(make_spec(routing=None))


def test_dense_twin() -> None:
    """The twin is what the reference computes from the same weights with the routing struck out."""
    checkpoint = lively_checkpoint(make_spec(predictor_hidden=2))
    ids_BS = distinct_ids(checkpoint.spec, 1, SEQ)
    with torch.no_grad():
        logits_BSV, decided = observed(checkpoint.dense().module().double(), ids_BS, torch.tensor([SEQ]))
    weights = {name: tensor.numpy() for name, tensor in checkpoint.weights.items()}
    (row,) = reference({**checkpoint.spec.to_dict(), "routing": None}, weights, ids_BS.tolist(), [SEQ])
    assert decided == {}
    np.testing.assert_allclose(logits_BSV[0].numpy(), np.array(row.logits), rtol=0, atol=TOLERANCE)


def test_float32() -> None:
    """The model as it is used, in float32 throughout."""
    assert_equals_reference(make_spec(router="mlp"), dtype=torch.float32, tolerance=1e-4)
