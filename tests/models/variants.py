"""One tiny spec of every kind of model that a spec can declare, for all tests that run over kinds."""

from __future__ import annotations

from tiny_models import make_spec

from mod_models.spec import EveryNth, ExpertsSpec, ModelSpec, RopeScaling

EVERY = EveryNth(every=1, offset=0)


def experts(**changes: object) -> ExpertsSpec:
    return ExpertsSpec(**{"n_experts": 4, "layers": (0, 2), **changes})


BIASES = {"attention_bias": "all", "mlp_bias": True, "rope_scaling": RopeScaling(kind="linear", factor=4.0)}
# Of the two pairs of a head of width 4, one lies between the wavelengths and one beyond both.
NORMED_HEADS = {
    "qk_norm": "head", "activation": "gelu_tanh", "embedding_scale": 2.5, "attention_bias": "qkv",
    "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_positions=12),
}  # fmt: skip

VARIANTS: dict[str, ModelSpec] = {
    "dense": make_spec(routing=None),
    "topk": make_spec(),
    "threshold": make_spec(selection="threshold", gate="sigmoid"),
    "predictor": make_spec(selection="predictor", predictor_hidden=3),
    "random": make_spec(selection="random", noise_seed=3),
    "stochastic": make_spec(router="noise", noise_seed=5),
    "early exit": make_spec(selection="exit", capacity_rule="ceil", capacity=(0.75, 0.375), layers=(1, 2), n_layers=4),
    "attention routed": make_spec(parts="attention"),
    "MLP routed": make_spec(parts="mlp", router_input="normed"),
    "routed apart": make_spec(parts="separate", router="linear_bias"),
    "routed apart by predictors": make_spec(parts="separate", selection="predictor", predictor_hidden=2),
    "FFN gated": make_spec(combine="ffn_gated"),
    "biases": make_spec(routing=None, **BIASES),
    "normed heads": make_spec(selection="threshold", gate="sigmoid", **NORMED_HEADS),
    "first tokens always, normed router": make_spec(
        selection="threshold", router="norm_mlp", always_first=2, gate="sigmoid_affine", combine="ffn_gated"
    ),
    "keys and values kept": make_spec(skipped_keys_values="kept", selection="threshold"),
    "keys and values kept, attention routed": make_spec(skipped_keys_values="kept", parts="attention"),
    # SkipGPT: both routers read the stream of the block.
    "keys and values kept, routed apart": make_spec(
        skipped_keys_values="kept",
        parts="separate",
        selection="threshold",
        gate="ones",
        router="mlp",
        router_hidden=3,
        router_activation="relu",
        router_stream="block",
    ),
    "skipped are scaled": make_spec(skipped_result="scaled", gate="tanh_affine", gate_scale=0.2, gate_shift=1.0),
    "skipped have a linear adapter": make_spec(skipped_result="adapter", parts="mlp", gate="ones"),
    "skipped have a bottleneck adapter": make_spec(
        skipped_result="adapter", adapter="bottleneck", adapter_hidden=3, selection="predictor", predictor_hidden=3
    ),
    # FlexiDepth.
    "keys and values kept, adapter": make_spec(
        skipped_keys_values="kept",
        skipped_result="adapter",
        adapter="gated",
        adapter_hidden=3,
        adapter_gate="rest",
        selection="threshold",
        gate="sigmoid",
        combine="ffn_gated",
        router="norm_mlp",
        router_activation="tanh",
        router_input="normed",
        qk_norm="head",
    ),
    # Mixture-of-Recursions, expert choice: three steps of two blocks, each among the tokens of the step before.
    "several blocks, nested": make_spec(
        n_layers=6,
        layers=(0, 2, 4),
        blocks_per_router=2,
        candidates="previous",
        gate="scaled_sigmoid",
        combine="double_residual",
        capacity_rule="floor_min1",
        capacity=(0.75, 0.5, 0.25),
    ),
    "several blocks, nested, threshold": make_spec(
        n_layers=7,
        layers=(0, 2, 4),
        blocks_per_router=2,
        candidates="previous",
        selection="threshold",
        gate="sigmoid",
        capacity=(0.75, 0.625, 0.5),
    ),
    "several blocks by predictors": make_spec(
        n_layers=5, layers=(0, 3), blocks_per_router=2, selection="predictor", predictor_hidden=3, positions="compact"
    ),
    "nested": make_spec(
        candidates="previous", selection="threshold", capacity=0.625, parts="attention", n_layers=4, layers=(0, 1, 3)
    ),
    "schedule": make_spec(capacity=(0.25, 0.6)),
    "absolute": make_spec(capacity_rule="absolute", capacity=3),
    "protected blocks": make_spec(n_layers=4, layers=EveryNth(every=1, offset=0, skip_first=1, skip_last=1)),
    "experts, token choice": make_spec(routing=None, experts=experts(capacity_factor=1.0)),
    "experts, two of a token": make_spec(routing=None, experts=experts(top_k=2)),
    "experts, expert choice": make_spec(routing=None, experts=experts(choice="expert", capacity_factor=1.5)),
    "staged MoDE": make_spec(capacity=0.625, experts=experts(n_experts=3, layers=EVERY)),
    "staged MoDE, expert choice": make_spec(
        capacity=0.625, experts=experts(n_experts=2, choice="expert", layers=EVERY)
    ),
    "staged MoDE, threshold": make_spec(selection="threshold", capacity=0.625, experts=experts(n_experts=2, top_k=1)),
    "integrated MoDE": make_spec(routing=None, experts=experts(noop_experts=2, top_k=2)),
    "integrated MoDE, expert choice": make_spec(routing=None, experts=experts(noop_experts=2, choice="expert")),
    "early exit with experts": make_spec(
        selection="exit",
        capacity_rule="ceil",
        capacity=(0.75, 0.5),
        layers=(0, 2),
        experts=experts(n_experts=2, layers=EVERY),
    ),
}
"""Specs by name. Widths and weights as in `tiny_models`."""
