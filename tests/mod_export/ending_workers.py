"""Work of a supervised process that ends before it serves. New processes import this file, so it imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def crash(path: str, restarts: int, say: Callable[[str], None]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def leave(path: str, restarts: int, say: Callable[[str], None]) -> int:
    return 7
