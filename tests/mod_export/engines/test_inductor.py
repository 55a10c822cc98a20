"""AOTInductor for real: what a package and its profile say, and everything that can be wrong with it."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mod_export
import mod_models
from mod_export.benchmark.model_parts import ms_by_part, part_of_kernel
from mod_export.config import config_from_toml
from mod_export.engines import inductor
from mod_export.engines.inductor import Inductor, InductorRunner, calls_of_package, kernels_of_calls
from mod_export.errors import EngineError, TargetError
from mod_export.export.capture import captured_module
from mod_export.export.weights import state_of, write_weights
from mod_export.stages.engines import Job
from mod_export.types import Bucket, Engine, Graph, Kernel, Variant
from mod_export.validate.checks import judge
from mod_export.validate.inputs import parity_batches
from mod_export.validate.parity import compare_runner
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

CONFIG = config_from_toml(None)
BUCKETS = (Bucket(1, 32), Bucket(2, 24))
WEIGHTS = "graphs/weights-float32.data"


@pytest.fixture(scope="module")
def loaded() -> LoadedTransformer:
    spec = ModelSpec(
        vocab_size=256, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24, max_positions=64,
        routing=RoutingSpec(layers=(0,), capacity=0.25),
    )  # fmt: skip
    return LoadedTransformer(random_checkpoint(spec, 0))


@pytest.fixture(scope="module")
def root(loaded: LoadedTransformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an engine for the first bucket, and one weights file."""
    root = tmp_path_factory.mktemp("inductor")
    for folder in ("graphs", "engines"):
        (root / folder).mkdir()
    write_weights(root / WEIGHTS, state_of(loaded.module()), "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # As no machine here has: nothing of it may be left in the package.
    compiled(root, loaded, BUCKETS[0])
    yield root
    torch.set_num_threads(threads)


def compiled(root: Path, loaded: LoadedTransformer, bucket: Bucket) -> None:
    graph = Graph(
        path="", model="mod", bucket=bucket, dtype="float32", target=None, k_by_layer=loaded.k_by_layer(bucket.seq)
    )
    module = loaded.module()
    job = Job(root=root, graph=graph, weights=WEIGHTS, program=lambda: captured_module(module, bucket, "").program)
    Inductor().build(job, Variant(dtype="float32"), root / engine_of(bucket).path, CONFIG)


def engine_of(bucket: Bucket, weights: str = WEIGHTS) -> Engine:
    return Engine(
        target="inductor", model="mod", bucket=bucket, dtype="float32", path=f"engines/{bucket.name}.pt2",
        weights=weights,
    )  # fmt: skip


@pytest.fixture
def runner(root: Path) -> Iterator[InductorRunner]:
    with Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, 1) as runner:
        yield runner


def feeds(bucket: Bucket) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.arange(bucket.batch * bucket.seq).reshape(bucket.batch, bucket.seq),
        "lengths": np.full(bucket.batch, bucket.seq),
    }


@pytest.mark.parametrize("bucket", [BUCKETS[0], pytest.param(BUCKETS[1], marks=pytest.mark.slow)])
def test_every_bucket_equals_the_eager_model(bucket: Bucket, root: Path, loaded: LoadedTransformer) -> None:
    if bucket != BUCKETS[0]:
        compiled(root, loaded, bucket)
    with Inductor().load(root, engine_of(bucket), CONFIG, 1) as runner:
        found = compare_runner(runner, Reference(loaded), parity_batches(loaded, bucket, [], 0, 1))
    row = judge(found, CONFIG.parity.float32, engine_of(bucket).setting)
    assert row.passed, row.reasons
    assert row.routing.routed > 0


def test_packages_hold_code_and_share_the_weights(root: Path, loaded: LoadedTransformer) -> None:
    with zipfile.ZipFile(root / engine_of(BUCKETS[0]).path) as package:
        names = package.namelist()
    assert not any("weights" in name or "constants" in name for name in names)
    # Other weights in the same file, other logits from the same package.
    bucket = BUCKETS[0]
    state = {name: tensor * 2 for name, tensor in state_of(loaded.module()).items()}
    write_weights(root / "graphs/other.data", state, "float32")
    with (
        Inductor().load(root, engine_of(bucket), CONFIG, 1) as one,
        Inductor().load(root, engine_of(bucket, "graphs/other.data"), CONFIG, 1) as two,
    ):
        assert not np.array_equal(one.run(feeds(bucket))["logits"], two.run(feeds(bucket))["logits"])


def test_other_weights_take_the_place_of_those_in_the_file(root: Path, loaded: LoadedTransformer) -> None:
    bucket = BUCKETS[0]
    zeros = {"embedding.weight": np.zeros(tuple(loaded.weights["embedding.weight"].shape), np.float32)}
    with (
        Inductor().load(root, engine_of(bucket), CONFIG, 1) as own,
        Inductor().load(root, engine_of(bucket), CONFIG, 1, zeros) as silenced,
    ):
        assert np.ptp(silenced.run(feeds(bucket))["logits"]) == 0
        assert np.ptp(own.run(feeds(bucket))["logits"]) > 0


def test_kernels_take_the_threads_of_whoever_runs_them(root: Path) -> None:
    with zipfile.ZipFile(root / engine_of(BUCKETS[0]).path) as package:
        kernels = [package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")]
    assert any("#pragma omp parallel" in kernel for kernel in kernels)
    assert not any("num_threads(" in kernel for kernel in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_takes_the_threads_that_it_is_loaded_with(root: Path, threads: int) -> None:
    with Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, threads) as runner:
        runner.run(feeds(BUCKETS[0]))
        assert runner.threads == torch.get_num_threads() == threads


def test_a_runner_knows_its_inputs_and_outputs(runner: InductorRunner) -> None:
    assert runner.inputs == ("input_ids", "lengths")
    assert runner.outputs == ("logits", "routed_0")
    assert runner.providers == ("AOTInductor CPU",)
    found = runner.run(feeds(BUCKETS[0]), ["routed_0"])
    assert list(found) == ["routed_0"]
    assert (found["routed_0"].dtype, found["routed_0"].shape) == (np.int64, (1, 8))


def test_wrong_feeds_and_outputs_are_refused(runner: InductorRunner) -> None:
    with pytest.raises(EngineError, match=r"inductor engines/b1s32\.pt2: got inputs \['input_ids'\], the engine has"):
        runner.run({"input_ids": feeds(BUCKETS[0])["input_ids"]})
    with pytest.raises(EngineError, match=r"input input_ids is int64 \[2, 24\], expected int64 \[1, 32\]"):
        runner.run(feeds(BUCKETS[1]))
    with pytest.raises(EngineError, match=r"no output routed_1; the engine has logits, routed_0"):
        runner.run(feeds(BUCKETS[0]), ["routed_1"])


def test_weights_that_are_missing_are_named(root: Path, loaded: LoadedTransformer) -> None:
    state = {name: tensor for name, tensor in state_of(loaded.module()).items() if name != "norm.weight"}
    write_weights(root / "graphs/less.data", state, "float32")
    with pytest.raises(EngineError, match=r"the weights file holds no norm\.weight; build again"):
        Inductor().load(root, engine_of(BUCKETS[0], "graphs/less.data"), CONFIG, 1)


def test_a_package_for_another_cpu_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = inductor.cpu_features()
    if not features:
        pytest.skip("the kernel does not say what this CPU can do")
    # Another machine is the environment of the loader.
    monkeypatch.setattr(inductor, "cpu_features", lambda: frozenset(sorted(features)[2:]))
    lacking = ", ".join(sorted(features)[:2])
    with pytest.raises(TargetError, match=rf"b1s32\.pt2: compiled for a CPU with {lacking}, which this one lacks"):
        Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, 1)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + bytes(99)])
def test_a_damaged_package_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / engine_of(BUCKETS[0]).path).write_bytes(content)
    with pytest.raises(EngineError, match=r"engines/b1s32\.pt2: AOTInductor cannot load it: "):
        Inductor().load(tmp_path, engine_of(BUCKETS[0]), CONFIG, 1)


def test_a_model_that_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(torch.nn.Module):
        def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
            return ids_BS * 2

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\ncase $* in *version*) echo 'g++ 12';; *) echo 'no space' >&2; exit 1;; esac\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    bucket = Bucket(1, 4)
    graph = Graph(path="", model="dense", bucket=bucket, dtype="float32", target=None, k_by_layer={})
    program = captured_module(Doubles(), bucket, "dense").program
    job = Job(root=tmp_path, graph=graph, weights="", program=lambda: program)
    with (
        torch._inductor.config.patch({"cpp.cxx": (str(broken),)}),
        pytest.raises(EngineError, match=r"dense\.pt2: AOTInductor failed: "),
    ):
        Inductor().build(job, Variant(dtype="float32"), tmp_path / "dense.pt2", CONFIG)
    assert not (tmp_path / "dense.pt2").exists()


def test_without_a_compiler() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = Inductor().availability()
    assert (found.builds, found.runs) == (False, True)
    assert found.reason == "no C++ compiler; install g++ to build, running needs none"


def test_calls_name_the_weights_they_read(root: Path) -> None:
    calls = calls_of_package(root / engine_of(BUCKETS[0]).path)
    products = Counter(weights for name, weights in calls if name == "aoti_torch_cpu_mm_out")
    assert {weights for weights in products if len(weights) != 1} == set()
    names = {name for (name,) in products}
    block = {f"layers.0.attention.{p}_proj.weight" for p in "qkvo"} | {
        f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert block <= names
    assert names - block == {"layers.0.router.projection.weight", "embedding.weight"}


def test_a_profile_places_every_kernel(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = Inductor().profile(root, engine_of(BUCKETS[0]), CONFIG, 1, feeds(BUCKETS[0]), 3)
    assert capfd.readouterr() == ("", "")
    assert profile.runs == 3
    assert profile.profiler == f"torch.profiler {torch.__version__}"
    assert all(kernel.ms > 0 for kernel in profile.kernels)
    placed = {kernel: part_of_kernel(kernel, {}) for kernel in profile.kernels}
    # The norms of this one block are fused with the gather before them, or with the scatter.
    assert {"routing", "attention_projections", "attention", "mlp", "head"} <= set(placed.values())
    assert "other" not in placed.values()
    assert sum(ms_by_part(profile, {}).values()) == pytest.approx(sum(kernel.ms for kernel in profile.kernels))


def test_a_package_names_no_files_of_the_machine_it_was_built_on(root: Path) -> None:
    with zipfile.ZipFile(root / engine_of(BUCKETS[0]).path) as package:
        for name in package.namelist():
            for source in (mod_export, mod_models):
                # The compiler's own command line may name the environment that it ran in.
                assert str(Path(source.__file__ or "").parent).encode() not in package.read(name), name


def marked(*names: str) -> Callable[[], None]:
    """Something that leaves these marks in torch's profile."""

    def run() -> None:
        for name in names:
            with torch.profiler.record_function(name):
                torch.ones(1)

    return run


def test_calls_are_matched_by_their_order() -> None:
    names = ("aoti_torch_cpu_mm_out", "graph_0_cpp_fused_add_0", "aoti_torch_cpu_mm_out")
    calls = (("aoti_torch_cpu_mm_out", ("a",)), ("cpp_fused_add_0", ("n",)), ("aoti_torch_cpu_mm_out", ("b",)))
    kernels = kernels_of_calls(marked(*names), 2, calls, "test")
    assert [(kernel.name, kernel.weights) for kernel in kernels] == list(calls)


def test_without_the_same_calls_no_weights_are_known() -> None:
    names = ("aoti_torch_cpu_mm_out", "graph_0_cpp_fused_add_0", "aoti_torch_cpu_mm_out")
    kernels = kernels_of_calls(marked(*names), 2, (("aoti_torch_cpu_mm_out", ("a",)),), "test")
    assert [(kernel.name, kernel.weights) for kernel in kernels] == [
        ("aoti_torch_cpu_mm_out", ()), ("cpp_fused_add_0", ()),
    ]  # fmt: skip
    assert isinstance(kernels[0], Kernel)


@pytest.mark.parametrize("names", [(), ("something_else",)])
def test_a_package_without_marks_shows_nothing(names: tuple[str, ...]) -> None:
    assert kernels_of_calls(marked(*names), 2, (), "test") == ()


def test_runs_that_differ_are_refused() -> None:
    names = iter([("aoti_torch_cpu_mm_out",), ("cpp_fused_add_0",)])
    with pytest.raises(EngineError, match=r"saw 2 kernels in 2 runs, .*; build the engine again with this mod-export"):
        kernels_of_calls(lambda: marked(*next(names))(), 2, (), "test")
