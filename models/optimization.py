"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): weight decay, learning rate, clipping, and bfloat16 training.

In bfloat16, matrix products and attention run in 16 bits; weights and residual stream stay float32. A router compares
scores of tokens, and with 8 bits of mantissa scores become equal that differ in float32. Routers and predictors
therefore stay float32, as they do in a 16-bit model at inference (`routing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mod_models.parallel import Workers
from mod_models.train_config import TrainConfig

__all__ = ["autocast", "clip_gradients", "keep_routers_float32", "learning_rate_at", "make_optimizer"]

LAST_SHARE = 0.1


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters, with decay of matrices only."""
    # Norms and biases are not decayed: they are scales and offsets, not directions.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def clip_gradients(model: nn.Module, largest: float, workers: Workers) -> float:
    """Scales the gradient so that its norm is at most `largest`; all processes have to call it.

    Squares are added up in float64 and the norm is rounded to float32, so that it is the same number however the
    gradient is cut into shards. In float32 the last bit would depend on that, and with it every later step.

    Returns:
        the norm before; NaN or infinite if any number in the gradient is.
    """
    given = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in given]
    norm_P = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in held])
    square = float(norm_P.square().sum())
    if workers.parallel == "fsdp":
        (square,) = workers.sums([square])
    norm = float(torch.tensor(math.sqrt(square), dtype=torch.float32))
    if norm > largest:
        for grad in held:
            grad.mul_(largest / norm)
    return norm


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine down to a tenth of the peak. `step` counts from 0."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (LAST_SHARE + (1 - LAST_SHARE) / 2 * (1 + math.cos(math.pi * done)))


FLOAT32_PARTS = ("router", "predictor", "mlp_router", "mlp_predictor")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of a forward pass: nothing for `float32`, autocast to 16 bits for `bfloat16`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def keep_routers_float32(model: nn.Module, device: torch.device) -> None:
    """Makes every router and predictor of the model leave autocast; their casts to float32 alone do not."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in FLOAT32_PARTS:
            # On the instance: a pair of hooks would leave autocast off when the module fails between them.
            module.forward = _outside_autocast(module.forward, device)


def _outside_autocast(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def float32_forward(*args: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return forward(*args)

    return float32_forward
