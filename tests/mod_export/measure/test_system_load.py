"""Conditions of real work: busy threads are counted, and notable conditions become flags."""

from __future__ import annotations

import hashlib
import math
import threading
import time

import pytest
from sample_rows import QUIET, changed

from mod_export.measure.conditions import Watch, condition_flags
from mod_export.rows.speed import Conditions

BLOCK = bytes(2**20)


def work(cpu_seconds: float) -> None:
    """Hashes for this much CPU time; hashing releases the GIL."""
    begin = time.thread_time()
    while time.thread_time() - begin < cpu_seconds:
        hashlib.sha256(BLOCK)


@pytest.mark.parametrize("count", [1, 2])
def test_threads_that_work_are_counted_whatever_share_of_the_cpu_they_get(count: int) -> None:
    # The threads are alive when the watch looks, as those of an engine are.
    release, waiting = threading.Barrier(count + 1), threading.Event()
    idle = threading.Thread(target=waiting.wait)
    workers = [threading.Thread(target=lambda: (work(0.3), release.wait())) for _ in range(count)]
    idle.start()
    watch = Watch()
    for worker in workers:
        worker.start()
    while release.n_waiting < count:
        time.sleep(0.01)
    found = watch.conditions()
    release.wait()
    waiting.set()
    for thread in (*workers, idle):
        thread.join()
    assert found.threads_used == pytest.approx(count, abs=0.3)
    assert found.load is not None
    assert found.load >= 0
    assert found.other_load is not None
    assert 0 <= found.other_load <= 1
    assert found.frequency_mhz is None or min(found.frequency_mhz) > 0


def test_a_moment_says_nothing_about_shares() -> None:
    found = Watch().conditions()
    assert found.threads_used is None
    assert found.other_load is None


NOTHING = Conditions(threads_used=None, frequency_mhz=None, load=None, other_load=None)
MORE = math.nextafter(0.1, 1)


@pytest.mark.parametrize(
    ("conditions", "threads", "flags"),
    [
        (QUIET, 1, []),
        (NOTHING, 1, []),
        (changed(QUIET, threads_used=1.4), 1, []),
        (changed(QUIET, threads_used=1.9), 1, ["1.9 threads were busy, 1 configured"]),
        (changed(QUIET, threads_used=4.0), 4, []),
        (changed(QUIET, threads_used=4.0), 0, []),
        (changed(QUIET, other_load=0.1), 1, []),
        (changed(QUIET, other_load=MORE), 1, ["others took 10 % of the machine's CPU time"]),
        (changed(QUIET, frequency_mhz=(2000.0, 2200.0)), 1, []),
        (changed(QUIET, frequency_mhz=(2400.0, 1800.0)), 1, ["the CPU's clock went from 2400 to 1800 MHz"]),
    ],
)
def test_what_lies_beyond_the_configured_share_is_said(conditions: Conditions, threads: int, flags: list[str]) -> None:
    assert condition_flags(conditions, threads, 0.1) == tuple(flags)
