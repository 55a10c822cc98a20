"""A replica on Ray Serve that Ray's memory monitor kills."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ray_serving import PROMPT, asking, inside, ray, ray_serve, slow, until

ROOM = 4 * 2**30
"""Bytes that may be used beyond those in use now, before the monitor kills a worker."""
PIECE = 64 * 2**20
NAME = "tiny"
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
        before = running.complete(8, model=NAME).choices[0].text
        (replica,) = running.replicas()
        process = inside(replica, lambda _: os.getpid())
        with contextlib.suppress(ray.exceptions.RayError), slow(replica, step_s=1.0):
            with asking(lambda: running.post({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}), 2) as answers:
                until(lambda: running.metric("busy_rows") == ROWS)
                with pytest.raises(ray.exceptions.RayError, match=r"(?i)low on memory|out of memory|oom"):
                    inside(replica, _fill)
            assert len(answers) == 2
            assert {status for status, _, _ in answers} <= {500, 503}
        until(lambda: running.post({"prompt": PROMPT})[0] == 200)
        assert running.complete(8, model=NAME).choices[0].text == before
        (replica,) = running.replicas()
        assert inside(replica, lambda _: os.getpid()) != process
