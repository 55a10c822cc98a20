"""The microbenchmarks run on both libraries; what they make of their times is checked with a clock that is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mod_export.benchmark import microbenchmarks
from mod_export.benchmark.microbenchmarks import Rate, gemm_rate, stream_rate


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(microbenchmarks, "SIZES", ((16, 32, 8), (4, 8, 16)))
    monkeypatch.setattr(microbenchmarks, "REPEATS", 3)
    monkeypatch.setattr(microbenchmarks, "SMALLEST_STREAM", 2**16)
    monkeypatch.setattr(microbenchmarks, "CACHE", tmp_path / "unknown")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("library", ["onnxruntime", "torch"])
@pytest.mark.parametrize("measure", [gemm_rate, stream_rate])
def test_both_libraries_give_rates(measure: Callable[[str, int], Rate], library: str) -> None:
    rate = measure(library, 1)
    assert 0 < rate.giga < 1e6
    assert torch.get_num_threads() == 1


class Clock:
    """Says the given seconds for one repeat after the other."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds: Iterator[float] = iter(seconds)
        self._now = 0.0
        self._running = False

    def perf_counter(self) -> float:
        if self._running:
            self._now += next(self._seconds)
        self._running = not self._running
        return self._now


def rate(monkeypatch: pytest.MonkeyPatch, seconds: list[float], units: list[int]) -> Rate:
    monkeypatch.setattr(microbenchmarks, "WARMUP", 1)
    monkeypatch.setattr(microbenchmarks, "REPEATS", 3)
    monkeypatch.setattr(microbenchmarks, "time", Clock(seconds))
    return microbenchmarks._rate([lambda: None] * len(units), np.array(units))


def test_the_fastest_repeat_after_the_warm_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rate(monkeypatch, [0.1, 2.2, 2.0, 2.1], [4_000_000_000])
    assert found == Rate(giga=pytest.approx(2.0), steady=True)


def test_the_rate_is_the_median_over_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three sizes take turns: 1, 2 and 5 seconds in every round.
    found = rate(monkeypatch, [1.0, 2.0, 5.0] * 4, [1_000_000_000] * 3)
    assert found == Rate(giga=pytest.approx(0.5), steady=True)


def test_repeats_that_disagree_are_unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rate(monkeypatch, [1.0, 1.0, 1.6, 1.7], [1]).steady


@pytest.mark.parametrize(("text", "cache"), [("32768K\n", 2**25), ("unclear", 0)])
def test_the_stream_is_larger_than_the_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cache: int
) -> None:
    path = tmp_path / "size"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(microbenchmarks, "CACHE", path)
    monkeypatch.setattr(microbenchmarks, "SMALLEST_STREAM", 2**20)
    assert microbenchmarks._stream_bytes() == max(2**20, 2 * cache)
