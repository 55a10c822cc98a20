"""Judges prefill and decode engines, on given texts like any other engine and on the texts that they write themselves,
and measures the quality that a model loses when it decides one token at a time.

A decode bucket and the prefill buckets together become a runner, (input_ids (B, S), lengths (B,)) -> logits and the
positions that ran, so that parity can judge them. The text is given and not written: its beginning is read as a prompt,
and the rest token by token on the cache that the prompt left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from mod_export.config import BuildConfig, GenerationOptions
from mod_export.engines.protocol import Runner
from mod_export.errors import BuildError, TargetError
from mod_export.judge.checks import ContradictionError, failed_row, unjudged_row
from mod_export.judge.compare import EMPTY
from mod_export.judge.inputs import Batch, affordable_tokens, one_of_each_kind, parity_batches
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.judge.text import TextSource, prompts_of, text_ids, text_kind
from mod_export.model.model import GeneratingModel, token_ids
from mod_export.rows.base import setting_fields
from mod_export.rows.correctness import ParityRow
from mod_export.rows.speed import QualityRow, TextsRow
from mod_export.runtime.cache import Kept
from mod_export.runtime.decoder import Decoder
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.runtime.logits import negative_log_likelihood
from mod_export.runtime.prompts import Prompts
from mod_export.types import PRIMARY, QUANTIZED, TOKEN_INPUTS, Bucket, Engine, Setting, Site, routed_output

Runs = list[tuple[Runner, list[Batch]]]
"""The ways in which an engine is run, each with its texts."""
LEAST_TOKENS, KINDS_OF_INPUT = 16, 4
TAIL = 16
"""Tokens that are read one by one after a prompt."""
FULL_ROWS = ("text", "random")
TEXT_TOKENS = 1024
"""Tokens of text on which engines with integer weights are judged."""
LEAST_PROMPTS = 4
"""Least number of further prompts for such engines, if there is enough text: each gives one next token to judge."""
NARROW_TOKENS = 200
"""Least number of new tokens that engines with integer weights write for each text, if the cache has room and the model
is not large.
"""
PROMPT_TOKENS = 32
"""Tokens of the prompts that engines and eager model both continue."""
SINGLE = 2
"""Least cost of a token read alone by the eager model, relative to one in a whole row: all weights are read for it."""


def parity_of_runs(
    opened: AbstractContextManager[Runs], engine: Engine, reference: Reference, config: BuildConfig
) -> ParityRow:
    """Judges an engine by its runs on given texts. An engine that cannot be loaded or run fails with the reason.

    Args:
        opened: `runs_of_prompts` or `runs_of_steps` of the engine.
        engine: the engine to judge.
        reference: reference of the model as it decides one token at a time, with the outputs of the engine: last logits
            of prompts, all logits of steps.
        config: the configuration.
    """
    gate = config.parity.gate(engine.dtype)
    try:
        with opened as runs:
            return judge_runner(runs, reference, gate, engine.setting, engine.path)
    except ContradictionError as error:
        return failed_row(f"cannot be run: {error}", gate, engine.setting, engine.path)
    except (BuildError, TargetError) as error:
        return unjudged_row(f"cannot be run: {error}", gate, engine.setting, engine.path)


@contextmanager
def runs_of_prompts(
    decoding: DecodingEngines, engine: Engine, reference: Reference, text_source: TextSource | None = None
) -> Iterator[Runs]:
    """Opens the runs by which a prefill engine is judged. `decoding` has all engines of the folder. `text_source` is as
    in `text_ids`.
    """
    with decoding.prompts_of([engine]) as prompts:
        yield prompt_parts(prompts, engine, reference, decoding.config, text_source)


@contextmanager
def runs_of_steps(
    decoding: DecodingEngines, engine: Engine, reference: Reference, text_source: TextSource | None = None
) -> Iterator[Runs]:
    """Opens the runs by which a decode engine is judged, with the same arguments as `runs_of_prompts`."""
    with (
        decoding.prompts(engine.model, engine.target, engine.dtype) as prompts,
        decoding.decoder(engine) as decoder,
    ):
        lengths = [prefill.bucket.seq for prefill in decoding.prefills(engine.model, engine.target, engine.dtype)]
        runs = decoding_parts(prompts, lengths, decoder, reference, decoding.config, text_source)
        if engine.dtype in QUANTIZED:
            runs += _text_parts(prompts, decoder, reference, decoding.config, text_source)
        yield runs


def prompt_parts(
    prompts: Prompts, engine: Engine, reference: Reference, config: BuildConfig, text_source: TextSource | None = None
) -> Runs:
    """Returns the runs by which a prefill engine is judged, each with its texts.

    The first run reads prompts of every kind, each at once. The second one, if the cache has room, reads prompts so
    long that even the longest engine reads them in up to three parts: a whole one, a whole one that continues it, and a
    padded one.
    """
    bucket = engine.bucket
    capacity = reference.k_by_layer(bucket)
    batches = _given_texts(reference, bucket, capacity.values(), config.seed, text_source)
    if engine.dtype in QUANTIZED:
        count = max(LEAST_PROMPTS, TEXT_TOKENS // bucket.seq)
        batches += _texts(reference, 1, bucket.seq, count, config, text_source)
    parts: Runs = [(PromptRunner(prompts, capacity), batches)]
    longest = config.generation.prompt_lengths(prompts.length)[-1]
    longer = Bucket(1, min(prompts.length, 2 * longest + max(1, longest // 2)))
    if longer.seq > bucket.seq:
        capacity = reference.k_by_layer(longer)
        batches = _given_texts(reference, longer, capacity.values(), config.seed, text_source)
        kinds = (*FULL_ROWS, "padded")
        parts.append((PromptRunner(prompts, capacity), [batch for batch in batches if batch.kind in kinds]))
    return parts


def _text_parts(
    prompts: Prompts, decoder: Decoder, reference: Reference, config: BuildConfig, text_source: TextSource | None
) -> Runs:
    """Returns a run that reads text token by token, enough of it to show a change of a percent in perplexity or in next
    tokens.
    """
    length = min(decoder.length, -(-TEXT_TOKENS // decoder.batch))
    bucket = Bucket(decoder.batch, length)
    runner = TokenByToken(prompts, decoder, reference.k_by_layer(bucket), in_turns=config.generation.slots == "fair")
    count = -(-TEXT_TOKENS // (decoder.batch * length))
    return [(runner, _texts(reference, decoder.batch, length, count, config, text_source))]


def _texts(
    reference: Reference, rows: int, length: int, count: int, config: BuildConfig, text_source: TextSource | None
) -> list[Batch]:
    """Returns `count` batches of text, none if there is no text; the texts differ from those of `_given_texts`."""
    texts = (text_ids(reference.model, rows, length, config.seed + 1 + i, text_source) for i in range(count))
    full_lengths = np.full(rows, length, dtype=np.int64)
    return [Batch.of_tokens("text", text_BS, full_lengths) for text_BS in texts if text_BS is not None]


def decoding_parts(
    prompts: Prompts,
    prefills: Sequence[int],
    decoder: Decoder,
    reference: Reference,
    config: BuildConfig,
    text_source: TextSource | None = None,
) -> Runs:
    """Returns the runs by which a decode engine is judged, each with its texts.

    The first run reads texts of every kind token by token, in every row, as many tokens as the configuration says. Then
    each prefill bucket has a run with a prompt that fills it, and some tokens on the cache that the prompt leaves. One
    more run has a prompt that leaves room for these tokens only, so that they fill the cache to its end. For a large
    model, the first texts are shorter, and texts after a prompt use the last row only.
    """
    in_turns = config.generation.slots == "fair"
    first = min(decoder.length, config.generation.judged_tokens)
    affordable = max(LEAST_TOKENS, affordable_tokens(reference.model, first) // (KINDS_OF_INPUT * decoder.batch))
    if affordable < first:
        # Prefers the shape of a prompt bucket if its length is similar: it is captured already.
        first = max(
            (n for n in prefills if decoder.batch == 1 and affordable <= 2 * n <= 4 * affordable), default=affordable
        )
    tail = min(TAIL, decoder.length - 1)
    longest = decoder.length - tail
    starts = sorted({max(1, min(length, longest)) for length in (*prefills, longest)} - {1})
    parts: Runs = []
    ends = [start + tail for start in starts]
    for prompt, length in [(1, first), *zip(starts, ends, strict=True)]:
        fits = decoder.batch * length <= affordable_tokens(reference.model, length)
        bucket = Bucket(decoder.batch if prompt == 1 or fits else 1, length)
        capacity = reference.k_by_layer(bucket)
        batches = _given_texts(reference, bucket, capacity.values(), config.seed, text_source)
        if prompt > 1:
            batches = [replace(batch, judged_from=prompt - 1) for batch in batches if batch.kind in FULL_ROWS]
        parts.append((TokenByToken(prompts, decoder, capacity, prompt, in_turns=in_turns), batches))
    return parts


def _given_texts(
    reference: Reference, bucket: Bucket, ks: Iterable[int], seed: int, text_source: TextSource | None
) -> list[Batch]:
    """Returns a batch of every kind; a large model gets no `ties`: its graphs of whole rows are judged on them."""
    batches = one_of_each_kind(parity_batches(reference.model, bucket, ks, seed, 1, text_source=text_source))
    if len(batches) * bucket.batch * bucket.seq <= affordable_tokens(reference.model, bucket.seq):
        return batches
    return [batch for batch in batches if batch.kind in (*FULL_ROWS, "padded")]


class _Borrowed:
    """A runner on engines that its creator opens and closes."""

    inputs: tuple[str, ...] = TOKEN_INPUTS
    providers: tuple[str, ...] = ()
    threads = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PromptRunner(_Borrowed):
    """A prefill engine as a runner of `outputs = "last"`, which reads prompts of any length in parts."""

    def __init__(self, prompts: Prompts, capacity: Mapping[Site, int]) -> None:
        """`capacity` maps each routing site to the number of tokens of a prompt that it selects, in the order of the
        engine's columns.
        """
        self._prompts, self._capacity = prompts, capacity
        self.outputs = (PRIMARY["last"], *map(routed_output, capacity))

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        ids_BS, lengths_B = feeds["input_ids"], feeds["lengths"]
        index_NBK = [np.full((len(ids_BS), k), EMPTY, dtype=np.int64) for k in self._capacity.values()]
        logits = []
        for row, (ids_S, n) in enumerate(zip(ids_BS, lengths_B.tolist(), strict=True)):
            cached, routed = self._prompts.read_routed(ids_S[:n].tolist())
            logits.append(cached.logits_V)
            for column, (site, k) in enumerate(self._capacity.items()):
                # More positions than slots would be a fault. It shows as positions that the reference did not select.
                positions = _prompt_positions(cached, routed, column, site)[:k]
                index_NBK[column][row, : len(positions)] = positions
        named = {PRIMARY["last"]: np.stack(logits)}
        named |= {routed_output(site): index_BK for site, index_BK in zip(self._capacity, index_NBK, strict=True)}
        return {name: named[name] for name in outputs or self.outputs}


class TokenByToken(_Borrowed):
    """A decode engine as a runner on given texts: reads a prompt of each row at once, and the rest token by token.

    It returns logits from the prompt's last token on.
    """

    def __init__(
        self,
        prompts: Prompts,
        decoder: Decoder,
        capacity: Mapping[Site, int],
        prompt: int = 1,
        *,
        in_turns: bool = False,
    ) -> None:
        """The texts have the length for which `capacity` was counted, and occupy the last rows of the decoder.

        Args:
            prompts: reads prompts.
            decoder: reads tokens.
            capacity: routing site -> tokens of a text that it selects, in the order of the engine's columns.
            prompt: number of tokens that are read as a prompt; fewer if a text is shorter.
            in_turns: runs one row at a time while the others are idle. An engine with fewer slots than rows then has a
                slot for every row, and decides as a prompt would.
        """
        self._prompts, self._decoder, self._capacity = prompts, decoder, capacity
        self._prompt, self._in_turns = prompt, in_turns
        self.outputs = (PRIMARY["logits"], *map(routed_output, capacity))

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        ids_BS, lengths_B = feeds["input_ids"], feeds["lengths"]
        decoder, prompt_B = self._decoder, np.minimum(self._prompt, lengths_B)
        B, S = ids_BS.shape
        rows_B, idle = np.arange(B), decoder.batch - B
        ran_NBS = np.zeros((len(self._capacity), B, S), dtype=bool)
        logits_BSV: np.ndarray | None = None
        for row, (ids_S, n) in enumerate(zip(ids_BS, prompt_B.tolist(), strict=True)):
            cached, routed = self._prompts.read_routed(ids_S[:n].tolist())
            decoder.put(idle + row, cached)
            if logits_BSV is None:
                logits_BSV = np.zeros((B, S, len(cached.logits_V)), np.float32)
            logits_BSV[row, n - 1] = cached.logits_V
            for column, site in enumerate(self._capacity):
                ran_NBS[column, row, _prompt_positions(cached, routed, column, site)] = True
        assert logits_BSV is not None
        turns = [rows_B == row for row in rows_B] if self._in_turns else [rows_B >= 0]
        for step, turn_B in itertools.product(range(int((lengths_B - prompt_B).max())), turns):
            going_B = (prompt_B + step < lengths_B) & turn_B
            position_B = np.where(going_B, prompt_B + step, EMPTY)
            ids_B = np.where(going_B, ids_BS[rows_B, position_B], 0)
            before_BN = None if decoder.ran_BN is None else decoder.cache["counts"].copy()
            all_ids, all_positions = np.pad(ids_B, (idle, 0)), np.pad(position_B, (idle, 0), constant_values=EMPTY)
            logits_BV = decoder.step(all_ids, all_positions)[idle:]
            logits_BSV[going_B, position_B[going_B]] = logits_BV[going_B]
            if before_BN is not None:
                ran_BN = _checked_ran(decoder, before_BN)[idle:]
                ran_NBS[:, going_B, position_B[going_B]] = ran_BN[going_B].T
        named = {PRIMARY["logits"]: logits_BSV} | {
            routed_output(site): _positions(ran_BS, k)
            for ran_BS, (site, k) in zip(ran_NBS, self._capacity.items(), strict=True)
        }
        return {name: named[name] for name in outputs or self.outputs}


def _prompt_positions(kept: Kept, routed: Mapping[str, np.ndarray], column: int, site: Site) -> np.ndarray:
    """Returns the positions that ran at a site. The prompt's own counts must agree: overflow is computed from them.

    Raises:
        ContradictionError: the counts do not match the positions.
    """
    positions = routed[routed_output(site)]
    assert kept.count_N is not None
    assert kept.overflow_N is not None
    count, overflow = kept.count_N[column], kept.overflow_N[column]
    if count != len(positions) or overflow < 0:
        raise ContradictionError(
            f"the prompt says of {site} that {count + overflow} tokens chose to run and {count} did, and names "
            f"{len(positions)} positions (outputs wanted, new_counts and {routed_output(site)})"
        )
    return positions


def _checked_ran(decoder: Decoder, before_BN: np.ndarray) -> np.ndarray:
    """Returns which rows ran at which site in the last step. As in a prompt, the step's own counts must agree.

    Raises:
        ContradictionError: a token ran that did not choose to, or the counts do not match the tokens that ran.
    """
    ran_BN, wanted_BN = decoder.ran_BN, decoder.wanted_BN
    assert ran_BN is not None
    assert wanted_BN is not None
    if (ran_BN & ~wanted_BN).any():
        raise ContradictionError("the step says of a token that it ran and did not choose to (outputs ran and wanted)")
    if not np.array_equal(decoder.cache["counts"], before_BN + ran_BN):
        raise ContradictionError(
            "the step's counts are not those before it and the tokens that ran (new_counts and ran)"
        )
    return ran_BN


def _positions(ran_BS: np.ndarray, k: int) -> np.ndarray:
    """Returns int64 (B, k), the positions of each row, ascending, then EMPTY."""
    index_BK = np.full((len(ran_BS), k), EMPTY, dtype=np.int64)
    for row, ran_S in enumerate(ran_BS):
        # More positions than slots would be a fault. It shows as positions that the reference did not select.
        positions = np.flatnonzero(ran_S)[:k]
        index_BK[row, : len(positions)] = positions
    return index_BK


def texts_of_decoding(
    decoding: DecodingEngines,
    engine: Engine,
    model: GeneratingModel,
    reference: Reference,
    text_source: TextSource | None = None,
) -> TextsRow:
    """Lets the engine and the eager model continue the same prompts, fewer for a large model. With integer weights, the
    texts of both differ sooner or later, so longer texts are written, but for a large model.

    Args:
        decoding: all engines of the folder.
        engine: the engine to judge.
        model: the eager model.
        reference: reference of `model.whole_rows`; it remembers what the eager model wrote.
        text_source: source of text, as in `text_ids`.

    Raises:
        EngineError: the engine failed.
    """
    options, loaded = decoding.config.generation, model.whole_rows
    longest = min(model.window, PROMPT_TOKENS + max(options.compared_tokens, NARROW_TOKENS))
    texts, start, tokens = compared_lengths(options, engine, affordable_tokens(loaded, longest))
    seed = decoding.config.seed
    prompt_NS = prompts_of(loaded, token_ids(loaded).vocab_size, texts, start, seed, text_source)
    expected = reference.remembered(
        f"{texts} texts of {start} and {tokens} tokens, seed {seed}",
        lambda: [model.write(ids_S.tolist(), tokens) for ids_S in prompt_NS],
    )
    with decoding.prompts(engine.model, engine.target, engine.dtype) as prompts, decoding.decoder(engine) as decoder:
        # Texts that share slots differ from the same texts written alone.
        rows = 1 if options.slots == "fair" else decoder.batch
        return texts_of(expected, prompts, decoder, prompt_NS, rows, engine.setting)


def compared_lengths(options: GenerationOptions, engine: Engine, affordable: int) -> tuple[int, int, int]:
    """Returns how many texts are written, how many tokens their prompts have, and how many new ones each gets, if
    running the model on `affordable` tokens at once takes long enough.
    """
    affordable //= SINGLE
    start = min(PROMPT_TOKENS, max(1, engine.bucket.seq // 2))
    longer = min(NARROW_TOKENS, affordable - start) if engine.dtype in QUANTIZED else 0
    tokens = min(max(options.compared_tokens, longer), engine.bucket.seq - start + 1)
    return min(options.compared_texts, max(1, affordable // (start + tokens))), start, tokens


def texts_of(
    expected: Sequence[Sequence[int]],
    prompts: Prompts,
    decoder: Decoder,
    prompt_NS: np.ndarray,
    rows: int,
    setting: Setting,
) -> TextsRow:
    """Lets the engine continue the prompts, `rows` of them at once. `expected` holds the eager model's continuation of
    each prompt, all of the same length.

    Raises:
        EngineError: the engine failed.
    """
    written: list[list[int]] = []
    for start in range(0, len(prompt_NS), rows):
        written += _greedy(prompts, decoder, prompt_NS[start : start + rows], len(expected[0]))
    firsts = [
        next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b), None)
        for ours, theirs in zip(written, expected, strict=True)
    ]
    different = [first for first in firsts if first is not None]
    return TextsRow(
        **setting_fields(setting),
        texts=len(prompt_NS),
        tokens=sum(map(len, written)),
        identical=len(firsts) - len(different),
        first_difference=min(different, default=None),
        same=sum(len(text) if first is None else first - 1 for first, text in zip(firsts, written, strict=True)),
    )


def _greedy(prompts: Prompts, decoder: Decoder, prompt_NS: np.ndarray, max_new_tokens: int) -> list[list[int]]:
    """Returns the continuations of the prompts, at most as many as the decoder has rows."""
    N, S = prompt_NS.shape
    logits_NV = []
    for row, ids_S in enumerate(prompt_NS):
        cached = prompts.read(ids_S.tolist())
        decoder.put(row, cached)
        logits_NV.append(cached.logits_V)
    token_N = np.argmax(np.stack(logits_NV), axis=1)
    written = [token_N]
    ids_B, position_B = np.zeros(decoder.batch, dtype=np.int64), np.full(decoder.batch, EMPTY, dtype=np.int64)
    for step in range(max_new_tokens - 1):
        ids_B[:N], position_B[:N] = token_N, S + step
        token_N = np.argmax(decoder.step(ids_B, position_B)[:N], axis=1)
        written.append(token_N)
    continuations: list[list[int]] = np.stack(written, axis=1).tolist()
    return continuations


# The quality lost when a model decides one token at a time


def quality_of(
    model: GeneratingModel,
    causal: Reference,
    own: Reference,
    texts: int,
    seed: int,
    text_source: TextSource | None = None,
) -> QualityRow | None:
    """Measures perplexity on the same texts, deciding one token at a time and as trained.

    Args:
        model: the model as it decides one token at a time.
        causal: its reference.
        own: the reference of the checkpoint as it was trained.
        texts: number of texts, each one window long; fewer for a large model.
        seed: seed for the choice of texts.
        text_source: source of text, as in `text_ids`.

    Returns:
        None if there is no text for the model, or if its window is a single token.
    """
    affordable = max(1, min(texts, affordable_tokens(own.model, model.window) // model.window))
    ids_NS = text_ids(own.model, affordable, model.window, seed, text_source)
    if ids_NS is None or model.window < 2:
        return None
    nll = own_nll = 0.0
    tokens = 0
    wanted, ran = dict.fromkeys(model.sites, 0), dict.fromkeys(model.sites, 0)
    for ids_S in ids_NS:
        batch = Batch.of_tokens("text", ids_S[None], np.array([model.window], dtype=np.int64))
        traced = causal.free(batch)
        text_nll, count = negative_log_likelihood(traced.logits_BSV, batch.ids_BS)
        nll, tokens = nll + text_nll, tokens + count
        own_nll += negative_log_likelihood(own.free(batch).logits_BSV, batch.ids_BS)[0]
        for site, judged in traced.judged.items():
            ran[site] += int((traced.routed[site] >= 0).sum())
            wanted[site] += int(((judged.score_BS > 0) & judged.open_BS).sum())
    token_count = ids_NS.size
    return QualityRow(
        tokens=tokens,
        window=model.window,
        perplexity=math.exp(nll / tokens),
        own_perplexity=math.exp(own_nll / tokens),
        wanted={str(site): count / token_count for site, count in wanted.items()},
        selected={str(site): count / token_count for site, count in ran.items()},
        overflow={str(site): max(0, wanted[site] - ran[site]) for site in wanted},
        text=text_kind(own.model, model.window, text_source),
    )
