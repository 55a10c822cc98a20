"""AOTInductor's kernels: a package compiled for real, and what its profile and its source say."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mod_export
import mod_models
from mod_export.benchmark.latency import timing_feeds
from mod_export.benchmark.model_parts import ms_by_part, part_of_kernel
from mod_export.config import config_from_toml
from mod_export.engines.inductor import Inductor, calls_of_package, kernels_of_calls
from mod_export.errors import EngineError
from mod_export.export.capture import captured_module
from mod_export.export.weights import state_of, write_weights
from mod_export.stages.engines import Job
from mod_export.types import Bucket, Engine, Graph, Kernel, Variant
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

CONFIG = config_from_toml(None)
BUCKET = Bucket(1, 32)
WEIGHTS = "graphs/weights-float32.data"
ENGINE = Engine(target="inductor", model="mod", bucket=BUCKET, dtype="float32", path="engines/mod.pt2", weights=WEIGHTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one engine of a routed block, its weights beside it."""
    spec = ModelSpec(
        vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24, max_positions=64,
        routing=RoutingSpec(layers=(0,), capacity=0.25),
    )  # fmt: skip
    loaded = LoadedTransformer(random_checkpoint(spec, 0))
    root = tmp_path_factory.mktemp("profiled")
    module = loaded.module()
    for folder in ("graphs", "engines"):
        (root / folder).mkdir()
    write_weights(root / WEIGHTS, state_of(module), "float32")
    graph = Graph(path="", model="mod", bucket=BUCKET, dtype="float32", target=None, k_by_layer={0: 8})
    job = Job(root=root, graph=graph, weights=WEIGHTS, program=lambda: captured_module(module, BUCKET, "").program)
    Inductor().build(job, Variant(dtype="float32"), root / ENGINE.path, CONFIG)
    return root


@pytest.mark.slow
def test_calls_name_the_weights_they_read(root: Path) -> None:
    calls = calls_of_package(root / ENGINE.path)
    products = Counter(weights for name, weights in calls if name == "aoti_torch_cpu_mm_out")
    assert {weights for weights in products if len(weights) != 1} == set()
    names = {name for (name,) in products}
    block = {f"layers.0.attention.{p}_proj.weight" for p in "qkvo"} | {
        f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert block <= names
    assert names - block == {"layers.0.router.projection.weight", "embedding.weight"}


@pytest.mark.slow
def test_a_profile_places_every_kernel(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = Inductor().profile(root, ENGINE, CONFIG, 1, timing_feeds(BUCKET, 64, 0), 3)
    assert capfd.readouterr() == ("", "")
    assert profile.runs == 3
    assert profile.profiler == f"torch.profiler {torch.__version__}"
    assert all(kernel.ms > 0 for kernel in profile.kernels)
    placed = {kernel: part_of_kernel(kernel, {}) for kernel in profile.kernels}
    # The norms of this one block are fused with the gather before them, or with the scatter.
    assert {"routing", "attention_projections", "attention", "mlp", "head"} <= set(placed.values())
    assert "other" not in placed.values()
    assert sum(ms_by_part(profile, {}).values()) == pytest.approx(sum(kernel.ms for kernel in profile.kernels))


@pytest.mark.slow
def test_a_package_names_no_files_of_the_machine_it_was_built_on(root: Path) -> None:
    with zipfile.ZipFile(root / ENGINE.path) as package:
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
