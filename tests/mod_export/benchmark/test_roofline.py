"""The roofline's cache: kept, keyed, replaced when asked, and survived when damaged or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mod_export.benchmark import microbenchmarks
from mod_export.benchmark import roofline as module
from mod_export.benchmark.microbenchmarks import Rate
from mod_export.benchmark.roofline import cache_file, cached_roofline
from mod_export.results.cost import Roofline

MACHINE = {"cpu": "a processor", "logical_cores": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and microbenchmarks of a few milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(microbenchmarks, "SIZES", ((16, 32, 8),))
    monkeypatch.setattr(microbenchmarks, "REPEATS", 3)
    monkeypatch.setattr(microbenchmarks, "SMALLEST_STREAM", 2**16)
    monkeypatch.setattr(microbenchmarks, "CACHE", tmp_path / "unknown")
    # Times of microseconds never agree: a machine that runs tests would always count as busy.
    monkeypatch.setattr(microbenchmarks, "STEADY", 1e9)
    monkeypatch.setattr(module, "MOST_OTHERS", 1.0)
    return tmp_path / "cache/mod-export/roofline.json"


def found(threads: int = 1, **options: bool) -> Roofline:
    roofline = cached_roofline(MACHINE, "float32", threads, **options)
    assert roofline is not None
    return roofline


def entries(cache: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8"))["entries"]
    return known


def with_rates(cache: Path, **changes: Any) -> None:
    """Changes what the cache holds, so that whoever reads it can be told from whoever measures."""
    data = json.loads(cache.read_text(encoding="utf-8"))
    for entry in data["entries"].values():
        entry |= changes
    cache.write_text(json.dumps(data), encoding="utf-8")


def test_it_is_measured_and_kept(cache: Path) -> None:
    first = found()
    assert first.dtype == "float32"
    assert first.threads == 1
    assert first.method.startswith("ONNX Runtime 1.")
    assert cache_file() == cache
    assert list(cache.parent.iterdir()) == [cache]
    with_rates(cache, gemm_gflops=123.25)
    assert found().gemm_gflops == 123.25


def test_other_conditions_are_measured_for_themselves(cache: Path) -> None:
    found()
    with_rates(cache, gemm_gflops=123.25)
    assert found(threads=2).gemm_gflops != 123.25
    other = cached_roofline({**MACHINE, "cpu": "another"}, "float32", 1)
    assert other is not None
    assert other.gemm_gflops != 123.25
    assert len(entries(cache)) == 3
    assert found().gemm_gflops == 123.25


def test_it_is_measured_again_when_asked(cache: Path) -> None:
    found()
    with_rates(cache, gemm_gflops=123.25)
    again = found(measure_again=True)
    assert again.gemm_gflops != 123.25
    assert found() == again


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", '{"version": 2, "entries": {}}', '{"version": 1, "entries": []}', "[" * 100_000, "\x00",
    ],
)  # fmt: skip
def test_a_damaged_cache_is_replaced(cache: Path, damage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(damage, encoding="utf-8")
    first = found()
    assert found() == first
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("changes", [{"gemm_gflops": 0}, {"gemm_gflops": "fast"}, {"unknown": 1}])
def test_a_damaged_entry_is_replaced(cache: Path, changes: dict[str, Any]) -> None:
    found()
    with_rates(cache, **changes)
    again = found()
    assert again.gemm_gflops > 0
    assert found() == again


def test_a_cache_that_cannot_be_written_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found().gemm_gflops > 0


def test_what_a_busy_machine_gave_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "gemm_rate", lambda library, threads: Rate(giga=7.0, steady=False))
    assert found().method.endswith("; the machine was busy, so both may be too low")
    assert not cache.exists()


def test_what_was_measured_beside_others_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OTHERS", -1.0)
    assert found().method.endswith("; the machine was busy, so both may be too low")
    assert not cache.exists()


def test_only_what_this_processor_computes_in_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_roofline(MACHINE, "float16", 1) is None
    # What is installed is the environment of this module.
    monkeypatch.setattr(module, "package_version", lambda name: None)
    assert cached_roofline(MACHINE, "float32", 1) is None


def test_without_onnx_runtime_pytorch_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "package_version", lambda name: "2.13" if name == "torch" else None)
    assert found().method.startswith("PyTorch 2.13: ")


@pytest.mark.parametrize("base", ["", "relative/path"])
def test_the_cache_is_in_the_home_folder_by_default(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_file() == tmp_path / ".cache/mod-export/roofline.json"


@pytest.mark.parametrize(
    ("flops", "size", "ms"),
    [(50_000_000, 0, 0.5), (50_000_000, 1_000, 0.5), (0, 20_000_000, 2.0), (50_000_000, 20_000_000, 2.0), (0, 0, 0.0)],
)
def test_the_slower_of_the_two_decides(flops: int, size: int, ms: float) -> None:
    roofline = Roofline(
        dtype="float32", threads=1, gemm_gflops=100.0, bandwidth_gbs=10.0, method="by hand", measured_at="never"
    )
    assert roofline.milliseconds(flops, size) == pytest.approx(ms)
