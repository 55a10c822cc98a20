"""Writes functions of numbers in the forms that stay exact where the exporter's overflow, or lose small numbers.

torch.onnx writes the formula of each as it stands in a textbook: `log(1 + x)` is 0 where x is below half a unit in the
last place of 1, and `log(exp(a) + exp(b))` is infinite from 89 on. PyTorch computes neither so. The forms of log1p and
expm1 are those of Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 1.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
MEAN, SUM = 1, 2
"""How a loss is reduced, as ATEN numbers it; 0 where it is not."""


def _log1p(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    sum_ = 1 + x
    found = x * (sum_.log() / torch.where(sum_ == 1, 1.0, sum_ - 1))
    return torch.where(sum_ == 1, x, torch.where(sum_.isinf(), sum_.log(), found))


def _expm1(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    power = x.exp()
    found = (power - 1) * (x / torch.where(power == 1, 1.0, power.log()))
    # Where nothing, or nothing else, is left of the power, the difference itself is exact.
    is_extreme = power.isinf() | (power - 1 == -1)
    return torch.where(power == 1, x, torch.where(is_extreme, power - 1, found))


def _log_of_one_and(power: Tensor) -> Tensor:
    """log(1 + exp(-|x|)) of -|x|: `softplus` is stable in every runtime, which `log1p` is not."""
    return torch.nn.functional.softplus(power)


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.relu(-x) - _log_of_one_and(-x.abs())


def _logaddexp(one: Tensor, other: Tensor) -> Tensor:
    largest = torch.maximum(one, other)
    # The same infinity twice is that infinity.
    return torch.where(one == other, largest + math.log(2), largest + _log_of_one_and(-(one - other).abs()))


def _logaddexp2(one: Tensor, other: Tensor) -> Tensor:
    largest, turns = torch.maximum(one, other), math.log(2)
    added = _log_of_one_and(-(one - other).abs() * turns) / turns
    return torch.where(one == other, largest + 1, largest + added)


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Of every beginning of a row, its logsumexp: N numbers are compared with N."""
    rows = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    place = torch.arange(rows.shape[-1], device=x.device)
    begun = rows.unsqueeze(-2).masked_fill(place > place[:, None], -math.inf)
    found = begun.logsumexp(-1)
    return found.movedim(-1, dim) if x.dim() else found.reshape(())


def _bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    share = 1.0 if pos_weight is None else (pos_weight - 1) * target + 1
    found = (1 - target) * x - share * _log_sigmoid(x)
    found = found if weight is None else found * weight
    return found.mean() if reduction == MEAN else found.sum() if reduction == SUM else found


def _hypot(one: Tensor, other: Tensor) -> Tensor:
    """Divided by the larger number, no square overflows."""
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
