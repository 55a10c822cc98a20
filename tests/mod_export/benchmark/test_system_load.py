"""Conditions of real work: busy threads are counted, and what is worth a word becomes a flag."""

from __future__ import annotations

import hashlib
import math
import threading
import time

import pytest
from sample_rows import changed

from mod_export.benchmark.system_load import Watch, condition_flags
from mod_export.results.latency import Conditions

QUIET = Conditions(threads_used=1.0, frequency_mhz=(2400.0, 2410.0), load=0.1, other_load=0.02)
BLOCK = bytes(2**20)


def work(cpu_seconds: float) -> None:
    """Hashing leaves the interpreter's lock to other threads."""
    begin = time.thread_time()
    while time.thread_time() - begin < cpu_seconds:
        hashlib.sha256(BLOCK)


@pytest.mark.parametrize("count", [1, 2])
def test_threads_that_work_are_counted_whatever_share_of_the_cpu_they_get(count: int) -> None:
    threads = [threading.Thread(target=work, args=(0.3,)) for _ in range(count)]
    waiting = threading.Event()
    idle = threading.Thread(target=waiting.wait)
    idle.start()
    watch = Watch()
    # The threads are alive when the watch looks, as those of an engine are.
    release = threading.Barrier(count + 1)
    workers = [threading.Thread(target=lambda thread=thread: (thread.run(), release.wait())) for thread in threads]
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


def test_quiet_conditions_have_no_flags() -> None:
    assert condition_flags(QUIET, 1, 0.1) == ()
    assert condition_flags(Conditions(threads_used=None, frequency_mhz=None, load=None, other_load=None), 1, 0.1) == ()


def test_every_condition_that_matters_is_said() -> None:
    noisy = Conditions(threads_used=1.9, frequency_mhz=(2400.0, 1800.0), load=3.0, other_load=0.42)
    assert condition_flags(noisy, 1, 0.1) == (
        "1.9 threads were busy, 1 configured",
        "others took 42 % of the machine's CPU time",
        "the CPU's clock went from 2400 to 1800 MHz",
    )


@pytest.mark.parametrize(("used", "threads", "flagged"), [(1.4, 1, 0), (1.6, 1, 1), (4.0, 4, 0), (4.0, 0, 0)])
def test_more_threads_than_configured(used: float, threads: int, flagged: int) -> None:
    assert len(condition_flags(changed(QUIET, threads_used=used), threads, 0.1)) == flagged


def test_flags_begin_beyond_the_configured_share() -> None:
    at = changed(QUIET, other_load=0.1, frequency_mhz=(2000.0, 2200.0))
    beyond = changed(QUIET, other_load=math.nextafter(0.1, 1), frequency_mhz=(2000.0, 2200.1))
    assert condition_flags(at, 1, 0.1) == ()
    assert len(condition_flags(beyond, 1, 0.1)) == 2
