"""Models that `make study` trains: those that the Mixture-of-Depths paper compares, at a size that one CPU core trains
in minutes. Each gets as many steps as the same number of training FLOPs allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RoutingSpec
from mod_models.train import TrainConfig
from mod_models.train.losses import losses
from mod_models.transformer import Transformer

SEQ = 256
BATCH = 8
BUDGET = 5e12
"""Training FLOPs of each model, forward and backward."""
SEEDS = (0, 1)

DENSE = ModelSpec(
    vocab_size=256, d_model=96, n_layers=6, n_heads=3, n_kv_heads=1, d_head=32, d_ff=288, max_positions=SEQ
)
ODD = EveryNth(every=2, offset=1)
EVERY = EveryNth(every=1, offset=0)


@dataclass(frozen=True, slots=True)
class Studied:
    """One model of the comparison."""

    name: str
    spec: ModelSpec
    about: str


def _mod(**declared: object) -> ModelSpec:
    routing = RoutingSpec(**{"predictor_hidden": 32, "layers": ODD, **declared})  # type: ignore[arg-type]  # Any field.
    return replace(DENSE, routing=routing)


def _moe(spec: ModelSpec, **declared: object) -> ModelSpec:
    experts = ExpertsSpec(**{"layers": ODD, "n_experts": 4, **declared})  # type: ignore[arg-type]  # Any field.
    return replace(spec, experts=experts)


STUDIED = (
    Studied("dense", DENSE, "every token through every block"),
    Studied("MoD 12.5 %", _mod(capacity=0.125), "every other block, top-k"),
    Studied("MoD 25 %", _mod(capacity=0.25), "every other block, top-k"),
    Studied("MoD 50 %", _mod(capacity=0.5), "every other block, top-k"),
    Studied("MoD 12.5 %, every block", _mod(capacity=0.125, layers=EVERY), "all six blocks, top-k"),
    Studied(
        "stochastic MoD 12.5 %",
        _mod(capacity=0.125, router="noise", predictor_hidden=0),
        "every other block, Gaussian noise instead of the router's score",
    ),
    Studied(
        "MoD 12.5 %, random choice",
        _mod(capacity=0.125, selection="random", predictor_hidden=0),
        "every other block, top-k of Gaussian noise, weighted by a learned router",
    ),
    Studied("MoE", _moe(DENSE), "four experts in every other block, a token goes to one"),
    Studied("staged MoDE", _moe(_mod(capacity=0.5)), "MoD 50 % around attention and the four experts"),
    Studied(
        "integrated MoDE",
        _moe(DENSE, noop_experts=4, capacity_factor=0.625),
        "four experts and four that do nothing, for half of the tokens",
    ),
)
"""Models in the order of the tables."""


def flops_of_row(spec: ModelSpec, *, training: bool, seq: int = SEQ) -> int:
    """Returns the FLOPs of one row of `seq` tokens, as PyTorch counts them in a forward pass, or in a training step's
    forward and backward pass with all auxiliary losses. Attention scores count as the full square, not the causal half.
    """
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    ids_BS1 = torch.randint(0, spec.vocab_size, (1, seq + 1), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        if training:
            losses(model, ids_BS1).total.backward()
        else:
            with torch.no_grad():
                model(ids_BS1[:, 1:], torch.tensor([seq]))
    return counter.get_total_flops()


def config_of(studied: Studied, seed: int, budget: float = BUDGET) -> TrainConfig:
    """Returns a training configuration with as many steps as the budget pays for."""
    steps = max(2, round(budget / (BATCH * flops_of_row(studied.spec, training=True))))
    return TrainConfig(
        steps=steps,
        batch=BATCH,
        seq=SEQ,
        warmup=max(1, steps // 20),
        seed=seed,
        eval_every=max(1, steps // 8),
        eval_batches=8,
        log_every=10,
    )
