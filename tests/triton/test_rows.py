"""Whole rows from a real Triton equal the results of `mod_export.load`, in both forms that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc
from command_line import FEW_SAMPLES
from foreign_models import Masked, made, masked_inputs
from triton_server import Serve, TritonServer

import mod_export
from mod_export.runtime.deployment import Deployment

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning"),
]


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Iterator[Deployment]:
    with pytest.warns(mod_export.errors.UnverifiedWarning):
        found = mod_export.load(folder, threads=1)
    with found:
        yield found


@pytest.fixture(scope="module")
def portable(serve: Serve) -> Iterator[TritonServer]:
    with serve("--forward", "onnxruntime") as found:
        yield found


def infer(server: TritonServer, ids: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    arrays = {"input_ids": ids} if lengths is None else {"input_ids": ids, "lengths": lengths}
    inputs = []
    for name, array in arrays.items():
        inputs.append(grpc.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    with grpc.InferenceServerClient(server.grpc) as client:
        found = client.infer("demo", inputs).as_numpy("logits")
    assert found is not None
    return found


def check(server: TritonServer, deployment: Deployment, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (1, 11), (1, 16), (1, 17), (2, 9), (2, 32), (1, 64)):
        ids = rng.integers(0, 256, shape)
        expected = deployment.run(ids)
        np.testing.assert_allclose(infer(server, ids), expected, atol=tolerance)
    lengths = np.array([3, 20])
    ids = rng.integers(0, 256, (2, 20))
    found, expected = infer(server, ids, lengths), deployment.run(ids, lengths)
    np.testing.assert_allclose(found[0, :3], expected[0, :3], atol=tolerance)
    np.testing.assert_allclose(found[1], expected[1], atol=tolerance)


def test_a_build_folder(server: TritonServer, deployment: Deployment) -> None:
    check(server, deployment, 1e-5)


def test_portable_graphs_and_the_router(portable: TritonServer, deployment: Deployment) -> None:
    check(portable, deployment, 1e-4)


@pytest.mark.parametrize("form", ["server", "portable"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 256]], "expected token ids from 0 to 255, got 1 to 256"),
        ([[1, -1]], "expected token ids from 0 to 255, got -1 to 1"),
        ([[1] * 65], "no bucket holds a batch of 1 x 65 tokens; built: b1s16, b1s64, b2s32. Build a larger one"),
        ([[1]] * 3, "no bucket holds a batch of 3 x 1 tokens"),
    ],
)
def test_what_no_bucket_takes_is_answered_400(
    request: pytest.FixtureRequest, form: str, ids: list[list[int]], message: str
) -> None:
    server = request.getfixturevalue(form)
    shape = [len(ids), len(ids[0])]
    data = [item for row in ids for item in row]
    tensor = {"name": "input_ids", "shape": shape, "datatype": "INT64", "data": data}
    status, body = server.post("models/demo/infer", {"inputs": [tensor]})
    assert status == 400
    assert message in body


def test_warm_up_has_run_every_bucket_before_it_is_ready(serve: Serve) -> None:
    for options, models in ((), ("demo",)), (("--forward", "onnxruntime"), ("demo-b1s16", "demo-b2s32", "demo-b1s64")):
        with serve(*options) as server:
            for model in models:
                _, body = server.get(f"models/{model}/stats")
                assert '"execution_count":0' not in body, body


def test_the_queue_is_bounded(serve: Serve) -> None:
    body = {"inputs": [{"name": "input_ids", "shape": [1, 64], "datatype": "INT64", "data": [1] * 64}]}
    with serve("--max-queue", 2) as server, ThreadPoolExecutor(30) as pool:
        codes = [code for code, _ in pool.map(lambda _: server.post("models/demo/infer", body), range(90))]
    assert set(codes) == {200, 503}


def test_a_model_of_other_inputs(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'targets = ["ort-cpu"]\n{FEW_SAMPLES}', encoding="utf-8")
    folder = tmp_path / "built"
    mod_export.build(made(Masked), masked_inputs, [(1, 16), (2, 32)], out=folder, config=tmp_path / "c.toml")
    for form in ("python", "onnxruntime"):
        with serve("--forward", form, folder=folder) as server, mod_export.load(folder, threads=1) as deployment:
            for shape in ((2, 32), (1, 16)):
                feeds = {name: tensor.numpy() for name, tensor in masked_inputs(*shape).items()}
                inputs = []
                for name, array in feeds.items():
                    inputs.append(
                        grpc.InferInput(name, list(array.shape), "INT64" if array.dtype.kind == "i" else "FP32")
                    )
                    inputs[-1].set_data_from_numpy(array)
                with grpc.InferenceServerClient(server.grpc) as client:
                    found = client.infer("demo", inputs)
                    for name, expected in deployment.infer(feeds).items():
                        np.testing.assert_allclose(found.as_numpy(name), expected, atol=1e-4)
            status, body = server.post(
                "models/demo/infer",
                {
                    "inputs": [
                        {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]},
                        {"name": "attention_mask", "shape": [1, 3], "datatype": "FP32", "data": [1, 1, 1]},
                    ]
                },
            )
            assert (status, "no bucket was built for" in body) == (400, True), body


def test_a_model_whose_process_was_killed(serve: Serve) -> None:
    """The server still says that it is ready, as docs/text.md states."""
    tensor = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    with serve() as server:
        (stub,) = [
            process
            for process in psutil.Process(server.process.pid).children()
            if "/demo/1/model.py" in " ".join(process.cmdline())
        ]
        stub.kill()
        status, body = server.post("models/demo/infer", {"inputs": [tensor]})
        assert (status, "Stub process" in body) == (500, True), body
        assert server.get("health/ready")[0] == 200
        server.process.kill()  # Otherwise it would wait half a minute for the model that is gone.
