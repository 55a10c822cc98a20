"""The names under which the cache of a model that writes text goes into its graphs and out of them.

Passes know a cache by these names alone: `keys_<layer>` and `values_<layer>` (B, G, L, E) as inputs of a step and
outputs of a prefill, `keys_row_<layer>` and `values_row_<layer>` (B, G, E) as outputs of a step, and
`present_keys_<layer>` and `present_values_<layer>` as outputs of a step that updates its cache itself.
"""

from __future__ import annotations

import re

__all__ = ["LOGITS", "SLOTS", "cache_of_row", "is_cache", "layer_of_cache", "present_of"]

LOGITS = "logits"
"""Output (B, V), that every read of a cache leads to."""
SLOTS = "slots"
"""Output int64 (B, layers) of a step: where the rows belong, -1 where there is nothing to remember."""

_CACHE = re.compile(r"(?:present_)?(?:keys|values)(?:_row)?_(\d+)")
_ROW = re.compile(r"(keys|values)_row_(\d+)")


def is_cache(name: str | None) -> bool:
    """Whether an input or output holds keys or values, whole or one row of them."""
    return name is not None and _CACHE.fullmatch(name) is not None


def cache_of_row(name: str | None) -> str | None:
    """`keys_3` of `keys_row_3`; None for anything but a row."""
    match = None if name is None else _ROW.fullmatch(name)
    return f"{match[1]}_{match[2]}" if match else None


def present_of(cache: str) -> str:
    """What the updated form of a cache is called."""
    return f"present_{cache}"


def layer_of_cache(cache: str) -> int:
    """The layer, which is also the column of `slots`."""
    return int(cache.rpartition("_")[2])
