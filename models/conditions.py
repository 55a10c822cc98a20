"""A data-dependent condition around a part of a model. A static graph can hold it: both branches have equal shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Branch = Callable[..., tuple[Tensor, ...]]


def either(mark_B: Tensor, run: Branch, other: Branch, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns `run(*given)` if any row is marked, else `other(*given)`.

    A graph holds both branches (ONNX If) and executes one. In eager mode only that one is called. Both must return
    tensors of the same shapes, dtypes and strides, and must not return their inputs.
    """
    any_row = mark_B.reshape(()) if len(mark_B) == 1 else mark_B.any()
    if torch.compiler.is_compiling():
        outputs: tuple[Tensor, ...] = torch.cond(any_row, run, other, given)
        return outputs
    return run(*given) if bool(any_row) else other(*given)
