"""The command generate: writes text to stdout token by token and a summary to stderr, or lines of JSON."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mod_export.cli.boundary import PATH, command, folder_argument, trusted_keys_option
from mod_export.errors import UsageError

if TYPE_CHECKING:
    from mod_export.runtime.generator import Generator
    from mod_export.runtime.request import Prompt
    from mod_export.runtime.stream import Stream
    from mod_export.types import ModelKind

DONE = ("text", "ids", "finish", "stop", "first_token_s", "read", "ran", "overflow")
"""Attributes of a `Completion` that --json shows."""

STDIN = "-"

say = partial(click.echo, nl=False)


@click.command()
@folder_argument
@click.argument("text_arguments", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--prompt", "texts", metavar="TEXT", multiple=True, help="A prompt, like TEXT; may be given several times."
)
@click.option(
    "--prompt-file",
    "files",
    metavar="FILE",
    type=PATH,
    multiple=True,
    help="A file that is a prompt, in UTF-8; -: stdin.",
)
@click.option("--ids", metavar="N,...", multiple=True, help="A prompt as token ids.")
@click.option(
    "--chat",
    is_flag=True,
    help="Prompts are messages of a user, put into the model's chat template. Without a prompt, each line of stdin is "
    "the next message of one conversation.",
)
@click.option("--system", metavar="TEXT", help="The system message of --chat.")
@click.option(
    "--template",
    metavar="NAME=VALUE",
    multiple=True,
    help="A variable of the chat template with its value in JSON, such as enable_thinking=false.",
)
@click.option("--no-special-tokens", is_flag=True, help="Leave out what the tokenizer adds to a prompt, such as <s>.")
@click.option(
    "--max-new-tokens", metavar="N", type=int, default=128, show_default=True, help="Most new tokens of each text."
)
@click.option(
    "--temperature",
    metavar="T",
    type=float,
    help="0 is greedy. Default: 0, unless the model's generation_config.json sets do_sample; then its temperature.",
)
@click.option(
    "--top-k", metavar="K", type=int, help="Sample among K tokens; 0: all. Default: generation_config.json, else 0."
)
@click.option(
    "--top-p", metavar="P", type=float, help="Nucleus sampling; 0 is greedy. Default: generation_config.json, else 1."
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of sampling; -1: a random one.")
@click.option("--stop", metavar="TEXT", multiple=True, help="A string that ends a text and is not part of it.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the tokens at which the model ends its texts.")
@click.option("--roll", is_flag=True, help="At the end of the window, continue from the second half of the text.")
@click.option("--target", metavar="T", help="Target of the engines; default: the fastest here, as the build measured.")
@click.option(
    "--dtype",
    metavar="D",
    help="Dtype of the engines; default: that of the fastest, or with --target the first that was built.",
)
@click.option("--model", "kind", type=click.Choice(["mod", "dense"]), default="mod", show_default=True)
@click.option("--threads", metavar="N", type=int, help="CPU threads of an engine; default: every physical core.")
@click.option(
    "--selection",
    type=click.Choice(["own", "topk-prefill"]),
    default="own",
    show_default=True,
    help="topk-prefill scores prompts as the checkpoint's spec routes them, and writes nothing.",
)
@trusted_keys_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each token and for the end of each text.")
@command
def generate(
    folder: Path,
    text_arguments: Sequence[str],
    texts: Sequence[str],
    files: Sequence[Path],
    ids: Sequence[str],
    chat: bool,
    system: str | None,
    template: Sequence[str],
    no_special_tokens: bool,
    max_new_tokens: int,
    stop: Sequence[str],
    ignore_eos: bool,
    roll: bool,
    target: str | None,
    dtype: str | None,
    kind: ModelKind,
    threads: int | None,
    selection: str,
    trusted_keys: tuple[Path, ...] | None,
    as_json: bool,
    verbosity: int,
    **sampling: Any,
) -> int:
    """Write text with a build folder, token by token, without PyTorch.

    Each TEXT is a prompt to continue or, with --chat, a message to answer.
    """
    prompts = _prompts_from([*text_arguments, *texts], files, ids)
    _check(prompts, chat=chat, ids=bool(ids), system=system, template=bool(template))
    if selection == "topk-prefill":
        if stop or roll or chat or kind == "dense":
            raise UsageError(
                "--selection topk-prefill scores prompts and writes nothing: leave out --stop, --roll, --chat and "
                "--model"
            )
        from mod_export.folder.signature import check_signature

        check_signature(folder, trusted_keys)
        _score(folder, prompts, target, dtype, threads, special=not no_special_tokens, as_json=as_json)
        return 0

    from mod_export.runtime.generator import load_generator

    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    requests: Iterable[Sequence[Prompt]] = [prompts]
    if chat:
        requests = [[[*messages, _message(str(prompt))] for prompt in prompts]] if prompts else _turns(messages)
    sampling |= {
        "ignore_eos": ignore_eos,
        "add_special_tokens": not no_special_tokens,
        "template": _variables(template),
    }
    with load_generator(folder, target, dtype, kind, threads, trusted_keys=trusted_keys) as generator:
        if chat and generator.vocabulary is not None:
            _ = generator.vocabulary.chat_template  # Refuses a model without a chat template before the user types.
        for several in requests:
            with generator.stream(several, max_new_tokens, stop=stop, rolling=roll, **sampling) as stream:
                _show(stream, text=generator.vocabulary is not None, as_json=as_json)
            messages.append({"role": "assistant", "content": stream.completions[0].text})
            if verbosity >= 0:
                click.echo(_summary(generator, stream), err=True)
    return 0


def _check(prompts: Sequence[Prompt], *, chat: bool, ids: bool, system: str | None, template: bool) -> None:
    if system is not None and not chat:
        raise UsageError("--system: is a message of a conversation; give --chat with it")
    if template and not chat:
        raise UsageError("--template: is about conversations; give --chat with it")
    if chat and ids:
        raise UsageError("--ids: a message of --chat is text; give it with --prompt, or leave out --chat")
    if not prompts and not chat:
        raise UsageError("expected a prompt; give it as TEXT, or with --prompt, --prompt-file or --ids")


def _variables(assignments: Sequence[str]) -> dict[str, Any]:
    variables = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            variables[name] = json.loads(value)  # Without a "=" the value is empty, which is not valid JSON either.
        except (ValueError, RecursionError):
            raise UsageError(f"--template: expected NAME=VALUE with a VALUE in JSON, got {assignment[:80]!r}") from None
    return variables


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _turns(messages: list[dict[str, str]]) -> Iterator[list[Sequence[dict[str, str]]]]:
    """Yields the conversation with each further line of stdin. The caller adds the answer to `messages`."""
    for number in itertools.count(1):
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        text = _decoded(line, f"line {number} of stdin")
        if text.strip():
            messages.append(_message(text.removesuffix("\n").removesuffix("\r")))
            yield [messages]


def _prompts_from(texts: Sequence[str], files: Sequence[Path], ids: Sequence[str]) -> list[str | list[int]]:
    prompts: list[str | list[int]] = list(texts)
    for path in files:
        try:
            content = sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read as a prompt ({error})") from error
        prompts.append(_decoded(content, "stdin" if str(path) == STDIN else str(path)))
    for listed in ids:
        try:
            prompts.append([int(token) for token in listed.replace(",", " ").split()])
        except ValueError:
            raise UsageError(f"--ids: expected whole numbers, got {listed!r}") from None
    return prompts


def _decoded(content: bytes, where: str) -> str:
    """Decodes a prompt and keeps its line ends as they are. A byte order mark at the beginning, which some editors
    write to mark a file as UTF-8, is dropped.
    """
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        offset = error.start + len(content) - len(error.object)
        raise UsageError(
            f"{where}: byte 0x{content[offset]:02x} at offset {offset} is not UTF-8; a prompt is text in UTF-8"
        ) from error


def _show(stream: Stream, *, text: bool, as_json: bool) -> None:
    """Shows a single text while it is written; several texts one after the other when all are done."""
    several = len(stream.completions) > 1
    for piece in stream:
        if as_json:
            say(json.dumps({"row": piece.row, "token": piece.token, "text": piece.text}) + "\n")
        elif not several:
            say(piece.text if text else "" if piece.token is None else f"{piece.token} ")
    for row, completion in enumerate(stream.completions):
        if as_json:
            say(json.dumps({"row": row, "done": {name: getattr(completion, name) for name in DONE}}) + "\n")
        elif several:
            say(f"--- {row} ---\n{completion.text if text else ' '.join(map(str, completion.ids))}\n")
        else:
            say("\n")


def _summary(generator: Generator, stream: Stream) -> str:
    done = stream.completions
    tokens = sum(len(completion.ids) for completion in done)
    first = [completion.first_token_s for completion in done if completion.first_token_s is not None]
    rate, steps = stream.tokens_per_second, stream.steps / stream.step_seconds if stream.step_seconds else 0.0
    threads = {0: "the library's own number of threads", 1: "1 thread"}
    parts = [
        f"{tokens} tokens in {stream.seconds:.2f} s",
        f"{'first' if len(done) == 1 else 'last first'} token after {1e3 * max(first, default=0.0):.0f} ms",
        *([] if rate is None else [f"then {rate:,.0f} tokens/s"]),
        *([f"{steps:,.0f} steps/s"] if steps else []),
    ]
    read = sum(completion.read for completion in done)
    ran = [sum(completion.ran.get(site, 0) for completion in done) / read for site in done[0].ran] if read else []
    if ran:
        parts.append(f"routed layers ran {100 * min(ran):.1f} to {100 * max(ran):.1f} % of the tokens")
    overflow = sum(sum(completion.overflow.values()) for completion in done)
    if overflow:
        parts.append(f"{overflow} tokens found no slot")
    parts += [
        f"cache {generator.cache_bytes(stream.bucket) / 2**20:.1f} MiB",
        f"{generator.target} {generator.dtype}, {threads.get(generator.threads, f'{generator.threads} threads')}",
    ]
    return ", ".join(parts)


def _score(
    folder: Path,
    prompts: Sequence[str | Sequence[int]],
    target: str | None,
    dtype: str | None,
    threads: int | None,
    *,
    special: bool,
    as_json: bool,
) -> None:
    """Scores prompts with the forward buckets of a folder. The model may select tokens in any way. `special` says
    whether the tokenizer adds its special tokens to a text.
    """
    from mod_export.folder.manifest import open_folder
    from mod_export.runtime.deployment import load, score
    from mod_export.runtime.texts import vocabulary_of

    vocabulary = vocabulary_of(folder, open_folder(folder, verify=False))
    with load(folder, target, dtype, threads=threads) as deployment:
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str) and vocabulary is None:
                raise UsageError(
                    "this model's ids stand for no text, as far as the folder says; give prompts as ids (--ids), or "
                    "build again where an earlier mod-export built it"
                )
            ids = vocabulary.ids(prompt, special) if isinstance(prompt, str) and vocabulary else list(map(int, prompt))
            scored = score(deployment, ids)
            if as_json:
                nll = None if math.isnan(scored.nll) else scored.nll  # JSON has no NaN.
                line = {"row": row, "tokens": scored.tokens, "nll": nll, "following": scored.following}
                say(json.dumps(line) + "\n")
                continue
            say(f"prompt {row}: {scored.tokens} tokens, perplexity {scored.perplexity:.3f}\n")
            for token, share in scored.following:
                reader = None if vocabulary is None else vocabulary.reader()
                text = "" if reader is None else repr(reader.feed(token) + reader.close())
                say(f"  next {token:>6} {text:<8} {100 * share:5.1f} %\n")
