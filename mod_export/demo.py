"""What `mod-export demo` builds: a trained checkpoint that is small, and an untrained one that is large enough to time.

The shipped model shows that everything works on real weights. Its layers are so small that timings say little about
larger ones, so a second model of a useful size, with initial weights, is built for one engine and measured. Time does
not depend on the values of weights.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mod_export.errors import CheckpointError
from mod_export.model import architectures

__all__ = ["demo_checkpoint", "timed_checkpoint"]

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
