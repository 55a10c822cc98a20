"""The command demo: builds a small trained checkpoint, and an untrained one that is large enough to be timed.

The trained model shows that everything works on real weights; its report comes first, within a minute. Its layers are
so small that their timings say little about larger models. So a second model of a useful size, with initial weights, is
built and measured: time does not depend on the values of weights.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from mod_export.cli.boundary import PATH, command, config_of
from mod_export.cli.build import build_and_show
from mod_export.errors import CheckpointError

SEED = 0


@click.command()
@click.option("-o", "--out", metavar="DIR", type=PATH, default=Path("build/demo"), show_default=True)
@command
def demo(out: Path, verbosity: int) -> int:
    """Build the trained checkpoint that ships with mod-export, then measure a model large enough to be timed."""
    from importlib.resources import files

    from mod_export.folder.workspace import check_root
    from mod_export.model.request import Request

    configs = Path(str(files("mod_export_configs")))
    named = out if out.name not in ("", "..") else out.resolve()
    timed_out = named.with_name(f"{named.name}-timed")
    check_root(timed_out)
    checkpoint = demo_checkpoint()
    trained = build_and_show(Request.checkpoint(checkpoint), config_of(configs / "demo.toml"), out, verbosity)
    with timed_checkpoint() as untrained:
        timed = build_and_show(Request.checkpoint(untrained), config_of(configs / "bench.toml"), timed_out, verbosity)
    click.echo(next_steps(text_checkpoint() or checkpoint, out, timed_out, sys.argv[0]))
    return trained or timed


def demo_checkpoint() -> Path:
    """Returns the trained checkpoint that an installed architecture ships.

    Raises:
        CheckpointError: none of them ships one.
    """
    from mod_export.model.checkpoint import architectures

    for architecture in architectures().values():
        path = architecture.demo_checkpoint()
        if path is not None:
            return path
    raise CheckpointError(
        "no installed architecture ships a trained checkpoint; build your own: mod-export build MODEL"
    )


def text_checkpoint() -> Path | None:
    """Returns the trained checkpoint with a tokenizer that an installed architecture ships, or None."""
    from mod_export.model.checkpoint import architectures

    return next(filter(None, (architecture.text_checkpoint() for architecture in architectures().values())), None)


@contextlib.contextmanager
def timed_checkpoint() -> Iterator[Path]:
    """Yields a checkpoint with initial weights, of a size that can be timed; it is deleted when the context ends.

    Raises:
        CheckpointError: no architecture declares such a size.
    """
    from mod_export.model.checkpoint import architectures

    for architecture in architectures().values():
        with tempfile.TemporaryDirectory() as folder:
            if architecture.timed_checkpoint(SEED, Path(folder) / "timed"):
                yield Path(folder) / "timed"
                return
    raise CheckpointError("no installed architecture declares a size to be timed")


def next_steps(writer: Path, trained: Path, timed: Path, command: str) -> str:
    """Says what to look at after a demo, and what to try next.

    Args:
        writer: a checkpoint that writes text.
        trained: the build folder of the trained model.
        timed: the build folder of the model that was timed.
        command: how mod-export is called here.
    """
    writing = trained.with_name("writing")
    look = {
        str(trained / "report.html"): "parity with PyTorch, and which tokens of a text each layer selected",
        str(timed / "report.html"): "speed against the dense baseline at 40 M parameters, under which conditions",
    }
    tries = {
        f"{command} validate {trained}": "check a build folder again, on any machine",
        f"{command} build {writer} -o {writing}": "a trained model for every target, and engines that write text",
        f'{command} generate {writing} --prompt "    # If the file is " --temperature 0.5': "let them write",
        f"{command} targets": "which targets can build and run here, and what the others lack",
        f"{command} build MODEL": "your own checkpoint, for every target that can build here",
    }
    lines = []
    for title, rows in (("Look at", look), ("Try next", tries)):
        width = max(map(len, rows))
        lines += ["", title, *(f"    {name:<{width}}    {description}" for name, description in rows.items())]
    return "\n".join(lines)
