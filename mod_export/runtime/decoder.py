"""A decode engine with its cache.

Each token costs a copy of its new key and value rows only.

Shape legend: B rows (texts), V vocabulary, G key/value heads, L slots of a layer, E head width, N routing sites.
"""

from __future__ import annotations

import numpy as np

from mod_export.engines.protocol import BindableRunner
from mod_export.errors import EngineError
from mod_export.runtime.cache import COUNTS, PARTS, TextCache, bound_outputs


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
        feeds = {name: np.zeros(*ports[name]) for name in runner.inputs}
        self._outputs = outputs = bound_outputs(runner, feeds)
        self._run = runner.bind(feeds, outputs)
        self._ids_B, self._position_B = feeds["input_ids"], feeds["positions"]
        super().__init__(
            {name: array for name, array in feeds.items() if name not in ("input_ids", "positions")}, length
        )
        self.batch = len(self._ids_B)
        self.ran_BN = outputs.get("ran")
        self.wanted_BN = outputs.get("wanted")
        layers = [int(name.removeprefix("keys_")) for name in self.cache if name.startswith("keys_")]
        names = [(layer, f"{part}_{layer}", f"{part}_row_{layer}") for layer in layers for part in PARTS]
        self._writes = [(layer, self.cache[name], outputs[row]) for layer, name, row in names if row in outputs]

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
            position_B: int64, how many tokens each row has read before; -1 for a row without a token.

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
        if self.batch == 1:
            for layer, cache_1GLE, row_1GE in self._writes:
                slot = slot_BL[0, layer]
                if slot >= 0:
                    cache_1GLE[0, :, slot] = row_1GE[0]
        else:
            rows_L = [np.flatnonzero(slot_B >= 0) for slot_B in slot_BL.T]
            for layer, cache_BGLE, row_BGE in self._writes:
                row_R = rows_L[layer]
                if len(row_R):
                    cache_BGLE[row_R, :, slot_BL[row_R, layer]] = row_BGE[row_R]
        if self.overflow_BN is not None:
            self.cache[COUNTS][:] = self._outputs["new_counts"]
            self.overflow_BN += self._outputs["wanted"] & ~self._outputs["ran"]
        return self._outputs["logits"]
