"""Rotary scaling of Llama 3.1 from a GGUF file, which stores the divisor of each angle, not the parameters of the rule.

llama.cpp's converter computes the divisors from the parameters in config.json and stores them as a tensor. A spec needs
the parameters, so they are recovered, and only accepted if they reproduce the tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mod_models.convert.gguf_file import GgufTensor
from mod_models.layers import ROPE_SCALINGS
from mod_models.spec import RopeScaling

FACTORS = "rope_freqs.weight"
LLAMA_3 = (4.0, 8192)
"""high_freq_factor and original_positions of every Llama 3.x, for tensors that do not determine them."""
TOLERANCE = 1e-5
"""Relative tolerance of a factor, because llama.cpp's converter computes factors in float32."""


def scaling_of(tensor: GgufTensor, theta: float, d_head: int) -> RopeScaling | str | None:
    """Returns the scaling that gives a tensor of factors, None if all factors are 1, or the problem as text."""
    if tensor.shape != (d_head // 2,) or tensor.stored is not torch.float32:
        return f"expected {d_head // 2} numbers of float32, got {list(tensor.shape)} of {tensor.stored}"
    factor_E = tensor.rows(0, d_head // 2).double()
    if not bool((torch.isfinite(factor_E) & (factor_E > 0)).all()):
        return "holds factors that are not above 0"
    angle_E = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    largest = float(factor_E.max())
    if largest == float(factor_E.min()):
        return None if largest == 1.0 else RopeScaling(kind="linear", factor=largest)
    for high, positions in _candidates(factor_E, angle_E, largest):
        if not (math.isfinite(high) and math.isfinite(positions)) or high <= 1 or not 1 <= positions < 2**31:
            continue
        # Only ratios of low_freq_factor, high_freq_factor and original_positions matter, so low_freq_factor can be 1.
        scaling = RopeScaling(
            kind="llama3", factor=largest, low_freq_factor=1.0, high_freq_factor=high,
            original_positions=round(positions),
        )  # fmt: skip
        again_E = angle_E / ROPE_SCALINGS["llama3"](angle_E, scaling)
        if bool(((again_E - factor_E).abs() <= TOLERANCE * factor_E).all()):
            return scaling
    return "its factors are not those of the rule of Llama 3.1, the only one that a spec can say"


def _candidates(factor_E: Tensor, angle_E: Tensor, largest: float) -> list[tuple[float, float]]:
    """Pairs (high_freq_factor, original_positions) that can explain the factors with low_freq_factor = 1.

    Between the two limits of the wavelength, the share of the unscaled angle is
    (positions * angle / 2 pi - 1) / (high - 1).
    """
    pairs: list[tuple[float, float]] = [LLAMA_3]
    between = (factor_E > 1 + TOLERANCE) & (factor_E < largest * (1 - TOLERANCE))
    angles = angle_E[between]
    share = (1 / factor_E[between] - 1 / largest) / (1 - 1 / largest)
    if not len(share):
        # No angle is between the limits: any limits that separate the slowed angles from the others will do.
        slowed, kept = float(angle_E[factor_E > 1 + TOLERANCE].max()), float(angle_E[factor_E <= 1 + TOLERANCE].min())
        whole = math.floor(2 * math.pi / slowed)
        pairs.append((min(LLAMA_3[0], whole * kept / (2 * math.pi)), whole))
    if len(share) == 1:
        pairs.append((LLAMA_3[0], float((1 + share[0] * (LLAMA_3[0] - 1)) * 2 * math.pi / angles[0])))
    if len(share) > 1:
        first, last = int(angles.argmax()), int(angles.argmin())
        slope = float((share[first] - share[last]) / (angles[first] - angles[last]))
        start = slope * float(angles[first]) - float(share[first])
        if start > 0:
            high = 1 + 1 / start
            positions = slope * (high - 1) * 2 * math.pi
            pairs += [(round(high, digits), positions) for digits in (0, 1, 2, 4)] + [(high, positions)]
    return pairs
