"""A runner refuses feeds that are not its engine's inputs: a silently dropped input compares different computations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mod_export.errors import EngineError

__all__ = ["check_feeds", "check_outputs"]


def check_feeds(where: str, inputs: Mapping[str, tuple[int, ...]], feeds: Mapping[str, np.ndarray]) -> None:
    """Every input fed, nothing else, with the engine's shape and as int64.

    Args:
        where: the engine, for the message.
        inputs: name -> static shape.
        feeds: name -> array.

    Raises:
        EngineError: names, shapes or dtypes differ.
    """
    if set(feeds) != set(inputs):
        raise EngineError(f"{where}: got inputs {sorted(feeds)}, the engine has {sorted(inputs)}")
    for name, array in feeds.items():
        if tuple(array.shape) != inputs[name] or array.dtype != np.int64:
            raise EngineError(
                f"{where}: input {name} is {array.dtype} {list(array.shape)}, expected int64 {list(inputs[name])}"
            )


def check_outputs(where: str, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Every wanted output exists.

    Raises:
        EngineError: one does not.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise EngineError(f"{where}: no output {', '.join(unknown)}; the engine has {', '.join(known)}")
