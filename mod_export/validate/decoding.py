"""Everything that is found out about one engine that writes text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Runner
from mod_export.errors import BuildError, TargetError
from mod_export.results.generation import TextsRow
from mod_export.results.parity import ParityRow
from mod_export.runtime.generate.decoder import Decoder, DecodingEngines, Prompts
from mod_export.sources.protocol import GeneratingModel
from mod_export.types import Bucket, Engine
from mod_export.validate.inputs import Batch, affordable_tokens, one_of_each_kind, parity_batches
from mod_export.validate.reference import Reference
from mod_export.validate.rows import failed_row, judge_runner, judge_runners
from mod_export.validate.token_by_token import PromptRunner, TokenByToken
from mod_export.validate.written import prompts_of, texts_of

__all__ = ["decoding_parts", "parity_of_decoding", "texts_of_decoding"]

LEAST_TOKENS, KINDS_OF_INPUT = 16, 4
TAIL = 16
"""Tokens that are read one by one after a prompt."""
FULL_ROWS = ("text", "random")
PROMPT_TOKENS = 32
"""Of the texts that engines and eager model both continue."""


def parity_of_decoding(
    found: DecodingEngines, engine: Engine, model: GeneratingModel, reference: Reference
) -> ParityRow:
    """Judges an engine on texts that are given. What cannot be loaded or run has failed, with the reason.

    Args:
        found: all engines of the folder.
        engine: one of them.
        model: as it decides one token at a time.
        reference: of `model.loaded`, with the outputs of the engine: last logits of prompts, all logits of steps.
    """
    gate = found.config.parity.gate(engine.dtype)
    try:
        if engine.role == "prefill":
            batches = one_of_each_kind(parity_batches(model.loaded, engine.bucket, found.config.seed, 1))
            with found.load(engine) as runner:
                return judge_runner(PromptRunner(runner), reference, batches, gate, engine.setting, engine.path)
        with found.prompts(engine.model, engine.target, engine.dtype) as prompts, found.decoder(engine) as decoder:
            lengths = [one.bucket.seq for one in found.prefills(engine.model, engine.target, engine.dtype)]
            parts = decoding_parts(prompts, lengths, decoder, model, found.config)
            return judge_runners(parts, reference, gate, engine.setting, engine.path)
    except (BuildError, TargetError) as error:
        return failed_row(f"cannot be run: {error}", gate, engine.setting, engine.path)


def decoding_parts(
    prompts: Prompts, prefills: Sequence[int], decoder: Decoder, model: GeneratingModel, config: BuildConfig
) -> list[tuple[Runner, list[Batch]]]:
    """What a decode engine is judged in.

    Texts of every kind from their first token on, as long as the configuration says; and for every prefill bucket a
    prompt that fills it and some tokens on the cache that it leaves, after the longest one up to the last slot.
    """
    loaded, in_turns = model.loaded, config.generation.slots == "fair"
    affordable = max(LEAST_TOKENS, affordable_tokens(loaded) // (KINDS_OF_INPUT * decoder.batch))
    first = min(decoder.length, config.generation.judged_tokens, affordable)
    tail = min(TAIL, decoder.length - 1)
    starts = sorted({max(1, min(length, decoder.length - tail)) for length in prefills} - {1})
    parts: list[tuple[Runner, list[Batch]]] = []
    ends = [*(start + tail for start in starts[:-1]), decoder.length][-len(starts) :] if starts else []
    for prompt, length in [(1, first), *zip(starts, ends, strict=True)]:
        batches = one_of_each_kind(parity_batches(loaded, Bucket(decoder.batch, length), config.seed, 1))
        if prompt > 1:
            batches = [replace(batch, judged_from=prompt - 1) for batch in batches if batch.kind in FULL_ROWS]
        capacity = {site: k for site, k in loaded.k_by_layer(length).items() if k}
        parts.append((TokenByToken(prompts, decoder, capacity, prompt, in_turns=in_turns), batches))
    return parts


def texts_of_decoding(found: DecodingEngines, engine: Engine, model: GeneratingModel) -> TextsRow:
    """Has the engine and the eager model continue the same prompts.

    Raises:
        EngineError: the engine failed.
    """
    options = found.config.generation
    longest = max(one.bucket.seq for one in found.prefills(engine.model, engine.target, engine.dtype))
    start = min(PROMPT_TOKENS, max(1, engine.bucket.seq // 2), longest)
    tokens = min(options.compared_tokens, engine.bucket.seq - start + 1)
    prompt_NS = prompts_of(model.loaded, options.compared_texts, start, found.config.seed)
    with found.prompts(engine.model, engine.target, engine.dtype) as prompts, found.decoder(engine) as decoder:
        # Texts that share slots are not those that each of them would be alone.
        rows = 1 if options.slots == "fair" else decoder.batch
        return texts_of(
            model,
            prompts,
            decoder,
            prompt_NS,
            tokens,
            rows,
            engine.setting,
        )
