"""Which models generate, why others do not and what to do about it, and the spec for a window."""

from __future__ import annotations

import dataclasses
import re

import pytest
from generating import GENERATING
from tiny_models import make_spec
from variants import VARIANTS, experts

from mod_export.model.transformer import MOD_TRANSFORMER
from mod_models.cache import routed_sites, sites, slots_of_layer
from mod_models.generation_spec import GenerationError, check_generates, for_generation, why_not
from mod_models.spec import ModelSpec
from mod_models.step import DecodeStep, Prefill

TRAIN = "train the predictor beside it"
RANKED = "routing.selection=topk: whether a token is among the k best depends on tokens after it"
EXITS = "routing.selection=exit: which tokens leave is decided by rank among all tokens"
CHOOSES = "experts.choice=expert: an expert takes the tokens of the whole text"
REFUSED = {
    **dict.fromkeys(
        (
            "topk", "attention routed", "MLP routed", "routed apart", "FFN gated", "schedule", "absolute",
            "protected blocks", "staged MoDE", "staged MoDE, expert choice", "skipped are scaled",
            "keys and values kept, attention routed", "skipped have a linear adapter",
            "several blocks, nested",
        ),
        (RANKED, TRAIN),
    ),
    "random": ("routing.selection=random: noise cannot decide in a text that is still being written", TRAIN),
    "stochastic": ("routing.router=noise: noise cannot decide", "train a router and a predictor"),
    **dict.fromkeys(("early exit", "early exit with experts"), (EXITS, "train with selection=topk and a predictor")),
    **dict.fromkeys(("experts, expert choice", "integrated MoDE, expert choice"), (CHOOSES, "train with choice=token")),
}  # fmt: skip
"""Names in VARIANTS -> the reason, and the way out."""


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_generates_or_is_refused_with_the_way_out(name: str) -> None:
    if name not in REFUSED:
        assert why_not(VARIANTS[name]) is None
        check_generates(for_generation(VARIANTS[name], 8))
        return
    reason, way_out = REFUSED[name]
    with pytest.raises(
        GenerationError, match=re.escape(f"this model cannot generate token by token: {reason}")
    ) as caught:
        for_generation(VARIANTS[name], 8)
    assert way_out in str(caught.value)


def test_a_weight_that_is_a_share_of_later_tokens() -> None:
    spec = make_spec(selection="threshold", gate="softmax_selected")
    with pytest.raises(GenerationError, match=r"routing\.gate=softmax_selected: .*train with a gate"):
        for_generation(spec, 8)
    assert why_not(make_spec(selection="threshold", gate="softmax_selected", combine="replace_ungated")) is None


@pytest.mark.parametrize("spec", GENERATING.values(), ids=GENERATING)
def test_what_generates_does_not_look_ahead_and_means_the_same_in_every_bucket(spec: ModelSpec) -> None:
    found = for_generation(spec, 12)
    assert found.looks_ahead == ()
    assert found.k_of_layer(12) == spec.k_of_layer(12)
    without_experts = dataclasses.replace(spec, experts=None) if spec.experts else spec
    assert found.k_by_layer(12) == spec.k_by_layer(12) or without_experts == spec
    for seq in (1, 5, 12, 16):
        assert found.k_by_layer(seq) == {site: min(k, seq) for site, k in found.k_by_layer(16).items()}
    # A second call with the same window changes nothing.
    assert for_generation(found, 12) == found


def test_a_predictor_that_was_trained_beside_top_k_decides() -> None:
    spec = MOD_TRANSFORMER.read(MOD_TRANSFORMER.demo_checkpoint()).checkpoint.spec
    found = for_generation(spec, 512, slack=3)
    assert found == dataclasses.replace(
        spec,
        routing=dataclasses.replace(
            spec.routing, selection="predictor", capacity_rule="absolute", capacity=(67, 67, 67, 67)
        ),
    )
    assert slots_of_layer(found, 512) == {layer: 67 if layer % 2 else 512 for layer in range(8)}
    assert slots_of_layer(found, 64) == dict.fromkeys(range(8), 64)


def test_slack_stops_at_the_window() -> None:
    assert for_generation(GENERATING["schedule"], 8, slack=4).k_of_layer(8) == {0: 6, 2: 8}


def test_slots_of_experts_are_those_of_the_window() -> None:
    spec = make_spec(selection="threshold", capacity=0.5, layers=(0, 1), experts=experts(layers=(0, 2), n_experts=2))
    found = for_generation(spec, 16).experts
    assert found.fixed_places == (5, 10)  # ceil(1.25 * 8 / 2) in a routed layer, ceil(1.25 * 16 / 2) elsewhere.
    attention = dataclasses.replace(spec, routing=dataclasses.replace(spec.routing, parts="attention"))
    assert for_generation(attention, 16).experts.fixed_places == (10, 10)


@pytest.mark.parametrize(
    ("window", "slack", "said"),
    [
        (0, 0, "window: expected a number of tokens from 1 to the model's max_positions 16, got 0"),
        (17, 0, "window: expected a number of tokens from 1 to the model's max_positions 16, got 17"),
        (8.0, 0, "window: expected a number of tokens from 1 to the model's max_positions 16, got 8.0"),
        (8, -1, "slack: expected a number of slots of at least 0, got -1"),
        (8, True, "slack: expected a number of slots of at least 0, got True"),
        (2, 0, "window: capacity 0.375 of 2 tokens leaves layer 0 no slot; give a longer window or slack"),
    ],
)
def test_a_window_that_cannot_be(window: int, slack: int, said: str) -> None:
    with pytest.raises(GenerationError) as caught:
        for_generation(VARIANTS["threshold"], window, slack)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (make_spec(selection="threshold"), "its slots are a share of each bucket"),
        (make_spec(routing=None, experts=experts()), "its slots are a share of each bucket"),
        (make_spec(capacity_rule="absolute", capacity=2, predictor_hidden=1), "routing.selection=topk"),
        (make_spec(), "routing.selection=topk: whether a token"),
    ],
)
def test_graphs_are_built_of_the_spec_of_a_window_alone(spec: ModelSpec, said: str) -> None:
    for build in (lambda: Prefill(spec, 8), lambda: DecodeStep(spec, 1, 8)):
        with pytest.raises(GenerationError) as caught:
            build()
        assert str(caught.value).startswith(f"this spec does not generate token by token: {said}")
        assert str(caught.value).endswith("see for_generation(spec, window)")


def test_the_columns_of_the_counts() -> None:
    spec = for_generation(
        make_spec(parts="separate", selection="threshold", layers=(0,), experts=experts(n_experts=2, layers=(0, 2))), 8
    )
    routed = ("0.attention", "0.mlp")
    assert sites(spec) == (*routed, "0.expert0", "0.expert1", "2.expert0", "2.expert1")
    assert routed_sites(spec) == routed
