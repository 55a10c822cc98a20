"""`mod-export generate`: text on stdout as it is written and a summary on stderr, or JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mod_export.build_folder.manifest import open_folder
from mod_export.errors import UsageError
from mod_export.runtime.deployment import load
from mod_export.runtime.generate.generator import Generator, Prompt, load_generator, vocabulary_of
from mod_export.runtime.generate.scoring import score
from mod_export.runtime.generate.stream import Stream
from mod_export.runtime.generate.texts import Vocabulary
from mod_export.types import ModelKind

__all__ = ["prompts_from", "score_prompts", "write_texts"]

Show = Callable[[str], None]


def prompts_from(texts: Sequence[str], files: Sequence[Path], ids: Sequence[str]) -> list[Prompt]:
    """The prompts of a command line: texts, files of one prompt each, and ids with spaces or commas between them.

    Raises:
        UsageError: none at all, a file that cannot be read, or ids that are not numbers.
    """
    found: list[Prompt] = list(texts)
    for path in files:
        try:
            found.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read as a prompt ({error})") from error
    for listed in ids:
        try:
            found.append([int(one) for one in listed.replace(",", " ").split()])
        except ValueError:
            raise UsageError(f"--ids: expected whole numbers, got {listed!r}") from None
    if not found:
        raise UsageError("expected a prompt; give one with --prompt, --prompt-file or --ids")
    return found


def write_texts(
    folder: Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    target: str | None,
    dtype: str | None,
    model: ModelKind,
    threads: int | None,
    as_json: bool,
    show: Show,
    tell: Show,
    **options: Any,
) -> None:
    """Writes texts. One is shown while it is written, several one after the other when all are done.

    Args:
        folder: the build folder.
        prompts: at least one.
        max_new_tokens: of each text.
        target: an engine family; None for the first that generates here.
        dtype: of the engines; None for the first built.
        model: `mod`, or `dense` for the dense baseline.
        threads: of a CPU engine; None for every physical core.
        as_json: a line for each piece and for the end of each text, instead of text.
        show: what goes to stdout.
        tell: what goes to stderr.
        options: of `Generator.stream`.
    """
    with load_generator(folder, target, dtype, model, threads) as generator:
        with generator.stream(prompts, max_new_tokens, **options) as stream:
            for piece in stream:
                if as_json:
                    show(json.dumps({"row": piece.row, "token": piece.token, "text": piece.text}) + "\n")
                elif len(prompts) == 1:
                    show(piece.text if generator.vocabulary else _id(piece.token))
        _end(generator, stream, as_json=as_json, show=show)
        tell(_summary(generator, stream))


def _threads(threads: int) -> str:
    return {0: "the library's own number of threads", 1: "1 thread"}.get(threads, f"{threads} threads")


def _id(token: int | None) -> str:
    return "" if token is None else f"{token} "


def _end(generator: Generator, stream: Stream, *, as_json: bool, show: Show) -> None:
    several = len(stream.completions) > 1
    for row, completion in enumerate(stream.completions):
        if as_json:
            fields = ("text", "ids", "finish", "stop", "first_token_s", "read", "ran", "overflow")
            found = {name: getattr(completion, name) for name in fields}
            show(json.dumps({"row": row, "done": found}) + "\n")
        elif several:
            text = completion.text if generator.vocabulary else " ".join(map(str, completion.ids))
            show(f"--- {row} ---\n{text}\n")
        else:
            show("\n")


def _summary(generator: Generator, stream: Stream) -> str:
    """One line: how many tokens, how fast, how much of the routed layers, how much memory."""
    done, taken = stream.completions, stream.seconds
    tokens = sum(len(one.ids) for one in done)
    first = [one.first_token_s for one in done if one.first_token_s is not None]
    steps = f", {stream.steps / stream.step_seconds:,.0f} steps/s" if stream.step_seconds else ""
    parts = [
        f"{tokens} tokens in {taken:.2f} s: {tokens / taken:,.0f} tokens/s{steps}",
        f"{'first' if len(done) == 1 else 'last first'} token after {1e3 * max(first, default=0.0):.0f} ms",
        f"cache {generator.cache_bytes(stream.bucket) / 2**20:.1f} MiB",
        f"{generator.target} {generator.dtype}, {_threads(generator.threads)}",
    ]
    read = sum(one.read for one in done)
    ran = [sum(one.ran.get(site, 0) for one in done) / read for site in done[0].ran] if read else []
    if ran:
        parts.insert(2, f"routed layers ran {100 * min(ran):.1f} to {100 * max(ran):.1f} % of the tokens")
    overflow = sum(sum(one.overflow.values()) for one in done)
    if overflow:
        parts.insert(3, f"{overflow} tokens found no slot")
    return ", ".join(parts)


def score_prompts(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    target: str | None,
    dtype: str | None,
    threads: int | None,
    as_json: bool,
    show: Show,
) -> None:
    """Scores prompts with the ordinary buckets of a folder, whatever its model's selection.

    Raises:
        UsageError: as `scoring.score`.
    """
    manifest = open_folder(folder, verify=False)
    vocabulary = vocabulary_of(folder, manifest)
    with load(folder, target, dtype, threads=threads) as deployment:
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str) and vocabulary is None:
                raise UsageError(
                    "this model's ids stand for no text, as far as the folder says; give prompts as ids (--ids), or "
                    "build again where an earlier mod-export built it"
                )
            ids = vocabulary.ids(prompt) if isinstance(prompt, str) and vocabulary else list(map(int, prompt))
            found = score(deployment, ids)
            if as_json:
                nll = None if math.isnan(found.nll) else found.nll  # JSON has no NaN.
                line = {"row": row, "tokens": found.tokens, "nll": nll, "following": found.following}
                show(json.dumps(line) + "\n")
                continue
            show(f"prompt {row}: {found.tokens} tokens, perplexity {found.perplexity:.3f}\n")
            for token, share in found.following:
                text = repr(_text(vocabulary, token)) if vocabulary else ""
                show(f"  next {token:>6} {text:<8} {100 * share:5.1f} %\n")


def _text(vocabulary: Vocabulary, token: int) -> str:
    """What a token alone stands for."""
    reader = vocabulary.reader()
    return reader.feed(token) + reader.close()
