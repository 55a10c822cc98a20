"""A condition on the data around a part of a model, which a static graph can hold: both branches have equal shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Branch = Callable[..., tuple[Tensor, ...]]


def either(mark_B: Tensor, run: Branch, other: Branch, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`run(*given)` where any row is marked, else `other(*given)`.

    A graph holds both branches (ONNX If) and executes one; eagerly only that one is ever called. They return tensors of
    equal shapes, dtypes and strides, and none that they were given.
    """
    any_row = mark_B.reshape(()) if len(mark_B) == 1 else mark_B.any()
    if torch.compiler.is_compiling():
        found: tuple[Tensor, ...] = torch.cond(any_row, run, other, given)
        return found
    return run(*given) if bool(any_row) else other(*given)
