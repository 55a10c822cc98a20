"""Conditions under which a model can write text token by token, and the spec with which it does so.

A forward pass sees the whole row when it decides. Generation decides about one token at a time and never takes a
decision back, so its declarations must be causal. The spec for generation is an ordinary spec whose capacities are
numbers of tokens (`absolute`, `fixed_places`), counted once for the window, the longest text. So slots do not depend on
the bucket: a prefill of a short prompt, a step with a short cache and a forward pass of the whole text agree.
This module does not import torch.
"""

from __future__ import annotations

import dataclasses

from mod_models.declarations import RoutingSpec
from mod_models.spec import ModelSpec, shown

TRAIN_ONE = (
    "train the predictor beside it (predictor_hidden of at least 1, paper section 3.5; `python -m mod_models.train` "
    "does by default), which learns to say of one token whether it will be chosen, or declare selection=threshold"
)
CANNOT_DRAW = "noise cannot decide in a text that is still being written"


class GenerationError(ValueError):
    """The model cannot generate token by token, or not in this window; the message gives the way out."""


def why_not(spec: ModelSpec) -> str | None:
    """Returns why a model cannot decide about one token at a time, and the way out; None if it can."""
    reason = None if spec.routing is None else _routing_reason(spec.routing)
    if reason is None and spec.experts is not None and spec.experts.choice == "expert":
        return (
            "experts.choice=expert: an expert takes the tokens of the whole text that suit it best, later ones among "
            "them; train with choice=token"
        )
    return reason


def _routing_reason(routing: RoutingSpec) -> str | None:
    if routing.router == "noise":
        return f"routing.router=noise: {CANNOT_DRAW}, and it is a control and no model; train a router and a predictor"
    if routing.selection == "random":
        return f"routing.selection=random: {CANNOT_DRAW}, and it is a control and no model; {TRAIN_ONE}"
    if routing.selection == "exit":
        return (
            "routing.selection=exit: which tokens leave is decided by rank among all tokens, and no predictor is "
            "defined for it; train with selection=topk and a predictor, or declare selection=threshold"
        )
    if routing.selection == "topk" and not routing.predictor_hidden:
        return f"routing.selection=topk: whether a token is among the k best depends on tokens after it; {TRAIN_ONE}"
    if routing.gate == "softmax_selected" and routing.combine != "replace_ungated":
        return (
            "routing.gate=softmax_selected: the weight of a token is a share of all chosen ones, later ones among "
            "them; train with a gate that looks at one token, such as sigmoid"
        )
    return None


def for_generation(spec: ModelSpec, window: int, slack: int = 0) -> ModelSpec:
    """Returns the spec with which a model generates texts of up to `window` tokens, prompt and answer together.

    If top-k selects in training, the predictor decides here. Each routed layer has the slots of its capacity in a row
    of `window` tokens plus `slack`, at most `window`. Slack helps because top-k fills its slots exactly, but the
    predictor only on average. Tokens that find no slot (overflow) are skipped, as in every first-come selection.
    Experts have the slots of a row of `window` tokens.

    Raises:
        GenerationError: the model cannot generate, or not in this window.
    """
    reason = why_not(spec)
    if reason is not None:
        raise GenerationError(f"this model cannot generate token by token: {reason}")
    if type(window) is not int or not 1 <= window <= spec.max_positions:
        raise GenerationError(
            f"window: expected a number of tokens from 1 to the model's max_positions {spec.max_positions}, got "
            f"{shown(window)}"
        )
    if type(slack) is not int or slack < 0:
        raise GenerationError(f"slack: expected a number of slots of at least 0, got {shown(slack)}")
    spec = _routed_in(spec, window, slack)
    if spec.experts is None:
        return spec
    layer_tokens = spec.tokens_of_layer(window)
    fixed = tuple(spec.expert_slots(layer, layer_tokens[layer].transformed) for layer in spec.expert_layers)
    return dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, fixed_places=fixed))


def _routed_in(spec: ModelSpec, window: int, slack: int) -> ModelSpec:
    if spec.routing is None:
        return spec
    slots = {layer: min(window, k + slack) for layer, k in spec.k_of_layer(window).items()}
    without = [layer for layer, k in slots.items() if k == 0]
    if without:
        raise GenerationError(
            f"window: capacity {shown(spec.routing.capacity)} of {window} tokens leaves layer {without[0]} no slot; "
            "give a longer window or slack"
        )
    routing = dataclasses.replace(
        spec.routing,
        selection="predictor" if spec.routing.selection == "topk" else spec.routing.selection,
        capacity_rule="absolute",
        capacity=tuple(slots.values()),
    )
    return dataclasses.replace(spec, routing=routing)


def check_generates(spec: ModelSpec) -> None:
    """Checks a spec before a prefill or a step is built with it.

    Raises:
        GenerationError: the spec is not from `for_generation`, so its slots would depend on the bucket.
    """
    reason = why_not(spec)
    if reason is None and spec.looks_ahead:
        reason = f"{', '.join(spec.looks_ahead)}"
    counted = spec.routing is None or spec.routing.capacity_rule == "absolute"
    fixed = spec.experts is None or bool(spec.experts.fixed_places)
    if reason is None and not (counted and fixed):
        reason = "its slots are a share of each bucket"
    if reason is not None:
        raise GenerationError(f"this spec does not generate token by token: {reason}; see for_generation(spec, window)")
