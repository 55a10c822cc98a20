"""The Open Inference Protocol with whole rows, by tritonclient and in JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from command_line import FEW_SAMPLES, invoke, toml_file
from serving import PATIENCE_S, Server, serving
from torch import nn
from tritonclient.utils import InferenceServerException

import mod_export
from mod_export.errors import EngineError
from mod_export.serve import inference_protocol
from mod_export.serve.service import Scoring
from mod_export.types import Unavailable

NAME = "writing"


class Client(triton.InferenceServerClient):
    """Triton's client, which its test closes."""

    def __del__(self) -> None:
        """Does nothing: the original closes it once more, in whatever thread collects it, which gevent refuses."""


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with contextlib.closing(Client(f"127.0.0.1:{server.port}")) as found:
        yield found


def tensor(name: str, array: np.ndarray, *, binary: bool) -> triton.InferInput:
    kinds = {"int64": "INT64", "float32": "FP32", "float64": "FP64", "int32": "INT32"}
    found = triton.InferInput(name, list(array.shape), kinds[array.dtype.name])
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def infer(server: Server, body: Any, headers: dict[str, str] | None = None, name: str = NAME) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    return httpx2.post(f"{server.url}/v2/models/{name}/infer", content=content, headers=all_headers, timeout=PATIENCE_S)


def test_it_says_what_it_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert client.is_model_ready(NAME, "1")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "mod-export"
    assert "binary_tensor_data" in metadata["extensions"]
    about = client.get_model_metadata(NAME)
    assert [(one["name"], one["datatype"]) for one in about["inputs"]] == [("input_ids", "INT64"), ("lengths", "INT64")]
    assert about["outputs"][0] == {"name": "logits", "datatype": "FP32", "shape": [-1, -1, 256]}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_logits_are_those_of_the_folder(
    client: triton.InferenceServerClient, written: Path, length: int, binary: bool
) -> None:
    ids = np.arange(length, dtype=np.int64)[None] + 60
    wanted = triton.InferRequestedOutput("logits", binary_data=binary)
    found = client.infer(NAME, [tensor("input_ids", ids, binary=binary)], outputs=[wanted], request_id="7")
    with mod_export.load(written) as deployment:
        expected = deployment.run(ids)
    np.testing.assert_allclose(found.as_numpy("logits"), expected, rtol=0, atol=1e-6)
    assert found.get_response()["id"] == "7"


def test_lengths_say_where_a_row_ends(client: triton.InferenceServerClient, written: Path) -> None:
    ids = np.arange(12, dtype=np.int64)[None]
    inputs = [tensor("input_ids", ids, binary=True), tensor("lengths", np.array([5]), binary=True)]
    found = client.infer(NAME, inputs).as_numpy("logits")
    with mod_export.load(written) as deployment:
        expected = deployment.run(ids, np.array([5]))
    assert found is not None
    np.testing.assert_allclose(found[:, :5], expected[:, :5], rtol=0, atol=1e-6)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.part = nn.Linear(6, 1), nn.Linear(6, 6)

    def forward(self, patches: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, chosen = torch.topk(self.router(patches).squeeze(-1), 4, dim=1)
        index = chosen[..., None].expand(-1, -1, 6)
        new = self.part(torch.gather(patches, 1, index)) * torch.sigmoid(weight)[..., None]
        mixed = patches.scatter_add(1, index, new) * scale
        return mixed, mixed.mean(1), chosen, chosen.sum(1, dtype=torch.int32), weight > 0, mixed.mean()


@pytest.mark.usefixtures("searching_few_rows")
def test_a_model_with_inputs_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Images().eval()
    rng = np.random.default_rng(0)
    config = toml_file(tmp_path, f"{FEW_SAMPLES}[cost]\nprofile_runs = 0\n")
    mod_export.build(
        model, inputs=lambda b, s: (torch.randn(b, s, 6), torch.ones(())), buckets=[(1, 16), (2, 16)],
        targets=["ort-cpu"], out=tmp_path / "images", config=config, verbosity=-1,
    )  # fmt: skip
    with (
        serving(tmp_path / "images") as server,
        contextlib.closing(Client(f"127.0.0.1:{server.port}")) as client,
    ):
        name = server.service.name
        about = client.get_model_metadata(name)
        shapes = {port["name"]: port["shape"] for port in about["inputs"]}
        assert shapes == {"patches": [-1, 16, 6], "scale": []}
        patches, scale = rng.standard_normal((2, 16, 6)).astype(np.float32), np.array(2.0, np.float32)
        inputs = [tensor("patches", patches, binary=True), tensor("scale", scale, binary=False)]
        found = client.infer(name, inputs)
        with torch.no_grad():
            expected = model(torch.from_numpy(patches), torch.from_numpy(scale))
        kinds = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}
        for port, of_model in zip(about["outputs"], expected, strict=True):
            array = found.as_numpy(port["name"])
            assert array is not None
            shape = [-1, *of_model.shape[1:]] if of_model.dim() else []
            assert (port["datatype"], port["shape"]) == (kinds[array.dtype.name], shape)
            assert (array.dtype, array.shape) == (of_model.numpy().dtype, of_model.shape)
            np.testing.assert_allclose(array.astype(float), of_model.numpy().astype(float), atol=1e-5)
        with pytest.raises(InferenceServerException, match="no bucket was built for patches"):
            client.infer(name, [tensor("patches", patches[:, :5], binary=True), tensor("scale", scale, binary=True)])
        # Integers in JSON are valid floats.
        body = {
            "inputs": [
                {"name": "scale", "shape": [], "datatype": "FP32", "data": [2]},
                {"name": "patches", "shape": [2, 16, 6], "datatype": "FP32", "data": patches.tolist()},
            ]
        }
        answer = infer(server, body, name=name)
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
def test_a_vocabulary_as_large_as_a_bucket_is_long(checkpoint: Path, tmp_path: Path) -> None:
    """The size of the vocabulary is none that a request chooses."""
    toml = 'buckets = [[1, 256]]\ntargets = ["ort-cpu"]\noutputs = "last"\n[generation]\nbuild = "never"\n'
    (tmp_path / "c.toml").write_text(toml)
    result = invoke("build", checkpoint, "--no-evidence", "-c", tmp_path / "c.toml", "-o", tmp_path / "out", "-q")
    assert result.exit_code == 0, result.output
    with serving(tmp_path / "out") as server:
        name = server.service.name
        about = httpx2.get(f"{server.url}/v2/models/{name}", timeout=PATIENCE_S).json()
        assert about["outputs"] == [{"name": "last_logits", "datatype": "FP32", "shape": [-1, 256]}]
        assert [port["shape"] for port in about["inputs"]] == [[-1, -1], [-1]]
        assert infer(server, {"inputs": [IDS]}, name=name).json()["outputs"][0]["shape"] == [1, 256]


def test_a_name_with_slashes(written: Path) -> None:
    with serving(written, name="org/model") as server, httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for model in ("/v2/models/org/model", "/v2/models/org/model/versions/1"):
            assert client.get(model).json()["name"] == "org/model"
            assert client.get(f"{model}/ready").json() == {"name": "org/model", "ready": True}
            answer = client.post(f"{model}/infer", json={"inputs": [IDS]})
            assert (answer.status_code, answer.json()["model_name"]) == (200, "org/model")
            refused = client.get(f"{model}/infer")
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert client.get("/v2/models/org/model/versions/2/ready").status_code == 404
        assert client.get("/v2/models/org").json()["error"] == (
            "model 'org': not served here; this server has 'org/model'")  # fmt: skip
        assert 'path="/v2/models/{name}/ready",status="200"' in client.get("/metrics").text


IDS = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": [1, 2]}, "input_ids: shape [1, 3] has 3 numbers, got 2"),
        ({"shape": [1, -3]}, "inputs.0.shape.1: Input should be greater than or equal to 0"),
        ({"shape": [1] * 9}, "inputs.0.shape: List should have at most 8 items"),
        (
            {"shape": [0, 2**40, 2**40], "data": []},
            "input_ids: shape [0, 1099511627776, 1099511627776] is larger than an array can be",
        ),
        ({"shape": [3]}, "expected token ids as whole numbers (batch, sequence), got int64 (3,)"),
        ({"shape": [1, 0], "data": []}, "expected token ids as whole numbers"),
        ({"datatype": "BYTES"}, "input_ids: datatype 'BYTES', expected one of BOOL, UINT8"),
        ({"datatype": "FP32"}, "expected token ids as whole numbers (batch, sequence), got float32"),
        ({"data": [1, 2, 300]}, "expected token ids from 0 to 255, got 1 to 300"),
        ({"data": [1, 2, -1]}, "expected token ids from 0 to 255, got -1 to 2"),
        ({"data": [1, 2, 2**70]}, "input_ids: data that is no INT64 ("),
        ({"data": [1.5, 2, 3]}, "input_ids: data that is no INT64 (numbers of another kind than INT64)"),
        ({"data": ["a", 2, 3]}, "input_ids: data that is no INT64 ("),
        ({"data": [[1, 2], [3]]}, "input_ids: data that is no INT64 ("),
        ({"data": [True, False, True]}, "input_ids: data that is no INT64 ("),
        ({"data": ["a" * 5000, *[""] * 5000]}, "input_ids: data that is no INT64 (expected numbers in at most 8 dim"),
        ({"data": [[[[[[[[[1]]]]]]]]]}, "input_ids: data that is no INT64 (expected numbers in at most 8 dimensions)"),
        ({"data": [{}, None, 3]}, "input_ids: data that is no INT64 ("),
        ({"data": None}, "input_ids: expected data, or binary_data_size among its parameters"),
        ({"datatype": "UINT8", "data": [1, 2, 256]}, "a number outside 0 to 255"),
        ({"name": "ids"}, "expected the inputs input_ids and, if rows are padded, lengths; got ids"),
        ({"shape": [1, 30], "data": [1] * 30}, "no bucket holds a batch of 1 x 30 tokens"),
        ({"parameters": {"binary_data_size": 24}}, "binary_data_size 24, expected 24 for its shape, and 0 bytes are"),
        ({"parameters": {"binary_data_size": "x"}}, "input_ids: binary_data_size x, expected 24"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_tensors_that_are_none(server: Server, change: dict[str, Any], message: str) -> None:
    answer = infer(server, {"inputs": [{**IDS, **change}]})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]


def test_bodies_that_are_none(server: Server) -> None:
    header = "Inference-Header-Content-Length"
    body = json.dumps({"inputs": [IDS]}).encode()
    for length in ("x", "-1", str(len(body) + 1), "9" * 50, "0" * 5000, "1e1"):
        answer = infer(server, body, {header: length})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"{header}: expected a number up to {len(body)}, got ")
    answer = infer(server, body + b"12", {header: str(len(body))})
    assert answer.json()["error"] == "2 bytes of the body belong to no input"
    for nonsense in (b"", b"{", b"[]", b"{}", b'{"inputs": 3}', b"\xff"):
        assert infer(server, nonsense).status_code == 400
    answer = infer(server, {"inputs": [IDS], "outputs": [{"name": "nonsense"}]})
    assert answer.json()["error"] == "output 'nonsense': this model has logits"
    large = infer(server, b" " * (2 << 20))
    assert large.status_code == 413
    assert "the body of the request is larger than " in large.json()["error"]


def test_a_server_that_reads_no_whole_rows_says_why(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "scoring", Unavailable("they missed their gates"))
    answer = infer(server, {"inputs": [IDS]})
    assert (answer.status_code, answer.json()["error"]) == (
        400, "this server reads no whole rows: they missed their gates")  # fmt: skip


def test_more_numbers_than_json_is_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_protocol, "MOST_JSON_NUMBERS", 700)
    answer = infer(server, {"inputs": [IDS]})
    assert (answer.status_code, answer.json()["error"]) == (
        400, "logits: has 768 numbers, too many for JSON; ask for binary_data")  # fmt: skip
    binary = infer(server, {"inputs": [IDS], "parameters": {"binary_data_output": True}})
    assert binary.status_code == 200


def test_models_and_versions_that_are_none(server: Server) -> None:
    for path in ("models/other", "models/other/ready", "models/writing/versions/2", "models/writing/versions/2/ready"):
        answer = httpx2.get(f"{server.url}/v2/{path}")
        assert answer.status_code == 404
        assert "this server has" in answer.json()["error"]
    assert infer(server, {"inputs": [IDS]}, name="other").status_code == 404


def test_numbers_that_json_has_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(server.service.scoring, Scoring)
    found = np.full((1, 3, 256), np.nan, np.float32)
    monkeypatch.setattr(type(server.service.scoring.deployment), "run", lambda *_: found)
    answer = infer(server, {"inputs": [IDS]})
    assert (answer.status_code, answer.json()["error"]) == (
        400, "logits: has numbers that are not finite, which JSON lacks; ask for binary_data")  # fmt: skip


def test_an_engine_that_keeps_failing_is_not_live(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if it reads token ids, which are checked before it reads them: other inputs may be why it fails."""

    def fails(*_: object) -> None:
        raise EngineError("it is broken")

    with serving(written) as server:
        assert isinstance(server.service.scoring, Scoring)
        deployment = server.service.scoring.deployment
        with monkeypatch.context() as patch:
            patch.setattr(type(deployment), "run", fails)
            for status in (200, 200, 503):
                assert infer(server, {"inputs": [IDS]}).status_code == 500
                assert httpx2.get(f"{server.url}/health/live").status_code == status
        assert infer(server, {"inputs": [IDS]}).status_code == 200
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(deployment, "vocab_size", None)
            patch.setattr(type(deployment), "infer", fails)
            assert [infer(server, {"inputs": [IDS]}).status_code for _ in range(4)] == [500] * 4
        assert httpx2.get(f"{server.url}/health/live").status_code == 200


def test_prompts_that_wait_are_bounded_and_drained(written: Path) -> None:
    with serving(written, max_queue=0) as server:
        scoring = server.service.scoring
        assert isinstance(scoring, Scoring)
        with scoring.admitted():
            answer = infer(server, {"inputs": [IDS]})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"] == "1 prompts are being scored or wait for it; try again in 1 s"
            assert not scoring.drain(0.01)
            refused = infer(server, {"inputs": [IDS]})
            assert refused.status_code == 503
            assert refused.json()["error"] == "this server is shutting down and takes no more requests"
        assert scoring.drain(1)
