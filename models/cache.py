"""The cache of texts that are being written: keys and values of tokens, and how many slots of each site are in use.

Shape legend: B rows (texts), G key/value heads, L slots of a layer, E head width, N routing sites.

A slot holds one token. If attention is not routed, the slot number is the token's position. If it is routed, the n-th
selected token of a row is in slot n. So the slots of a row fill from the front, and no list of positions is needed:
keys are rotated to their positions before they are stored. Unused slots of a row hold arbitrary finite numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.spec import ModelSpec, Site, is_expert, layer_of

COUNTS = "counts"


class CacheTensor(NamedTuple):
    """One tensor of the cache; `layer` is None for the counts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: int | None


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


def cache_layout(spec: ModelSpec, rows: int, max_len: int) -> list[CacheTensor]:
    """Returns the tensors of a cache in the order of the graphs' inputs: for each layer `keys_<layer>` and
    `values_<layer>` (B, G, L, E), and in a model with routing sites `counts`, int64 (B, N), the slots in use.
    """
    tensors = []
    for layer, slots in slots_of_layer(spec, max_len).items():
        shape = (rows, spec.n_kv_heads, slots, spec.d_head)
        tensors += [CacheTensor(f"{part}_{layer}", shape, torch.float32, layer) for part in ("keys", "values")]
    if sites(spec):
        tensors.append(CacheTensor(COUNTS, (rows, len(sites(spec))), torch.int64, None))
    return tensors


def write_rows(cache: Mapping[str, Tensor], rows: Mapping[str, Tensor], slot_BL: Tensor) -> None:
    """Writes the keys and values of a step into the cache in place, one slot of each row.

    Args:
        cache: name -> tensor, as in `cache_layout`.
        rows: `keys_<layer>` and `values_<layer>`, each (B, G, E).
        slot_BL: int64 (B, layers), the slot to write; negative if the row keeps nothing in this layer.
    """
    for name, row_BGE in rows.items():
        slot_B = slot_BL[:, int(name.rpartition("_")[2])]
        kept_N = (slot_B >= 0).nonzero().squeeze(1)
        cache[name][kept_N, :, slot_B[kept_N]] = row_BGE[kept_N]
