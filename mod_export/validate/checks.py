"""The table of checks. Each looks at all comparisons of one candidate and at what is allowed, and gives its reasons to
fail, none when it holds.

Every condition is written so that a NaN fails it: `not value <= limit`, never `value > limit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mod_export.validate.allowance import Allowance

if TYPE_CHECKING:
    from mod_export.validate.parity import Comparison

__all__ = [
    "CHECKS",
    "check_divergence",
    "check_error",
    "check_next_token",
    "check_outputs",
    "check_perplexity",
    "check_routing",
]

FEWEST_POSITIONS = 1000
"""A share of fewer is no measurement of a percent."""


def check_outputs(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The engine gives what its model has to give, and nothing else."""
    return [f"outputs: {problem}" for one in found for problem in one.problems]


def check_routing(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """Positions are a selection, and every token that is routed differently is a near-tie."""
    reasons = []
    for kind, layer in ((one.kind, layer) for one in found for layer in one.layers):
        where = f"{kind}: layer {layer.layer} routing"
        if layer.malformed:
            reasons.append(f"{where}: {layer.malformed}")
        bound = allowed.scores[layer.layer]
        faults = [distance for distance in layer.distances if not distance <= bound]
        if faults:
            reasons.append(
                f"{where}: {len(faults)} tokens differ by more than a near-tie, "
                f"the worst is {allowed.share(layer.layer, max(faults)):.3g} from the edge of the selection, "
                f"allowed {allowed.share(layer.layer, bound):.3g} of the layer's root mean square"
            )
    return reasons


def check_error(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The largest error of a logit, and the root mean square of all, given the same routing."""
    reasons = []
    for one in found:
        if not one.error.max_abs <= allowed.max_abs:
            reasons.append(
                f"{one.kind}: logits: max abs error {one.error.max_abs:.3g} given the same routing, "
                f"allowed {allowed.max_abs:.3g}"
            )
        if allowed.rms is not None and not one.error.rms <= allowed.rms:
            reasons.append(
                f"{one.kind}: logits: root mean square error {one.error.rms:.3g} given the same routing, "
                f"allowed {allowed.rms:.3g}"
            )
    return reasons


def check_next_token(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The most probable next token, where float32 can tell which one it is: over all inputs, because one is short. Of a
    quantized model over real text, if there is any, each model with its own routing.
    """
    least = allowed.gate.next_token_agreement
    texts = [one.text for one in found if one.text is not None] if allowed.quantized else []
    if texts:
        positions, agreed = sum(text.positions for text in texts), sum(text.agreed for text in texts)
        how = "agree on text, each with its own routing"
    else:
        same = np.concatenate([one.shortfalls for one in found]) <= allowed.next_token_slack
        positions, agreed, how = len(same), int(same.sum()), "agree given the same routing"
    if not (agreed + _luck(positions, least, allowed)) / positions >= least:
        return [f"next token: {agreed / positions:.4%} {how}, at least {least:.4%} must"]
    return []


def _luck(positions: int, least: float, allowed: Allowance) -> float:
    """Positions that may differ beyond the gate: of a quantized model some do, and of a few positions how many is
    chance. Two standard deviations are allowed then. Of an exact model none may.
    """
    if not allowed.quantized or positions >= FEWEST_POSITIONS:
        return 0.0
    return 2 * math.sqrt(positions * least * (1 - least))


def check_divergence(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """The distribution of the next token."""
    return [
        f"{one.kind}: next token: divergence {one.kl:.3g} nats given the same routing, allowed {allowed.gate.max_kl:g}"
        for one in found
        if not one.kl <= allowed.gate.max_kl
    ]


def check_perplexity(found: Sequence[Comparison], allowed: Allowance) -> Sequence[str]:
    """What the model makes of real text, over all of it."""
    texts = [one.text for one in found if one.text is not None]
    if not texts:
        return []
    tokens = sum(text.tokens for text in texts)
    expected = sum(text.own_nll if allowed.quantized else text.reference_nll for text in texts)
    nats = abs(sum(text.nll for text in texts) - expected) / tokens
    if not nats <= np.log(allowed.gate.max_perplexity_ratio):
        how = "" if allowed.quantized else " given the same routing"
        return [
            f"text: log perplexity is {nats:.3g} nats from the reference's{how}, allowed a factor of "
            f"{allowed.gate.max_perplexity_ratio:g}"
        ]
    return []


CHECKS: tuple[Callable[[Sequence[Comparison], Allowance], Sequence[str]], ...] = (
    check_outputs,
    check_routing,
    check_error,
    check_next_token,
    check_divergence,
    check_perplexity,
)
