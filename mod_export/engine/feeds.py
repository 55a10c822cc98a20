"""A runner refuses feeds that are not its engine's inputs: a silently dropped input compares different computations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mod_export.errors import EngineError

__all__ = ["Port", "check_bound", "check_feeds", "check_outputs"]


class Port(NamedTuple):
    """What an input or output of an engine is: its static shape, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


INT64: np.dtype[np.generic] = np.dtype(np.int64)


def check_feeds(
    where: str,
    inputs: Mapping[str, tuple[int, ...]],
    feeds: Mapping[str, np.ndarray],
    dtypes: Mapping[str, np.dtype[np.generic]] | None = None,
) -> None:
    """Every input fed, nothing else, with the engine's shape and dtype.

    Args:
        where: the engine, for the message.
        inputs: name -> static shape.
        feeds: name -> array.
        dtypes: of inputs that are not int64, by name.

    Raises:
        EngineError: names, shapes or dtypes differ.
    """
    if set(feeds) != set(inputs):
        raise EngineError(f"{where}: got inputs {sorted(feeds)}, the engine has {sorted(inputs)}")
    for name, array in feeds.items():
        expected = (dtypes or {}).get(name, INT64)
        if tuple(array.shape) != inputs[name] or array.dtype != expected:
            raise EngineError(
                f"{where}: input {name} is {array.dtype} {list(array.shape)}, expected {expected} {list(inputs[name])}"
            )


def check_bound(
    where: str, ports: Mapping[str, Port], feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    """Arrays that are read and written where they lie: each of its port's shape and dtype, and in one piece.

    Raises:
        EngineError: one is not, or there is no such port.
    """
    for name, array in {**feeds, **outputs}.items():
        port = ports.get(name)
        if port is None:
            raise EngineError(f"{where}: nothing is called {name}; the engine has {', '.join(ports)}")
        if tuple(array.shape) != port.shape or array.dtype != port.dtype or not array.flags.c_contiguous:
            raise EngineError(
                f"{where}: {name} is {array.dtype} {list(array.shape)}, expected {port.dtype} {list(port.shape)} in "
                "one piece"
            )


def check_outputs(where: str, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Every wanted output exists.

    Raises:
        EngineError: one does not.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise EngineError(f"{where}: no output {', '.join(unknown)}; the engine has {', '.join(known)}")
