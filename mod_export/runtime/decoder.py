"""A decode engine with its cache.

Each token costs a copy of its new key and value rows only.

Shape legend: B rows (texts), V vocabulary, G key/value heads, L slots of a layer, E head width, N routing sites, C
caches (keys or values of a layer), K rows that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.engines.protocol import BindableRunner
from mod_export.errors import EngineError
from mod_export.runtime.cache import COUNTS, TextCache, bound_outputs, by_name, new_cache

TOKENS = ("input_ids", "positions")
"""The inputs of a decode engine besides its cache."""


@dataclass(frozen=True, slots=True)
class _NewRows:
    """Holds the caches of equal shape that an engine does not update itself, and the engine's new rows for them. They
    share their memory, so that all rows of a step are written at once.
    """

    layer_C: np.ndarray
    cache_CBGLE: np.ndarray
    row_CBGE: np.ndarray

    def write(self, slot_BL: np.ndarray) -> None:
        """Writes each row into its slot, int64 (B, layers); -1 means that the row is not kept."""
        slot_CB = slot_BL.T[self.layer_C]
        c_K, b_K = np.nonzero(slot_CB >= 0)
        self.cache_CBGLE[c_K, b_K, :, slot_CB[c_K, b_K]] = self.row_CBGE[c_K, b_K]


class Decoder(TextCache):
    """The cache of one decode bucket, and its engine.

    Attributes:
        batch: number of rows.
        ran_BN: bool, whether the last token of each row ran at each site; None if the model has no routing sites.
        wanted_BN: bool, whether that token wanted a slot of the site; None as above.
    """

    def __init__(self, runner: BindableRunner, length: int, where: str) -> None:
        """Allocates the whole cache; it is never reallocated.

        Raises:
            EngineError: the engine is not a decode engine.
        """
        ports = runner.ports
        if not {"input_ids", "positions", "slots", "logits"} <= set(ports):
            expected = "expected input_ids, positions, slots and logits; build again"
            raise EngineError(f"{where}: has {', '.join(ports)}, {expected}")
        tokens = {name: np.zeros(*ports[name]) for name in TOKENS}
        caches = {name: ports[name] for name in runner.inputs if name not in TOKENS}
        # The caches that get new rows are apart from those that the engine updates itself.
        written = new_cache({name: port for name, port in caches.items() if _row(name) in ports})
        cache = by_name(written | new_cache({name: port for name, port in caches.items() if _row(name) not in ports}))
        self._outputs = outputs = bound_outputs(runner, cache)
        self._new_rows = [_new_rows(names, cache_CBGLE, outputs) for names, cache_CBGLE in written.items()]
        self._run = runner.bind({**tokens, **cache}, outputs)
        self._ids_B, self._position_B = tokens.values()
        super().__init__(cache, length)
        self.batch = len(self._ids_B)
        self.ran_BN = outputs.get("ran")
        self.wanted_BN = outputs.get("wanted")

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of tokens that each can hold."""
        return self.batch, self.length

    def slots_of(self, row: int) -> np.ndarray:
        """Copies the slot that the last token of a row filled in every layer, int64; -1 for none."""
        slots: np.ndarray = self._outputs["slots"][row].copy()
        return slots

    def step(self, ids_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
        """Reads one token of each row.

        Args:
            ids_B: int64.
            position_B: int64, how many tokens each row has read before; IDLE or VACANT for a row without a token.

        Returns:
            logits_BV. The next step overwrites this memory. Rows without a token hold meaningless values.

        Raises:
            EngineError: the engine failed, or a row is full.
        """
        if position_B.max(initial=-1) >= self.length:
            raise EngineError(f"position {position_B.max()}: a row of this cache holds {self.length} tokens")
        self._ids_B[:] = ids_B
        self._position_B[:] = position_B
        self._run()
        slot_BL = self._outputs["slots"]
        for rows in self._new_rows:
            rows.write(slot_BL)
        if self.overflow_BN is not None:
            self.cache[COUNTS][:] = self._outputs["new_counts"]
            self.overflow_BN += self._outputs["wanted"] & ~self._outputs["ran"]
        return self._outputs["logits"]


def _new_rows(names: Sequence[str], cache_CBGLE: np.ndarray, outputs: dict[str, np.ndarray]) -> _NewRows:
    """Gives the new rows of caches of equal shape one memory, and replaces them in `outputs`."""
    C, B, G, _, E = cache_CBGLE.shape
    row_CBGE = np.zeros((C, B, G, E), cache_CBGLE.dtype)
    outputs.update(zip(map(_row, names), row_CBGE, strict=True))
    return _NewRows(np.array([int(name.rpartition("_")[2]) for name in names]), cache_CBGLE, row_CBGE)


def _row(cache: str) -> str:
    """Returns the name of the output that holds the new row of a cache."""
    part, _, layer = cache.rpartition("_")
    return f"{part}_row_{layer}"
