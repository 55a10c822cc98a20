"""Commands that only show something: report, inspect, targets, config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mod_export.cli.boundary import PATH, command, config_of, folder_argument

if TYPE_CHECKING:
    from pydantic import BaseModel

OPTIONS_PAGE = """# Configuration

Every option of a configuration file, with its default. `mod-export config explain` prints this page, and
`mod-export config show [CONFIG.toml]` the whole resolved configuration. Reasons for the numbers: docs/evidence.md
(parity, latency and cost), docs/text.md (generation)."""


@click.command()
@folder_argument
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@command
def report(folder: Path, form: str, verbosity: int) -> int:
    """Show the report of a build folder."""
    from mod_export.folder.files import verify_files
    from mod_export.folder.manifest import open_folder
    from mod_export.report import print_report, render_html
    from mod_export.rows.report import report_from_json

    manifest = open_folder(folder, verify=False)
    # Engines may be missing from a copied folder, but a report that was changed is not a measurement.
    verify_files(folder, manifest.entries(["report.json"]))
    text = (folder / "report.json").read_text(encoding="utf-8")
    build_report = report_from_json(text, str(folder / "report.json"))
    if form == "text":
        print_report(build_report, str(folder))
    else:
        # JSON and the page are always UTF-8, whatever the terminal's encoding.
        click.echo((text if form == "json" else render_html(build_report)).encode(), nl=False)
    return 0


@click.command()
@click.argument("path", metavar="MODEL|PROGRAM|GRAPH|DIR", type=PATH)
@click.option("--text", metavar="FILE|TEXT", help="Show which layer runs which token of this text.")
@click.option("--html", metavar="FILE", type=PATH, help="Write the model as a page, with the routing of a text.")
@command
def inspect(path: Path, text: str | None, html: Path | None, verbosity: int) -> int:
    """Show what a model, a program (.pt2), an ONNX graph or a build folder holds: routing, FLOPs, sizes, operators."""
    from mod_export.inspect import describe

    click.echo(describe(path, text=text, html=html), nl=False)
    return 0


@click.command()
@command
def targets(verbosity: int) -> int:
    """List every target, and what this machine can do with it."""
    from mod_export.engines import ENGINES
    from mod_export.environment import missing_modules

    # Every engine is built from graphs made with PyTorch and ONNX, whatever its own library is.
    missing = missing_modules("build")
    width = max(map(len, ENGINES))
    for name, engine in ENGINES.items():
        status = engine.availability()
        able = [verb for verb, can in (("builds", status.builds and not missing), ("runs", status.runs)) if can]
        reason = status.reason
        if status.builds and missing:
            reason += f'; to build, pip install "mod-export[build]" (missing: {", ".join(missing)})'
        click.echo(f"{name:<{width}}  {', '.join(able) or '-':<12}  {reason}")
    return 0


@click.group()
def config() -> None:
    """Show configurations."""


@config.command("show")
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=PATH)
@command
def show(config_file: Path | None, verbosity: int) -> int:
    """Print the whole resolved configuration."""
    from mod_export.config import toml_from_config

    click.echo(toml_from_config(config_of(config_file)), nl=False)
    return 0


@config.command()
@command
def explain(verbosity: int) -> int:
    """Print every option with its default and what it means."""
    from mod_export.config import config_from_toml

    click.echo("\n".join([OPTIONS_PAGE, *_explained(config_from_toml(None), "", set())]))
    return 0


def _explained(section: BaseModel, name: str, known: set[type[BaseModel]]) -> Iterator[str]:
    """Yields lines of Markdown about a table of the configuration and the tables in it. Sections in `known` were
    explained before, so only their defaults are shown.
    """
    from pydantic import BaseModel

    kind = type(section)
    fields = {field.alias or key: (getattr(section, key), field) for key, field in kind.model_fields.items()}
    options = {key: pair for key, pair in fields.items() if not isinstance(pair[0], BaseModel)}
    if options:
        yield from ("", f"## [{name}]" if name else "## Top level", "")
    if kind in known:
        yield "Defaults: " + ", ".join(f"`{key} = {json.dumps(value)}`" for key, (value, _) in options.items()) + "."
    elif options:
        yield from (cleandoc(kind.__doc__ or ""), "")
        for key, (value, field) in options.items():
            yield f"* `{key} = {json.dumps(value)}`: {' '.join((field.description or '').split())}"
    known.add(kind)
    for key, (value, _) in fields.items():
        if isinstance(value, BaseModel):
            yield from _explained(value, f"{name}.{key}".removeprefix("."), known)
