"""Random small models, all sound: whatever is said against a build of one of them is a false alarm."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from base_folder import checkpoint_with

from mod_models.checkpoint import Checkpoint
from mod_models.declarations import COMBINES, GATES, LEARNED_ROUTERS, PARTS, SELECTIONS
from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RoutingSpec, SpecError

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


def random_build(seed: int) -> RandomBuild:
    """Sizes, heads, capacities, routing declarations, weights, batch and lengths, all drawn from one seed."""
    rng = random.Random(seed)
    n_layers, kv_heads = rng.randint(1, 6), rng.choice((1, 2, 3))
    layers = tuple(sorted(rng.sample(range(n_layers), rng.randint(1, n_layers))))
    seq = rng.choice(LENGTHS)
    gate = rng.choice(GATES)
    scaled = gate in ("scaled_sigmoid", "tanh_affine")
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
            router_hidden=8 if router == "mlp" else 0,
            router_input=rng.choice(("raw", "normed")),
            gate=gate,
            gate_scale=rng.choice((0.5, 2.0)) if scaled else 1.0,
            gate_shift=rng.choice((0.0, 1.0)) if gate == "tanh_affine" else 0.0,
            combine=rng.choice(COMBINES),
            capacity=rng.choice(CAPACITIES),
            capacity_rule=rng.choice(("floor_min1", "ceil")),
            positions=rng.choice(("original", "compact")),
        ),
    )
    return _build_of(spec, seed, seq, rng)


def random_build_of_any_kind(seed: int) -> RandomBuild:
    """The sizes of `random_build`, with any selection, parts of blocks, and experts in half of the models."""
    base = random_build(seed).checkpoint.spec
    rng = random.Random(seed + 0.5)
    while True:
        try:
            return _build_of(_of_any_kind(base, rng), seed, rng.choice(LENGTHS), rng)
        except SpecError:
            # Declarations that do not go together: drawn again.
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
