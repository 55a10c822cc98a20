"""Commands that build a user's model: build, sweep."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mod_export.cli.boundary import PATH, SOURCE, command, config_of, config_option, target_option, text_option
from mod_export.errors import GATE_FAILED

if TYPE_CHECKING:
    from mod_export.config import BuildConfig
    from mod_export.model.request import Request

SHAPE = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


def _shapes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...] | None:
    """Parses a list of shapes, rows x tokens, such as 1x128,1x512."""
    if value is None:
        return None
    matches = [SHAPE.fullmatch(part) for part in value.split(",")]
    if None in matches:
        raise click.BadParameter(f"{value!r}: expected rows x tokens, such as 1x128,1x512", ctx, param)
    return tuple((int(match[1]), int(match[2])) for match in matches if match is not None)


@click.command()
@click.argument("models", metavar="MODEL...", type=SOURCE, nargs=-1, required=True)
@config_option
@click.option("-o", "--out", metavar="DIR", type=PATH, help="Build folder; default build/NAME.")
@click.option(
    "--baseline",
    metavar="MODEL",
    type=SOURCE,
    multiple=True,
    help="A dense model to compare with, in place of the dense baseline that is derived from MODEL where possible; "
    "repeat it for each .pt2 of one dense model.",
)
@click.option(
    "--buckets", metavar="BxS,...", callback=_shapes, help="Shapes, rows x tokens, in place of the configuration's."
)
@click.option("--samples", metavar="FILE", type=PATH, help="A safetensors file with the inputs of a .pt2, by name.")
@click.option(
    "--capacity", metavar="C", type=float, help="Capacity of every routed layer, in place of the model's own."
)
@target_option
@click.option(
    "--max-memory", metavar="SIZE", help="Memory that the build may use, such as 12GiB; default: what is free."
)
@click.option("--report", metavar="FILE", type=PATH, help="Write report.json here as well.")
@click.option(
    "--no-evidence",
    "unverified",
    is_flag=True,
    help="Stop when the engines are built: no parity, no times, no report. The same command without it goes on.",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    type=PATH,
    help="The model's tokenizer: a tokenizer.json, or a folder that transformers can read; default: that in the MODEL "
    "folder or beside model.pt.",
)
@text_option("Judge and time on", "held-out text of the model, or else Python's documentation")
@command
def build(
    models: tuple[str, ...],
    config_file: Path | None,
    out: Path | None,
    baseline: tuple[str, ...],
    buckets: tuple[tuple[int, int], ...] | None,
    samples: Path | None,
    capacity: float | None,
    targets: Sequence[str],
    max_memory: str | None,
    report: Path | None,
    unverified: bool,
    tokenizer: Path | None,
    text_file: Path | None,
    verbosity: int,
) -> int:
    """Build MODEL for every target.

    MODEL is a checkpoint (model.pt, or a folder of config.json and model.safetensors); anything that `convert` takes,
    such as a Hugging Face folder, hf://ORG/NAME[@REVISION] or a GGUF file; programs of torch.export.save, one .pt2 for
    each shape; or my_model.py:make_model, a function that returns a module and its inputs.
    """
    from mod_export.model.hub import fetched
    from mod_export.model.request import Request

    overrides = {"max_memory": max_memory, "buckets": buckets}
    config = config_of(config_file, targets, **{name: value for name, value in overrides.items() if value is not None})
    paths = {source: fetched(source) for source in (*models, *baseline)}
    request = Request(
        sources=tuple(paths[named] for named in models),
        baseline=tuple(paths[named] for named in baseline),
        samples=samples,
        capacity=capacity,
    )
    folder = out or _default_folder(models[0])
    # As typed: another machine has another cache of the hub.
    named = replace(request, sources=models, baseline=baseline)
    return build_and_show(
        request, config, folder, verbosity, report, tokenizer, named, unverified=unverified, text=text_file
    )


def _default_folder(model: str | Path, suffix: str = "") -> Path:
    """Returns build/NAME, see `title_of`. If MODEL is that folder itself, returns build/NAME-build."""
    from mod_export.model.request import title_of

    folder = Path("build") / ((title_of(model) or "model") + suffix)
    return folder.with_name(f"{folder.name}-build") if folder.resolve() == Path(model).resolve() else folder


def build_and_show(
    request: Request,
    config: BuildConfig,
    folder: Path,
    verbosity: int,
    report_file: Path | None = None,
    tokenizer: Path | None = None,
    named: Request | None = None,
    *,
    unverified: bool = False,
    text: Path | None = None,
) -> int:
    """Runs a build, with its progress on stderr and its report on stdout, and returns the exit code.

    `named` is the request with the names that the user typed, for the command that repeats the build; by default they
    are those of the request. `unverified` stops after the engines are built. `text` is a file to judge and time on.
    """
    from rich.console import Console

    from mod_export.folder.files import check_place, write_whole
    from mod_export.folder.workspace import check_root
    from mod_export.pipeline.plan import check_names

    # Checks that need no PyTorch come first, because loading PyTorch takes longer than all of them.
    check_names(config.targets)
    request.check()
    check_root(folder)
    if report_file is not None:
        check_place(report_file)

    from mod_export.console import Progress
    from mod_export.pipeline.stages import build as run
    from mod_export.report import print_report
    from mod_export.report.wording import printable
    from mod_export.rows.base import sentences
    from mod_export.types import Bucket

    buckets = [Bucket(batch, seq) for batch, seq in config.buckets]
    files, notes = request.tokenizer(tokenizer)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    with Progress(Console(stderr=True), verbosity) as progress:
        models = partial(request.models, buckets)
        again = _again(named or request, tokenizer, text)
        report = run(
            models,
            config,
            folder,
            progress,
            _as_typed(),
            request.capacity,
            files,
            again,
            evidence=not unverified,
            text=text,
        )
    if report_file is not None:
        write_whole(report_file, report.to_json())
    if unverified:
        for sentence in sentences(report.failed):
            click.echo(f"  - {printable(sentence)}")
        click.echo(f"built, and nothing verified: {folder}")
        return GATE_FAILED if report.failed else 0
    print_report(report, str(folder))
    return 0 if report.verdict.status == "pass" else GATE_FAILED


def _as_typed() -> str:
    return shlex.join(["mod-export", *sys.argv[1:]])


def _again(request: Request, tokenizer: Path | None, text: Path | None) -> str:
    """Returns the command that repeats a build with its resolved configuration (which has targets, buckets, memory)."""
    optional = (
        ("--samples", request.samples),
        ("--capacity", request.capacity),
        ("--tokenizer", tokenizer),
        ("--text", text),
    )
    options = [("--baseline", value) for value in request.baseline] + [
        (name, value) for name, value in optional if value is not None
    ]
    arguments = [str(part) for option in options for part in option]
    return shlex.join(["mod-export", "build", *request.sources, *arguments, "-c", "config.toml", "-o", "BUILD"])


@click.command()
@click.argument("model", type=PATH)
@click.option("--capacity", "capacities", metavar="C,...", multiple=True, help="Capacities; default: the model's own.")
@click.option("--seq", "seqs", metavar="S,...", multiple=True, help="Row lengths; default: the configuration's.")
@click.option(
    "--batch", "batches", metavar="B,...", multiple=True, help="Numbers of rows; default: the configuration's."
)
@click.option(
    "--target",
    "targets",
    metavar="T,...",
    multiple=True,
    help="Targets; default: the configuration's, or the first that can run here.",
)
@config_option
@click.option("-o", "--out", metavar="DIR", type=PATH, help="Folder of the sweep; default build/NAME-sweep.")
@click.option("--ray", "ray_address", metavar="ADDRESS", help="Spread the cells over this Ray cluster.")
@command
def sweep(
    model: Path,
    capacities: Sequence[str],
    seqs: Sequence[str],
    batches: Sequence[str],
    targets: Sequence[str],
    config_file: Path | None,
    out: Path | None,
    ray_address: str | None,
    verbosity: int,
) -> int:
    """Build and measure MODEL over a grid: where routing pays, which k to choose, speed against quality."""
    from rich.console import Console

    from mod_export.model.checkpoint import look_at_checkpoint

    config = config_of(config_file)
    look_at_checkpoint(model)

    from mod_export.sweep.run import Axes, exit_code_of
    from mod_export.sweep.run import sweep as run
    from mod_export.sweep.show import SweepProgress, render_text

    folder = out or _default_folder(model, "-sweep")
    axes = Axes(capacities=capacities, seqs=seqs, batches=batches, targets=targets)
    progress = SweepProgress(Console(stderr=True), verbosity, str(folder))
    report = run(model, config, folder, axes, ray_address, progress, _as_typed())
    click.echo(render_text(report, str(folder)), nl=False)
    return exit_code_of(report)
