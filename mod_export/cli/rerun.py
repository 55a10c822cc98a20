"""Commands that check and time a finished build folder on this machine: validate, bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mod_export.cli.boundary import PATH, command, config_of, config_option, folder_argument, target_option, text_option
from mod_export.errors import GATE_FAILED


@click.command()
@folder_argument
@target_option
@config_option
@click.option(
    "--model", "checkpoint", metavar="MODEL", type=PATH, help="Compare with this checkpoint, not the folder's weights."
)
@text_option("Judge on", "held-out text of the model, or else Python's documentation")
@command
def validate(
    folder: Path,
    targets: Sequence[str],
    config_file: Path | None,
    checkpoint: Path | None,
    text_file: Path | None,
    verbosity: int,
) -> int:
    """Check a build folder again: files, weights, parity and causality, without the checkpoint."""
    from rich.console import Console

    from mod_export.console import Progress
    from mod_export.pipeline.rerun import validate_folder
    from mod_export.report.text import render_validation
    from mod_export.rows.correctness import CausalityRow, ParityRow, StructureRow
    from mod_export.rows.speed import QualityRow, TextsRow

    config = config_of(config_file) if config_file else None
    with Progress(Console(stderr=True), verbosity) as progress:
        progress.stage_started("validate")
        checked = validate_folder(folder, config, targets, checkpoint, text=text_file)
    rows = checked.rows
    text = render_validation(
        rows(StructureRow),
        rows(ParityRow),
        rows(CausalityRow),
        rows(TextsRow),
        rows(QualityRow),
        checked.verdict,
        checked.notes,
    )
    click.echo(text, nl=False)
    return 0 if checked.verdict.status == "pass" else GATE_FAILED


@click.command()
@folder_argument
@target_option
@config_option
@click.option("--rivals", is_flag=True, help="Also time ONNX Runtime, OpenVINO and torch.compile on the same model.")
@text_option("Time texts on", "Python's documentation")
@command
def bench(
    folder: Path,
    targets: Sequence[str],
    config_file: Path | None,
    rivals: bool,
    text_file: Path | None,
    verbosity: int,
) -> int:
    """Measure the latency of a build folder again, against its dense baseline if it has one."""
    from rich.console import Console

    from mod_export.console import Progress
    from mod_export.pipeline.rerun import bench_folder
    from mod_export.report.text import render_bench
    from mod_export.rows.base import PairRow
    from mod_export.rows.speed import RivalRow

    config = config_of(config_file) if config_file else None
    with Progress(Console(stderr=True), verbosity) as progress:
        progress.stage_started("bench")
        timed = bench_folder(folder, config, targets, rivals=rivals, text=text_file)
    for note in timed.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(render_bench(timed.rows(PairRow), timed.verdict, timed.not_compared, timed.rows(RivalRow)), nl=False)
    return 0 if timed.verdict.status == "pass" else GATE_FAILED
