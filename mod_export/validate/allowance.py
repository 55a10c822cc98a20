"""What rounding can explain: the gates of the configuration, applied to the rounding of the model at hand.

A fixed tolerance is too wide for a small, well-conditioned model, where a wrong gate hides below it, and too narrow for
a deep one with large logits. So the reference is run in float64 as well, and its own float32 error is the unit: the
error of a float32 candidate is of the same size, whatever the order in which it sums. For 16-bit floats the unit grows
with the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2: errors are linear in
it to first order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.config import ParityGate
from mod_export.types import QUANTIZED, DType, Site
from mod_export.validate.compare import LayerRouting

if TYPE_CHECKING:
    from mod_export.validate.parity import Comparison

__all__ = ["Allowance", "allowance"]

ROUNDOFF: dict[DType, float] = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 2.0**-7,
    "int4": 2.0**-4,
}
"""Half the distance between 1 and the next number; of whole numbers half a step, as a share of the largest of them."""
FEWEST_LOGITS = 1000
"""The root mean square of fewer rounding errors varies too much to be a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one engine may differ by.

    Attributes:
        gate: of the configuration.
        max_abs: largest error of a logit.
        rms: root mean square of the errors, None where only a fixed tolerance is known.
        scores: layer -> largest distance from the edge of the selection, in the units of the scores, at which a token
            that only one side selects is a near-tie.
        scales: layer -> largest root mean square of a row's scores, which the report states distances as shares of.
        noise: largest rounding error of the reference, None where it was not measured.
        quantized: whether weights are whole numbers: the model is then another one, near to the reference, and is
            judged by what it makes of real text, with the routing that either of them chooses.
    """

    gate: ParityGate
    max_abs: float
    rms: float | None
    scores: Mapping[Site, float]
    scales: Mapping[Site, float]
    noise: float | None
    quantized: bool = False

    @property
    def next_token_slack(self) -> float:
        """Two logits that are nearer than this are equal as far as float32 can tell, whatever the engine's dtype."""
        return 0.0 if self.noise is None else 2 * self.gate.rounding_error * self.noise

    def share(self, layer: Site, distance: float) -> float:
        """A distance of scores as a share of the layer's scale."""
        return distance / (self.scales[layer] or 1.0)


def allowance(found: Sequence[Comparison], gate: ParityGate, dtype: DType) -> Allowance:
    """The largest rounding error of the reference over all inputs: on a single small one it can be small by luck.

    Args:
        found: what was compared, each with the rounding error where it was measured.
        gate: of `dtype`.
        dtype: of the engine.
    """
    quantized = dtype in QUANTIZED
    noises = [one.noise for one in found if one.noise is not None]
    by_layer: dict[Site, list[LayerRouting]] = {}
    for routing in (routing for one in found for routing in one.layers):
        by_layer.setdefault(routing.layer, []).append(routing)
    scales = {layer: _largest([one.scale for one in many]) for layer, many in by_layer.items()}
    caps = {layer: gate.near_tie * scale for layer, scale in scales.items()}
    if not noises:
        return Allowance(
            gate=gate, max_abs=gate.max_abs, rms=None, scores=caps, scales=scales, noise=None, quantized=quantized
        )
    coarser = ROUNDOFF[dtype] / ROUNDOFF["float32"]
    scores = {}
    for layer, many in by_layer.items():
        # No score is known better than to its last digits. Two are compared, each with its own error.
        unit = _largest([*(one.noise or 0.0 for one in many), 2 * ROUNDOFF["float32"] * scales[layer]])
        # np.minimum, unlike min, keeps a NaN.
        scores[layer] = float(np.minimum(caps[layer], 2 * gate.rounding_error * coarser * unit))
    noise = _largest([one.max_abs for one in noises])
    rms = gate.rounding_error_rms * coarser * _largest([one.rms for one in noises])
    return Allowance(
        gate=gate,
        max_abs=gate.rounding_error * coarser * noise,
        rms=rms if sum(one.error.count for one in found) >= FEWEST_LOGITS else None,
        scores=scores,
        scales=scales,
        noise=noise,
        quantized=quantized,
    )


def _largest(values: Sequence[float]) -> float:
    """NaN as soon as one of them is not finite: a reference that overflows would otherwise allow everything."""
    return float(np.max(values)) if np.isfinite(values).all() else float("nan")
