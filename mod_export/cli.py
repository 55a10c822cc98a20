"""The command line: arguments to configuration to exit code, and the only place where errors become text.

Results go to stdout, progress and errors to stderr. Exit codes: 0 all gates passed, 1 a bug, 2 usage, configuration or
unusable input, 3 a stage could not build, 4 built but a gate failed, 130 interrupted, 141 nobody reads the result (as a
shell says of a program that a closed pipe ended).
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mod_export import __version__
from mod_export.errors import ModExportError, UsageError
from mod_export.outfile import check_place, write_text

if TYPE_CHECKING:
    from mod_export.artifacts import ModelKind
    from mod_export.config import BuildConfig

__all__ = ["main"]

GATE_FAILED = 4
INTERRUPTED = 130
UNREAD = 141
RESUME = ("build", "demo", "sweep")
BUG = 1


class _Path(click.Path):
    """A path that the operating system can look up. Whether something has to be there is for each command to say."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        try:
            path.exists()
        except OSError as error:
            self.fail(f"{path}: {error.strerror}", param, ctx)
        return path


PATH = _Path()
folder_argument = click.argument("folder", metavar="DIR", type=PATH)
config_option = click.option(
    "-c", "--config", "config_file", metavar="CONFIG.toml", type=PATH, help="Configuration file."
)
target_option = click.option(
    "--target", "targets", metavar="T", multiple=True, help="Only this target; may be given several times."
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Name every step; tracebacks for errors.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mod-export")
def cli() -> None:
    """Puts Mixture-of-Depths models into production: export, engines, parity and speed-up against the dense twin."""


def _command(function: Callable[..., int]) -> Callable[..., None]:
    """Turns errors into messages and exit codes, and the function's result into the exit code."""

    @wraps(function)
    def wrapped(**arguments: Any) -> None:
        verbose = bool(arguments.get("verbose"))
        try:
            code = function(**arguments)
            sys.stdout.flush()
        except ModExportError as error:
            if verbose:
                traceback.print_exc()
            lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
            click.echo("\n".join(["error: " + lines[0], *(f"       {line}" for line in lines[1:])]), err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            resumes = "; what was whole is kept, and the same command resumes there"
            click.echo("interrupted" + (resumes if function.__name__ in RESUME else ""), err=True)
            code = INTERRUPTED
        except BrokenPipeError:
            # `mod-export report DIR | head`: what is still buffered must not fail again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = UNREAD
        except Exception as error:  # The one broad except: whatever else arrives here is our bug, and says so.
            traceback.print_exc()
            click.echo(
                f"bug in mod-export {__version__}: {type(error).__name__}; please report the text above", err=True
            )
            code = BUG
        sys.exit(code)

    return wrapped


@cli.command()
@click.argument("model", type=PATH)
@config_option
@click.option("-o", "--out", metavar="DIR", type=PATH, help="Build folder; default build/NAME.")
@click.option("--baseline", metavar="MODEL", type=PATH, help="A dense checkpoint instead of the dense twin.")
@click.option("--capacity", metavar="C", type=float, help="Of every routed layer, instead of the checkpoint's own.")
@target_option
@click.option(
    "--max-memory", metavar="SIZE", help="Memory that the build may take, such as 12GiB; default: what is free."
)
@click.option("--report", metavar="FILE", type=PATH, help="Write report.json here as well.")
@click.option(
    "--tokenizer",
    metavar="FILE",
    type=PATH,
    help="The model's tokenizer.json, kept in the build folder; default: the one in the MODEL folder, if any.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
@verbose_option
@_command
def build(
    model: Path,
    config_file: Path | None,
    out: Path | None,
    baseline: Path | None,
    capacity: float | None,
    targets: Sequence[str],
    max_memory: str | None,
    report: Path | None,
    tokenizer: Path | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Build MODEL (model.pt, or a folder of config.json and model.safetensors) for every target."""
    folder = out or Path("build") / (model.resolve().name.removesuffix(".pt") or "model")
    verbosity = -1 if quiet else int(verbose)
    config = _config(config_file, targets, **({} if max_memory is None else {"max_memory": max_memory}))
    return _build(model, config, folder, baseline, report, verbosity, capacity, tokenizer)


def _build(
    model: Path,
    config: BuildConfig,
    folder: Path,
    baseline: Path | None,
    report_file: Path | None,
    verbosity: int,
    capacity: float | None = None,
    tokenizer: Path | None = None,
) -> int:
    from rich.console import Console

    from mod_export.model import look_at_checkpoint
    from mod_export.plan import check_names
    from mod_export.workspace import check_root

    # What can be refused without PyTorch is refused before it is loaded, which takes longer than all of this.
    check_names(config.targets)
    for checkpoint in filter(None, (model, baseline)):
        look_at_checkpoint(checkpoint)
    check_root(folder)
    if report_file is not None:
        check_place(report_file)

    from mod_export.console import Progress
    from mod_export.pipeline import build as run
    from mod_export.report import print_report

    progress = Progress(Console(stderr=True), verbosity)
    try:
        command = " ".join(["mod-export", *sys.argv[1:]])
        report = run(model, config, folder, baseline, progress, command, capacity, tokenizer or _own_tokenizer(model))
    finally:
        progress.stop()
    if report_file is not None:
        write_text(report_file, report.to_json())
    print_report(report, str(folder))
    return 0 if report.verdict.status == "pass" else GATE_FAILED


def _own_tokenizer(model: Path) -> Path | None:
    """Beside the weights, as Hugging Face's folders have it."""
    path = model / "tokenizer.json"
    return path if path.is_file() else None


@cli.command()
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
@_command
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


@cli.command()
@click.argument("model", type=PATH)
@click.option("--capacity", "capacities", metavar="C,...", multiple=True, help="Default: the model's own.")
@click.option("--seq", "seqs", metavar="S,...", multiple=True, help="Lengths; default: the configuration's.")
@click.option("--batch", "batches", metavar="B,...", multiple=True, help="Default: the configuration's.")
@click.option("--target", "targets", metavar="T,...", multiple=True, help="Default: the first that can run here.")
@config_option
@click.option("-o", "--out", metavar="DIR", type=PATH, help="Folder of the sweep; default build/NAME-sweep.")
@click.option("--ray", "ray_address", metavar="ADDRESS", help="Spread the cells over this Ray cluster.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
@verbose_option
@_command
def sweep(
    model: Path,
    capacities: Sequence[str],
    seqs: Sequence[str],
    batches: Sequence[str],
    targets: Sequence[str],
    config_file: Path | None,
    out: Path | None,
    ray_address: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Build and measure MODEL over a grid: break-even, which k to take, speed against quality."""
    from rich.console import Console

    from mod_export.model import look_at_checkpoint

    config = _config(config_file, ())
    look_at_checkpoint(model)

    from mod_export.sweep.grid import Asked
    from mod_export.sweep.run import exit_code_of
    from mod_export.sweep.run import sweep as run
    from mod_export.sweep.text import SweepProgress, render_text

    folder = out or Path("build") / f"{model.resolve().name.removesuffix('.pt') or 'model'}-sweep"
    asked = Asked(capacities=capacities, seqs=seqs, batches=batches, targets=targets)
    progress = SweepProgress(Console(stderr=True), -1 if quiet else int(verbose), str(folder))
    report = run(model, config, folder, asked, ray_address, progress, " ".join(["mod-export", *sys.argv[1:]]))
    click.echo(render_text(report, str(folder)), nl=False)
    return exit_code_of(report)


@cli.command()
@folder_argument
@target_option
@config_option
@click.option(
    "--model", "checkpoint", metavar="MODEL", type=PATH, help="Compare with this checkpoint, not the folder's weights."
)
@verbose_option
@_command
def validate(
    folder: Path, targets: Sequence[str], config_file: Path | None, checkpoint: Path | None, verbose: bool
) -> int:
    """Check a build folder again, on this machine: files, weights, parity and causality, without the checkpoint."""
    _need("torch", "onnx", "onnx_ir", "onnxscript", "safetensors")

    from mod_export.report.validation import render_validation
    from mod_export.revalidate import validate_folder

    found = validate_folder(folder, _config(config_file, ()) if config_file else None, targets, checkpoint)
    click.echo(render_validation(found.structure, found.parity, found.causality, found.verdict, found.notes), nl=False)
    return 0 if found.verdict.status == "pass" else GATE_FAILED


@cli.command()
@folder_argument
@target_option
@config_option
@verbose_option
@_command
def bench(folder: Path, targets: Sequence[str], config_file: Path | None, verbose: bool) -> int:
    """Measure latency of a build folder against its dense twin again, on this machine."""
    from mod_export.folder import bench_decoding, bench_folder
    from mod_export.report.rows import render_speedup, render_steps

    config = _config(config_file, ()) if config_file else None
    latency, speedup, verdict = bench_folder(folder, config, targets)
    click.echo(render_speedup(latency, speedup, verdict), nl=False)
    click.echo(render_steps(bench_decoding(folder, config, targets)), nl=False)
    return 0 if verdict.status == "pass" else GATE_FAILED


@cli.command()
@folder_argument
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@verbose_option
@_command
def report(folder: Path, form: str, verbose: bool) -> int:
    """Render what a build measured."""
    from mod_export.report import print_report, render_html, report_from_json
    from mod_export.runtime import opened_folder
    from mod_export.workspace import verify_files

    manifest = opened_folder(folder, verify=False)
    # The engines may have been left behind, but numbers that were changed are nobody's measurement.
    verify_files(folder, {"report.json": manifest["files"]["report.json"]})
    text = (folder / "report.json").read_text(encoding="utf-8")
    found = report_from_json(text, str(folder / "report.json"))
    if form == "text":
        print_report(found, str(folder))
    else:
        # Both are UTF-8 by their own rules, whatever the terminal's encoding.
        click.echo((text if form == "json" else render_html(found)).encode(), nl=False)
    return 0


@cli.command()
@click.argument("path", metavar="MODEL|GRAPH|DIR", type=PATH)
@click.option("--text", metavar="FILE|TEXT", help="Show which layer runs which token of it.")
@click.option("--html", metavar="FILE", type=PATH, help="Write the model as a page, with the routing of a text.")
@click.option("--png", metavar="FILE", type=PATH, help="The same as a picture.")
@verbose_option
@_command
def inspect(path: Path, text: str | None, html: Path | None, png: Path | None, verbose: bool) -> int:
    """Show what a model, an ONNX graph or a build folder holds: spec, routing, FLOPs, sizes, operators."""
    from mod_export.inspect import describe

    click.echo(describe(path, text=text, html=html, png=png), nl=False)
    return 0


@cli.command()
@verbose_option
@_command
def targets(verbose: bool) -> int:
    """List every target, and what this machine can do with it."""
    from mod_export.engine import ENGINES

    width = max(map(len, ENGINES))
    for name, engine in ENGINES.items():
        found = engine.availability()
        can = (
            "builds, runs"
            if found.builds and found.runs
            else "builds"
            if found.builds
            else "runs"
            if found.runs
            else "-"
        )
        click.echo(f"{name:<{width}}  {can:<12}  {found.reason}")
    return 0


@cli.group()
def config() -> None:
    """Look at configurations."""


@config.command("show")
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=PATH)
@verbose_option
@_command
def show(config_file: Path | None, verbose: bool) -> int:
    """Print the whole resolved configuration."""
    from mod_export.config import toml_from_config

    click.echo(toml_from_config(_config(config_file, ())), nl=False)
    return 0


@cli.command()
@click.option("-o", "--out", metavar="DIR", type=PATH, default=Path("build/demo"), show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
@verbose_option
@_command
def demo(out: Path, quiet: bool, verbose: bool) -> int:
    """Build the trained checkpoint that ships with mod-export, then measure a model large enough to be timed."""
    from mod_export.demo import demo_checkpoint, timed_checkpoint
    from mod_export.workspace import check_root

    verbosity = -1 if quiet else int(verbose)
    named = out if out.name not in ("", "..") else out.resolve()
    timed_out = named.with_name(f"{named.name}-timed")
    check_root(timed_out)
    trained = _build(demo_checkpoint(), _named_config("demo"), out, None, None, verbosity)
    with timed_checkpoint() as checkpoint:
        timed = _build(checkpoint, _named_config("bench"), timed_out, None, None, verbosity)
    return trained or timed


def _config(path: Path | None, targets: Sequence[str], **overrides: Any) -> BuildConfig:
    from mod_export.config import config_from_toml

    return config_from_toml(path, {**({"targets": tuple(targets)} if targets else {}), **overrides})


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


def _named_config(name: str) -> BuildConfig:
    from importlib.resources import files

    return _config(Path(str(files("mod_export_configs").joinpath(f"{name}.toml"))), ())


def main() -> None:
    """Entry point of the command `mod-export`."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is shown escaped instead of failing the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="mod-export")


if __name__ == "__main__":
    main()
