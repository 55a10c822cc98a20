"""The ways of `make retrofit`: what each changes in a dense model, how it is trained, and where its results are."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mod_models.train import TrainConfig
from mod_models.train.retrofit import FITTED, LEARNED

CONTROLS = ("dense", "removed", "narrowed")
"""Values of `Way.kind` of models that route nothing."""
SAMPLES = "retrofit"
"""The folder of the samples, inside that of the page."""
ABOUT = "about.json"
"""Beside the samples, and beside the trained models: the settings that all of them share."""
AS_GIVEN = "as_given"
"""Name of the dense model before any training, in ABOUT and among the answers."""
ANSWERS = "answers"
"""Folder beside the samples: how well their models answer the questions of lm-eval, in files of the same names."""
SPEEDS = "speed"
"""Folder beside the samples: the speed of each shape, which training changes hardly."""
SEEDS = 6
"""Number of seeds of a run, from 0 on. A model that follows the training of its dense model adds this number to its
seed, so that it reads other windows of the text. Sums from 12 on are the windows of fits and calibrations.
"""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a model of a dense one, and to train it.

    Attributes:
        kind: the routed part; or `dense` for the dense model itself, `removed` for the dense model without the blocks
            that `route` names, `narrowed` for the dense model whose MLPs keep a share of their neurons.
        route: the routed or removed layers; `{half}` is half of all layers.
        share: share of the tokens that the part runs, or of the neurons that are kept.
        skipped_keys: `kept` or `absent`.
        adapter: what skipped tokens run.
        adapter_share: how many neurons a gated adapter has, as a share of those of the MLP.
        routers: `fitted` or `learned`.
        taught: whether the dense model as given is the teacher, whose predictions count as much as the text.
        dense_first: share of the training tokens that the dense model is trained on before the way starts from it and
            has it for its teacher; 0 to start from the dense model as given.
    """

    kind: str
    route: str
    share: float
    skipped_keys: str = "absent"
    adapter: str = "none"
    adapter_share: float = 0.0
    routers: str = FITTED
    taught: bool = False
    dense_first: float = 0.0

    @property
    def routes(self) -> bool:
        """Whether tokens are routed at all."""
        return self.kind not in CONTROLS

    @property
    def shape(self) -> str:
        """Names everything that decides about speed."""
        adapter = f"{self.adapter}-{self.adapter_share:g}" if self.adapter_share else self.adapter
        left = [name for name in (self.skipped_keys, adapter, self.routers) if name not in USUAL]
        name = f"{self.kind}-{self.route.replace(':', '-')}-{self.share}".replace("-{half}", "")
        return "-".join([name, *left])

    @property
    def name(self) -> str:
        first = f"-first-{self.dense_first:g}" if self.dense_first else ""
        return f"{self.shape}{'-taught' if self.taught else ''}{first}"

    @property
    def has_teacher(self) -> bool:
        """Whether it learns from the dense model that it starts from."""
        return self.taught or self.dense_first > 0


USUAL = ("absent", "none", FITTED)
"""Values that are not in the name of a way."""
DENSE = Way("dense", "none", 1.0)
GRID = (
    DENSE,
    Way("removed", "cheapest:3", 0.0),
    Way("narrowed", "all", 0.8),
    Way("mlp", "cheapest:{half}", 0.5, adapter="gated", adapter_share=0.25),
    Way("mlp", "every:1", 0.5, adapter="gated", adapter_share=0.25),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear"),
    Way("removed", "cheapest:3", 0.0, taught=True),
    Way("narrowed", "all", 0.8, taught=True),
    Way("mlp", "cheapest:{half}", 0.5, adapter="gated", adapter_share=0.25, taught=True),
    Way("mlp", "every:1", 0.5, adapter="gated", adapter_share=0.25, taught=True),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear", taught=True),
    Way("removed", "cheapest:3", 0.0, dense_first=0.75),
    Way("narrowed", "all", 0.8, dense_first=0.75),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear", dense_first=0.75),
    # Similar to GateSkip (arXiv 2510.13876): a learned gate on the output of every attention and MLP, here a scalar in
    # place of a vector; all weights learn, and the share of the tokens falls from 1.
    Way("separate", "every:1", 0.8, skipped_keys="kept", routers=LEARNED),
    Way("removed", "cheapest:5", 0.0),
    Way("narrowed", "all", 0.85),
    Way("narrowed", "all", 0.65),
    Way("mlp", "cheapest:{half}", 0.25, adapter="linear"),
    Way("mlp", "cheapest:{half}", 0.5, adapter="linear", routers=LEARNED),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept", adapter="linear"),
    Way("block", "cheapest:{half}", 0.5, skipped_keys="kept", adapter="linear"),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept"),
    Way("block", "cheapest:{half}", 0.75, skipped_keys="kept", routers=LEARNED),
    Way("attention", "cheapest:{half}", 0.5, skipped_keys="kept"),
    Way("block", "cheapest:{half}", 0.75),
    Way("mlp", "cheapest:{half}", 0.5),
    Way("block", "deepest:{half}", 0.75, skipped_keys="kept", adapter="linear"),
)
"""Ways in the order of their training. Controls, and ways to compare with them, come first, in case the run is stopped.
"""


def steps_of_dense(way: Way, steps: int) -> int:
    """Returns how many of at least two steps train the dense model before the way starts; it has one left at least."""
    return min(max(1, round(way.dense_first * steps)), steps - 1) if way.dense_first else 0


def config_of(way: Way, given: argparse.Namespace) -> TrainConfig:
    """Returns the settings of a way. Every way has the same budget, and all with the same `dense_first` the same
    batches.

    Only a model that routes has predictors to calibrate, and only routers that learn begin at capacity 1.
    """
    steps = given.steps - steps_of_dense(way, given.steps)
    return TrainConfig(
        steps=steps, batch=given.batch, micro_batch=given.micro_batch, seq=given.seq,
        learning_rate=given.learning_rate, router_learning_rate=10 * given.learning_rate, weight_decay=0.0,
        warmup=max(1, steps // 20), eval_every=max(1, steps // 2), eval_batches=given.eval_batches,
        log_every=max(1, steps // 40), recompute=given.recompute, precision=given.precision,
        anneal=0.5 if way.routes and way.routers == LEARNED else 0.0, distill=1.0 if way.has_teacher else 0.0,
        calibrate=8 if way.routes else 0, seed=given.seed + (SEEDS if way.dense_first else 0),
    )  # fmt: skip
