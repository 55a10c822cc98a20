"""The command that runs a build folder's engines: generate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mod_export.cli.boundary import command
from mod_export.cli.options import PATH, folder_argument
from mod_export.errors import UsageError

if TYPE_CHECKING:
    from mod_export.types import ModelKind

__all__ = ["generate"]


@click.command()
@folder_argument
@click.option("--prompt", "texts", metavar="TEXT", multiple=True, help="Text to continue; may be given several times.")
@click.option("--prompt-file", "files", metavar="FILE", type=PATH, multiple=True, help="A file that is a prompt.")
@click.option("--ids", metavar="N,...", multiple=True, help="A prompt as token ids.")
@click.option("--max-new-tokens", metavar="N", type=int, default=128, show_default=True, help="Of each text.")
@click.option("--temperature", metavar="T", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", metavar="K", type=int, default=0, show_default=True, help="Sample among K tokens; 0: all.")
@click.option("--top-p", metavar="P", type=float, default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--stop", metavar="TEXT", multiple=True, help="Ends a text; is not part of it.")
@click.option("--roll", is_flag=True, help="At the end of the window, continue from the second half of the text.")
@click.option("--target", metavar="T", help="Target whose engines run; default: the first that generates here.")
@click.option("--dtype", metavar="D", help="Of the engines; default: the first built.")
@click.option("--model", "kind", type=click.Choice(["mod", "dense"]), default="mod", show_default=True)
@click.option("--threads", metavar="N", type=int, help="CPU threads of an engine; default: every physical core.")
@click.option(
    "--selection",
    type=click.Choice(["own", "topk-prefill"]),
    default="own",
    show_default=True,
    help="topk-prefill scores prompts as the checkpoint's spec routes them, and writes nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each token and for the end of each text.")
@command
def generate(
    folder: Path,
    texts: Sequence[str],
    files: Sequence[Path],
    ids: Sequence[str],
    max_new_tokens: int,
    stop: Sequence[str],
    roll: bool,
    target: str | None,
    dtype: str | None,
    kind: ModelKind,
    threads: int | None,
    selection: str,
    as_json: bool,
    verbosity: int,
    **sampling: Any,
) -> int:
    """Write text with a build folder, token by token, without PyTorch."""
    from mod_export.runtime.generate.console import prompts_from, score_prompts, write_texts

    prompts = prompts_from(texts, files, ids)
    show = partial(click.echo, nl=False)
    if selection == "topk-prefill":
        if stop or roll or kind == "dense":
            raise UsageError(
                "--selection topk-prefill scores prompts and writes nothing: leave out --stop, --roll and --model"
            )
        score_prompts(folder, prompts, target=target, dtype=dtype, threads=threads, as_json=as_json, show=show)
        return 0
    write_texts(
        folder,
        prompts,
        max_new_tokens,
        target=target,
        dtype=dtype,
        model=kind,
        threads=threads,
        as_json=as_json,
        show=show,
        tell=_ignore if verbosity < 0 else partial(click.echo, err=True),
        stop=stop,
        rolling=roll,
        **sampling,
    )
    return 0


def _ignore(text: str) -> None:
    """What -q does with the summary."""
