"""The prefill and decode engines of a build folder, and the cache of a decode bucket that they fill.

Shape legend: B rows (texts), S tokens of a prompt, V vocabulary, G key/value heads, L slots of a layer, E head width,
N routing sites.

The decoder owns the cache, not the engine. The engine reads it in place and returns the new key and value row of each
layer, and the decoder writes these rows into their slots. So each token costs a copy of its new rows only; the cache
is never copied or reallocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import BindableRunner, Runner
from mod_export.errors import EngineError, TargetError
from mod_export.runtime.prefix_cache import BlockState
from mod_export.types import PRIMARY, DType, Engine, ModelKind

PARTS = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of the cached state of one row after its first `length` tokens.

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


class Prompts:
    """The prefill engines for one row, keyed by the longest prompt that each can read."""

    def __init__(self, runners: Mapping[int, Runner]) -> None:
        self._runners = dict(sorted(runners.items()))

    @property
    def longest(self) -> int:
        """Length in tokens of the longest prompt that one engine call can read."""
        return max(self._runners)

    def read(self, ids: Sequence[int]) -> Kept:
        """Reads a prompt of 1 to `longest` tokens in the smallest bucket that fits.

        Raises:
            EngineError: the engine failed.
        """
        return kept_from_prefill(self.found(ids, routed=False), 0, len(ids))

    def found(self, ids: Sequence[int], *, routed: bool = True) -> dict[str, np.ndarray]:
        """Returns the engine's outputs for one prompt; `routed` adds the selected positions of every site."""
        n = len(ids)
        bucket = next(length for length in self._runners if length >= n)
        ids_1S = np.zeros((1, bucket), dtype=np.int64)
        ids_1S[0, :n] = ids
        runner = self._runners[bucket]
        feeds = {"input_ids": ids_1S, "lengths": np.array([n], dtype=np.int64)}
        wanted = [name for name in runner.outputs if routed or not name.startswith("routed_")]
        return runner.run({name: array for name, array in feeds.items() if name in runner.inputs}, wanted)


def kept_from_prefill(outputs: Mapping[str, np.ndarray], row: int, length: int) -> Kept:
    """Extracts the cached state of one row, which holds `length` tokens, from the outputs of a prefill engine."""
    rows = {name: array[row] for name, array in outputs.items() if name.partition("_")[0] in PARTS}
    count_N = outputs["counts"][row] if "counts" in outputs else None
    overflow_N = outputs["wanted"][row] - outputs["counts"][row] if "counts" in outputs else None
    return Kept(length, rows, count_N, overflow_N, outputs[PRIMARY["last"]][row])


class Decoder:
    """The cache of one decode bucket, and its engine.

    Attributes:
        batch: number of rows.
        length: number of tokens that a row can hold.
        cache: name -> array: `keys_<layer>` and `values_<layer>` (B, G, L, E), and `counts` int64 (B, N).
        ran_BN: bool, whether the last token of each row ran at each site; None if the model has no routing sites.
        wanted_BN: bool, whether that token wanted a slot of the site; None as above.
        overflow_BN: int64, tokens of each row that wanted a slot of a site but found none left; None as above.
    """

    def __init__(self, runner: BindableRunner, length: int, where: str) -> None:
        """Allocates the whole cache; it is never reallocated.

        Raises:
            EngineError: the engine is not a decode engine.
        """
        ports = runner.ports
        if not {"input_ids", "positions", "slots"} <= set(ports):
            raise EngineError(f"{where}: has {', '.join(ports)}, expected input_ids, positions and slots; build again")
        self.cache = {name: np.zeros(*ports[name]) for name in runner.inputs}
        # An output named present_* is the cache tensor itself: such an engine updates the cache in place.
        self._outputs = outputs = {
            name: self.cache.get(name.removeprefix("present_"), np.zeros(0))
            if name.startswith("present_")
            else np.zeros(*port)
            for name, port in ports.items()
            if name not in runner.inputs
        }
        self._run = runner.bind(self.cache.copy(), outputs)
        self._ids_B, self._position_B = self.cache.pop("input_ids"), self.cache.pop("positions")
        self.length = length
        self.batch = len(self._ids_B)
        self.ran_BN = outputs.get("ran")
        self.wanted_BN = outputs.get("wanted")
        counts_BN = self.cache.get("counts")
        self.overflow_BN = None if counts_BN is None else np.zeros_like(counts_BN)
        layers = [int(name.removeprefix("keys_")) for name in self.cache if name.startswith("keys_")]
        names = [(layer, f"{part}_{layer}", f"{part}_row_{layer}") for layer in layers for part in PARTS]
        self._writes = [(layer, self.cache[name], outputs[row]) for layer, name, row in names if row in outputs]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of tokens that each can hold."""
        return self.batch, self.length

    @property
    def kv_bytes(self) -> dict[int, int]:
        """Layer -> bytes of its keys and values."""
        sizes: dict[int, int] = {}
        for name, array in self.cache.items():
            if name != "counts":
                layer = int(name.rpartition("_")[2])
                sizes[layer] = sizes.get(layer, 0) + array.nbytes
        return sizes

    def clear(self, row: int) -> None:
        """Empties a row. Old keys and values stay in its slots: an unused slot has weight 0 in attention."""
        if self.overflow_BN is not None:
            self.cache["counts"][row] = 0
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
            self.cache["counts"][row] = kept.count_N
            self.overflow_BN[row] = kept.overflow_N

    def keep(self, row: int, length: int, logits_V: np.ndarray) -> Kept:
        """Copies the cached state of a row that has read `length` tokens."""
        rows = {name: array[row, :, :length].copy() for name, array in self.cache.items() if name != "counts"}
        if self.overflow_BN is None:
            return Kept(length, rows, None, None, logits_V.copy())
        return Kept(length, rows, self.cache["counts"][row].copy(), self.overflow_BN[row].copy(), logits_V.copy())

    def slots_of(self, row: int) -> np.ndarray:
        """Copies the slot that the last token of a row filled in every layer, int64; -1 for none."""
        slots: np.ndarray = self._outputs["slots"][row].copy()
        return slots

    def block(self, row: int, slots: Sequence[np.ndarray]) -> BlockState:
        """Copies what the last tokens of a row, with these slots, changed in it."""
        slots_TL = np.stack(slots)
        filled_L = {layer: slots_TL[slots_TL[:, layer] >= 0, layer] for layer in range(slots_TL.shape[1])}
        rows = {
            name: (filled_L[layer], array[row][:, filled_L[layer]])
            for layer in filled_L
            for name, array in ((name, self.cache.get(name)) for name in (f"keys_{layer}", f"values_{layer}"))
            if array is not None
        }
        if self.overflow_BN is None:
            return BlockState(rows, None, None)
        return BlockState(rows, self.cache["counts"][row].copy(), self.overflow_BN[row].copy())

    def put_block(self, row: int, block: BlockState) -> None:
        """Continues a row by a block, as if its tokens had been read."""
        for name, (slots, rows_GSE) in block.rows.items():
            self.cache[name][row][:, slots] = rows_GSE
        if self.overflow_BN is not None:
            self.cache["counts"][row] = block.count_N
            self.overflow_BN[row] = block.overflow_N

    def read_on(self, kept: Kept, ids: Sequence[int]) -> Kept:
        """Returns the cached state after reading more tokens (at least one). This overwrites row 0."""
        self.put(0, kept)
        ids_B, position_B = np.zeros(self.batch, dtype=np.int64), np.full(self.batch, -1, dtype=np.int64)
        for position, token in enumerate(ids, kept.length):
            ids_B[0], position_B[0] = token, position
            logits_BV = self.step(ids_B, position_B)
        return self.keep(0, kept.length + len(ids), logits_BV[0])

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
            self.cache["counts"][:] = self._outputs["new_counts"]
            self.overflow_BN += self._outputs["wanted"] & ~self._outputs["ran"]
        return self._outputs["logits"]


@dataclass(frozen=True, slots=True)
class DecodingEngines:
    """The prefill and decode engines of a build folder.

    Attributes:
        engines: the engines.
        load: opens an engine.
        config: the resolved configuration.
    """

    engines: Sequence[Engine]
    load: Callable[[Engine], Runner]
    config: BuildConfig

    def prefills(self, kind: ModelKind, target: str, dtype: DType) -> list[Engine]:
        """Returns the prefill engines of one model, target and dtype."""
        wanted = ("prefill", kind, target, dtype)
        return [engine for engine in self.engines if (engine.role, engine.model, engine.target, engine.dtype) == wanted]

    @contextlib.contextmanager
    def prompts(self, kind: ModelKind, target: str, dtype: DType) -> Iterator[Prompts]:
        """Opens all prefill engines of one model, target and dtype."""
        with contextlib.ExitStack() as opened:
            engines = self.prefills(kind, target, dtype)
            yield Prompts({engine.bucket.seq: opened.enter_context(self.load(engine)) for engine in engines})

    @contextlib.contextmanager
    def decoder(self, engine: Engine) -> Iterator[Decoder]:
        """Opens a decode engine and allocates its cache.

        Raises:
            TargetError: engines of this target cannot be bound to a cache on this machine.
        """
        with self.load(engine) as runner:
            if not isinstance(runner, BindableRunner):
                raise TargetError(f"{engine.path}: {engine.target} keeps no cache here")
            yield Decoder(runner, engine.bucket.seq, f"{engine.target} {engine.path}")
