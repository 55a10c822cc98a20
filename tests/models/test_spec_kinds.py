"""The spec of each kind of model: what is refused and in which words, and what it computes."""

import dataclasses
import math
from typing import Any

import pytest
from tiny_models import make_spec
from variants import EVERY, VARIANTS, experts

from mod_models.declarations import CHOICES
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, SpecError
from mod_models.spec_checks import LIMITS


def problems(data: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_dict(data)
    return caught.value.problems


def routed(**changes: Any) -> dict[str, Any]:
    data = make_spec().to_dict()
    return {**data, "routing": {**data["routing"], **changes}}


def with_experts(**changes: Any) -> dict[str, Any]:
    return {**make_spec().to_dict(), "experts": {"n_experts": 4, **changes}}


def test_defaults_of_experts() -> None:
    declared = ModelSpec.from_dict({**make_spec().to_dict(), "experts": {}}).experts
    assert declared == ExpertsSpec()
    assert dataclasses.asdict(ExpertsSpec()) == {
        "layers": {"every": 1, "offset": 0, "skip_first": 0, "skip_last": 0}, "n_experts": 8, "choice": "token",
        "top_k": 1, "capacity_factor": 1.25, "fixed_places": (), "noop_experts": 0,
    }  # fmt: skip


EXIT = {"selection": "exit", "capacity_rule": "ceil"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"selection": "predictor"},
            "selection: predictor decides by an auxiliary predictor and predictor_hidden is 0, so there are no weights "
            "for one; give predictor_hidden and train with it, or declare threshold or topk",
        ),
        (
            {"router": "noise", "selection": "threshold", "predictor_hidden": 3},
            "router: noise replaces the router, and a predictor can learn nothing from it; expected selection=topk and "
            "predictor_hidden=0, got threshold and 3",
        ),
        (
            {"selection": "random", "predictor_hidden": 3},
            "predictor_hidden: no predictor can learn what noise chooses; expected 0 with selection=random, got 3",
        ),
        (
            {"parts": "attention", "combine": "ffn_gated"},
            "combine: ffn_gated weighs the MLP, and with parts=attention attention is routed by itself, without a "
            "weight; declare paper",
        ),
        (
            {"parts": "separate", "combine": "ffn_gated"},
            "combine: ffn_gated weighs the MLP, and with parts=separate attention is routed by itself, without a "
            "weight; declare paper",
        ),
        ({**EXIT, "parts": "mlp"}, "parts: a token that exits skips whole blocks; expected block, got mlp"),
        (
            {**EXIT, "positions": "compact"},
            "positions: exit keeps the positions of the sequence; expected original",
        ),
        (
            {"selection": "exit", "capacity_rule": "floor"},
            "capacity_rule: floor can leave no token at all in the model; declare floor_min1 or ceil",
        ),
        (
            {**EXIT, "capacity": [0.25, 0.5]},
            "capacity: tokens that exit never come back, so the schedule must not rise, got [0.25, 0.5]",
        ),
        # Not numbers at all, which cannot be compared with each other.
        ({**EXIT, "capacity": ["0.5", 0.5]}, "capacity: expected a number or a list of numbers, got ('0.5', 0.5)"),
        ({**EXIT, "capacity": [0.5]}, "capacity: the schedule has 1 entries for 2 routed layers"),
        (
            {"layers": {"skip_first": -1}},
            "layers: skip_first and skip_last must be whole numbers of at least 0, got -1 and 0",
        ),
        (
            {"layers": {"skip_last": 1.5}},
            "layers: skip_first and skip_last must be whole numbers of at least 0, got 0 and 1.5",
        ),
        (
            {"layers": {"every": 1, "offset": 0, "skip_first": 2, "skip_last": 1}},
            "layers: offset 0, without the first 2 and the last 1, leaves none of the 3 layers routed; use "
            "routing=null",
        ),
    ],
)  # fmt: skip
def test_routing_is_refused(changes: dict[str, Any], message: str) -> None:
    assert problems(routed(**changes)) == [f"spec.routing.{message}"]


def test_every_problem_of_an_exit_at_once() -> None:
    changes = {"parts": "mlp", "positions": "compact", "capacity_rule": "floor", "capacity": [0.1, 1.0]}
    assert len(problems(routed(selection="exit", **changes))) == 4


FACTOR = "capacity_factor: expected a number above 0, at most 1024, got "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choice": "tokens"}, "choice: unknown variant 'tokens'; known: token, expert"),
        ({"choice": None}, "choice: unknown variant None; known: token, expert"),
        (
            {"n_experts": 0, "noop_experts": 1},
            "n_experts: no-op experts stand beside real ones, and there are none; give n_experts, or route the block "
            "(spec.routing) instead",
        ),
        *(
            ({name: value}, f"{name}: expected a whole number from {least} to {LIMITS[name]}, got {value!r}")
            for name, least in (("n_experts", 1), ("top_k", 1), ("noop_experts", 0))
            for value in (-1, 2.0, "2", None, True)
        ),
        ({"n_experts": 0}, f"n_experts: expected a whole number from 1 to {LIMITS['n_experts']}, got 0"),
        *(({"capacity_factor": value}, f"{FACTOR}{value!r}") for value in (0, -1.0, 1025, math.nan, "1", None, True)),
        (
            {"choice": "expert", "top_k": 2},
            "top_k: with expert choice the experts take tokens, not tokens experts; leave it at 1 and say how many "
            "with capacity_factor, got 2",
        ),
        (
            {"top_k": 5, "noop_experts": 1},
            "top_k: 5 of 5 experts leaves nothing to choose; lower it, or give more experts",
        ),
        ({"fixed_places": 3}, "fixed_places: expected a list of numbers, got 3"),
        ({"fixed_places": [3]}, "fixed_places: 1 entries for 3 layers with experts"),
        *(
            ({"fixed_places": [3, value, 1]}, f"fixed_places: expected a whole number from 1 to {2**24}, got {value!r}")
            for value in (0, "1", 2.0, True)
        ),
        ({"n_experts": 1}, "top_k: 1 of 1 experts leaves nothing to choose; lower it, or give more experts"),
        ({"layers": {"offset": 3}}, "layers: offset 3 leaves none of the 3 layers with experts; use experts=null"),
        ({"layers": [3]}, "layers: expected ascending numbers from 0 to 2, each once, got (3,)"),
        ({"n_expert": 3}, "n_expert: unknown field, did you mean 'n_experts'?"),
        ({"layers": {"evry": 1}}, "layers.evry: unknown field, did you mean 'every'?"),
    ],
)  # fmt: skip
def test_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    assert problems(with_experts(**changes)) == [f"spec.experts.{message}"]


def test_no_tables() -> None:
    assert problems({**make_spec().to_dict(), "experts": 3}) == ["spec.experts: expected a table, got int"]
    with pytest.raises(SpecError, match=r"^spec\.experts: expected an ExpertsSpec or None, got dict$"):
        make_spec(experts={})
    with pytest.raises(SpecError, match=r"^spec\.routing: expected a RoutingSpec or None, got ExpertsSpec$"):
        make_spec(routing=ExpertsSpec())


@pytest.mark.parametrize(
    ("layers", "meant"),
    [
        (EveryNth(every=1, offset=0, skip_first=1, skip_last=2), (1, 2, 3)),
        (EveryNth(every=2, offset=0, skip_first=1), (2, 4)),
        (EveryNth(every=3, offset=2, skip_last=1), (2,)),
        (EveryNth(skip_first=9), ()),
    ],
)
def test_protected_layers(layers: EveryNth, meant: tuple[int, ...]) -> None:
    assert layers.of(6) == meant


@pytest.mark.parametrize(
    ("declared", "tokens", "slots"),
    [
        ({"n_experts": 4, "capacity_factor": 1.0}, 8, 2),
        ({"n_experts": 4, "capacity_factor": 1.25}, 8, 3),
        ({"n_experts": 4, "capacity_factor": 1.0, "top_k": 2}, 8, 4),
        ({"n_experts": 4, "capacity_factor": 0.01}, 8, 1),
        ({"n_experts": 4, "capacity_factor": 100}, 8, 8),
        ({"n_experts": 3, "capacity_factor": 1.0, "noop_experts": 3}, 9, 3),  # No-op experts have no slots.
        ({"n_experts": 2, "capacity_factor": 1.5, "choice": "expert"}, 4, 3),
    ],
)
def test_slots_of_an_expert_by_its_share(declared: dict[str, Any], tokens: int, slots: int) -> None:
    assert ExpertsSpec(**declared).slots(tokens) == slots


HALF = experts(n_experts=2, capacity_factor=1.0, layers=EVERY)


def of_experts(**places: int) -> dict[str, int]:
    """of_experts(_0=4): four places for each of the two experts of layer 0."""
    return {f"{layer[1:]}.expert{e}": k for layer, k in places.items() for e in (0, 1)}


@pytest.mark.parametrize(
    ("changes", "k_by_layer"),
    [
        ({"parts": "separate"}, {"0.attention": 4, "0.mlp": 4, "2.attention": 4, "2.mlp": 4}),
        ({"parts": "attention", "layers": (1,)}, {1: 4}),
        # Beside the routing of whole blocks, staged: experts share what the block takes.
        ({"experts": HALF}, {0: 4, **of_experts(_0=2, _1=4), 2: 4, **of_experts(_2=2)}),
        ({"experts": HALF, "parts": "mlp", "layers": (0,)}, {0: 4, **of_experts(_0=2, _1=4, _2=4)}),
        ({"experts": HALF, "parts": "attention", "layers": (0,)}, {0: 4, **of_experts(_0=4, _1=4, _2=4)}),
        (
            {"experts": HALF, "parts": "separate", "layers": (2,)},
            {**of_experts(_0=4, _1=4), "2.attention": 4, "2.mlp": 4, **of_experts(_2=2)},
        ),
        ({"experts": HALF, "routing": None}, of_experts(_0=4, _1=4, _2=4)),
        # Nobody is taken: no experts there, unless attention alone is routed.
        ({"experts": HALF, "capacity": 1e-9, "layers": (1,)}, {**of_experts(_0=4), 1: 0, **of_experts(_2=4)}),
        (
            {"experts": HALF, "capacity": 1e-9, "layers": (1,), "parts": "separate"},
            {**of_experts(_0=4), "1.attention": 0, "1.mlp": 0, **of_experts(_2=4)},
        ),
        (
            {"experts": HALF, "capacity": 1e-9, "layers": (1,), "parts": "attention"},
            {**of_experts(_0=4), 1: 0, **of_experts(_1=4, _2=4)},
        ),
        # Who exits is missing in every later layer.
        ({**EXIT, "capacity": (0.75, 0.25), "layers": (0, 1)}, {0: 6, 1: 2}),
        (
            {**EXIT, "capacity": (0.75, 0.25), "layers": (0, 2), "experts": HALF},
            {0: 6, **of_experts(_0=3, _1=3), 2: 2, **of_experts(_2=1)},
        ),
    ],
)  # fmt: skip
def test_places_of_routing(changes: dict[str, Any], k_by_layer: dict[int | str, int]) -> None:
    """In the order in which a model decides them."""
    found = make_spec(**{"capacity": 0.5, **changes}).k_by_layer(8)
    assert list(found.items()) == list(k_by_layer.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_twin(name: str) -> None:
    spec = VARIANTS[name]
    assert spec.dense() == dataclasses.replace(spec, routing=None)
    assert all(".expert" in str(site) for site in spec.dense().k_by_layer(8))


@pytest.mark.parametrize("gate", ["identity", "softmax_selected"])
@pytest.mark.parametrize("choice", [None, *CHOICES])
@pytest.mark.parametrize("selection", [None, "topk", "threshold", "predictor", "random", "exit"])
def test_looks_ahead(selection: str | None, choice: str | None, gate: str) -> None:
    declared: dict[str, Any] = {"experts": experts(choice=choice) if choice else None}
    if selection is None:
        declared["routing"] = None
    else:
        declared |= {
            "selection": selection,
            "predictor_hidden": 0 if selection == "random" else 2,
            "capacity_rule": "ceil",
            "gate": gate,
        }
    ranked = [f"routing.selection={selection}"] if selection in ("topk", "random", "exit") else []
    weighed = ["routing.gate=softmax_selected"] if selection and gate == "softmax_selected" else []
    of_experts = ["experts.choice=expert"] if choice == "expert" else []
    assert make_spec(**declared).looks_ahead == (*ranked, *weighed, *of_experts)


def test_a_gate_that_weighs_nothing_does_not_look_ahead() -> None:
    spec = make_spec(selection="threshold", gate="softmax_selected", combine="replace_ungated")
    assert spec.looks_ahead == ()


def test_fixed_places_of_an_expert() -> None:
    """One number for each layer that has experts, and no more than there are tokens."""
    spec = ModelSpec.from_dict(with_experts(layers=[0, 2], fixed_places=[3, 5]))
    assert spec.experts == ExpertsSpec(n_experts=4, layers=(0, 2), fixed_places=(3, 5))
    assert [spec.expert_slots(layer, tokens) for layer in (0, 2) for tokens in (8, 4, 1)] == [3, 3, 1, 5, 4, 1]
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert spec.k_by_layer(16)["2.expert3"] == 5
