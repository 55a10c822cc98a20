"""Commands that run what a build folder holds: generate, validate, bench."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mod_export.cli.boundary import GATE_FAILED, command
from mod_export.cli.options import PATH, config_of, config_option, folder_argument, target_option, verbose_option
from mod_export.errors import UsageError

if TYPE_CHECKING:
    from mod_export.artifacts import ModelKind

__all__ = ["bench", "generate", "validate"]


@click.command()
@folder_argument
@click.option(
    "--prompt", "texts", metavar="TEXT", multiple=True, help="What to go on from; may be given several times."
)
@click.option("--prompt-file", "files", metavar="FILE", type=PATH, multiple=True, help="A file that is a prompt.")
@click.option("--ids", metavar="N,...", multiple=True, help="A prompt as token ids.")
@click.option("--max-new-tokens", metavar="N", type=int, default=128, show_default=True, help="Of each text.")
@click.option("--temperature", metavar="T", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", metavar="K", type=int, default=0, show_default=True, help="Sample among K tokens; 0: all.")
@click.option("--top-p", metavar="P", type=float, default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--stop", metavar="TEXT", multiple=True, help="Ends a text, and is no part of it.")
@click.option("--roll", is_flag=True, help="At the end of the window, go on from the text's second half.")
@click.option("--target", metavar="T", help="An engine family; default: the first that generates here.")
@click.option("--dtype", metavar="D", help="Of the engines; default: the first built.")
@click.option("--model", "kind", type=click.Choice(["mod", "dense"]), default="mod", show_default=True)
@click.option(
    "--selection",
    type=click.Choice(["own", "topk-prefill"]),
    default="own",
    show_default=True,
    help="topk-prefill scores prompts as the checkpoint's spec routes them, and writes nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each token and for the end of each text.")
@verbose_option
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
    selection: str,
    as_json: bool,
    verbose: bool,
    **sampling: Any,
) -> int:
    """Write text with a build folder, token by token, without PyTorch."""
    from mod_export.generation.console import prompts_from, score_prompts, write_texts

    prompts = prompts_from(texts, files, ids)
    show = partial(click.echo, nl=False)
    if selection == "topk-prefill":
        if stop or roll or kind == "dense":
            raise UsageError(
                "--selection topk-prefill scores prompts and writes nothing: leave out --stop, --roll and --model"
            )
        score_prompts(folder, prompts, target=target, dtype=dtype, as_json=as_json, show=show)
        return 0
    write_texts(
        folder,
        prompts,
        max_new_tokens,
        target=target,
        dtype=dtype,
        model=kind,
        as_json=as_json,
        show=show,
        tell=partial(click.echo, err=True),
        stop=stop,
        rolling=roll,
        **sampling,
    )
    return 0


@click.command()
@folder_argument
@target_option
@config_option
@click.option(
    "--model", "checkpoint", metavar="MODEL", type=PATH, help="Compare with this checkpoint, not the folder's weights."
)
@verbose_option
@command
def validate(
    folder: Path, targets: Sequence[str], config_file: Path | None, checkpoint: Path | None, verbose: bool
) -> int:
    """Check a build folder again, on this machine: files, weights, parity and causality, without the checkpoint."""
    _need("torch", "onnx", "onnx_ir", "onnxscript", "safetensors")

    from mod_export.report.validation import render_validation
    from mod_export.revalidate import validate_folder

    found = validate_folder(folder, config_of(config_file, ()) if config_file else None, targets, checkpoint)
    click.echo(render_validation(found.structure, found.parity, found.causality, found.verdict, found.notes), nl=False)
    return 0 if found.verdict.status == "pass" else GATE_FAILED


def _need(*modules: str) -> None:
    """Validation rebuilds the reference and exports again; a server that only runs engines has nothing to do that with.

    Raises:
        UsageError: a module cannot be imported.
    """
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise UsageError(
                f"validate compares with PyTorch, and {name} cannot be imported here ({error}); install "
                "mod-export[build], or use bench, which needs the engine's library only"
            ) from error


@click.command()
@folder_argument
@target_option
@config_option
@verbose_option
@command
def bench(folder: Path, targets: Sequence[str], config_file: Path | None, verbose: bool) -> int:
    """Measure latency of a build folder against its dense twin again, on this machine."""
    from mod_export.folder import bench_decoding, bench_folder
    from mod_export.report.rows import render_speedup, render_steps

    config = config_of(config_file, ()) if config_file else None
    latency, speedup, verdict = bench_folder(folder, config, targets)
    click.echo(render_speedup(latency, speedup, verdict), nl=False)
    click.echo(render_steps(bench_decoding(folder, config, targets)), nl=False)
    return 0 if verdict.status == "pass" else GATE_FAILED
