"""The spec as plain data: what it accepts, and its messages about the rest."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_specs import WHOLE, plain, problems
from tiny_models import make_spec
from variants import VARIANTS

from mod_models import declarations, routing
from mod_models import experts as expert_layers
from mod_models.declarations import LIMITS
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RopeScaling, RoutingSpec, SpecError

SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "max_positions")
TABLES = {
    "router": declarations.ROUTERS, "router_input": declarations.ROUTER_INPUTS, "gate": declarations.GATES,
    "combine": declarations.COMBINES, "selection": declarations.SELECTIONS,
    "capacity_rule": tuple(declarations.CAPACITY_RULES), "positions": declarations.POSITIONS,
    "parts": declarations.PARTS, "candidates": declarations.CANDIDATES,
}  # fmt: skip
STEPS = {"blocks_per_router": 2, "layers": [1]}
EXIT = {"selection": "exit", "capacity_rule": "ceil"}


def test_round_trip() -> None:
    for spec in (make_spec(layers=EveryNth(every=3, offset=0), capacity=0.5), *VARIANTS.values()):
        assert ModelSpec.from_dict(spec.to_dict()) == spec
        assert json.loads(json.dumps(spec.to_dict())) == spec.to_dict()


def test_defaults_are_the_papers() -> None:
    declared = ModelSpec.from_dict({**dict.fromkeys(SIZES, 4), "routing": {}, "experts": {}})
    assert (declared.routing, declared.experts) == (RoutingSpec(), ExpertsSpec())
    assert dataclasses.asdict(RoutingSpec()) == {
        "layers": {"every": 2, "offset": 1, "skip_first": 0, "skip_last": 0}, "blocks_per_router": 1,
        "parts": "block", "candidates": "all",
        "router": "linear", "router_input": "raw", "router_stream": "part", "router_hidden": 0,
            "router_activation": "silu", "gate": "identity", "gate_scale": 1.0,
        "gate_shift": 0.0, "combine": "paper", "skipped_keys_values": "absent", "skipped_result": "identity",
            "adapter": "linear", "adapter_hidden": 0, "adapter_gate": "ones", "selection": "topk",
            "always_first": 0, "noise_seed": 0,
        "capacity_rule": "floor_min1",
        "capacity": 0.125, "positions": "original", "predictor_hidden": 0,
    }  # fmt: skip
    assert dataclasses.asdict(ExpertsSpec()) == {
        "layers": {"every": 1, "offset": 0, "skip_first": 0, "skip_last": 0}, "n_experts": 8, "choice": "token",
        "top_k": 1, "capacity_factor": 1.25, "fixed_places": (), "noop_experts": 0,
    }  # fmt: skip


def test_every_name_has_its_implementation() -> None:
    assert tuple(routing.ROUTERS) == declarations.ROUTERS
    assert tuple(routing.GATES) == declarations.GATES
    assert tuple(routing.COMBINES) == declarations.COMBINES
    assert {*routing.BLOCKS_COMBINES} == {*declarations.COMBINES} - {*declarations.FFN_GATED}
    assert tuple(expert_layers.EXPERT_CHOICES) == declarations.CHOICES


def test_needs_no_torch() -> None:
    code = "import sys, mod_models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Refusals and their messages.


def test_unknown_fields() -> None:
    data = plain({"gaet": "ones", "layers": {"evry": 2}}, {"n_expert": 3, "layers": {"evry": 1}}, n_laers=3, zzz=1)
    known = (
        "vocab_size, d_model, n_layers, n_heads, n_kv_heads, d_head, d_ff, max_positions, rope_theta, rope_scaling, "
        "norm_eps, attention_bias, qk_norm, activation, mlp_bias, embedding_scale"
    )
    assert problems(data) == [
        "spec.n_laers: unknown field, did you mean 'n_layers'?",
        f"spec.zzz: unknown field; known: {known}, tie_embeddings, routing, experts",
        "spec.routing.gaet: unknown field, did you mean 'gate'?",
        "spec.routing.layers.evry: unknown field, did you mean 'every'?",
        "spec.experts.n_expert: unknown field, did you mean 'n_experts'?",
        "spec.experts.layers.evry: unknown field, did you mean 'every'?",
    ]
    for name, text in ((3, "3"), ("a b", "'a b'"), ("x" * 500, f"'{'x' * 27}...{'x' * 28}'")):
        (problem,) = problems({**plain(), name: 1})
        assert problem.startswith(f"spec.{text}: unknown field; known: ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *((value, [f"spec: expected a table, got {type(value).__name__}"]) for value in (None, [], "text", 3)),
        ({}, [f"spec.{name}: missing" for name in SIZES]),
        (
            plain() | {"routing": [1], "experts": 3, "rope_scaling": 8.0},
            [
                "spec.rope_scaling: expected a table, got float",
                "spec.routing: expected a table, got list",
                "spec.experts: expected a table, got int",
            ],
        ),
        (
            plain(tie_embeddings=1, mlp_bias="no"),
            [
                "spec.mlp_bias: expected true or false, got 'no'",
                "spec.tie_embeddings: expected true or false, got 1",
            ],
        ),
        (
            plain(n_heads=4, n_kv_heads=3, d_head=5),
            [
                "spec.n_kv_heads: 3 does not divide n_heads 4",
                "spec.d_head: RoPE rotates pairs, so it must be even, got 5",
            ],
        ),
    ],
)
def test_what_is_no_model(data: Any, said: list[str]) -> None:
    assert problems(data) == said


def test_tables_of_another_type() -> None:
    with pytest.raises(SpecError, match=r"^spec\.routing: expected a RoutingSpec or None, got ExpertsSpec; spec\.exp"):
        make_spec(routing=ExpertsSpec(), experts={})


@pytest.mark.parametrize("value", [-1, 2.0, "8", None, True, [8], 10**30])
def test_whole_numbers(value: object) -> None:
    """All sizes of a table at once, each with its own limits."""
    got = "a whole number beyond 64 bits" if value == 10**30 else repr(value)

    def said(where: str, names: tuple[str, ...], least: int) -> list[str]:
        return [f"{where}.{name}: {WHOLE.format(least, LIMITS[name], got)}" for name in names]

    assert problems(plain(**dict.fromkeys(SIZES, value))) == said("spec", SIZES, 1)
    widths = ("router_hidden", "predictor_hidden", "noise_seed")
    assert problems(plain(dict.fromkeys(widths, value))) == said("spec.routing", widths, 0)
    counts = {"n_experts": 1, "noop_experts": 0, "top_k": 1}
    expected = [line for name, least in counts.items() for line in said("spec.experts", (name,), least)]
    assert problems(plain(experts=dict.fromkeys(counts, value))) == expected


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e39, 10**400, "1", None, True])
def test_numbers(value: object) -> None:
    got = "a whole number beyond 64 bits" if value == 10**400 else repr(value)
    names = ("rope_theta", "norm_eps", "embedding_scale")
    assert problems(plain(**dict.fromkeys(names, value))) == [
        f"spec.{name}: expected a number above 0, got {got}" for name in names
    ]
    assert problems(plain(experts={"capacity_factor": value})) == [
        f"spec.experts.capacity_factor: expected a number above 0, at most 1024, got {got}"
    ]
    if value not in (0, -1.0):
        assert problems(plain({"gate_scale": value, "gate_shift": value})) == [
            f"spec.routing.{name}: expected a number, got {got}" for name in ("gate_scale", "gate_shift")
        ]


@pytest.mark.parametrize("value", ["Ones", ["ones"], {"a": 1}, None, 0])
def test_unknown_variants(value: object) -> None:
    expected = [f"{name}: unknown variant {value!r}; known: {', '.join(table)}" for name, table in TABLES.items()]
    found = problems(plain(dict.fromkeys(TABLES, value)))
    assert sorted(found) == sorted(f"spec.routing.{line}" for line in expected)
    (choice,) = problems(plain(experts={"choice": value}))
    assert choice == f"spec.experts.choice: unknown variant {value!r}; known: token, expert"


NOT_A_PATTERN = "layers: every must be a whole number of at least 1 and offset of at least 0, got "
NOT_LAYERS = "layers: expected {every, offset} or a list of layer numbers, got "
NOT_ASCENDING = "layers: expected ascending numbers from 0 to 2, each once, got "
NO_CAPACITY = "capacity: expected a number or a list of numbers, got "
NO_SHARE = "capacity: expected a share in (0, 1], got "
NO_COUNT = "capacity: the absolute rule takes a whole number of tokens of at least 1, got "
SKIPS = "layers: skip_first and skip_last must be whole numbers of at least 0, got "


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router": "mlp", "router_hidden": 0}, "router_hidden: the mlp router needs a width of at least 1, got 0"),
        ({"layers": {"every": 0}}, NOT_A_PATTERN + "every=0, offset=1"),
        ({"layers": {"every": "2"}}, NOT_A_PATTERN + "every='2', offset=1"),
        ({"layers": {"offset": -1}}, NOT_A_PATTERN + "every=2, offset=-1"),
        ({"layers": {"offset": 3}}, "layers: offset 3 leaves none of the 3 layers routed; use routing=null"),
        ({"layers": {"skip_first": -1}}, SKIPS + "-1 and 0"),
        ({"layers": {"skip_last": 1.5}}, SKIPS + "0 and 1.5"),
        (
            {"layers": {"every": 1, "offset": 0, "skip_first": 2, "skip_last": 1}},
            "layers: offset 0, without the first 2 and the last 1, leaves none of the 3 layers routed; use "
            "routing=null",
        ),
        ({"layers": []}, NOT_LAYERS + "()"),
        ({"layers": ["1"]}, NOT_LAYERS + "('1',)"),
        ({"layers": [True]}, NOT_LAYERS + "(True,)"),
        ({"layers": None}, NOT_LAYERS + "None"),
        ({"layers": [0, 3]}, NOT_ASCENDING + "(0, 3)"),
        ({"layers": [-1, 0]}, NOT_ASCENDING + "(-1, 0)"),
        ({"layers": [1, 1]}, NOT_ASCENDING + "(1, 1)"),
        ({"capacity": 0}, NO_SHARE + "0"),
        ({"capacity": 1.01, "capacity_rule": "ceil"}, NO_SHARE + "1.01"),
        ({"capacity": [0.5, 2], "capacity_rule": "floor_min1"}, NO_SHARE + "2"),
        ({"capacity": math.nan}, NO_CAPACITY + "nan"),
        ({"capacity": None}, NO_CAPACITY + "None"),
        ({"capacity": True}, NO_CAPACITY + "True"),
        ({"capacity": ["0.5", 0.5]}, NO_CAPACITY + "('0.5', 0.5)"),
        ({"capacity": [0.5]}, "capacity: the schedule has 1 entries for 2 routed layers"),
        ({"capacity": 0, "capacity_rule": "absolute"}, NO_COUNT + "0"),
        ({"capacity": 2.5, "capacity_rule": "absolute"}, NO_COUNT + "2.5"),
        ({"capacity": [4, -1], "capacity_rule": "absolute"}, NO_COUNT + "-1"),
        (
            {"selection": "predictor", "predictor_hidden": 0},
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
        *(
            (
                {"parts": parts, "combine": combine},
                f"combine: {combine} weighs the MLP, and with parts={parts} attention is routed by itself, without a "
                "weight; declare paper",
            )
            for parts in ("attention", "separate")
            for combine in declarations.FFN_GATED
        ),
        ({**EXIT, "parts": "mlp"}, "parts: a token that exits skips whole blocks; expected block, got mlp"),
        ({**EXIT, "positions": "compact"}, "positions: exit keeps the positions of the sequence; expected original"),
        (
            {"selection": "exit", "capacity_rule": "floor"},
            "capacity_rule: floor can leave no token at all in the model; declare floor_min1 or ceil",
        ),
        (
            {**EXIT, "capacity": [0.25, 0.5]},
            "capacity: tokens that exit never come back, so the schedule must not rise, got [0.25, 0.5]",
        ),
        *(
            ({"blocks_per_router": value}, f"blocks_per_router: {WHOLE.format(1, 2**10, repr(value))}")
            for value in (0, "2", 2.0, True)
        ),
        (
            {**STEPS, "layers": [0, 1]},
            "blocks_per_router: 2 blocks from block 0 on are too many, because block 1 has the next router",
        ),
        (
            {**STEPS, "layers": [2]},
            "blocks_per_router: 2 blocks from block 2 on are too many, because the model has no more",
        ),
        *(
            (
                {**STEPS, **changes},
                "blocks_per_router: a token that a router skips for 2 blocks is absent from all of "
                f"them; expected {said}",
            )
            for changes, said in (
                ({"parts": "mlp"}, "parts=block, got mlp"),
                ({"skipped_keys_values": "kept"}, "skipped_keys_values=absent, got kept"),
                ({"skipped_result": "scaled"}, "skipped_result=identity, got scaled"),
            )
        ),
        *(
            (
                {**STEPS, "combine": combine},
                f"blocks_per_router: {combine} weighs the MLP of one block; declare another combine rule",
            )
            for combine in declarations.FFN_GATED
        ),
        ({**STEPS, **EXIT}, "blocks_per_router: a token that exits skips all later blocks anyway; expected 1, got 2"),
        (
            {"candidates": "previous", **EXIT},
            "candidates: with selection=exit a router is only given the tokens that are left; expected all",
        ),
        (
            {"candidates": "previous", "parts": "separate"},
            "candidates: with parts=separate, a layer has two routers; expected all",
        ),
        (
            {"candidates": "previous", "capacity": [0.25, 0.5]},
            "capacity: a router cannot select more tokens than the router before it ran, so the schedule must not "
            "rise, got [0.25, 0.5]",
        ),
        # These are not even numbers, and cannot be compared with each other.
        ({**EXIT, "capacity": ["0.5", 0.5]}, NO_CAPACITY + "('0.5', 0.5)"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{name}={one}" for name, one in value.items()),
)
def test_routing_is_refused(changes: dict[str, Any], said: str) -> None:
    assert problems(plain(changes)) == [f"spec.routing.{said}"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"n_experts": 0, "noop_experts": 1},
            "n_experts: no-op experts stand beside real ones, and there are none; give n_experts, or route the block "
            "(spec.routing) instead",
        ),
        ({"n_experts": 0}, f"n_experts: {WHOLE.format(1, LIMITS['n_experts'], 0)}"),
        ({"capacity_factor": 1025}, "capacity_factor: expected a number above 0, at most 1024, got 1025"),
        (
            {"choice": "expert", "top_k": 2},
            "top_k: with expert choice the experts take tokens, not tokens experts; leave it at 1 and say how many "
            "with capacity_factor, got 2",
        ),
        (
            {"top_k": 5, "noop_experts": 1},
            "top_k: 5 of 5 experts leaves nothing to choose; lower it, or give more experts",
        ),
        ({"n_experts": 1}, "top_k: 1 of 1 experts leaves nothing to choose; lower it, or give more experts"),
        ({"fixed_places": 3}, "fixed_places: expected a list of numbers, got 3"),
        ({"fixed_places": [3]}, "fixed_places: 1 entries for 3 layers with experts"),
        *(
            ({"fixed_places": [3, value, 1]}, f"fixed_places: {WHOLE.format(1, 2**24, repr(value))}")
            for value in (0, "1", 2.0, True)
        ),
        ({"layers": {"offset": 3}}, "layers: offset 3 leaves none of the 3 layers with experts; use experts=null"),
        ({"layers": [3]}, NOT_ASCENDING + "(3,)"),
    ],
    ids=str,
)
def test_experts_are_refused(changes: dict[str, Any], said: str) -> None:
    assert problems(plain(experts=changes)) == [f"spec.experts.{said}"]


def test_a_router_for_several_blocks_with_experts() -> None:
    data = plain({**STEPS, "layers": [0]}, {"layers": [1, 2]})
    assert problems(data) == [
        "spec.routing.blocks_per_router: a router decides about one block if it has experts, as block 1 has; expected "
        "1, got 2"
    ]


def test_every_problem_at_once() -> None:
    assert len(problems(plain(d_model=0, n_layers="3", norm_eps=-1, tie_embeddings=None))) == 4
    assert len(problems(plain({"gate": "x", "combine": "y", "gate_scale": "z", "layers": [9]}))) == 4
    exit_ = {"selection": "exit", "parts": "mlp", "positions": "compact", "capacity_rule": "floor"}
    assert len(problems(plain({**exit_, "capacity": [0.1, 1.0]}))) == 4


# For any content of a file, the result is a spec or a SpecError.

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from([10**400, -(10**400), 2**24, "x" * 10_000, float("nan"), *declarations.GATES,
                     *declarations.COMBINES, *declarations.SELECTIONS, *declarations.PARTS, *declarations.CHOICES]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(["every", "offset", "skip_first", "skip_last"]), SCALARS), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


def fields_of(kind: type) -> st.SearchStrategy[dict[Any, Any]]:
    names = [field.name for field in dataclasses.fields(kind)]
    return st.dictionaries(st.one_of(st.sampled_from(names), SCALARS), ANYTHING, max_size=3)


@given(
    fields_of(ModelSpec),
    fields_of(RoutingSpec),
    fields_of(ExpertsSpec),
    fields_of(RopeScaling),
    st.sampled_from(declarations.SELECTIONS),
)
@settings(max_examples=60)
def test_arbitrary_values(
    fields: dict[Any, Any],
    routed: dict[Any, Any],
    mixture: dict[Any, Any],
    scaling: dict[Any, Any],
    selection: str,
) -> None:
    data = plain({"selection": selection, "capacity_rule": "ceil", **routed}, {"layers": [1], "n_experts": 2} | mixture)
    data["rope_scaling"] = {"kind": "llama3", "factor": 2.0} | scaling
    data.update(fields)
    try:
        built = ModelSpec.from_dict(data)
    except SpecError as error:
        message = str(error)
    else:
        message = "sound"
        assert ModelSpec.from_dict(built.to_dict()) == built
        assert all(0 <= k <= 64 for k in built.k_by_layer(64).values())
    assert 0 < len(message) < 10_000


def test_values_that_cannot_be_printed() -> None:
    """A pickle can hold what JSON cannot: itself, or more levels than Python can print."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    itself: list[Any] = []
    itself.append(itself)
    for value in (deep, itself, [10**5000]):
        assert len(problems(plain(d_model=value, norm_eps=value))) == 2
        assert len(problems(plain({"gate": value, "layers": value}))) == 2
        assert len(problems(plain({"capacity": value}))) == 1
        assert len(problems(plain({"capacity": value, "selection": "exit"}))) == 1
        assert len(problems(plain(experts={"layers": value, "n_experts": value, "capacity_factor": value}))) == 3


def test_fixed_slots_of_an_expert() -> None:
    """There is one number for each layer with experts, at most the number of tokens."""
    spec = ModelSpec.from_dict(plain(experts={"layers": [0, 2], "fixed_places": [3, 5]}))
    assert spec.experts == ExpertsSpec(n_experts=4, layers=(0, 2), fixed_places=(3, 5))
    assert [spec.expert_slots(layer, tokens) for layer in (0, 2) for tokens in (8, 4, 1)] == [3, 3, 1, 5, 4, 1]
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert make_spec(experts=spec.experts, routing=None).k_by_layer(16)["2.expert3"] == 5
