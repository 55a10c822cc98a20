"""Reads prompts in parts, with the prefill engines of a build folder.

A prompt is read from its beginning. The engine that reads the most tokens reads parts of it as long as enough tokens
are left, then the next smaller engine, and so on. The engine that reads the fewest tokens pads the rest. A larger
engine pads the rest if the smaller ones would compute no fewer tokens. So two prompts with the same beginning read
it in the same parts, up to the last whole part of the longest engine, and with results that are equal bit for bit.

Shape legend: S tokens that an engine reads, V vocabulary, N routing sites. There is one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.engines.protocol import BindableRunner
from mod_export.errors import EngineError
from mod_export.runtime.cache import COUNTS, PARTS, CachedBlock, Kept, TextCache, bound_outputs, by_name, new_cache
from mod_export.types import PRIMARY, ROUTED, TOKEN_INPUTS

TOKENS = (*TOKEN_INPUTS, "positions")
"""The inputs that are not the cache."""


class Prompts(TextCache):
    """The prefill engines for one row, and the cache that they fill.

    Attributes:
        position: number of tokens that the row has read.
        routed: after a part, `routed_<site>` -> int64 (K,), the positions of its tokens that ran, then -1.
    """

    def __init__(self, runners: Mapping[int, BindableRunner], length: int, where: str) -> None:
        """Allocates the cache.

        Args:
            runners: number of tokens that an engine reads -> the engine.
            length: number of tokens that a row can hold.
            where: name of the engines for messages.

        Raises:
            EngineError: an engine is not a prefill engine, or their caches differ.
        """
        first = next(iter(runners.values()))
        cache = by_name(new_cache({name: first.ports[name] for name in first.inputs if name not in TOKENS}))
        super().__init__(cache, length)
        self._engines = {seq: _Engine(runners[seq], seq, cache, where) for seq in sorted(runners, reverse=True)}
        self.position = 0
        self.routed: dict[str, np.ndarray] = {}
        self._last: _Engine | None = None

    def start(self, kept: Kept | None = None) -> None:
        """Begins another text, or continues after what was kept of one."""
        self.position = 0
        self.clear(0)
        if kept is not None:
            self.put(0, kept)
            self.position = kept.length

    def parts(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Splits tokens into the parts that are read at once."""
        parts, done = [], 0
        for length in part_lengths(len(ids), list(self._engines)):
            parts.append(tuple(ids[done : done + length]))
            done += length
        return parts

    def read_part(self, ids: Sequence[int]) -> np.ndarray:
        """Reads one of `parts`.

        Returns:
            logits_V after its last token. The next part overwrites this memory.

        Raises:
            EngineError: the engine failed, or the row is full.
        """
        if self.position + len(ids) > self.length:
            raise EngineError(f"{self.position} and {len(ids)} tokens: a row of this cache holds {self.length} tokens")
        engine = self._engines[min(seq for seq in self._engines if seq >= len(ids))]
        outputs = engine.read(ids, self.position)
        if self.overflow_BN is not None:
            ran_BN = outputs["new_counts"] - self.cache[COUNTS]
            self.overflow_BN += outputs["wanted"] - ran_BN
            self.cache[COUNTS][:] = outputs["new_counts"]
        self.position += len(ids)
        self.routed = {name: array[0] for name, array in outputs.items() if name.startswith(ROUTED)}
        self._last = engine
        logits_V: np.ndarray = outputs[PRIMARY["last"]][0]
        return logits_V

    def last_block(self) -> CachedBlock:
        """Copies what the last part changed."""
        assert self._last is not None
        return self.block(0, self._last.filled, self._last.outputs[PRIMARY["last"]][0])

    def take(self, block: CachedBlock, tokens: int) -> None:
        """Continues the row with a part of this many tokens that was read earlier and kept."""
        self.put_block(0, block)
        self.position += tokens

    def read(self, ids: Sequence[int], kept: Kept | None = None) -> Kept:
        """Reads tokens of a text, at least one, from its beginning or after what was kept of it.

        Raises:
            EngineError: the engine failed, or the row is full.
        """
        return self.read_routed(ids, kept)[0]

    def read_routed(self, ids: Sequence[int], kept: Kept | None = None) -> tuple[Kept, dict[str, np.ndarray]]:
        """Does what `read` does, and returns `routed_<site>` -> int64 (K,) too, the positions of the tokens that ran.

        Raises:
            EngineError: the engine failed, or the row is full.
        """
        self.start(kept)
        positions_by_output: dict[str, list[np.ndarray]] = {}
        for part in self.parts(ids):
            logits_V = self.read_part(part)
            for name, positions_K in self.routed.items():
                positions_by_output.setdefault(name, []).append(positions_K[positions_K >= 0])
        read = self.keep(0, self.position, logits_V)
        return read, {name: np.concatenate(positions) for name, positions in positions_by_output.items()}


def part_lengths(tokens: int, sizes: Sequence[int]) -> list[int]:
    """Splits a number of tokens into parts for engines of these sizes, in descending order; the last one is padded."""
    if not tokens:
        return []
    largest, smaller = sizes[0], sizes[1:]
    whole, rest = divmod(tokens, largest)
    ends = part_lengths(rest, smaller) if smaller else [rest] if rest else []
    computed = sum(min(size for size in smaller if size >= end) for end in ends) if smaller else largest
    return [largest] * whole + ([rest] if rest and computed >= largest else ends)


class _Engine:
    """One engine on the shared cache.

    Attributes:
        seq: number of tokens that it reads.
        outputs: its outputs by name.
    """

    def __init__(self, runner: BindableRunner, seq: int, cache: dict[str, np.ndarray], where: str) -> None:
        shapes = {name: array.shape for name, array in cache.items()}
        input_shapes = {name: runner.ports[name].shape for name in runner.inputs if name not in TOKENS}
        if not {*TOKENS} <= {*runner.inputs} or input_shapes != shapes:
            raise EngineError(
                f"{where}: the engine that reads {seq} tokens does not continue texts on the cache of the others; "
                "build again"
            )
        self.seq = seq
        tokens = {name: np.zeros(*runner.ports[name]) for name in TOKENS}
        self._ids_1S, self._length_1, self._position_1 = tokens.values()
        self.outputs = bound_outputs(runner, cache)
        self._run = runner.bind({**tokens, **cache}, self.outputs)
        layers = [int(name.removeprefix("keys_")) for name in cache if name.startswith("keys_")]
        names = [(layer, f"{part}_{layer}", f"{part}_rows_{layer}") for layer in layers for part in PARTS]
        self._layers = layers
        self._writes = [(layer, cache[name], self.outputs[row]) for layer, name, row in names if row in self.outputs]

    def read(self, ids: Sequence[int], position: int) -> dict[str, np.ndarray]:
        """Reads tokens and writes their keys and values into the cache, but not the counts."""
        self._ids_1S[0, : len(ids)] = ids
        self._ids_1S[0, len(ids) :] = 0
        self._length_1[0], self._position_1[0] = len(ids), position
        self._run()
        slot_L, kept_L = self.outputs["slots"][0], self.outputs["kept"][0]
        for layer, cache_1GLE, rows_1GTE in self._writes:
            slot, count = slot_L[layer], kept_L[layer]
            cache_1GLE[0, :, slot : slot + count] = rows_1GTE[0, :, :count]
        return self.outputs

    @property
    def filled(self) -> dict[int, np.ndarray]:
        """Layer -> the slots that the last part took."""
        slot_L, kept_L = self.outputs["slots"][0].tolist(), self.outputs["kept"][0].tolist()
        return {layer: np.arange(slot_L[layer], slot_L[layer] + kept_L[layer]) for layer in self._layers}
