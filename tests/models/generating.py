"""One tiny model of every kind that can write text token by token, with its reference results on whole rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from observing import observed
from tiny_models import lively_checkpoint, make_spec
from torch import Tensor
from variants import BIASES, EVERY, NORMED_HEADS, VARIANTS, experts

from mod_models.cache import cache_layout
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec, Site
from mod_models.transformer import Transformer

WINDOW = 14
GENERATING: dict[str, ModelSpec] = {
    **{
        name: VARIANTS[name]
        for name in (
            "dense",
            "threshold",
            "predictor",
            "routed apart by predictors",
            "keys and values kept",
            "keys and values kept, routed apart",
            "keys and values kept, adapter",
            "skipped have a bottleneck adapter",
            "several blocks, nested, threshold",
            "several blocks by predictors",
            "nested",
        )
    },
    "first tokens always": make_spec(selection="threshold", always_first=2, router="norm_mlp", gate="ones"),
    "first tokens always, by predictors": make_spec(
        selection="predictor",
        predictor_hidden=2,
        always_first=3,
        parts="separate",
        capacity_rule="strict_floor",
        capacity=0.5,
    ),
    "trained by rank": make_spec(predictor_hidden=3, layers=(1, 2)),
    "MLP routed, normed, adapter": make_spec(
        parts="mlp",
        selection="predictor",
        predictor_hidden=2,
        router_input="normed",
        skipped_result="adapter",
        adapter="gated",
        adapter_hidden=3,
        gate="ones",
    ),
    "routed apart, normed, experts": make_spec(
        parts="separate", selection="threshold", router_input="normed", experts=experts()
    ),
    "attention routed": make_spec(parts="attention", selection="threshold", router_input="normed"),
    "MLP routed": make_spec(parts="mlp", selection="threshold", router="linear_bias", combine="replace"),
    "compact positions": make_spec(selection="threshold", positions="compact", gate="tanh_affine"),
    "FFN gated": make_spec(selection="predictor", predictor_hidden=2, combine="ffn_gated", router_input="normed"),
    "schedule": make_spec(selection="threshold", router="mlp", capacity=(0.25, 0.6), combine="double_residual"),
    "everybody may": make_spec(selection="threshold", capacity=1.0, combine="replace_ungated", gate="softmax_selected"),
    "experts": make_spec(routing=None, experts=experts(capacity_factor=1.0)),
    "two experts of a token, or none": make_spec(routing=None, experts=experts(noop_experts=2, top_k=2)),
    "experts in routed blocks": make_spec(
        selection="predictor", predictor_hidden=2, capacity=0.625, experts=experts(n_experts=2, top_k=1, layers=EVERY)
    ),
    "experts in routed MLPs": make_spec(
        parts="separate", selection="threshold", capacity=0.75, experts=experts(n_experts=3, top_k=2, layers=(1, 2))
    ),
    "experts after routed attention": make_spec(parts="attention", selection="threshold", experts=experts()),
    "biases": make_spec(selection="threshold", **BIASES),
    "normed heads": make_spec(routing=None, **NORMED_HEADS),
    "keys and values kept, attention routed": make_spec(
        skipped_keys_values="kept", parts="attention", selection="threshold"
    ),
    "skipped are scaled": make_spec(
        skipped_result="scaled", selection="threshold", gate="tanh_affine", gate_scale=0.2, gate_shift=1.0
    ),
    "skipped have a linear adapter": make_spec(skipped_result="adapter", parts="mlp", selection="threshold"),
    "keys and values kept, experts": make_spec(
        skipped_keys_values="kept", selection="threshold", experts=experts(n_experts=2, layers=EVERY)
    ),
    "a head for each": make_spec(selection="threshold", n_kv_heads=4, tie_embeddings=False, gate="scaled_sigmoid"),
}
"""Specs by name, before `for_generation`."""


class Meaning(NamedTuple):
    """The causal model on whole rows: logits (B, S, V), and for each routing site its tokens and its overflow."""

    logits_BSV: Tensor
    ran: list[dict[Site, list[int]]]
    overflow: list[dict[Site, int]]
    margin: float


@functools.cache
def generating_model(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """Returns a lively model whose spec has the length of the window. Many tests share it, so none may change it."""
    model = lively_checkpoint(GENERATING[name], seed=1).module()
    return Transformer(for_generation(GENERATING[name], WINDOW)).sharing(model).to(dtype)


def texts(rows: int) -> Tensor:
    return torch.randint(0, 16, (rows, WINDOW), generator=torch.Generator().manual_seed(3))


def meaning(model: Transformer, ids_BS: Tensor) -> Meaning:
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1])
    with torch.no_grad():
        logits_BSV, decided = observed(model, ids_BS, lengths_B)
    ran: list[dict[Site, list[int]]] = [{} for _ in ids_BS]
    overflow: list[dict[Site, int]] = [{} for _ in ids_BS]
    margin = float("inf")
    for site, routing in decided.items():
        wanted_B = ((routing.score_BS > 0) & routing.open_BS).sum(1)
        margin = min([margin, *routing.score_BS[routing.open_BS].abs().tolist()])
        for b, (position_K, live_K) in enumerate(zip(routing.index_BK, routing.live_BK, strict=True)):
            ran[b][site] = position_K[live_K].tolist()
            overflow[b][site] = int(wanted_B[b]) - len(ran[b][site])
    return Meaning(logits_BSV, ran, overflow, margin)


def empty_cache(spec: ModelSpec, rows: int, max_len: int) -> dict[str, Tensor]:
    """Cache before the first token: float64 zeros by name."""
    dtypes = {torch.float32: torch.float64, torch.int64: torch.int64}
    return {item.name: torch.zeros(item.shape, dtype=dtypes[item.dtype]) for item in cache_layout(spec, rows, max_len)}
