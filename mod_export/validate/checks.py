"""The table of checks. Each looks at one comparison and one gate and gives its reasons to fail, none when it holds.

Every condition is written so that a NaN fails it: `not value <= limit`, never `value > limit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mod_export.config import ParityGate

if TYPE_CHECKING:
    from mod_export.validate.parity import Comparison

__all__ = ["CHECKS", "check_error", "check_next_token", "check_routing"]


def check_routing(found: Comparison, gate: ParityGate) -> Sequence[str]:
    """Positions are a selection, and every token that is routed differently is a near-tie."""
    reasons = []
    for layer in found.layers:
        if layer.malformed:
            reasons.append(f"layer {layer.layer} routing: {layer.malformed}")
        faults = [distance for distance in layer.distances if not distance <= gate.near_tie]
        if faults:
            reasons.append(
                f"layer {layer.layer} routing: {len(faults)} tokens differ by more than a near-tie, "
                f"the worst is {max(faults):.3g} from the k-th score, allowed {gate.near_tie:g}"
            )
    return reasons


def check_error(found: Comparison, gate: ParityGate) -> Sequence[str]:
    """The largest error of a logit, given the same routing."""
    if not found.error.max_abs <= gate.max_abs:
        return [f"logits: max abs error {found.error.max_abs:.3g} given the same routing, allowed {gate.max_abs:g}"]
    return []


def check_next_token(found: Comparison, gate: ParityGate) -> Sequence[str]:
    """The most probable next token."""
    if not found.next_token_agreement >= gate.next_token_agreement:
        return [
            f"next token: {found.next_token_agreement:.4%} agree given the same routing, "
            f"at least {gate.next_token_agreement:.4%} must"
        ]
    return []


CHECKS: tuple[Callable[[Comparison, ParityGate], Sequence[str]], ...] = (check_routing, check_error, check_next_token)
