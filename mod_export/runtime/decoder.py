"""The prefill and decode engines of a build folder, and the cache of a decode bucket that they read into.

Shape legend: B rows (texts), S tokens of a prompt, V vocabulary, G key/value heads, L slots of a layer, E head width,
N routing sites.

The cache belongs to the decoder and not to the engine. The engine reads it in place and returns the new key and value
row of each layer, which are then written into their slots. So for each token only its new rows are copied, and the
cache is never copied or allocated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import BindableRunner, Runner
from mod_export.errors import EngineError, TargetError
from mod_export.types import PRIMARY, DType, Engine, ModelKind

PARTS = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Kept:
    """The cached state of one row after its first `length` tokens, copied out of a cache.

    Attributes:
        length: tokens that were read.
        rows: name of a tensor of the cache -> (G, L, E), its first slots, as many as are used.
        count_N: int64, slots that are used at each site; None where the model routes nothing.
        overflow_N: int64, how many tokens wanted a slot and found none; likewise.
        logits_V: of the token that comes next.
    """

    length: int
    rows: Mapping[str, np.ndarray]
    count_N: np.ndarray | None
    overflow_N: np.ndarray | None
    logits_V: np.ndarray


class Prompts:
    """Prefill engines of one row, by length: each reads a prompt of up to its own length."""

    def __init__(self, runners: Mapping[int, Runner]) -> None:
        self._runners = dict(sorted(runners.items()))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that is read at once."""
        return max(self._runners)

    def read(self, ids: Sequence[int]) -> Kept:
        """Reads a prompt of 1 to `longest` tokens in the smallest bucket that holds it.

        Raises:
            EngineError: the engine failed.
        """
        return kept_from_prefill(self.found(ids, routed=False), 0, len(ids))

    def found(self, ids: Sequence[int], *, routed: bool = True) -> dict[str, np.ndarray]:
        """The engine's outputs for a prompt in one row, with the selected positions of every site if `routed`."""
        n = len(ids)
        bucket = next(length for length in self._runners if length >= n)
        ids_1S = np.zeros((1, bucket), dtype=np.int64)
        ids_1S[0, :n] = ids
        runner = self._runners[bucket]
        feeds = {"input_ids": ids_1S, "lengths": np.array([n], dtype=np.int64)}
        wanted = [name for name in runner.outputs if routed or not name.startswith("routed_")]
        return runner.run({name: array for name, array in feeds.items() if name in runner.inputs}, wanted)


def kept_from_prefill(found: Mapping[str, np.ndarray], row: int, length: int) -> Kept:
    """The cached state of one row of a prefill engine's outputs, after `length` tokens."""
    rows = {name: array[row] for name, array in found.items() if name.partition("_")[0] in PARTS}
    count_N = found["counts"][row] if "counts" in found else None
    overflow_N = found["wanted"][row] - found["counts"][row] if "counts" in found else None
    return Kept(length, rows, count_N, overflow_N, found[PRIMARY["last"]][row])


class Decoder:
    """The cache of one decode bucket, and its engine.

    Attributes:
        batch: rows.
        length: tokens that a row can hold.
        cache: name -> array: `keys_<layer>` and `values_<layer>` (B, G, L, E), and `counts` int64 (B, N).
        ran_BN: bool, which rows ran at which site in the last step; None where the model routes nothing.
        wanted_BN: bool, which rows wanted to; likewise.
        overflow_BN: int64, how many tokens of each row wanted a slot and found none; likewise.
    """

    def __init__(self, runner: BindableRunner, length: int, where: str) -> None:
        """Allocates the whole cache, once.

        Raises:
            EngineError: the engine is not a decode engine.
        """
        ports = runner.ports
        if not {"input_ids", "positions", "slots"} <= set(ports):
            raise EngineError(f"{where}: has {', '.join(ports)}, expected input_ids, positions and slots; build again")
        self.cache = {name: np.zeros(*ports[name]) for name in runner.inputs}
        # What an engine updates itself is at the address that it reads.
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
    def kv_bytes(self) -> dict[int, int]:
        """Bytes of keys and values by layer."""
        found: dict[int, int] = {}
        for name, array in self.cache.items():
            if name != "counts":
                layer = int(name.rpartition("_")[2])
                found[layer] = found.get(layer, 0) + array.nbytes
        return found

    def clear(self, row: int) -> None:
        """Empties a row. What its slots hold is left there: an unused slot has weight 0 in attention."""
        if self.overflow_BN is not None:
            self.cache["counts"][row] = 0
            self.overflow_BN[row] = 0

    def wipe(self) -> None:
        """Clears every row after a failure: an unused slot has weight 0 in attention, but 0 x NaN is NaN."""
        for cache in self.cache.values():
            cache.fill(0)

    def put(self, row: int, kept: Kept) -> None:
        """Gives a row the cached state of another one."""
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
        """Copies out the cached state of a row of `length` tokens."""
        rows = {name: array[row, :, :length].copy() for name, array in self.cache.items() if name != "counts"}
        if self.overflow_BN is None:
            return Kept(length, rows, None, None, logits_V.copy())
        return Kept(length, rows, self.cache["counts"][row].copy(), self.overflow_BN[row].copy(), logits_V.copy())

    def read_on(self, kept: Kept, ids: Sequence[int]) -> Kept:
        """The cached state after further tokens, at least one, which are read in the first row."""
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
            position_B: int64, how many tokens the row has read before; -1 for a row without a token.

        Returns:
            logits_BV, in memory that the next step writes to; those of rows without a token are meaningless.

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
        engines: all of them.
        load: opens one.
        config: the resolved configuration.
    """

    engines: Sequence[Engine]
    load: Callable[[Engine], Runner]
    config: BuildConfig

    def prefills(self, kind: ModelKind, target: str, dtype: DType) -> list[Engine]:
        """All prefill engines of a model, of one target and dtype."""
        wanted = ("prefill", kind, target, dtype)
        return [one for one in self.engines if (one.role, one.model, one.target, one.dtype) == wanted]

    @contextlib.contextmanager
    def prompts(self, kind: ModelKind, target: str, dtype: DType) -> Iterator[Prompts]:
        """All prefill engines of a model, of one target and dtype, as one reader of prompts."""
        with contextlib.ExitStack() as opened:
            engines = self.prefills(kind, target, dtype)
            yield Prompts({one.bucket.seq: opened.enter_context(self.load(one)) for one in engines})

    @contextlib.contextmanager
    def decoder(self, engine: Engine) -> Iterator[Decoder]:
        """A decode engine with its cache.

        Raises:
            TargetError: engines of its target cannot keep a cache on this machine.
        """
        with self.load(engine) as runner:
            if not isinstance(runner, BindableRunner):
                raise TargetError(f"{engine.path}: {engine.target} keeps no cache here")
            yield Decoder(runner, engine.bucket.seq, f"{engine.target} {engine.path}")
