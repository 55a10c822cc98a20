"""Bound inputs and outputs, in this machine's memory: what runs on a GPU differs in where the memory lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mod_export.engines.ort_session import CPU, BoundRunner, OrtRunner, session_from_onnx
from mod_export.errors import EngineError

ENGINE = "engines/ort-cpu/mod-b2s32-float32.onnx"


def feeds(seed: int = 0) -> dict[str, np.ndarray]:
    return {"input_ids": np.random.default_rng(seed).integers(0, 256, (2, 32)), "lengths": np.array([32, 9])}


@pytest.fixture
def bound(built: Path) -> Iterator[BoundRunner]:
    session = session_from_onnx(built / ENGINE, built / "graphs", [CPU], 1, {})
    with BoundRunner(session, "bound", 1, "cpu", 0) as runner:
        yield runner


def test_it_gives_what_an_unbound_session_gives(bound: BoundRunner, built: Path) -> None:
    with OrtRunner(session_from_onnx(built / ENGINE, built / "graphs", [CPU], 1, {}), "unbound", 1) as unbound:
        assert (bound.inputs, bound.outputs, bound.providers) == (unbound.inputs, unbound.outputs, unbound.providers)
        for seed in range(3):
            found, expected = bound.run(feeds(seed)), unbound.run(feeds(seed))
            for name in unbound.outputs:
                np.testing.assert_array_equal(found[name], expected[name])


def test_what_was_returned_is_not_written_again(bound: BoundRunner) -> None:
    first = bound.run(feeds(0), ["logits"])["logits"]
    kept = first.copy()
    assert not np.array_equal(bound.run(feeds(1), ["logits"])["logits"], kept)
    np.testing.assert_array_equal(first, kept)


def test_threads_take_turns(bound: BoundRunner) -> None:
    expected = [bound.run(feeds(seed), ["logits"])["logits"] for seed in range(3)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(30):
            if not np.array_equal(bound.run(feeds(seed), ["logits"])["logits"], expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_feeds_and_what_the_engine_refuses(bound: BoundRunner) -> None:
    with pytest.raises(EngineError, match="bound: got inputs"):
        bound.run({})
    with pytest.raises(EngineError, match=r"bound: ONNX Runtime failed: .*indices element out of data bounds"):
        bound.run({**feeds(), "input_ids": np.full((2, 32), 10_000)})
