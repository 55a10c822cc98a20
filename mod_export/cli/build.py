"""Commands that build a model of the user: build, sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mod_export.cli.boundary import GATE_FAILED, PATH, command, config_of, config_option, target_option

if TYPE_CHECKING:
    from mod_export.config import BuildConfig


@click.command()
@click.argument("model", type=PATH)
@config_option
@click.option("-o", "--out", metavar="DIR", type=PATH, help="Build folder; default build/NAME.")
@click.option(
    "--baseline",
    metavar="MODEL",
    type=PATH,
    help="A dense checkpoint to compare with; default: the dense baseline that is derived from MODEL, if it has one.",
)
@click.option("--capacity", metavar="C", type=float, help="Of every routed layer, in place of the checkpoint's own.")
@target_option
@click.option(
    "--max-memory", metavar="SIZE", help="Memory that the build may use, such as 12GiB; default: what is free."
)
@click.option("--report", metavar="FILE", type=PATH, help="Write report.json here as well.")
@click.option(
    "--tokenizer",
    metavar="FILE",
    type=PATH,
    help="The model's tokenizer.json, kept in the build folder; default: the one in the MODEL folder, if any.",
)
@command
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
    verbosity: int,
) -> int:
    """Build MODEL (model.pt, or a folder of config.json and model.safetensors) for every target."""
    config = config_of(config_file, targets, **({} if max_memory is None else {"max_memory": max_memory}))
    folder = out or _default_folder(model)
    return build_and_show(model, config, folder, verbosity, baseline, report, capacity, tokenizer)


def _default_folder(model: Path, suffix: str = "") -> Path:
    return Path("build") / ((model.resolve().name.removesuffix(".pt") or "model") + suffix)


def build_and_show(
    model: Path,
    config: BuildConfig,
    folder: Path,
    verbosity: int,
    baseline: Path | None = None,
    report_file: Path | None = None,
    capacity: float | None = None,
    tokenizer: Path | None = None,
) -> int:
    """Runs a build, with its progress on stderr and its report on stdout; returns the exit code."""
    from rich.console import Console

    from mod_export.build_folder.files import check_place, write_whole
    from mod_export.build_folder.manifest import TOKENIZER
    from mod_export.build_folder.workspace import check_root
    from mod_export.plan import check_names
    from mod_export.sources.checkpoint import look_at_checkpoint

    # What can be refused without PyTorch is refused before it is loaded, which takes longer than all of this.
    check_names(config.targets)
    for checkpoint in filter(None, (model, baseline)):
        look_at_checkpoint(checkpoint)
    check_root(folder)
    if report_file is not None:
        check_place(report_file)
    if tokenizer is None and (model / TOKENIZER).is_file():
        tokenizer = model / TOKENIZER  # Beside the weights, as Hugging Face's folders have it.

    from mod_export.console import Progress
    from mod_export.pipeline import build as run
    from mod_export.report import print_report

    with Progress(Console(stderr=True), verbosity) as progress:
        report = run(model, config, folder, baseline, progress, _as_typed(), capacity, tokenizer)
    if report_file is not None:
        write_whole(report_file, report.to_json())
    print_report(report, str(folder))
    return 0 if report.verdict.status == "pass" else GATE_FAILED


def _as_typed() -> str:
    return " ".join(["mod-export", *sys.argv[1:]])


@click.command()
@click.argument("model", type=PATH)
@click.option("--capacity", "capacities", metavar="C,...", multiple=True, help="Default: the model's own.")
@click.option("--seq", "seqs", metavar="S,...", multiple=True, help="Lengths; default: the configuration's.")
@click.option("--batch", "batches", metavar="B,...", multiple=True, help="Default: the configuration's.")
@click.option("--target", "targets", metavar="T,...", multiple=True, help="Default: the first that can run here.")
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

    from mod_export.sources.checkpoint import look_at_checkpoint

    config = config_of(config_file)
    look_at_checkpoint(model)

    from mod_export.sweep.grid import Axes
    from mod_export.sweep.run import exit_code_of
    from mod_export.sweep.run import sweep as run
    from mod_export.sweep.text import SweepProgress, render_text

    folder = out or _default_folder(model, "-sweep")
    axes = Axes(capacities=capacities, seqs=seqs, batches=batches, targets=targets)
    progress = SweepProgress(Console(stderr=True), verbosity, str(folder))
    report = run(model, config, folder, axes, ray_address, progress, _as_typed())
    click.echo(render_text(report, str(folder)), nl=False)
    return exit_code_of(report)
