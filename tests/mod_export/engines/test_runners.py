"""The contract of every ONNX Runtime session on the CPU, also where inputs and outputs stay in place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graphs import parsed

from mod_export.engines.ort_c import ort_c
from mod_export.engines.ort_session import CPU, BoundRunner, OrtRunner, session_from_onnx
from mod_export.engines.ort_shared import SharedRunner, shared_runner
from mod_export.engines.protocol import BindableRunner, EngineRunner, Port
from mod_export.errors import EngineError
from mod_export.graph.weights import WeightsFile, bind_weights, write_weights

GRAPH = """g (float[2,3] x, int64[2] i) => (float[2,3] y, int64[2] j, bool[2] b)
<float[4,3] w = {0,1,2,3,4,5,6,7,8,9,10,11}>
{ r = Gather (w, i)  y = Add (x, r)  j = Add (i, i)  b = Equal (i, j) }"""
WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
Bindable = SharedRunner | OrtRunner


def written(folder: Path) -> tuple[Path, Path]:
    """Writes the graph and the file of its weight, and returns both paths."""
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
    return OrtRunner(session_from_onnx(written(folder)[0], folder, [CPU], 1), "small", 1)


def device(folder: Path) -> BoundRunner:
    """The runner for GPUs, in this machine's memory; on a GPU, only the place of the memory differs."""
    return BoundRunner(session_from_onnx(written(folder)[0], folder, [CPU], 1), "small", 1, "cpu", 0)


@pytest.fixture(params=[shared, own, device], ids=lambda make: make.__name__)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineRunner]:
    with request.param(tmp_path) as opened:
        yield opened


@pytest.fixture(params=[shared, own], ids=lambda make: make.__name__)
def bindable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bindable]:
    with request.param(tmp_path) as opened:
        yield opened


WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def every_runner(path: Path) -> list[EngineRunner]:
    """Every runner of ONNX Runtime for a graph with the weights file `w.data` beside it."""
    api = ort_c()
    assert api is not None
    session = session_from_onnx(path, path.parent, [CPU], 1)
    return [
        shared_runner(api, path, path.parent / "w.data", "small", 1),
        OrtRunner(session, "small", 1),
        BoundRunner(session, "small", 1, "cpu", 0),
    ]


@pytest.mark.parametrize("name", [*WHOLE, "float16", "float32", "double", "bool"])
def test_every_dtype_of_numpy_goes_in_and_comes_out(tmp_path: Path, name: str) -> None:
    """Models of users take token ids of int32, for example."""
    onnx = {"float32": "float"}.get(name, name)
    path = tmp_path / "g.onnx"
    path.write_bytes(
        ir.to_proto(parsed(f"g ({onnx}[3] x) => ({onnx}[3] y) {{ y = Identity (x) }}")).SerializeToString()
    )
    write_weights(tmp_path / "w.data", {"w": torch.ones(1)}, "float32")
    x = np.array([0, 1, 3]).astype(name)
    for made in every_runner(path):
        with made as runner:
            (y,) = runner.run({"x": x}).values()
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)


def test_inputs_and_outputs_may_have_no_dimension(tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    graph = parsed("g (float[2] x, float t) => (float[2] y, float u) { y = Mul (x, t) u = Neg (t) }")
    for value in (graph.graph.inputs[1], graph.graph.outputs[1]):
        value.shape = ir.Shape([])
    path.write_bytes(ir.to_proto(graph).SerializeToString())
    write_weights(tmp_path / "w.data", {"w": torch.ones(1)}, "float32")
    for made in every_runner(path):
        with made as runner:
            outputs = runner.run({"x": np.ones(2, np.float32), "t": np.array(3, np.float32)})
            assert outputs["u"].shape == ()
            assert outputs["u"] == -3
            np.testing.assert_array_equal(outputs["y"], [3, 3])


def arrays(number: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    feeds = {"x": np.full((2, 3), number, np.float32), "i": np.array([0, 3])}
    return feeds, {"y": np.zeros((2, 3), np.float32), "j": np.zeros(2, np.int64), "b": np.zeros(2, bool)}


def test_it_runs_and_keeps_what_it_returned(runner: EngineRunner) -> None:
    assert (runner.inputs, runner.outputs) == (("x", "i"), ("y", "j", "b"))
    assert (runner.providers, runner.threads) == ((CPU,), 1)
    first = runner.run(arrays()[0])
    # Feeds need not be contiguous.
    second = runner.run({"x": np.full((3, 2), 5, np.float32).T, "i": np.array([0, 9, 3])[::2]}, ["y"])
    assert [array.dtype for array in first.values()] == [np.float32, np.int64, np.bool_]
    assert list(second) == ["y"]
    np.testing.assert_array_equal(first["y"], WEIGHT[[0, 3]] + 1)
    np.testing.assert_array_equal(second["y"], WEIGHT[[0, 3]] + 5)
    np.testing.assert_array_equal(first["j"], [0, 6])


@pytest.mark.parametrize(
    ("wrong", "wanted", "message"),
    [
        ({"i": None}, [], r"got inputs \['x'\], the engine has \['i', 'x'\]"),
        ({"extra": np.zeros(1)}, [], r"got inputs \['extra', 'i', 'x'\], the engine has \['i', 'x'\]"),
        ({"i": np.array([[1]])}, [], r"input i is int64 \[1, 1\], expected int64 \[2\]"),
        ({"x": np.ones((2, 3))}, [], r"input x is float64 \[2, 3\], expected float32 \[2, 3\]"),
        ({"i": np.array([0, 99])}, [], r"ONNX Runtime failed: .*indices element out of data bounds"),
        ({}, ["z"], "no output z; the engine has y, j, b"),
    ],
    ids=["one too few", "one too many", "shape", "dtype", "a run that fails", "no such output"],
)
def test_what_cannot_be_run(
    runner: EngineRunner, wrong: dict[str, np.ndarray | None], wanted: list[str], message: str
) -> None:
    inputs = {name: array for name, array in {**arrays()[0], **wrong}.items() if array is not None}
    with pytest.raises(EngineError, match=f"^small: {message}"):
        runner.run(inputs, wanted)
    np.testing.assert_array_equal(runner.run(arrays()[0])["j"], [0, 6])


def test_several_threads_may_run_it(runner: EngineRunner) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not np.array_equal(runner.run(arrays(number)[0], ["y"])["y"], WEIGHT[[0, 3]] + np.float32(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_are_in_place(bindable: Bindable) -> None:
    """The next run reads what is written into the feeds, and every run writes into the bound outputs."""
    assert isinstance(bindable, BindableRunner)
    assert dict(bindable.ports) == {
        name: Port(array.shape, array.dtype) for name, array in {**arrays()[0], **arrays()[1]}.items()
    }
    pairs = [arrays() for _ in range(3)]
    for feeds, outputs in pairs:
        run = bindable.bind(feeds, outputs)
        only = bindable.bind(feeds, {"j": outputs["j"]})
        for x, i in ((1.0, [0, 3]), (5.0, [2, 1]), (-2.0, [0, 0])):
            feeds["x"][:], feeds["i"][:] = x, i
            run()
            np.testing.assert_array_equal(outputs["y"], WEIGHT[i] + np.float32(x))
            np.testing.assert_array_equal(outputs["j"], 2 * np.array(i))
            np.testing.assert_array_equal(outputs["b"], np.array(i) == 0)
        feeds["i"][:] = 2
        only()
        np.testing.assert_array_equal(outputs["j"], [4, 4])
        np.testing.assert_array_equal(outputs["y"], WEIGHT[[0, 0]] - np.float32(2))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("x", np.ones((3, 2), np.float32), r"small: x is float32 \[3, 2\], expected float32 \[2, 3\], contiguous"),
        ("x", np.ones((2, 3)), r"small: x is float64 \[2, 3\], expected float32 \[2, 3\], contiguous"),
        ("x", np.ones((3, 2), np.float32).T, r"small: x is float32 \[2, 3\], expected float32 \[2, 3\], contiguous"),
        ("y", np.ones((2, 6), np.float32)[:, ::2], r"small: y is float32 \[2, 3\], expected .*, contiguous"),
        ("j", np.zeros(2, np.int32), r"small: j is int32 \[2\], expected int64 \[2\], contiguous"),
        ("z", np.zeros(2), r"small: no input or output is called z; the engine has x, i, y, j, b"),
    ],
    ids=["shape", "dtype", "transposed feed", "output with gaps", "output dtype", "name"],
)
def test_arrays_that_do_not_fit(bindable: Bindable, name: str, array: np.ndarray, message: str) -> None:
    feeds, outputs = arrays()
    (feeds if name in feeds else outputs)[name] = array
    with pytest.raises(EngineError, match=message):
        bindable.bind(feeds, outputs)


def test_a_run_in_place_that_fails_and_a_closed_session(bindable: Bindable) -> None:
    """The bound run must keep the feeds alive, because the session has only their addresses."""
    feeds, outputs = arrays()
    run, alone = bindable.bind(feeds, outputs), bindable.bind(arrays()[0], outputs)
    rubbish = [np.full((2, 3), -1, np.float32) for _ in range(1000)]
    feeds["i"][:] = 99
    with pytest.raises(EngineError, match="small: ONNX Runtime failed: "):
        run()
    alone()
    np.testing.assert_array_equal(outputs["y"], WEIGHT[[0, 3]] + 1)
    assert len(rubbish) == 1000
    bindable.close()
    for closed in (run, lambda: bindable.run(feeds)):
        with pytest.raises(EngineError, match="small: the session is closed; open another one"):
            closed()
