"""Prefill and decode engines as runners of whole texts, so that parity judges them like any other engine.

A decode bucket and the prefill buckets together become a runner, (input_ids (B, S), lengths (B,)) -> logits and the
positions that ran. The text is not written but given: its beginning as a prompt, and the rest token by token on the
cache that the prompt left.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from mod_export.engines.protocol import Runner
from mod_export.errors import EngineError
from mod_export.runtime.generate.decoder import Decoder, Prompts, kept_from_prefill
from mod_export.types import PRIMARY, Site, routed_output

__all__ = ["PromptRunner", "TokenByToken"]

EMPTY = -1


class PromptRunner:
    """A prefill engine as a runner of `outputs = "last"`: without what it leaves for the next token."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.inputs, self.providers, self.threads = runner.inputs, runner.providers, runner.threads
        self.outputs = (PRIMARY["last"], *(name for name in runner.outputs if name.startswith("routed_")))

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        wanted = list(outputs or self.outputs)
        found = self._runner.run(feeds, ["logits" if name == PRIMARY["last"] else name for name in wanted])
        return {name: found["logits" if name == PRIMARY["last"] else name] for name in wanted}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TokenByToken:
    """A decode engine on given texts: a prompt of each row at once, and the rest of it token by token.

    It gives logits from the prompt's last token on. It holds what it was given and opens nothing.
    """

    inputs: tuple[str, ...] = ("input_ids", "lengths")
    providers: tuple[str, ...] = ()
    threads = 0

    def __init__(
        self,
        prompts: Prompts,
        decoder: Decoder,
        capacity: Mapping[Site, int],
        prompt: int = 1,
        *,
        in_turns: bool = False,
    ) -> None:
        """The texts are as long as `capacity` is counted for.

        Args:
            prompts: read prompts.
            decoder: reads tokens.
            capacity: routing site -> tokens of a text that it selects, in the order of the engine's columns.
            prompt: tokens that are read as a prompt, fewer of a shorter text.
            in_turns: one row at a time, the others idle: an engine with fewer slots than rows has one for each then,
                and decides as a prompt would.
        """
        self._prompts, self._decoder, self._capacity = prompts, decoder, capacity
        self._prompt, self._in_turns = prompt, in_turns
        self.outputs = (PRIMARY["logits"], *map(routed_output, capacity))

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        ids_BS, lengths_B = feeds["input_ids"], feeds["lengths"]
        decoder, prompt_B = self._decoder, np.minimum(self._prompt, lengths_B)
        B, S = ids_BS.shape
        answer = _Answer(B, S, self._capacity)
        for row, (ids_S, n) in enumerate(zip(ids_BS, prompt_B.tolist(), strict=True)):
            found = self._prompts.found(ids_S[:n].tolist())
            decoder.put(row, kept_from_prefill(found, 0, n))
            answer.prompt(row, n, found)
        rows_B = np.arange(len(ids_BS))
        turns = [rows_B == row for row in rows_B] if self._in_turns else [rows_B >= 0]
        for step, turn_B in itertools.product(range(int((lengths_B - prompt_B).max())), turns):
            going_B = (prompt_B + step < lengths_B) & turn_B
            position_B = np.where(going_B, prompt_B + step, EMPTY)
            ids_B = np.where(going_B, ids_BS[rows_B, position_B], 0)
            before_BN = None if decoder.ran_BN is None else decoder.cache["counts"].copy()
            logits_BV = decoder.step(ids_B, position_B)
            answer.step(position_B, logits_BV, decoder.ran_BN)
            if before_BN is not None:
                _check_counts(decoder, before_BN)
        given = answer.outputs()
        return {name: given[name] for name in outputs or self.outputs}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _check_counts(decoder: Decoder, before_BN: np.ndarray) -> None:
    """What a step says of itself has to agree: overflow is counted from it.

    Raises:
        EngineError: a token ran that did not choose to, or the counts are not those of the tokens that ran.
    """
    ran_BN, wanted_BN = decoder.ran_BN, decoder.wanted_BN
    assert ran_BN is not None
    assert wanted_BN is not None
    if (ran_BN & ~wanted_BN).any():
        raise EngineError("the step says of a token that it ran and did not choose to (outputs ran and wanted)")
    if not np.array_equal(decoder.cache["counts"], before_BN + ran_BN):
        raise EngineError("the step's counts are not those before it and the tokens that ran (new_counts and ran)")


class _Answer:
    """Logits and positions as they come in."""

    def __init__(self, rows: int, seq: int, capacity: Mapping[Site, int]) -> None:
        self._shape = (rows, seq)
        self._capacity = capacity
        self._logits_BSV: np.ndarray | None = None
        self._ran_NBS = np.zeros((len(capacity), rows, seq), dtype=bool)

    def prompt(self, row: int, length: int, found: Mapping[str, np.ndarray]) -> None:
        self._put(row, length - 1, found["logits"][0])
        for column, (ran_BS, site) in enumerate(zip(self._ran_NBS, self._capacity, strict=True)):
            positions_K = found[routed_output(site)][0]
            ran_BS[row, positions_K[positions_K >= 0]] = True
            count, wanted = found["counts"][0, column], found["wanted"][0, column]
            if count != (positions_K >= 0).sum() or wanted < count:
                raise EngineError(
                    f"the prompt says of {site} that {wanted} tokens chose to run and {count} did, and names "
                    f"{(positions_K >= 0).sum()} positions (outputs wanted, counts and {routed_output(site)})"
                )

    def step(self, position_B: np.ndarray, logits_BV: np.ndarray, ran_BN: np.ndarray | None) -> None:
        for row in np.flatnonzero(position_B >= 0).tolist():
            self._put(row, int(position_B[row]), logits_BV[row])
            if ran_BN is not None:
                self._ran_NBS[:, row, position_B[row]] = ran_BN[row]

    def _put(self, row: int, position: int, logits_V: np.ndarray) -> None:
        if self._logits_BSV is None:
            self._logits_BSV = np.zeros((*self._shape, len(logits_V)), dtype=np.float32)
        self._logits_BSV[row, position] = logits_V

    def outputs(self) -> dict[str, np.ndarray]:
        assert self._logits_BSV is not None
        found = {PRIMARY["logits"]: self._logits_BSV}
        for ran_BS, (site, k) in zip(self._ran_NBS, self._capacity.items(), strict=True):
            index_BK = np.full((len(ran_BS), k), EMPTY, dtype=np.int64)
            for row, ran_S in enumerate(ran_BS):
                # More than there are slots would be a fault, and shows as positions that the reference did not select.
                positions = np.flatnonzero(ran_S)[:k]
                index_BK[row, : len(positions)] = positions
            found[routed_output(site)] = index_BK
        return found
