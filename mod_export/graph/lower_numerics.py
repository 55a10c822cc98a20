"""Writes numeric functions in forms that stay accurate where the exporter's forms overflow or lose small numbers.

torch.onnx writes textbook formulas: `log(1 + x)` is 0 if x is below half a unit in the last place of 1, and
`log(exp(a) + exp(b))` is infinite from 89 on. PyTorch avoids both. The forms of log1p and expm1 are those of Higham,
"Accuracy and Stability of Numerical Algorithms", 2nd edition, section 1.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
MEAN, SUM = 1, 2
"""ATEN's numbers for the reduction of a loss; 0 is no reduction."""


def _log1p(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    sum_ = 1 + x
    result = x * (sum_.log() / torch.where(sum_ == 1, 1.0, sum_ - 1))
    return torch.where(sum_ == 1, x, torch.where(sum_.isinf(), sum_.log(), result))


def _expm1(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    power = x.exp()
    result = (power - 1) * (x / torch.where(power == 1, 1.0, power.log()))
    # If the power is infinite or vanishes beside 1, the difference itself is exact.
    is_extreme = power.isinf() | (power - 1 == -1)
    return torch.where(power == 1, x, torch.where(is_extreme, power - 1, result))


def _log_of_one_and(power: Tensor) -> Tensor:
    """log(1 + exp(power)), where power is -|x|. Unlike `log1p`, `softplus` is stable in every runtime."""
    return torch.nn.functional.softplus(power)


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.relu(-x) - _log_of_one_and(-x.abs())


def _logaddexp(one: Tensor, other: Tensor) -> Tensor:
    largest = torch.maximum(one, other)
    # Equal numbers are treated apart, because the difference of equal infinities is NaN.
    return torch.where(one == other, largest + math.log(2), largest + _log_of_one_and(-(one - other).abs()))


def _logaddexp2(one: Tensor, other: Tensor) -> Tensor:
    largest, turns = torch.maximum(one, other), math.log(2)
    added = _log_of_one_and(-(one - other).abs() * turns) / turns
    return torch.where(one == other, largest + 1, largest + added)


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logsumexp of every prefix of a row, computed from N copies of the row under an N x N mask."""
    rows = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    place = torch.arange(rows.shape[-1], device=x.device)
    prefixes = rows.unsqueeze(-2).masked_fill(place > place[:, None], -math.inf)
    result = prefixes.logsumexp(-1)
    return result.movedim(-1, dim) if x.dim() else result.reshape(())


def _bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    share = 1.0 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * x - share * _log_sigmoid(x)
    loss = loss if weight is None else loss * weight
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _hypot(one: Tensor, other: Tensor) -> Tensor:
    """Divides by the larger number, so that no square overflows."""
    one, other = one.abs(), other.abs()
    largest, smallest = torch.maximum(one, other), torch.minimum(one, other)
    share = smallest / torch.where(largest == 0, 1.0, largest)
    return torch.where(largest.isinf(), largest, largest * (share * share + 1).sqrt())


def _fmax(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one.isnan(), other, torch.where(other.isnan(), one, torch.maximum(one, other)))


def _fmin(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one.isnan(), other, torch.where(other.isnan(), one, torch.minimum(one, other)))


EXACT: Mapping[Any, Callable[..., Tensor]] = {
    ATEN.log1p.default: _log1p,
    ATEN.expm1.default: _expm1,
    ATEN.log_sigmoid.default: _log_sigmoid,
    ATEN.logaddexp.default: _logaddexp,
    ATEN.logaddexp2.default: _logaddexp2,
    ATEN.logcumsumexp.default: _logcumsumexp,
    ATEN.binary_cross_entropy_with_logits.default: _bce_with_logits,
    ATEN.hypot.default: _hypot,
    ATEN.fmax.default: _fmax,
    ATEN.fmin.default: _fmin,
}
