"""What `mod-export demo` builds: a small trained checkpoint, and an untrained one that is large enough to be timed.

The trained model shows that everything works on real weights; its report comes first, within a minute. Its layers are
so small that their timings say little about larger models. So a second model of a useful size, with initial weights, is
built and measured: time does not depend on the values of weights.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from mod_export.errors import CheckpointError
from mod_export.sources.checkpoint import architectures

__all__ = ["demo_checkpoint", "next_steps", "timed_checkpoint"]

SEED = 0


def demo_checkpoint() -> Path:
    """The trained checkpoint that an installed architecture ships.

    Raises:
        CheckpointError: none ships one.
    """
    for architecture in architectures().values():
        path = architecture.demo_checkpoint()
        if path is not None:
            return path
    raise CheckpointError(
        "no installed architecture ships a trained checkpoint; build your own: mod-export build MODEL"
    )


@contextlib.contextmanager
def timed_checkpoint() -> Iterator[Path]:
    """A checkpoint with initial weights, of a size that can be timed; gone when the context ends.

    Raises:
        CheckpointError: no architecture declares such a size.
    """
    for architecture in architectures().values():
        spec = architecture.timed_spec()
        if spec is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "timed"
                architecture.random(spec, SEED, path)
                yield path
                return
    raise CheckpointError("no installed architecture declares a size to be timed")


def next_steps(checkpoint: Path, trained: Path, timed: Path, command: str = "mod-export") -> str:
    """What to look at after a demo, and what to try next.

    Args:
        checkpoint: the trained checkpoint.
        trained: its build folder.
        timed: build folder of the checkpoint that was built to be timed.
        command: how mod-export is called here.
    """
    look = {
        str(trained / "report.html"): "parity with PyTorch, and which tokens of a text each layer selected",
        str(timed / "report.html"): "speed against the dense baseline at 40 M parameters, under which conditions",
    }
    writing = trained.with_name("writing")
    tries = {
        f"{command} validate {trained}": "check a build folder again, on any machine",
        f"{command} build {checkpoint} -o {writing}": "the same model for every target, and engines that write text",
        f'{command} generate {writing} --prompt "def main("': "let them write",
        f"{command} targets": "which targets can build and run here, and what the others lack",
        f"{command} build MODEL": "your own checkpoint, for every target that can build here",
    }
    lines = ["Look at", *_columns(look), "", "Try next", *_columns(tries)]
    return "\n".join(["", *lines])


def _columns(rows: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in rows)
    return [f"    {name:<{width}}    {what}" for name, what in rows.items()]
