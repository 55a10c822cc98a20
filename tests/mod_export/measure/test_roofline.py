"""Both rates on both libraries, and the cache of rates: what is kept, under which key, and when it is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
import pytest
import torch

from mod_export.measure import roofline as module
from mod_export.measure.roofline import Rate, cache_file, cached_roofline, gemm_rate, one_operator, stream_rate
from mod_export.rows.cost import Roofline

MACHINE = {"cpu": "a processor", "logical_cores": 2, "usable_cores": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a module that measures for a few milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SIZES", ((16, 32, 8),))
    monkeypatch.setattr(module, "REPEATS", 3)
    monkeypatch.setattr(module, "SMALLEST_STREAM", 2**16)
    monkeypatch.setattr(module, "CACHE", tmp_path / "unknown")
    # Times of microseconds never agree: a machine that runs tests would always count as busy.
    monkeypatch.setattr(module, "STEADY", 1e9)
    monkeypatch.setattr(module, "MOST_OTHERS", 1.0)
    return tmp_path / "cache/mod-export/roofline.json"


def found(threads: int = 1, **options: bool) -> Roofline:
    roofline = cached_roofline(MACHINE, "float32", threads, **options)
    assert roofline is not None
    return roofline


def with_rate(cache: Path, gemm_gflops: object) -> None:
    """Changes the cached rate, so that a cached result differs from a new measurement."""
    data = json.loads(cache.read_text(encoding="utf-8"))
    changed = {key: entry | {"gemm_gflops": gemm_gflops} for key, entry in data.items()}
    cache.write_text(json.dumps(changed), encoding="utf-8")


def test_it_is_measured_once_for_each_condition_and_again_when_asked(cache: Path) -> None:
    first = found()
    assert (first.dtype, first.threads) == ("float32", 1)
    assert first.method.startswith("ONNX Runtime 1.")
    assert list(cache.parent.iterdir()) == [cache]
    with_rate(cache, 123.25)
    # A process that may use fewer cores does not share the bandwidth of all of them.
    for other in ({"cpu": "another"}, {"usable_cores": 1}):
        elsewhere = cached_roofline({**MACHINE, **other}, "float32", 1)
        assert elsewhere is not None
        assert elsewhere.gemm_gflops != 123.25
    assert found(threads=2).gemm_gflops != 123.25
    assert found().gemm_gflops == 123.25
    assert len(json.loads(cache.read_text(encoding="utf-8"))) == 4
    again = found(measure_again=True)
    assert again.gemm_gflops != 123.25
    assert found() == again


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1, "entries": {}}', "[" * 100_000, "\x00"])
def test_a_damaged_cache_is_replaced(cache: Path, damage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(damage, encoding="utf-8")
    assert found() == found()
    assert len(json.loads(cache.read_text(encoding="utf-8"))) == 1


@pytest.mark.parametrize("rate", [0, "fast"])
def test_a_damaged_entry_is_replaced(cache: Path, rate: object) -> None:
    found()
    with_rate(cache, rate)
    again = found()
    assert again.gemm_gflops > 0
    assert found() == again


def test_a_cache_that_cannot_be_written_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found().gemm_gflops > 0


@pytest.mark.parametrize("busy", ["unsteady", "others"])
def test_what_a_busy_machine_gave_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    if busy == "unsteady":
        monkeypatch.setattr(module, "gemm_rate", lambda library, threads: Rate(giga=7.0, steady=False))
    else:
        monkeypatch.setattr(module, "MOST_OTHERS", -1.0)
    assert found().method.endswith("; the machine was busy, so both may be too low")
    assert not cache.exists()


@pytest.mark.parametrize("base", ["", "relative/path"])
def test_the_cache_is_in_the_home_folder_by_default(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_file() == tmp_path / ".cache/mod-export/roofline.json"


def test_what_is_installed_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_roofline(MACHINE, "float16", 1) is None
    monkeypatch.setattr(module, "package_version", lambda name: "2.13" if name == "torch" else None)
    assert found().method.startswith("PyTorch 2.13: ")
    monkeypatch.setattr(module, "package_version", lambda name: None)
    assert cached_roofline(MACHINE, "float32", 1) is None


def test_the_slower_of_the_two_decides() -> None:
    roofline = Roofline(
        dtype="float32", threads=1, gemm_gflops=100.0, bandwidth_gbs=10.0, method="by hand", measured_at="never"
    )
    work = [(50_000_000, 0), (50_000_000, 1_000), (0, 20_000_000), (50_000_000, 20_000_000), (0, 0)]
    assert [roofline.milliseconds(*item) for item in work] == pytest.approx([0.5, 0.5, 2.0, 2.0, 0.0])


@pytest.mark.parametrize("library", ["onnxruntime", "torch"])
@pytest.mark.parametrize("measure", [gemm_rate, stream_rate])
def test_both_libraries_give_rates(measure: Callable[[str, int], Rate], library: str) -> None:
    rate = measure(library, 1)
    assert 0 < rate.giga < 1e6
    assert torch.get_num_threads() == 1


class Clock:
    """A clock that reports the given seconds for one repeat after the other."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds: Iterator[float] = iter(seconds)
        self._now = 0.0
        self._running = False

    def perf_counter(self) -> float:
        if self._running:
            self._now += next(self._seconds)
        self._running = not self._running
        return self._now


@pytest.mark.parametrize(
    ("seconds", "units", "expected"),
    [
        ([0.1, 2.2, 2.0, 2.1], [4_000_000_000], Rate(giga=2.0, steady=True)),
        # Three sizes take turns: 1, 2 and 5 seconds in every round.
        ([1.0, 2.0, 5.0] * 4, [1_000_000_000] * 3, Rate(giga=0.5, steady=True)),
        ([1.0, 1.0, 1.6, 1.7], [1_000_000_000], Rate(giga=1.0, steady=False)),
    ],
    ids=["the fastest repeat after the warm-up", "the median over the sizes", "repeats that disagree"],
)
def test_what_becomes_of_times(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], units: list[int], expected: Rate
) -> None:
    monkeypatch.setattr(module, "WARMUP", 1)
    monkeypatch.setattr(module, "STEADY", 1.25)
    monkeypatch.setattr(module, "time", Clock(seconds))
    found = module._rate([lambda: None] * len(units), np.array(units))
    assert (found.giga, found.steady) == (pytest.approx(expected.giga), expected.steady)


@pytest.mark.parametrize(("text", "cache"), [("32768K\n", 2**25), ("unclear", 0)])
def test_the_stream_is_larger_than_the_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cache: int
) -> None:
    path = tmp_path / "size"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(module, "CACHE", path)
    monkeypatch.setattr(module, "SMALLEST_STREAM", 2**20)
    assert module._stream_bytes() == max(2**20, 2 * cache)


@pytest.mark.parametrize(("operator", "rows"), [("MatMul", 1), ("MatMul", 300), ("Neg", 5)])
def test_graphs_written_by_hand_are_onnx(operator: str, rows: int) -> None:
    x = np.arange(rows * 130, dtype=np.float32).reshape(rows, 130)
    weights = np.ones((130, 3), np.float32)
    expected = x @ weights if operator == "MatMul" else -x
    graph = one_operator(operator, x.shape, weights.shape if operator == "MatMul" else None, expected.shape)
    onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)
    (result,) = ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(result, expected)
