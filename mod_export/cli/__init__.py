"""The command line: turns arguments into a configuration, and results and errors into text and an exit code.

Results go to stdout, progress and errors to stderr. Exit codes: 0 all gates passed, 1 a bug, 2 usage, configuration or
unusable input, 3 nothing could be built, 4 a gate failed or a part could not be built, 130 interrupted, 141 the reader
of stdout closed the pipe (a shell reports this code for a program that SIGPIPE ended).
"""

from __future__ import annotations

import io
import sys

import click

from mod_export import __version__
from mod_export.cli.build import build, sweep
from mod_export.cli.convert import convert
from mod_export.cli.demo import demo
from mod_export.cli.generate import generate
from mod_export.cli.plan import plan
from mod_export.cli.rerun import bench, validate
from mod_export.cli.serve import serve
from mod_export.cli.show import config, inspect, report, targets
from mod_export.cli.sign import sign, verify
from mod_export.cli.triton import triton

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mod-export")
def cli() -> None:
    """Puts Mixture-of-Depths models into production: export, engines, parity, and speed-up over the dense baseline."""


for command in (
    build,
    convert,
    generate,
    serve,
    triton,
    sweep,
    validate,
    bench,
    sign,
    verify,
    report,
    inspect,
    plan,
    targets,
    config,
    demo,
):
    cli.add_command(command)


def main() -> None:
    """Entry point of the command `mod-export`."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks is shown as an escape, instead of failing the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="mod-export")
