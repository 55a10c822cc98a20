from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import torch

from mod_export.config import BuildConfig
from mod_export.engines.ort import OrtCpu, OrtCuda
from mod_export.engines.ort_session import CPU, session_from_onnx
from mod_export.environment import package_version
from mod_export.errors import EngineError, TargetError
from mod_export.stages.engines import Job
from mod_export.types import Bucket, Engine, Graph, Variant

BUCKET = Bucket(1, 64)
ON_CPU = "engines/ort-cpu/mod-b1s64-float32.onnx"
WEIGHTS = "graphs/weights-float32.data"


def engine(target: str, path: str = ON_CPU) -> Engine:
    return Engine(target=target, model="mod", bucket=BUCKET, dtype="float32", path=path, weights=WEIGHTS)


def job(root: Path) -> Job:
    graph = Graph(
        path="graphs/mod-b1s64.onnx", model="mod", bucket=BUCKET, dtype="float32", target=None, k_by_layer={1: 8, 3: 8}
    )
    return Job(root=root, graph=graph, weights=WEIGHTS, program=lambda: pytest.fail("an ONNX engine needs no program"))


def feeds() -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(64)[None], "lengths": np.array([60])}


def test_an_engine_is_the_graph_proven_to_load(built: Path, config: BuildConfig, tmp_path: Path) -> None:
    OrtCpu().build(job(built), Variant(dtype="float32"), tmp_path / "engine.onnx", config)
    assert (tmp_path / "engine.onnx").read_bytes() == (built / "graphs/mod-b1s64.onnx").read_bytes()


def test_a_runner_finds_its_weights_in_another_folder(built: Path, config: BuildConfig) -> None:
    with OrtCpu().load(built, engine("ort-cpu"), config, 1) as runner:
        assert runner.inputs == ("input_ids", "lengths")
        assert runner.outputs == ("logits", "routed_1", "routed_3")
        assert runner.providers == (CPU,)
        assert runner.threads == 1
        found = runner.run(feeds())
        assert {name: array.shape for name, array in found.items()} == {
            "logits": (1, 64, 256),
            "routed_1": (1, 8),
            "routed_3": (1, 8),
        }
        assert list(runner.run(feeds(), ["routed_3"])) == ["routed_3"]


def test_other_weights_take_the_place_of_those_in_the_file(built: Path, config: BuildConfig) -> None:
    zeros = {name: np.zeros((256, 32), np.float32) for name in ("embedding.weight",)}
    with (
        OrtCpu().load(built, engine("ort-cpu"), config, 1) as own,
        OrtCpu().load(built, engine("ort-cpu"), config, 1, zeros) as silenced,
    ):
        assert np.ptp(own.run(feeds())["logits"]) > 0
        assert np.ptp(silenced.run(feeds())["logits"]) == 0
        # And of nobody else's.
        assert np.ptp(own.run(feeds())["logits"]) > 0


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (
            {"layers.9.weight": np.zeros(3, np.float32)},
            r"Failed to find existing initializer with name layers\.9\.weight",
        ),
        ({"embedding.weight": np.zeros((256, 31), np.float32)}, "."),
        ({"embedding.weight": np.zeros((256, 32), np.float16)}, "."),
    ],
)
def test_weights_that_are_not_the_engines_are_refused(
    built: Path, config: BuildConfig, weights: dict[str, np.ndarray], reason: str
) -> None:
    with pytest.raises(EngineError, match=rf"^mod-b1s64-float32\.onnx: ONNX Runtime refuses this graph: .*{reason}"):
        OrtCpu().load(built, engine("ort-cpu"), config, 1, weights)


def test_an_engine_takes_the_threads_that_it_is_loaded_with(built: Path, config: BuildConfig) -> None:
    with OrtCpu().load(built, engine("ort-cpu"), config, 3) as runner:
        assert runner.threads == 3
        before = psutil.Process().num_threads()
        with OrtCpu().load(built, engine("ort-cpu"), config, 5):
            # The thread that calls is one of the five.
            assert psutil.Process().num_threads() == before + 4


def test_a_damaged_graph_is_refused(built_copy: Path, config: BuildConfig) -> None:
    path = built_copy / ON_CPU
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"^mod-b1s64-float32\.onnx: ONNX Runtime refuses this graph: "):
        OrtCpu().load(built_copy, engine("ort-cpu"), config, 1)


def test_a_graph_without_its_weights_is_refused(built_copy: Path, config: BuildConfig, tmp_path: Path) -> None:
    (built_copy / WEIGHTS).unlink()
    with pytest.raises(EngineError, match=r"^mod-b1s64\.onnx: ONNX Runtime refuses this graph: "):
        OrtCpu().build(job(built_copy), Variant(dtype="float32"), tmp_path / "engine.onnx", config)
    assert not (tmp_path / "engine.onnx").exists()


def test_an_operator_without_a_kernel_is_refused(tmp_path: Path) -> None:
    domains = '["" : 23, "com.vendor" : 1]'
    text = f"<ir_version: 10, opset_import: {domains}> g (float[1] x) => (float[1] y) {{ y = com.vendor.F(x) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "foreign.onnx")
    with pytest.raises(EngineError, match=r"^foreign\.onnx: ONNX Runtime refuses this graph: .*com\.vendor"):
        session_from_onnx(tmp_path / "foreign.onnx", tmp_path, [CPU], 1, {})


def test_no_graph_at_all(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^absent\.onnx: ONNX Runtime refuses this graph: .*File doesn't exist"):
        session_from_onnx(tmp_path / "absent.onnx", tmp_path, [CPU], 1)
    with pytest.raises(EngineError, match=r"^a graph in memory: ONNX Runtime refuses this graph: "):
        session_from_onnx(b"no graph", tmp_path, [CPU], 1)


def test_cuda_is_not_claimed_without_a_gpu() -> None:
    found = OrtCuda().availability()
    assert found.reason
    if not torch.cuda.is_available() and not Path("/proc/driver/nvidia/version").exists():
        assert (found.builds, found.runs) == (False, False)
        assert "GPU" in found.reason or "onnxruntime-gpu" in found.reason


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU")
def test_cuda_refuses_to_run_on_the_cpu_instead(built: Path, config: BuildConfig) -> None:
    with pytest.raises(
        TargetError,
        match=r"^ort-cuda: (no CUDA session on this machine|the session runs on CPUEx|this onnxruntime has no)",
    ):
        OrtCuda().load(built, engine("ort-cuda"), config, 1)


def test_the_installed_runtime_is_named() -> None:
    assert OrtCpu().availability().reason == f"onnxruntime {package_version('onnxruntime')}"


def test_a_runtime_without_cuda(monkeypatch: pytest.MonkeyPatch, built: Path, config: BuildConfig) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CPU])
    found = OrtCuda().availability()
    assert (found.builds, found.runs) == (False, False)
    assert found.reason == "this onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
    with pytest.raises(TargetError, match=rf"^ort-cuda: {found.reason}$"):
        OrtCuda().load(built, engine("ort-cuda"), config, 1)
