"""AOTInductor on a GPU, as far as a machine without a GPU can test it.

The same package code runs in bfloat16 on this CPU, and the runner has its buffers on this CPU. A CUDA graph is recorded
with stand-ins for what only a GPU provides. Every refusal is tested.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captures import bucket_example, captured_module, ports
from safetensors.torch import load_file

from mod_export.config import config_from_toml
from mod_export.engines import inductor_cuda
from mod_export.engines.inductor import Inductor, without_tf32
from mod_export.engines.inductor_cuda import CudaRunner, InductorCuda, check_architecture, gpu_problem, placed
from mod_export.engines.protocol import EngineJob
from mod_export.errors import EngineError, TargetError
from mod_export.graph.weights import state_of, write_weights
from mod_export.judge.inputs import parity_batches
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.model.transformer import TransformerModel
from mod_export.types import Bucket, Engine, Graph, Variant
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

CONFIG = config_from_toml(None)
BUCKET = Bucket(2, 24)
ENGINE = Engine(
    target="inductor", model="mod", bucket=BUCKET, dtype="bfloat16", path="engines/e.pt2",
    weights="graphs/weights-bfloat16.data",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> TransformerModel:
    spec = ModelSpec(
        vocab_size=256, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24, max_positions=64,
        routing=RoutingSpec(layers=(0,), capacity=0.25),
    )  # fmt: skip
    return TransformerModel(random_checkpoint(spec, 0))


@pytest.fixture(scope="module")
def root(loaded: TransformerModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package in bfloat16 for this CPU, and the two weights files that it reads."""
    root = tmp_path_factory.mktemp("inductor")
    for folder in ("graphs", "engines"):
        (root / folder).mkdir()
    for dtype in ("float32", "bfloat16"):
        write_weights(root / f"graphs/weights-{dtype}.data", state_of(loaded.module()), dtype)
    graph = Graph(
        path="", model="mod", bucket=BUCKET, dtype="float32", target=None, k_by_layer=loaded.k_by_layer(BUCKET.seq),
        **ports(BUCKET, 256),
    )  # fmt: skip
    module = loaded.module()
    job = EngineJob(root=root, graph=graph, program=lambda dtype: captured_module(module, BUCKET, "", dtype).program)
    Inductor().build(job, Variant(dtype="bfloat16"), root / ENGINE.path, CONFIG)
    return root


def feeds(seed: int = 0) -> dict[str, np.ndarray]:
    return {"input_ids": np.random.default_rng(seed).integers(0, 256, (2, 24)), "lengths": np.array([24, 24])}


@pytest.mark.slow
def test_bfloat16_meets_its_gates(root: Path, loaded: TransformerModel) -> None:
    with Inductor().load(root, ENGINE, CONFIG, 1) as runner:
        parts = [(runner, parity_batches(loaded, BUCKET, [], 0, 1))]
        row = judge_runner(parts, Reference(loaded), CONFIG.parity.bfloat16, ENGINE.setting)
        assert row.passed, row.reasons
        assert row.routing.routed > 0
        assert runner.run(feeds())["logits"].dtype == np.float32


@pytest.mark.slow
def test_a_package_reads_products_in_16_bits_and_the_rest_in_float32(root: Path) -> None:
    _, metadata, tensors = Inductor().opened(root, ENGINE, None, "cpu")
    dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    assert dtypes == json.loads(metadata["weights"])
    assert dtypes["layers.0.mlp.up_proj.weight"] == "torch.bfloat16"
    assert dtypes["layers.0.router.projection.weight"] == dtypes["layers.0.mlp_norm.weight"] == "torch.float32"
    assert dtypes["rope_cos"] == "torch.float32"
    wide = load_file(root / "graphs/weights-float32.data")
    assert torch.equal(tensors["layers.0.router.projection.weight"], wide["layers.0.router.projection.weight"])


@pytest.mark.slow
def test_weights_that_replace_others_are_cast_to_the_packages_type(root: Path) -> None:
    name = "layers.0.mlp.up_proj.weight"
    zeros = {name: np.zeros((24, 16), np.float32), "no such weight": np.zeros(1, np.float32)}
    _, _, tensors = Inductor().opened(root, ENGINE, zeros, "cpu")
    assert tensors[name].dtype == torch.bfloat16
    assert not tensors[name].any()


@contextlib.contextmanager
def cuda_runner(root: Path, *, cuda_graph: bool) -> Iterator[CudaRunner]:
    """The runner for GPUs, with its buffers in the memory of this machine."""
    package, metadata, tensors = Inductor().opened(root, ENGINE, None, "cpu", run_single_threaded=True)
    with CudaRunner(
        package, {**metadata, "gpu": "sm90"}, tensors, "test e.pt2", "cpu", cuda_graph=cuda_graph
    ) as runner:
        yield runner


@pytest.mark.slow
def test_the_runner_gives_what_the_processors_runner_gives(root: Path) -> None:
    with Inductor().load(root, ENGINE, CONFIG, 1) as plain, cuda_runner(root, cuda_graph=False) as runner:
        assert (runner.inputs, runner.outputs) == (plain.inputs, plain.outputs)
        assert runner.providers == ("AOTInductor sm90",)
        assert runner.threads == 0
        first = runner.run(feeds(0), ["logits"])
        before = first["logits"].copy()
        second = runner.run(feeds(1))
        np.testing.assert_array_equal(first["logits"], before)  # The array belongs to the caller.
        for seed, outputs in enumerate((first, second)):
            np.testing.assert_array_equal(outputs["logits"], plain.run(feeds(seed))["logits"])


class Package:
    """Stands in for a package that multiplies x by t."""

    def get_constant_fqns(self) -> list[str]:
        return []

    def load_constants(self, *_weights: object, **_how: object) -> None:
        pass

    def __call__(self, x: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
        return [x * t, -t]


def test_inputs_and_outputs_may_have_no_dimension() -> None:
    metadata = {"inputs": '{"x": ["float32", [2]], "t": ["float32", []]}', "outputs": "y,u"}
    with CudaRunner(Package(), metadata, {}, "small", "cpu", cuda_graph=False) as runner:
        outputs = runner.run({"x": np.ones(2, np.float32), "t": np.array(3, np.float32)})
    assert outputs["u"].shape == ()
    assert outputs["u"] == -3
    np.testing.assert_array_equal(outputs["y"], [3, 3])


class Recorded:
    """Stands in for torch.cuda.CUDAGraph: replays what was run while it was recorded, into the same memory."""

    def __init__(self) -> None:
        self.run: Callable[[], Any] | None = None
        self.replays = 0

    def replay(self) -> None:
        assert self.run is not None
        self.run()
        self.replays += 1


def recording(monkeypatch: pytest.MonkeyPatch, runner: CudaRunner, *, fails: bool = False) -> list[Recorded]:
    graphs: list[Recorded] = []

    def made() -> Recorded:
        graphs.append(Recorded())
        return graphs[-1]

    @contextlib.contextmanager
    def record(graph: Recorded, stream: object) -> Iterator[None]:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        yield
        # With a GPU the recorded kernels write to the memory of the recorded results.
        results, inputs = runner._results, tuple(runner._given.values())

        def again() -> None:
            for target, source in zip(results, runner._package(*inputs), strict=True):
                target.copy_(source)

        graph.run = again

    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return graphs


@pytest.mark.slow
def test_a_run_is_recorded_once_and_replayed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Inductor().load(root, ENGINE, CONFIG, 1) as plain, cuda_runner(root, cuda_graph=True) as runner:
        graphs = recording(monkeypatch, runner)
        for seed in range(3):
            np.testing.assert_array_equal(runner.run(feeds(seed))["logits"], plain.run(feeds(seed))["logits"])
        assert [graph.replays for graph in graphs] == [3]


@pytest.mark.slow
def test_a_run_that_cannot_be_recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_runner(root, cuda_graph=True) as runner:
        recording(monkeypatch, runner, fails=True)
        message = (
            r"test e\.pt2: no CUDA graph can be recorded of it \(operation not permitted when stream is capturing\); "
            r"set target\.inductor-cuda\.cuda_graph = false$"
        )
        with pytest.raises(EngineError, match=message):
            runner.run(feeds())


@pytest.mark.slow
def test_a_run_that_fails_is_an_error_of_ours(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_runner(root, cuda_graph=False) as runner:

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

        monkeypatch.setattr(runner, "_package", fail)
        with pytest.raises(
            EngineError, match=r"test e\.pt2: torch failed: CUDA error: an illegal memory access was enc"
        ):
            runner.run(feeds())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_a_program_stays_on_the_processor(loaded: TransformerModel, dtype: Any) -> None:
    """The program is moved to meta, a device that refuses to compute with tensors of another device."""
    module = loaded.module()
    program = placed(captured_module(module, BUCKET, "", dtype).program, "meta")
    results = program.module()(*(tensor.to("meta") for tensor in bucket_example(module, BUCKET, 24)))
    assert {tensor.device.type for tensor in results} == {"meta"}


def test_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch finds is the environment, so the test replaces it.
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = rf"torch {torch.__version__} is built without CUDA; install one that is built with it"
    assert InductorCuda().availability().reason == gpu_problem() == reason
    with pytest.raises(TargetError, match=r"^inductor-cuda: cannot run engines/e\.pt2 here: torch .* without CUDA"):
        InductorCuda().load(tmp_path, ENGINE, CONFIG, 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_problem() == f"torch {torch.__version__} finds no NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu_problem(1) == "there is no CUDA device 1; torch finds 1"
    assert gpu_problem(0) == ""


def test_what_a_gpu_needs_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_cuda, "gpu_problem", lambda device=0: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(inductor_cuda, "no_triton", lambda: "no Triton for this GPU; install triton to build")
    found = InductorCuda().availability()
    assert (found.builds, found.runs, found.reason) == (False, True, "no Triton for this GPU; install triton to build")
    monkeypatch.setattr(inductor_cuda, "no_triton", lambda: "")
    found = InductorCuda().availability()
    assert (found.builds, found.runs) == (True, True)
    assert found.reason.startswith(f"torch {torch.__version__} on NVIDIA H100 (sm90), ")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert InductorCuda().availability().reason.startswith("no C++ compiler")


def test_no_float32_is_rounded_while_an_engine_is_compiled_or_runs() -> None:
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    try:
        convolutions.allow_tf32 = products.allow_tf32 = True
        with without_tf32():
            assert (convolutions.allow_tf32, products.allow_tf32) == (False, False)
        assert (convolutions.allow_tf32, products.allow_tf32) == (True, True)
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


@pytest.mark.slow
def test_an_engine_of_another_gpu_was_not_made_here(root: Path) -> None:
    """The package is one for the processor, so it names no GPU."""
    assert Inductor().made_here(root, ENGINE)
    assert not InductorCuda().made_here(root, ENGINE)


def test_a_package_for_another_gpu_is_refused() -> None:
    with pytest.raises(TargetError, match=r"^e\.pt2: compiled for sm90, this GPU is sm89; build again here$"):
        check_architecture("e.pt2", "sm90", "sm89")
    check_architecture("e.pt2", "sm90", "sm90")
