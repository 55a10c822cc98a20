"""Training on text: the settings of a run. Each field of `TrainConfig` is an option of `python -m mod_models.train`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from mod_models.spec import ModelSpec, RoutingSpec, shown

DEFAULT_SPEC = ModelSpec(
    vocab_size=256,
    d_model=192,
    n_layers=8,
    n_heads=6,
    n_kv_heads=2,
    d_head=32,
    d_ff=512,
    max_positions=2048,
    routing=RoutingSpec(predictor_hidden=48),
)
PRECISIONS = ("float32", "bfloat16")
RECOMPUTED = ("none", "layers")
TRAINED = ("all", "routed", "routers")
HALF_OF_THE_RUN = 0.5
LARGEST_OPTION = 10**9


class TrainError(ValueError):
    """The run cannot start or cannot continue; the message says why."""


def _option(
    default: float | str, allowed: float | tuple[str, ...], text: str, most: float = LARGEST_OPTION, **more: object
) -> Any:
    """Field of TrainConfig. `allowed` is the least number, or the tuple of names; `more` is for the argument parser."""
    limits = {"choices": allowed} if isinstance(allowed, tuple) else {"least": allowed, "most": most}
    return field(default=default, metadata={**limits, "help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one run; each step takes `batch` rows of `seq` + 1 tokens. The rate warms up, then falls as a cosine.

    `batch` counts the rows of all processes together, so the results do not depend on the number of processes.

    Raises:
        TrainError: values are out of range; one message lists all of them.
    """

    steps: int = _option(3000, 1, "optimizer steps")
    batch: int = _option(8, 1, "rows a step, of all processes together")
    micro_batch: int = _option(0, 0, "rows that a process computes at once, gradients added up; 0 for all of its rows")
    seq: int = _option(512, 1, "tokens in a row that the model reads; it predicts the token after each")
    learning_rate: float = _option(2e-3, 0, "peak rate of AdamW")
    warmup: int = _option(100, 0, "steps of linear warm-up, before a cosine down to a tenth of the peak")
    weight_decay: float = _option(0.1, 0, "of matrices; norms and biases are not decayed")
    clip: float = _option(1.0, 0, "largest norm of the gradient")
    seed: int = _option(0, 0, "of the initial weights and of the batches")
    eval_every: int = _option(250, 1, "steps between evaluations; the state to resume from is saved with each")
    eval_batches: int = _option(16, 1, "held-out batches of an evaluation")
    log_every: int = _option(25, 1, "steps between rows of the log")
    precision: str = _option("float32", PRECISIONS, "of matrix products and attention; weights stay float32")
    predictor_loss: float = _option(1.0, 0, "weight of the auxiliary predictors' loss; 0 does not train them")
    calibrate: int = _option(
        0, 0, "batches of text on which, before each evaluation, predictors are set to what their routers say; without "
        "a value 8", const=8,
    )  # fmt: skip
    router_loss: float = _option(0.0, 0, "weight of the routers' binary cross entropy against the top-k")
    balance_loss: float = _option(0.01, 0, "weight of the load balance of token-choice experts")
    train: str = _option("all", TRAINED, "which weights: all, of routed layers, or routers, predictors, adapters")
    router_learning_rate: float = _option(0.0, 0, "peak rate of routers and predictors; 0 for --learning-rate")
    anneal: float = _option(
        0.0, 0, "share of the run over which capacity falls from 1 to the spec's; without a value half of the run",
        most=1, const=HALF_OF_THE_RUN,
    )  # fmt: skip
    distill: float = _option(
        0.0, 0, "weight of KL(dense || model), the dense model being the one that --route is given; without a value 1",
        const=1.0,
    )  # fmt: skip
    recompute: str = _option("none", RECOMPUTED, "activation checkpointing: what is computed again instead of kept")

    def __post_init__(self) -> None:
        problems = []
        for option in fields(self):
            value, allowed = getattr(self, option.name), option.metadata
            if "choices" in allowed:
                if value not in allowed["choices"]:
                    problems.append(f"{option.name}: expected {' or '.join(allowed['choices'])}, got {shown(value)}")
            elif not allowed["least"] <= value <= allowed["most"]:
                limits = f"{allowed['least']} to {allowed['most']}"
                problems.append(f"{option.name}: expected {limits}, got {shown(value)}")
        if problems:
            raise TrainError("; ".join(problems))
