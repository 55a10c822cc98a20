"""Every kind of model compared with `loop_reference`, which shares no code with it: routing, scores and logits.

The models run in float64, so the remaining difference comes from what the design fixes in float32: the rotary tables,
the router's scores and the gates made from them. That is a few 1e-7 of each value. `TOLERANCE` allows the layers above
to enlarge it, and `test_declarations_differ` shows that two declarations never come that close.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from loop_reference import RowTrace, reference
from observing import observed
from pairs import pairwise
from tiny_models import distinct_ids, lively_checkpoint, make_spec
from variants import BIASES, EVERY, NORMED_HEADS, VARIANTS, experts

from mod_models.declarations import (
    COMBINES,
    FFN_GATED,
    GATES,
    LEARNED_ROUTERS,
    PARTS,
    POSITIONS,
    ROUTER_INPUTS,
    SELECTIONS,
)
from mod_models.spec import CAPACITY_RULES, EveryNth, ModelSpec

TOLERANCE = 2e-5
SEQ = 8
LENGTHS = (8, 5, 2, 1)  # k is 3: two rows have fewer real tokens.
CHOICES: dict[str, Any] = {
    "router": (*LEARNED_ROUTERS, "noise"),
    "router_input": ROUTER_INPUTS,
    "gate": GATES,
    "combine": COMBINES,
    "positions": POSITIONS,
    "selection": SELECTIONS,
    "parts": PARTS,
    "capacity": (
        ("floor", 0.375), ("floor", (0.5, 0.25)), ("floor_min1", 0.01), ("strict_floor", 0.5), ("ceil", (0.99, 0.3)),
        ("absolute", 3),
        ("absolute", (99, 1)),
    ),
    "layers": ((0, 2), EveryNth(every=1, offset=0, skip_first=1, skip_last=1), EveryNth(every=2, offset=0)),
    "always_first": (0, 2, 5),
    "experts": (
        None, experts(layers=EVERY), experts(top_k=2, noop_experts=2), experts(choice="expert"),
        experts(choice="expert", noop_experts=1, n_experts=3, layers=EVERY),
        experts(top_k=3, capacity_factor=0.3, layers=(1,)),
    ),
    "sizes": (
        {"n_heads": 4, "n_kv_heads": 2}, {"n_heads": 1, "n_kv_heads": 1}, {"n_heads": 4, "n_kv_heads": 4},
        {"n_heads": 6, "n_kv_heads": 3, "tie_embeddings": False},
        {"rope_theta": 50.0, "norm_eps": 0.3, "d_head": 6, "d_model": 10, "router_hidden": 7},
    ),
    "blocks": ({}, BIASES, NORMED_HEADS, {"activation": "gelu", "attention_bias": "qkv"}),
    "lengths": ((8, LENGTHS), (1, (1,)), (5, (5, 2, 1)), (11, (11, 7, 4))),
}  # fmt: skip


def sound(row: dict[str, Any]) -> bool:
    """Whether the checks of a spec accept this combination."""
    exits, noise = row.get("selection") == "exit", row.get("router") == "noise"
    apart = row.get("parts") in ("attention", "separate")
    rule = row.get("capacity", ("ceil", 0.5))[0]
    return not (
        (exits and (row.get("parts", "block") != "block" or row.get("positions") == "compact" or rule == "floor"))
        or (noise and row.get("selection", "topk") != "topk")
        or (apart and row.get("combine") in FFN_GATED)
    )


ROWS = pairwise(CHOICES, sound)


def spec_of(row: dict[str, Any]) -> ModelSpec:
    declared = {name: value for name, value in row.items() if name not in ("capacity", "sizes", "blocks", "lengths")}
    rule, capacity = row["capacity"]
    hidden = 0 if row["router"] == "noise" or row["selection"] == "random" else 3
    return make_spec(
        **declared, **row["sizes"], **row["blocks"], n_layers=4, capacity_rule=rule, capacity=capacity,
        predictor_hidden=hidden, noise_seed=5,
    )  # fmt: skip


def equals_reference(
    spec: ModelSpec, seq: int = SEQ, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float64,
    tolerance: float = TOLERANCE, *, seed: int = 0, training: bool = False,
) -> list[RowTrace]:  # fmt: skip
    """Returns the reference's results, for tests that need certain events in them.

    The weights come from the first seed whose choices are so clear that float32 and float64 agree on them.
    """
    ids_BS = distinct_ids(spec, len(lengths), seq)
    for number in range(seed, seed + 20):
        checkpoint = lively_checkpoint(spec, number)
        weights = {name: tensor.numpy() for name, tensor in checkpoint.weights.items()}
        rows = reference(spec.to_dict(), weights, ids_BS.tolist(), list(lengths), training=training)
        if min(row.margin for row in rows) > 1e-4:
            break
    else:
        raise AssertionError("no seed whose choices are clear")
    with torch.no_grad():
        logits_BSV, decided = observed(checkpoint.module().to(dtype).train(training), ids_BS, torch.tensor(lengths))
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
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


def names_of(row: dict[str, Any]) -> str:
    return "-".join(str(row[name]) for name in ("router", "gate", "combine", "selection", "parts"))


@pytest.mark.parametrize("row", ROWS, ids=names_of)
def test_every_pair_of_declarations(row: dict[str, Any]) -> None:
    seq, lengths = row["lengths"]
    equals_reference(spec_of(row), seq, lengths)


def test_no_pair_is_left_out() -> None:
    """Every name is in the table, and every sound pair is in some row."""
    for left, right in itertools.combinations(CHOICES, 2):
        expected = [p for p in itertools.product(CHOICES[left], CHOICES[right]) if sound({left: p[0], right: p[1]})]
        found = [(row[left], row[right]) for row in ROWS]
        assert all(pair in found for pair in expected)
    assert {rule for rule, _ in CHOICES["capacity"]} == set(CAPACITY_RULES)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_in_float32(name: str) -> None:
    """Models are used in float32 throughout."""
    equals_reference(VARIANTS[name], dtype=torch.float32, tolerance=1e-4)


def test_declarations_differ() -> None:
    """The tests above can distinguish declarations: two different ones are a thousand tolerances apart."""
    ids_BS, lengths_B = distinct_ids(make_spec(), 1, SEQ), torch.tensor([SEQ])
    logits: dict[tuple[str, ...], torch.Tensor] = {}
    for gate, combine, positions in itertools.product(GATES, COMBINES, POSITIONS):
        # A weight of one has no effect, and an ungated block has no weight, whatever its gate.
        doubled = combine if gate != "ones" else combine.removesuffix("_ffn_gated")
        ungated = combine == "replace_ungated" or (gate == "ones" and doubled != "double_residual")
        meaning = (positions, *(("ungated",) if ungated else (gate, doubled)))
        model = lively_checkpoint(make_spec(gate=gate, combine=combine, positions=positions)).module().double()
        found = model(ids_BS, lengths_B)[0].detach()
        torch.testing.assert_close(found, logits.setdefault(meaning, found), rtol=0, atol=TOLERANCE)
    assert len(logits) == 2 * (6 * 5 + 1 + 1)
    for router, router_input in itertools.product(LEARNED_ROUTERS, ROUTER_INPUTS):
        model = lively_checkpoint(make_spec(router=router, router_input=router_input)).module().double()
        logits[router, router_input] = model(ids_BS, lengths_B)[0].detach()
    del logits["linear", "raw"]  # The default is among the combinations above.
    of_blocks: tuple[dict[str, Any], ...] = (
        *({"attention_bias": name} for name in ("qkv", "all")),
        *({"activation": name} for name in ("gelu", "gelu_tanh")),
        *({"rope_scaling": NORMED_HEADS["rope_scaling"]}, {"rope_scaling": BIASES["rope_scaling"]}),
        *({"qk_norm": "head"}, {"mlp_bias": True}, {"embedding_scale": 1.5}),
    )
    for changes in of_blocks:
        model = lively_checkpoint(make_spec(**changes)).module().double()
        logits["blocks", *map(str, changes.values())] = model(ids_BS, lengths_B)[0].detach()
    for left, right in itertools.combinations(logits, 2):
        # The two forms of GELU differ by 5e-4 at most.
        least = 10 if {left[-1], right[-1]} == {"gelu", "gelu_tanh"} else 1000
        assert (logits[left] - logits[right]).abs().max() > least * TOLERANCE, (left, right)


@pytest.mark.parametrize("selection", ["threshold", "predictor"])
def test_first_come_first_served(selection: str) -> None:
    """With one slot a token overflows; with as many slots as tokens none does."""
    few = equals_reference(make_spec(selection=selection, predictor_hidden=3, capacity=0.125))
    assert max(row.overflow for row in few) > 0
    assert {len(chosen) for row in few for chosen in row.chosen.values()} == {0, 1}
    many = equals_reference(make_spec(selection=selection, predictor_hidden=3, capacity=1.0))
    assert max(row.overflow for row in many) == 0
    assert max(len(chosen) for row in many for chosen in row.chosen.values()) > 1


@pytest.mark.parametrize("parts", ["block", "separate"])
def test_a_predictor_that_is_trained_leaves_the_choice_to_the_router(parts: str) -> None:
    spec = make_spec(selection="predictor", predictor_hidden=3, parts=parts)
    as_trained = equals_reference(spec, training=True)
    assert [row.chosen for row in as_trained] != [row.chosen for row in equals_reference(spec)]
    assert as_trained[0].chosen == equals_reference(make_spec(parts=parts, predictor_hidden=3))[0].chosen


@pytest.mark.parametrize("parts", PARTS)
def test_no_slot_at_all(parts: str) -> None:
    """With k = 0, the part is left out together with its experts; the other part runs."""
    equals_reference(make_spec(parts=parts, capacity=1e-9, experts=experts(layers=EVERY)))


@pytest.mark.parametrize("seed_of_noise", [0, 2**31])
def test_noise(seed_of_noise: int) -> None:
    spec = make_spec(selection="random", noise_seed=seed_of_noise, parts="separate", layers=(0, 1))
    (row,) = equals_reference(spec, lengths=(SEQ,), seed=1)
    assert len({tuple(chosen) for chosen in row.chosen.values()}) > 1, "each routing site has its own noise"


@pytest.mark.parametrize("capacity", [(1.0, 0.75, 0.5), (0.75, 0.75, 0.125)], ids=str)
def test_exits(capacity: tuple[float, ...]) -> None:
    spec = make_spec(selection="exit", n_layers=5, layers=(1, 3, 4), capacity=capacity, capacity_rule="ceil")
    for row in equals_reference(spec):
        first, second, third = row.chosen.values()
        assert set(first) >= set(second) >= set(third)


@pytest.mark.parametrize(("factor", "dropped"), [(0.3, True), (4.0, False)])
def test_experts_that_are_full(factor: float, dropped: bool) -> None:
    """With a factor of at least n_experts / top_k, each expert has a slot for every token."""
    rows = equals_reference(make_spec(routing=None, experts=experts(top_k=2, capacity_factor=factor)), seed=1)
    assert (max(row.overflow for row in rows) > 0) is dropped


def test_dense_baseline() -> None:
    """It equals the reference with the same weights and without the routing."""
    checkpoint = lively_checkpoint(make_spec(predictor_hidden=2))
    ids_BS = distinct_ids(checkpoint.spec, 1, SEQ)
    with torch.no_grad():
        logits_BSV, decided = observed(checkpoint.dense().module().double(), ids_BS, torch.tensor([SEQ]))
    weights = {name: tensor.numpy() for name, tensor in checkpoint.weights.items()}
    (row,) = reference({**checkpoint.spec.to_dict(), "routing": None}, weights, ids_BS.tolist(), [SEQ])
    assert decided == {}
    np.testing.assert_allclose(logits_BSV[0].numpy(), np.array(row.logits), rtol=0, atol=TOLERANCE)
