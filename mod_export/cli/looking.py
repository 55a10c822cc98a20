"""Commands that show: report, inspect, targets, config show."""

from __future__ import annotations

from pathlib import Path

import click

from mod_export.cli.boundary import command
from mod_export.cli.options import PATH, config_of, folder_argument, verbose_option

__all__ = ["config", "inspect", "report", "targets"]


@click.command()
@folder_argument
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@verbose_option
@command
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


@click.command()
@click.argument("path", metavar="MODEL|GRAPH|DIR", type=PATH)
@click.option("--text", metavar="FILE|TEXT", help="Show which layer runs which token of it.")
@click.option("--html", metavar="FILE", type=PATH, help="Write the model as a page, with the routing of a text.")
@click.option("--png", metavar="FILE", type=PATH, help="The same as a picture.")
@verbose_option
@command
def inspect(path: Path, text: str | None, html: Path | None, png: Path | None, verbose: bool) -> int:
    """Show what a model, an ONNX graph or a build folder holds: spec, routing, FLOPs, sizes, operators."""
    from mod_export.inspect import describe

    click.echo(describe(path, text=text, html=html, png=png), nl=False)
    return 0


@click.command()
@verbose_option
@command
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


@click.group()
def config() -> None:
    """Look at configurations."""


@config.command("show")
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=PATH)
@verbose_option
@command
def show(config_file: Path | None, verbose: bool) -> int:
    """Print the whole resolved configuration."""
    from mod_export.config import toml_from_config

    click.echo(toml_from_config(config_of(config_file, ())), nl=False)
    return 0
