"""A replica on Ray Serve that Ray's memory monitor kills."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ray_serving import NAME, inside, kill_while_it_writes, ray, ray_serve

ROOM = 4 * 2**30
"""Bytes that may be used beyond those in use now, before the monitor kills a worker."""
PIECE = 64 * 2**20
ROWS = 3


def _fill(own: Any) -> None:
    """Takes twice as much memory as there is room for, unless the monitor kills this process first."""
    own.pieces = []
    for _ in range(2 * ROOM // PIECE):
        own.pieces.append(np.ones(PIECE, np.uint8))
        time.sleep(0.01)


@pytest.mark.slow
def test_a_replica_that_takes_too_much_memory_is_killed_and_replaced(written: Path) -> None:
    """Nothing in the server can help here: the monitor sends SIGKILL to the replica, and sometimes to Ray Serve's
    controller as well. No request hangs, and the next replica answers.
    """
    # The replica runs a function of this file but cannot import it.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + ROOM) / memory.total
    environment = {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "50"}
    with (
        ray_serve(environment) as on_ray,
        on_ray.application(folder=written, name=NAME, rows=ROWS, max_queue=2) as running,
    ):

        def kill(replica: Any) -> None:
            with pytest.raises(ray.exceptions.RayError, match=r"(?i)low on memory|out of memory|oom"):
                inside(replica, _fill)

        kill_while_it_writes(running, ROWS, kill, step_s=1.0)
