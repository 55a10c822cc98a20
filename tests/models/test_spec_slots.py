"""What a spec computes: the slots of every routing site, the routed layers, and which declarations look ahead."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_spec
from variants import EVERY, experts

from mod_models.spec import EveryNth, ExpertsSpec, SpecError

EXIT = {"selection": "exit", "capacity_rule": "ceil"}


@pytest.mark.parametrize(
    ("rule", "capacity", "seq", "k"),
    [
        ("floor", 0.125, 2048, 256), ("floor", 0.125, 7, 0), ("floor", 1.0, 7, 7),
        # The product is in float64 before it is cut off: 0.29 * 100 is 28.999..., 0.07 * 100 is 7.000...1.
        ("floor", 0.29, 100, 28), ("ceil", 0.07, 100, 8),
        ("floor_min1", 0.125, 7, 1), ("floor_min1", 0.125, 17, 2), ("floor_min1", 1e-9, 1, 1),
        ("ceil", 0.125, 7, 1), ("ceil", 0.125, 16, 2), ("ceil", 0.125, 17, 3), ("ceil", 1, 17, 17),
        ("absolute", 4, 8, 4), ("absolute", 4, 3, 3), ("absolute", 4.0, 4, 4),
    ],
)  # fmt: skip
def test_capacity_rules(rule: str, capacity: float, seq: int, k: int) -> None:
    assert make_spec(capacity_rule=rule, capacity=capacity).k_by_layer(seq) == {0: k, 2: k}


@given(st.floats(1e-6, 1), st.integers(1, 100_000))
def test_capacity_rules_hold_to_their_names(share: float, seq: int) -> None:
    exact = Fraction(share) * seq
    k = {
        rule: make_spec(capacity_rule=rule, capacity=share).k_by_layer(seq)[0]
        for rule in ("floor", "floor_min1", "ceil")
    }
    # Float64 rounds the product, so a product within 1e-9 of a whole number may fall on either side of it.
    assert exact - 1 - Fraction(1, 10**9) <= k["floor"] <= exact + Fraction(1, 10**9)
    assert k["floor_min1"] == max(1, k["floor"])
    assert 0 <= k["ceil"] - k["floor"] <= 1
    assert k["ceil"] >= exact - Fraction(1, 10**9)
    assert max(k.values()) <= seq


@pytest.mark.parametrize(
    ("layers", "meant"),
    [
        (EveryNth(), (1, 3, 5)),
        (EveryNth(every=4, offset=1), (1, 5)),
        (EveryNth(every=1, offset=0, skip_first=1, skip_last=2), (1, 2, 3)),
        (EveryNth(every=2, offset=0, skip_first=1), (2, 4)),
        (EveryNth(every=3, offset=2, skip_last=1), (2,)),
        ((0, 5), (0, 5)),
    ],
    ids=str,
)
def test_routed_layers(layers: EveryNth | tuple[int, ...], meant: tuple[int, ...]) -> None:
    spec = make_spec(n_layers=6, layers=layers)
    assert spec.routed_layers == tuple(spec.k_by_layer(8)) == meant
    assert spec.dense().routed_layers == ()
    assert EveryNth(skip_first=9).of(6) == ()


def test_another_capacity_changes_nothing_else() -> None:
    spec = make_spec(capacity=(0.5, 0.25), predictor_hidden=2)
    assert spec.capacity is None
    changed = spec.with_capacity(0.125)
    assert changed.capacity == 0.125
    assert changed.k_by_layer(16) == {0: 2, 2: 2}
    assert changed == make_spec(capacity=0.125, predictor_hidden=2)
    assert make_spec(capacity=(0.5, 0.5)).capacity == 0.5
    with pytest.raises(SpecError, match=r"spec\.routing\.capacity: expected a share in \(0, 1\], got 2\.0"):
        make_spec().with_capacity(2.0)
    with pytest.raises(SpecError, match=r"spec\.routing: null, so there is no routed layer"):
        make_spec().dense().with_capacity(0.5)
    assert make_spec().dense().capacity is None


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


def of_experts(**slots: int) -> dict[str, int]:
    """of_experts(_0=4) means four slots for each of the two experts of layer 0."""
    return {f"{layer[1:]}.expert{e}": k for layer, k in slots.items() for e in (0, 1)}


@pytest.mark.parametrize(
    ("changes", "k_by_layer"),
    [
        ({"parts": "separate"}, {"0.attention": 4, "0.mlp": 4, "2.attention": 4, "2.mlp": 4}),
        ({"parts": "attention", "layers": (1,)}, {1: 4}),
        ({"capacity": (0.5, 0.25)}, {0: 4, 2: 2}),
        # If whole blocks are routed (staged), experts share the tokens that the block selects.
        ({"experts": HALF}, {0: 4, **of_experts(_0=2, _1=4), 2: 4, **of_experts(_2=2)}),
        ({"experts": HALF, "parts": "mlp", "layers": (0,)}, {0: 4, **of_experts(_0=2, _1=4, _2=4)}),
        ({"experts": HALF, "parts": "attention", "layers": (0,)}, {0: 4, **of_experts(_0=4, _1=4, _2=4)}),
        (
            {"experts": HALF, "parts": "separate", "layers": (2,)},
            {**of_experts(_0=4, _1=4), "2.attention": 4, "2.mlp": 4, **of_experts(_2=2)},
        ),
        ({"experts": HALF, "routing": None}, of_experts(_0=4, _1=4, _2=4)),
        # If no token is selected, there are no experts, unless only attention is routed.
        ({"experts": HALF, "capacity": 1e-9, "layers": (1,)}, {**of_experts(_0=4), 1: 0, **of_experts(_2=4)}),
        (
            {"experts": HALF, "capacity": 1e-9, "layers": (1,), "parts": "separate"},
            {**of_experts(_0=4), "1.attention": 0, "1.mlp": 0, **of_experts(_2=4)},
        ),
        (
            {"experts": HALF, "capacity": 1e-9, "layers": (1,), "parts": "attention"},
            {**of_experts(_0=4), 1: 0, **of_experts(_1=4, _2=4)},
        ),
        # Tokens that exit are missing in every later layer.
        (
            {**EXIT, "capacity": (0.75, 0.25), "layers": (0, 2), "experts": HALF},
            {0: 6, **of_experts(_0=3, _1=3), 2: 2, **of_experts(_2=1)},
        ),
    ],
)  # fmt: skip
def test_slots_of_routing_sites(changes: dict[str, Any], k_by_layer: dict[int | str, int]) -> None:
    """Sites are in the order in which a model decides them."""
    found = make_spec(**{"capacity": 0.5, **changes}).k_by_layer(8)
    assert list(found.items()) == list(k_by_layer.items())


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"routing": None}, ()),
        ({"routing": None, "experts": experts()}, ()),
        ({"routing": None, "experts": experts(choice="expert")}, ("experts.choice=expert",)),
        *(
            ({"selection": name, "capacity_rule": "ceil"}, (f"routing.selection={name}",))
            for name in ("topk", "random", "exit")
        ),
        ({"selection": "threshold"}, ()),
        ({"selection": "predictor", "predictor_hidden": 2, "experts": experts()}, ()),
        ({"selection": "threshold", "gate": "softmax_selected"}, ("routing.gate=softmax_selected",)),
        # It has no effect without a gate.
        ({"selection": "threshold", "gate": "softmax_selected", "combine": "replace_ungated"}, ()),
        (
            {"gate": "softmax_selected", "experts": experts(choice="expert")},
            ("routing.selection=topk", "routing.gate=softmax_selected", "experts.choice=expert"),
        ),
    ],
    ids=str,
)
def test_looks_ahead(declared: dict[str, Any], named: tuple[str, ...]) -> None:
    assert make_spec(**declared).looks_ahead == named
