"""Inputs and outputs that have their places for good, in both kinds of sessions of ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graphs import parsed

from mod_export.engines.ort_c import ort_c
from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.ort_shared import SharedRunner, shared_runner
from mod_export.engines.protocol import BindableRunner, Port
from mod_export.errors import EngineError
from mod_export.export.weights import bind_weights, write_weights
from mod_export.export.weights_file import WeightsFile

GRAPH = """g (float[2,3] x, int64[2] i) => (float[2,3] y, int64[2] j, bool[2] b)
<float[4,3] w = {0,1,2,3,4,5,6,7,8,9,10,11}>
{ r = Gather (w, i)  y = Add (x, r)  j = Add (i, i)  b = Equal (i, j) }"""
WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def written(folder: Path) -> tuple[Path, Path]:
    """The graph, and the file of its weight."""
    write_weights(folder / "w.data", {"w": torch.from_numpy(WEIGHT)}, "float32")
    model = parsed(GRAPH)
    bind_weights(model, [WeightsFile.open(folder / "w.data")], folder)
    (folder / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    return folder / "g.onnx", folder / "w.data"


def shared(folder: Path) -> SharedRunner:
    api = ort_c()
    assert api is not None
    return shared_runner(api, *written(folder), "small", 1)


def own(folder: Path) -> OrtRunner:
    return OrtRunner(session_from_onnx(written(folder)[0], folder, [CPU], 1, {}), "small", 1)


@pytest.fixture(params=[shared, own], ids=["shared", "own"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedRunner | OrtRunner]:
    make: Callable[[Path], SharedRunner | OrtRunner] = request.param
    with make(tmp_path) as found:
        yield found


def arrays() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    feeds = {"x": np.ones((2, 3), np.float32), "i": np.array([0, 3])}
    return feeds, {"y": np.zeros((2, 3), np.float32), "j": np.zeros(2, np.int64), "b": np.zeros(2, bool)}


def test_ports(runner: SharedRunner | OrtRunner) -> None:
    assert isinstance(runner, BindableRunner)
    assert dict(runner.ports) == {
        "x": Port((2, 3), np.dtype(np.float32)),
        "i": Port((2,), np.dtype(np.int64)),
        "y": Port((2, 3), np.dtype(np.float32)),
        "j": Port((2,), np.dtype(np.int64)),
        "b": Port((2,), np.dtype(np.bool_)),
    }


def test_results_are_in_place(runner: SharedRunner | OrtRunner) -> None:
    """What is written into the feeds is read by the next run, and every run writes where it was told."""
    feeds, outputs = arrays()
    run = runner.bind(feeds, outputs)
    for x, i in ((1.0, [0, 3]), (5.0, [2, 1]), (-2.0, [0, 0])):
        feeds["x"][:], feeds["i"][:] = x, i
        run()
        np.testing.assert_array_equal(outputs["y"], WEIGHT[i] + np.float32(x))
        np.testing.assert_array_equal(outputs["j"], 2 * np.array(i))
        np.testing.assert_array_equal(outputs["b"], np.array(i) == 0)


def test_some_of_the_outputs(runner: SharedRunner | OrtRunner) -> None:
    feeds, outputs = arrays()
    runner.bind(feeds, {"j": outputs["j"]})()
    np.testing.assert_array_equal(outputs["j"], [0, 6])


def test_several_places_take_turns(runner: SharedRunner | OrtRunner) -> None:
    pairs = [arrays() for _ in range(3)]
    runs = [runner.bind(*pair) for pair in pairs]
    for number, (feeds, _) in enumerate(pairs):
        feeds["x"][:] = number
    for run in reversed(runs):
        run()
    for number, (feeds, outputs) in enumerate(pairs):
        np.testing.assert_array_equal(outputs["y"], WEIGHT[feeds["i"]] + np.float32(number))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("x", np.ones((3, 2), np.float32), r"small: x is float32 \[3, 2\], expected float32 \[2, 3\], contiguous"),
        ("x", np.ones((2, 3)), r"small: x is float64 \[2, 3\], expected float32 \[2, 3\], contiguous"),
        ("x", np.ones((3, 2), np.float32).T, r"small: x is float32 \[2, 3\], expected float32 \[2, 3\], contiguous"),
        ("y", np.ones((2, 6), np.float32)[:, ::2], r"small: y is float32 \[2, 3\], expected .*, contiguous"),
        ("j", np.zeros(2, np.int32), r"small: j is int32 \[2\], expected int64 \[2\], contiguous"),
        ("b", np.zeros(3, bool), r"small: b is bool \[3\], expected bool \[2\], contiguous"),
        ("z", np.zeros(2), r"small: no input or output is called z; the engine has x, i, y, j, b"),
    ],
    ids=["shape", "dtype", "transposed feed", "output with gaps", "output dtype", "output shape", "name"],
)
def test_arrays_that_do_not_fit(runner: SharedRunner | OrtRunner, name: str, array: np.ndarray, message: str) -> None:
    feeds, outputs = arrays()
    (feeds if name in feeds else outputs)[name] = array
    with pytest.raises(EngineError, match=message):
        runner.bind(feeds, outputs)


def test_a_run_that_fails(runner: SharedRunner | OrtRunner) -> None:
    feeds, outputs = arrays()
    run = runner.bind(feeds, outputs)
    feeds["i"][:] = 99
    with pytest.raises(EngineError, match="small: ONNX Runtime failed: "):
        run()
    feeds["i"][:] = 1
    run()
    np.testing.assert_array_equal(outputs["j"], [2, 2])


def test_a_closed_session(runner: SharedRunner | OrtRunner) -> None:
    run = runner.bind(*arrays())
    runner.__exit__(None, None, None)
    with pytest.raises(EngineError, match="small: the session is closed; open another one"):
        run()


def test_feeds_live_as_long_as_the_run(runner: SharedRunner | OrtRunner) -> None:
    """Nobody else holds them, and the session knows no more than their addresses."""
    outputs = arrays()[1]
    run = runner.bind(arrays()[0], outputs)
    rubbish = [np.full((2, 3), -1, np.float32) for _ in range(1000)]
    run()
    np.testing.assert_array_equal(outputs["y"], WEIGHT[[0, 3]] + 1)
    assert len(rubbish) == 1000
