"""The cache between the graphs that write a text: its tensors and slots, and the inputs and outputs of these graphs.

`step.py` has the modules, and says how the slots of a row fill.

Shape legend: B rows (texts), G key/value heads, E head width, L slots of a layer, N routing sites.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mod_models.spec import ModelSpec, Site, is_expert, layer_of

COUNTS = "counts"


class CacheTensor(NamedTuple):
    """One tensor of the cache."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def sites(spec: ModelSpec) -> tuple[Site, ...]:
    """All routing sites, experts included, in the order in which a token reaches them: the columns of the counts."""
    return tuple(spec.k_by_layer(spec.max_positions))


def routed_sites(spec: ModelSpec) -> tuple[Site, ...]:
    """The routing sites that are not experts: each selects or skips tokens."""
    return tuple(site for site in sites(spec) if not is_expert(site))


def expert_sites(spec: ModelSpec, layer: int) -> tuple[Site, ...]:
    """The routing sites of the experts of a layer."""
    return tuple(site for site in sites(spec) if is_expert(site) and layer_of(site) == layer)


def slots_of_layer(spec: ModelSpec, max_len: int) -> dict[int, int]:
    """Layer -> slots of its keys and values in a cache for texts of up to `max_len` tokens. The spec is from
    `generation_spec.for_generation`, and its window is at least `max_len`.
    """
    return {layer: tokens.attended for layer, tokens in enumerate(spec.tokens_of_layer(max_len))}


def cache_layout(spec: ModelSpec, rows: int, max_len: int, room: int = 0) -> list[CacheTensor]:
    """Returns the tensors of a cache in the order of the graphs' inputs: for each layer `keys_<layer>` and
    `values_<layer>` (B, G, L, E), and in a model with routing sites `counts`, int64 (B, N), the slots in use.

    Each layer has `room` slots more than it can use.
    """
    tensors = []
    for layer, slots in slots_of_layer(spec, max_len).items():
        shape = (rows, spec.n_kv_heads, slots + room, spec.d_head)
        tensors += [CacheTensor(f"{part}_{layer}", shape, torch.float32) for part in ("keys", "values")]
    if sites(spec):
        tensors.append(CacheTensor(COUNTS, (rows, len(sites(spec))), torch.int64))
    return tensors


def prefill_inputs(spec: ModelSpec, max_len: int) -> list[str]:
    """Names of the inputs of `Prefill`, in order."""
    return ["input_ids", "lengths", "positions", *(tensor.name for tensor in cache_layout(spec, 1, max_len))]


def prefill_outputs(spec: ModelSpec) -> list[str]:
    """Names of the outputs of `Prefill`, in order."""
    rows = [f"{part}_rows_{layer}" for layer in range(spec.n_layers) for part in ("keys", "values")]
    return ["last_logits", *rows, "slots", "kept", *(["new_counts", "wanted"] if sites(spec) else [])]


def step_inputs(spec: ModelSpec, max_len: int) -> list[str]:
    """Names of the inputs of `DecodeStep`, in order."""
    return ["input_ids", "positions", *(tensor.name for tensor in cache_layout(spec, 1, max_len))]


def step_outputs(spec: ModelSpec) -> list[str]:
    """Names of the outputs of `DecodeStep`, in order."""
    rows = [f"{part}_row_{layer}" for layer in range(spec.n_layers) for part in ("keys", "values")]
    return ["logits", *rows, "slots", *(["new_counts", "wanted", "ran"] if sites(spec) else [])]
