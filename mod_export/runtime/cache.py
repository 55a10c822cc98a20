"""The cache of rows of text: keys and values of the tokens that each row has read, and the used slots of routing sites.

The cache belongs to the reader of prompts or to the decoder, not to the engine. An engine reads it in place and returns
the new keys and values of each layer, and the owner writes them into their slots; or the engine writes them itself, if
its output and the cache are the same memory. The cache is never reallocated.

Shape legend: B rows (texts), T tokens of one call, V vocabulary, G key/value heads, L slots of a layer, E head width,
N routing sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mod_export.engines.protocol import BindableRunner, Port
from mod_export.runtime.logits import Logprob

PARTS = ("keys", "values")
COUNTS = "counts"
IN_PLACE = "present_"
"""Prefix of the name of an output that is a tensor of the cache itself."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The cached state of one row after its first `length` tokens.

    Attributes:
        length: number of tokens read.
        rows: name of a cache tensor -> (G, L, E), its first L slots, which include all used ones.
        count_N: int64, used slots of each site; None if the model has no routing sites.
        overflow_N: int64, tokens that wanted a slot of each site but found none left; None as above.
        logits_V: logits of the next token.
    """

    length: int
    rows: Mapping[str, np.ndarray]
    count_N: np.ndarray | None
    overflow_N: np.ndarray | None
    logits_V: np.ndarray


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What reading some tokens changed in a row.

    Attributes:
        rows: name of a cache tensor -> (slots, (G, slots, E)), the slots that were filled and what they hold.
        count_N: int64, used slots of each routing site after the tokens; None if the model has no routing sites.
        overflow_N: int64, tokens so far that wanted a slot of each site but found none left; None as above.
        logits_V: the logits after the tokens.
        logprobs: for a scored prompt, the log probability of each of these tokens except the first of a text.
    """

    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    count_N: np.ndarray | None
    overflow_N: np.ndarray | None
    logits_V: np.ndarray
    logprobs: tuple[Logprob, ...] = ()


class TextCache:
    """The cache of some rows.

    Attributes:
        length: number of tokens that a row can hold.
        cache: name -> array: `keys_<layer>` and `values_<layer>` (B, G, L, E), and `counts` int64 (B, N).
        overflow_BN: int64, tokens of each row that wanted a slot of a site but found none left; None if the model has
            no routing sites.
    """

    def __init__(self, cache: dict[str, np.ndarray], length: int) -> None:
        self.cache, self.length = cache, length
        counts_BN = cache.get(COUNTS)
        self.overflow_BN = None if counts_BN is None else np.zeros_like(counts_BN)

    @property
    def kv_bytes(self) -> dict[int, int]:
        """Layer -> bytes of its keys and values."""
        sizes: dict[int, int] = {}
        for name, array in self.cache.items():
            if name != COUNTS:
                layer = int(name.rpartition("_")[2])
                sizes[layer] = sizes.get(layer, 0) + array.nbytes
        return sizes

    def clear(self, row: int) -> None:
        """Empties a row. Old keys and values stay in its slots: an unused slot has weight 0 in attention."""
        if self.overflow_BN is not None:
            self.cache[COUNTS][row] = 0
            self.overflow_BN[row] = 0

    def wipe(self) -> None:
        """Zeroes the whole cache after a failure: an unused slot has weight 0 in attention, but 0 x NaN is NaN."""
        for cache in self.cache.values():
            cache.fill(0)

    def put(self, row: int, kept: Kept) -> None:
        """Overwrites a row with a kept state."""
        self.clear(row)
        for name, cache in self.cache.items():
            if name in kept.rows:
                row_GLE = kept.rows[name]
                slots = min(row_GLE.shape[1], cache.shape[2])
                cache[row, :, :slots] = row_GLE[:, :slots]
        if self.overflow_BN is not None:
            self.cache[COUNTS][row] = kept.count_N
            self.overflow_BN[row] = kept.overflow_N

    def state(self, row: int, length: int, logits_V: np.ndarray) -> Kept:
        """Returns the cached state of a row that has read `length` tokens. It uses the memory of the cache."""
        rows = {name: array[row, :, :length] for name, array in self.cache.items() if name != COUNTS}
        if self.overflow_BN is None:
            return Kept(length, rows, None, None, logits_V)
        return Kept(length, rows, self.cache[COUNTS][row], self.overflow_BN[row], logits_V)

    def keep(self, row: int, length: int, logits_V: np.ndarray) -> Kept:
        """Copies the cached state of a row that has read `length` tokens."""
        state = self.state(row, length, logits_V)
        rows = {name: array.copy() for name, array in state.rows.items()}
        if state.count_N is None or state.overflow_N is None:
            return Kept(length, rows, None, None, logits_V.copy())
        return Kept(length, rows, state.count_N.copy(), state.overflow_N.copy(), logits_V.copy())

    def block(self, row: int, filled: Mapping[int, np.ndarray], logits_V: np.ndarray) -> CachedBlock:
        """Copies what the last tokens of a row changed in it; `filled` holds the slots that they took in each layer."""
        rows = {
            name: (slots, array[row][:, slots])
            for layer, slots in filled.items()
            for name, array in ((name, self.cache.get(name)) for name in (f"keys_{layer}", f"values_{layer}"))
            if array is not None
        }
        if self.overflow_BN is None:
            return CachedBlock(rows, None, None, logits_V.copy())
        return CachedBlock(rows, self.cache[COUNTS][row].copy(), self.overflow_BN[row].copy(), logits_V.copy())

    def put_block(self, row: int, block: CachedBlock) -> None:
        """Continues a row with a block, as if its tokens had been read."""
        for name, (slots, rows_GSE) in block.rows.items():
            self.cache[name][row][:, slots] = rows_GSE
        if self.overflow_BN is not None:
            self.cache[COUNTS][row] = block.count_N
            self.overflow_BN[row] = block.overflow_N


def new_cache(ports: Mapping[str, Port]) -> dict[tuple[str, ...], np.ndarray]:
    """Allocates the tensors of a cache: names of tensors of equal shape and dtype -> one array (C, ...) of these C.

    NumPy 2.2 and later ask for huge pages for arrays of 4 MiB and more, which caches of all layers together often have.
    """
    alike: dict[Port, list[str]] = {}
    for name, port in ports.items():
        alike.setdefault(port, []).append(name)
    return {tuple(names): np.zeros((len(names), *shape), dtype) for (shape, dtype), names in alike.items()}


def by_name(together: Mapping[tuple[str, ...], np.ndarray]) -> dict[str, np.ndarray]:
    """Returns name -> array of each tensor of `new_cache`."""
    return {name: array for names, array_C in together.items() for name, array in zip(names, array_C, strict=True)}


def bound_outputs(runner: BindableRunner, cache: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns memory for an engine's outputs: the cache itself where an output updates it in place, else new arrays."""
    return {
        name: cache[name.removeprefix(IN_PLACE)] if name.startswith(IN_PLACE) else np.zeros(*port)
        for name, port in runner.ports.items()
        if name not in runner.inputs
    }
