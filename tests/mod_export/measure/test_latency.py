"""Sampling on real sessions of ONNX Runtime; nothing here depends on how fast the machine is."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import onnx
import onnxruntime as ort  # noqa: TID253 - a test may load what it tests on.
import pytest
from numpy.typing import NDArray

from mod_export.artifacts import Bucket, ModelKind
from mod_export.errors import EngineError
from mod_export.measure.latency import Setting, latency_rows, sample_latency
from mod_export.protocols import Runner

SETTING = Setting(target="ort-cpu", bucket=Bucket(1, 4), dtype="float32")
FEEDS: dict[str, NDArray[np.generic]] = {
    "x": np.arange(8, dtype=np.float32).reshape(2, 4),
    "lengths": np.array([4], dtype=np.int64),
}


class Session:
    """A real session on a tiny graph that writes down every run."""

    def __init__(self, log: list[str], name: str, *, threads: int = 1, lengths: bool = False) -> None:
        inputs = "float[2,4] x, int64[1] lengths" if lengths else "float[2,4] x"
        body = "y = Add(x, x) z = Mul(x, x)"
        graph = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => (float[2,4] y, float[2,4] z) {{ {body} }}'
        model = onnx.parser.parse_model(graph)
        self._session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.inputs = tuple(item.name for item in self._session.get_inputs())
        self.outputs: tuple[str, ...] = ("y", "z")
        self.providers = tuple(self._session.get_providers())
        self.threads = threads
        self.fed: set[tuple[str, ...]] = set()
        self.collected: list[bool] = []
        self._log, self._name = log, name

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        self._log.append(self._name)
        self.fed.add(tuple(feeds))
        self.collected.append(gc.isenabled())
        wanted = list(outputs or self.outputs)
        return dict(zip(wanted, self._session.run(wanted, dict(feeds)), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def test_rows_hold_every_sample_and_its_conditions() -> None:
    log: list[str] = []
    dense, mod = Session(log, "dense"), Session(log, "mod")
    rows = latency_rows({"dense": dense, "mod": mod}, FEEDS, SETTING, warmup=3, samples=8, seed=0)
    assert [row.model for row in rows] == ["dense", "mod"]
    assert len(log) == 2 * (3 + 8)
    for row in rows:
        assert (row.target, row.bucket, row.dtype) == ("ort-cpu", "b1s4", "float32")
        assert (row.providers, row.threads, row.warmup) == (("CPUExecutionProvider",), 1, 3)
        assert len(row.samples_ms) == 8
        assert min(row.samples_ms) > 0
        assert row.p50_ms == np.median(row.samples_ms)
        assert (row.p90_ms, row.p99_ms) == tuple(np.percentile(row.samples_ms, (90, 99)))
        assert row.mean_ms == np.mean(row.samples_ms)
        assert row.stdev_ms == np.std(row.samples_ms, ddof=1)


@pytest.mark.parametrize("count", [2, 3])
def test_runners_take_turns_and_each_order_is_followed_by_its_reverse(count: int) -> None:
    log: list[str] = []
    names = "abc"[:count]
    sample_latency([Session(log, name) for name in names], FEEDS, warmup=2, samples=10, seed=0)
    rounds = ["".join(log[begin : begin + count]) for begin in range(0, len(log), count)]
    assert len(rounds) == 12
    assert all(sorted(one) == list(names) for one in rounds)
    assert rounds[1::2] == [one[::-1] for one in rounds[::2]]
    assert len(set(rounds)) > 1


def test_the_order_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        sample_latency([Session(log, name) for name in "ab"], FEEDS, warmup=0, samples=20, seed=seed)
        return log

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(4)}) > 1


def test_a_runner_is_fed_what_it_has_inputs_for() -> None:
    dense, mod = Session([], "dense"), Session([], "mod", lengths=True)
    latency_rows({"dense": dense, "mod": mod}, FEEDS, SETTING, warmup=1, samples=2, seed=0)
    assert dense.fed == {("x",)}
    assert mod.fed == {("x", "lengths")}


def test_only_the_outputs_asked_for_are_fetched() -> None:
    class Watched(Session):
        def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
            asked.append(outputs)
            return super().run(feeds, outputs)

    asked: list[Sequence[str] | None] = []
    sample_latency([Watched([], "a")], FEEDS, warmup=0, samples=1, seed=0, outputs=["z"])
    sample_latency([Watched([], "a")], FEEDS, warmup=0, samples=1, seed=0)
    assert asked == [["z"], None]


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_rests_and_then_is_as_before(was_on: bool) -> None:
    session = Session([], "a")
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        sample_latency([session], FEEDS, warmup=1, samples=2, seed=0)
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
    assert session.collected == [False] * 3


def test_the_garbage_collector_comes_back_after_a_failing_run() -> None:
    class Broken(Session):
        def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
            raise EngineError("the device is gone")

    with pytest.raises(EngineError, match="the device is gone"):
        sample_latency([Broken([], "a")], FEEDS, warmup=1, samples=2, seed=0)
    assert gc.isenabled()


def test_progress_is_told_after_every_round() -> None:
    told: list[int] = []
    log: list[str] = []
    runners: list[Runner] = [Session(log, "a"), Session(log, "b")]
    sample_latency(runners, FEEDS, warmup=2, samples=3, seed=0, after_round=lambda: told.append(len(log)))
    assert told == [2, 4, 6, 8, 10]


def test_different_conditions_are_not_compared() -> None:
    runners: dict[ModelKind, Runner] = {"dense": Session([], "dense", threads=4), "mod": Session([], "mod", threads=1)}
    message = (
        r"ort-cpu b1s4 float32: latency can only be compared under the same conditions, but the engines run "
        r"dense on CPUExecutionProvider with 4 threads; mod on CPUExecutionProvider with 1 threads\. Load all"
    )
    with pytest.raises(EngineError, match=message):
        latency_rows(runners, FEEDS, SETTING, warmup=1, samples=2, seed=0)
