"""Random small models without faults: every complaint about a build of one of them is a false alarm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from build_folders import Silent
from foreign_models import token_ids
from mod_dialects import DIALECTS, Model
from mod_manners import MANNERS
from torch import Tensor, nn

from benchmarks.faults.base_folder import checkpoint_with, randomized
from mod_export.config import config_from_toml
from mod_export.model import model
from mod_export.model.module import model_from_module
from mod_export.model.request import Request
from mod_export.pipeline.stages import build
from mod_export.rows.report import BuildReport
from mod_export.types import Bucket
from mod_models.checkpoint import Checkpoint, save_checkpoint
from mod_models.declarations import (
    ADAPTER_GATES,
    ADAPTERS,
    CANDIDATES,
    COMBINES,
    GATES,
    KEYS_VALUES,
    LEARNED_ROUTERS,
    MLP_ROUTERS,
    PARTS,
    RESULTS,
    SELECTIONS,
)
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RoutingSpec, SpecError

Load = Callable[[], tuple[model.Model, model.Model | None]]
CAPACITIES = (0.06, 0.125, 0.25, 0.3, 0.5, 0.9, 1.0)
LENGTHS = (7, 16, 24, 33, 48, 64, 100)
TOML = """
buckets = {buckets}
targets = ["ort-cpu"]
seed = {seed}
[latency]
samples = 5
warmup = 1
bootstrap = 100
min_speedup = 0.0
"""


@dataclass(frozen=True)
class RandomBuild:
    """A checkpoint and the configuration to build it with."""

    checkpoint: Checkpoint
    toml: str

    def build(self, folder: Path) -> BuildReport:
        """Builds it into `folder / "build"`."""
        save_checkpoint(folder / "model.pt", self.checkpoint)
        return _built(Request.checkpoint(folder / "model.pt").models, self.toml, folder)


@dataclass(frozen=True)
class RandomForeign:
    """A user's module, its inputs at each bucket, and the configuration to build it with."""

    module: nn.Module
    inputs: Callable[[int, int, int], Tensor]
    buckets: list[Bucket]
    toml: str

    def build(self, folder: Path) -> BuildReport:
        """Builds it into `folder / "build"`."""
        captured = model_from_module(self.module, self.inputs, self.buckets, type(self.module).__name__)
        return _built(lambda: (captured, None), self.toml, folder)


def _built(load: Load, toml: str, folder: Path) -> BuildReport:
    (folder / "c.toml").write_text(toml, encoding="utf-8")
    return build(load, config_from_toml(folder / "c.toml"), folder / "build", Silent(), "mod-export build model.pt")


def random_foreign(seed: int) -> RandomForeign:
    """Returns a model that routes as public code does, with random weights. Unless fixed, its buckets are random."""
    rng = random.Random(seed)
    name, std = rng.choice(sorted({*DIALECTS, *MANNERS})), rng.choice((0.05, 0.1, 0.2, 0.4))
    if name in MANNERS:
        manner = MANNERS[name]
        module, buckets = manner.make(), [Bucket(manner.rows, manner.tokens)]
        return _foreign_of(module, lambda batch, seq, seed: manner.inputs(seed)[0], buckets, std, seed)
    lengths = rng.sample((8, 12, 16, 24, 33, 64), 2)
    buckets = [Bucket(rng.choice((1, 2, 3)), seq) for seq in lengths]
    return _foreign_of(Model(DIALECTS[name]), token_ids, buckets, std, seed)


def foreign_of_ties(seed: int) -> RandomForeign:
    """Returns a model whose routers are zero. All scores tie, so torch.topk and engines may select any tokens."""
    drawn = _foreign_of(Model(DIALECTS["scatter_add"]), token_ids, [Bucket(2, 16)], 0.2, seed)
    for name, tensor in drawn.module.named_parameters():
        if "router" in name:
            tensor.data.zero_()
    return drawn


def _foreign_of(
    module: nn.Module, inputs: Callable[[int, int, int], Tensor], buckets: list[Bucket], std: float, seed: int
) -> RandomForeign:
    toml = TOML.format(buckets=[[bucket.batch, bucket.seq] for bucket in buckets], seed=seed)
    return RandomForeign(randomized(module.eval(), seed, std), inputs, buckets, toml)


def random_build(seed: int) -> RandomBuild:
    """Draws sizes, heads, capacities, routing declarations, weights, batch and lengths from one seed."""
    rng = random.Random(seed)
    n_layers, kv_heads = rng.randint(1, 6), rng.choice((1, 2, 3))
    layers = tuple(sorted(rng.sample(range(n_layers), rng.randint(1, n_layers))))
    seq = rng.choice(LENGTHS)
    gate = rng.choice(GATES)
    scaled = gate in ("scaled_sigmoid", "sigmoid_affine", "tanh_affine")
    router = rng.choice(LEARNED_ROUTERS)
    spec = ModelSpec(
        vocab_size=rng.choice((40, 256, 256, 1000)),
        d_model=rng.choice((16, 24, 32, 48, 64, 96)),
        n_layers=n_layers,
        n_heads=kv_heads * rng.choice((1, 2, 4)),
        n_kv_heads=kv_heads,
        d_head=rng.choice((4, 8, 16, 32)),
        d_ff=rng.choice((32, 48, 96, 160)),
        max_positions=128,
        tie_embeddings=rng.random() < 0.5,
        routing=RoutingSpec(
            layers=EveryNth() if n_layers > 1 and rng.random() < 0.5 else layers,
            router=router,
            router_hidden=8 if router in MLP_ROUTERS else 0,
            router_input=rng.choice(("raw", "normed")),
            gate=gate,
            gate_scale=rng.choice((0.5, 2.0)) if scaled else 1.0,
            gate_shift=rng.choice((0.0, 1.0)) if gate in ("sigmoid_affine", "tanh_affine") else 0.0,
            combine=rng.choice(COMBINES),
            capacity=rng.choice(CAPACITIES),
            capacity_rule=rng.choice(("floor_min1", "ceil")),
            positions=rng.choice(("original", "compact")),
        ),
    )
    return _build_of(spec, seed, seq, rng)


def random_build_of_any_kind(seed: int) -> RandomBuild:
    """Like `random_build`, but with any selection, routed parts of blocks, and experts in half of the models."""
    base = random_build(seed).checkpoint.spec
    rng = random.Random(seed + 0.5)
    while True:
        try:
            return _build_of(_of_any_kind(base, rng), seed, rng.choice(LENGTHS), rng)
        except SpecError:
            # The declarations contradict each other, so others are drawn.
            continue


def _of_any_kind(base: ModelSpec, rng: random.Random) -> ModelSpec:
    selection = rng.choice(SELECTIONS)
    routing = replace(
        base.routing,
        selection=selection,
        parts=rng.choice(PARTS),
        router=rng.choice((base.routing.router, "noise")) if selection == "topk" else base.routing.router,
        predictor_hidden=8 if selection == "predictor" else 0,
        noise_seed=rng.randint(0, 9),
        router_stream=rng.choice(("part", "block")),
        skipped_keys_values=rng.choice(KEYS_VALUES),
        skipped_result=rng.choice(RESULTS),
        adapter=rng.choice(ADAPTERS),
        adapter_hidden=8,
        adapter_gate=rng.choice(ADAPTER_GATES),
        candidates="all" if selection == "exit" else rng.choice(CANDIDATES),
    )
    if selection != "exit" and rng.random() < 0.5:
        # Most of these have too few layers or other declarations that contradict it.
        routing = replace(
            routing,
            layers=EveryNth(every=rng.choice((2, 3)), offset=rng.choice((0, 1)), skip_last=1),
            blocks_per_router=2,
            parts="block",
            skipped_keys_values="absent",
            skipped_result="identity",
        )
    experts = ExpertsSpec(
        layers=EveryNth(every=rng.choice((1, 2)), offset=0),
        n_experts=rng.choice((1, 2, 4, 8)),
        choice=rng.choice(("token", "expert")),
        top_k=rng.choice((1, 1, 2)),
        capacity_factor=rng.choice((0.5, 1.0, 1.25, 4.0)),
        noop_experts=rng.choice((0, 0, 2)),
    )
    return replace(
        base, routing=routing if rng.random() < 0.8 else None, experts=experts if rng.random() < 0.5 else None
    )


def _build_of(spec: ModelSpec, seed: int, seq: int, rng: random.Random) -> RandomBuild:
    std = rng.choice((0.02, 0.05, 0.1, 0.2, 0.4))
    return RandomBuild(
        checkpoint=checkpoint_with(spec, seed, std),
        toml=TOML.format(buckets=[[rng.choice((1, 2, 3)), seq]], seed=rng.randint(0, 1000)),
    )
