"""The cache of a text that is being written: keys and values of its tokens, and how many slots of each site are in use.

Shape legend: B rows (texts), G key/value heads, L slots of a layer, E head width, N routing sites.

A slot holds one token. Where attention is not routed, the slot is the token's position. Where it is, the n-th token
that is selected in its row is in slot n. So the slots of a row fill from the front, and no list of positions is needed:
keys are rotated to their positions before they are stored. A row's slots from its count on hold any finite numbers.
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
    """The routing sites in the order in which a token meets them, experts too: the columns of the counts."""
    return tuple(spec.k_by_layer(spec.max_positions))


def routed_sites(spec: ModelSpec) -> tuple[Site, ...]:
    """The sites that are no experts: where a token is selected or skipped."""
    return tuple(site for site in sites(spec) if not is_expert(site))


def expert_sites(spec: ModelSpec, layer: int) -> tuple[Site, ...]:
    """The experts of a layer."""
    return tuple(site for site in sites(spec) if is_expert(site) and layer_of(site) == layer)


def slots_of_layer(spec: ModelSpec, max_len: int) -> dict[int, int]:
    """How many slots the keys and values of each layer have, in a cache of texts of up to `max_len` tokens; the spec is
    from `generation_spec.for_generation`, and its window at least as long.
    """
    return {layer: given.attended for layer, given in enumerate(spec.tokens_of_layer(max_len))}


def cache_layout(spec: ModelSpec, rows: int, max_len: int) -> list[CacheTensor]:
    """All tensors of a cache in the order in which graphs take them: of each layer `keys_<layer>` and
    `values_<layer>` (B, G, L, E), and if the model routes `counts`, int64 (B, N), the slots in use.
    """
    found = []
    for layer, slots in slots_of_layer(spec, max_len).items():
        shape = (rows, spec.n_kv_heads, slots, spec.d_head)
        found += [CacheTensor(f"{part}_{layer}", shape, torch.float32, layer) for part in ("keys", "values")]
    if sites(spec):
        found.append(CacheTensor(COUNTS, (rows, len(sites(spec))), torch.int64, None))
    return found


def write_rows(cache: Mapping[str, Tensor], rows: Mapping[str, Tensor], slot_BL: Tensor) -> None:
    """Writes the keys and values of a step into the cache, in place: one slot of each row, no copy of the tensor.

    Args:
        cache: name -> tensor, as in `cache_layout`.
        rows: `keys_<layer>` and `values_<layer>`, each (B, G, E).
        slot_BL: int64 (B, layers), where they go; negative for a row that keeps nothing in this layer.
    """
    for name, row_BGE in rows.items():
        slot_B = slot_BL[:, int(name.rpartition("_")[2])]
        kept_N = (slot_B >= 0).nonzero().squeeze(1)
        cache[name][kept_N, :, slot_B[kept_N]] = row_BGE[kept_N]
