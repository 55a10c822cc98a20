"""The command that converts models from other formats: convert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mod_export.cli.boundary import PATH, SOURCE, command


@click.command()
@click.argument("source", metavar="SOURCE", type=SOURCE)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--max-positions",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens of the longest row; default: what SOURCE allows.",
)
@click.option(
    "--ignore-field",
    "ignored",
    metavar="NAME",
    multiple=True,
    help="A field of SOURCE's config.json, or a metadata key of a GGUF file, that is not known here and changes "
    "nothing; may be given several times.",
)
@click.option(
    "--implementation",
    metavar="NAME",
    help="The implementation of Mixture-of-Depths that SOURCE is a folder of, because its files do not say how its "
    "routers route: astramind, dlo, ohara, sramshetty, d-llm, flexidepth, skipgpt, mindskip, p-mod, recursions.",
)
@click.option(
    "--capacity",
    metavar="C",
    type=float,
    help="With --implementation, the share of the tokens that a routed layer takes, or their number where the "
    "implementation counts them; default: what SOURCE or the implementation says.",
)
@click.option(
    "--base",
    metavar="FOLDER",
    type=SOURCE,
    help="The model that SOURCE is a LoRA adapter of, a folder or hf://ORG/NAME; default: the folder that SOURCE "
    "names.",
)
@command
def convert(
    source: str,
    out: Path,
    max_positions: int | None,
    ignored: Sequence[str],
    implementation: str | None,
    capacity: float | None,
    base: str | None,
    verbosity: int,
) -> int:
    """Write SOURCE, a language model of another format, as the checkpoint OUT.

    SOURCE is a Hugging Face folder, a LoRA adapter of PEFT, a GGUF file, or hf://ORG/NAME[@REVISION] on the Hugging
    Face hub. OUT is a new folder that `build` and others take. Families: Llama, Mistral, Qwen2, Qwen3, SmolLM, Phi-3,
    Gemma.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from mod_export.folder.manifest import TOKENIZER
    from mod_export.model.checkpoint import convert as run
    from mod_export.model.hub import fetched

    path = Path(fetched(source))
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=verbosity < 0 or not console.is_terminal
    ) as progress:
        task = progress.add_task("weights", total=None)
        converted = run(
            path,
            out,
            max_positions,
            ignored,
            lambda done, all_: progress.update(task, completed=done, total=all_),
            implementation,
            capacity,
            None if base is None else Path(fetched(base)),
        )
    names = list(converted.companions)
    parts = [f"{out}  {converted.family}, {converted.parameters / 1e6:,.2f} M parameters"]
    parts += [f"copied {', '.join(names)}"] if names else []
    for note in converted.notes:
        click.echo(f"note: {note}", err=True)
    parts += [] if TOKENIZER in names else [f"no {TOKENIZER} in {source}, so its ids stand for no text"]
    click.echo("; ".join(parts))
    return 0
