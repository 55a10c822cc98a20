"""Real AOTInductor packages: their content, their profiles, and everything that can be wrong with them."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from captures import captured_module, ports

import mod_export
import mod_models
from mod_export.config import config_from_toml
from mod_export.engines import inductor
from mod_export.engines.inductor import Inductor, calls_of_package, kernels_of_calls
from mod_export.engines.protocol import EngineJob
from mod_export.errors import EngineError, TargetError
from mod_export.graph.weights import state_of, write_weights
from mod_export.judge.inputs import parity_batches
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.measure.parts import ms_by_part, part_of_kernel
from mod_export.model.transformer import TransformerModel
from mod_export.types import Bucket, Engine, Graph, Variant
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

CONFIG = config_from_toml(None)
BUCKETS = (Bucket(1, 32), Bucket(2, 24))
WEIGHTS = "graphs/weights-float32.data"
AARCH64 = 183
"""e_machine of Arm in an ELF header; x86-64 is 62."""


@pytest.fixture(scope="module")
def loaded() -> TransformerModel:
    spec = ModelSpec(
        vocab_size=256, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24, max_positions=64,
        routing=RoutingSpec(layers=(0,), capacity=0.25),
    )  # fmt: skip
    return TransformerModel(random_checkpoint(spec, 0))


@pytest.fixture(scope="module")
def root(loaded: TransformerModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an engine for the first bucket, and one weights file."""
    root = tmp_path_factory.mktemp("inductor")
    for folder in ("graphs", "engines"):
        (root / folder).mkdir()
    write_weights(root / WEIGHTS, state_of(loaded.module()), "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # No test machine has 3 threads; the package must not remember the number.
    compiled(root, loaded, BUCKETS[0])
    yield root
    torch.set_num_threads(threads)


def compiled(root: Path, loaded: TransformerModel, bucket: Bucket) -> None:
    graph = Graph(
        path="",
        model="mod",
        bucket=bucket,
        dtype="float32",
        target=None,
        k_by_layer=loaded.k_by_layer(bucket.seq),
        **ports(bucket, 256),
    )
    module = loaded.module()
    job = EngineJob(root=root, graph=graph, program=lambda dtype: captured_module(module, bucket, "", dtype).program)
    Inductor().build(job, Variant(dtype="float32"), root / engine_of(bucket).path, CONFIG)


def engine_of(bucket: Bucket, weights: str = WEIGHTS) -> Engine:
    return Engine(
        target="inductor", model="mod", bucket=bucket, dtype="float32", path=f"engines/{bucket.name}.pt2",
        weights=weights,
    )  # fmt: skip


def feeds(bucket: Bucket) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.arange(bucket.batch * bucket.seq).reshape(bucket.batch, bucket.seq),
        "lengths": np.full(bucket.batch, bucket.seq),
    }


@pytest.mark.parametrize("bucket", [BUCKETS[0], pytest.param(BUCKETS[1], marks=pytest.mark.slow)])
def test_every_bucket_equals_the_eager_model(bucket: Bucket, root: Path, loaded: TransformerModel) -> None:
    if bucket != BUCKETS[0]:
        compiled(root, loaded, bucket)
    with Inductor().load(root, engine_of(bucket), CONFIG, 1) as runner:
        parts = [(runner, parity_batches(loaded, bucket, [], 0, 1))]
        row = judge_runner(parts, Reference(loaded), CONFIG.parity.float32, engine_of(bucket).setting)
    assert row.passed, row.reasons
    assert row.routing.routed > 0


def test_a_package_holds_code_and_nothing_of_the_machine_it_was_built_on(root: Path) -> None:
    with zipfile.ZipFile(root / engine_of(BUCKETS[0]).path) as package:
        files = {name: package.read(name) for name in package.namelist()}
    assert not any("weights" in name or "constants" in name for name in files)
    kernels = [content.decode() for name, content in files.items() if name.endswith(".cpp")]
    assert any("#pragma omp parallel" in kernel for kernel in kernels)
    assert not any("num_threads(" in kernel for kernel in kernels)
    # The compiler's own command line may name the environment that it ran in.
    for source in (mod_export, mod_models):
        folder = str(Path(source.__file__ or "").parent).encode()
        assert [name for name, content in files.items() if folder in content] == []


def test_weights_are_those_of_the_file_or_given_in_their_place(root: Path, loaded: TransformerModel) -> None:
    bucket = BUCKETS[0]
    state = {name: tensor * 2 for name, tensor in state_of(loaded.module()).items()}
    write_weights(root / "graphs/other.data", state, "float32")
    zeros = {"embedding.weight": np.zeros(tuple(loaded.weights["embedding.weight"].shape), np.float32)}
    with (
        Inductor().load(root, engine_of(bucket), CONFIG, 1) as original,
        Inductor().load(root, engine_of(bucket, "graphs/other.data"), CONFIG, 1) as doubled,
        Inductor().load(root, engine_of(bucket), CONFIG, 1, zeros) as silenced,
    ):
        logits, different, zero = (runner.run(feeds(bucket))["logits"] for runner in (original, doubled, silenced))
        assert not np.array_equal(logits, different)
        assert np.ptp(logits) > np.ptp(zero) == 0


@pytest.mark.slow
def test_a_single_weight_is_not_part_of_the_code(loaded: TransformerModel, tmp_path: Path) -> None:
    """Inductor writes vectors of up to 8 numbers into its kernels unless it is told not to."""
    routing = RoutingSpec(layers=(0,), capacity=0.25, router="linear_bias")
    biased = TransformerModel(random_checkpoint(replace(loaded.checkpoint.spec, routing=routing), 0))
    for folder in ("graphs", "engines"):
        (tmp_path / folder).mkdir()
    write_weights(tmp_path / WEIGHTS, state_of(biased.module()), "float32")
    compiled(tmp_path, biased, BUCKETS[0])
    engine, bias = engine_of(BUCKETS[0]), {"layers.0.router.projection.bias": np.full(1, 50, np.float32)}
    with (
        Inductor().load(tmp_path, engine, CONFIG, 1) as original,
        Inductor().load(tmp_path, engine, CONFIG, 1, bias) as gated,
    ):
        logits, others = (runner.run(feeds(BUCKETS[0]))["logits"] for runner in (original, gated))
    assert not np.array_equal(logits, others)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_takes_the_threads_that_it_is_loaded_with(root: Path, threads: int) -> None:
    with Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, threads) as runner:
        runner.run(feeds(BUCKETS[0]))
        assert runner.threads == torch.get_num_threads() == threads


def test_a_runner_knows_its_inputs_and_outputs(root: Path) -> None:
    with Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, 1) as runner:
        assert runner.inputs == ("input_ids", "lengths")
        assert runner.outputs == ("logits", "routed_0")
        assert runner.providers == ("AOTInductor CPU",)
        outputs = runner.run(feeds(BUCKETS[0]), ["routed_0"])
        message = r"inductor engines/b1s32\.pt2: input input_ids is int64 \[2, 24\], expected int64 \[1, 32\]"
        with pytest.raises(EngineError, match=message):
            runner.run(feeds(BUCKETS[1]))
    assert list(outputs) == ["routed_0"]
    assert (outputs["routed_0"].dtype, outputs["routed_0"].shape) == (np.int64, (1, 8))


def test_feeds_need_not_be_contiguous(root: Path) -> None:
    bucket = Bucket(1, 32)
    ids_BS = np.random.default_rng(0).integers(0, 256, (bucket.batch, bucket.seq))
    with Inductor().load(root, engine_of(bucket), CONFIG, 1) as runner:
        lengths_B = np.full(bucket.batch, bucket.seq)
        plain = runner.run({"input_ids": ids_BS, "lengths": lengths_B})["logits"]
        for strided_BS in (np.repeat(ids_BS, 2, 1)[:, ::2], ids_BS[:, ::-1].copy()[:, ::-1]):
            assert not strided_BS.flags.c_contiguous
            given = runner.run({"input_ids": strided_BS, "lengths": lengths_B})["logits"]
            np.testing.assert_array_equal(given, plain)


def test_weights_that_are_missing_are_named(root: Path, loaded: TransformerModel) -> None:
    state = {name: tensor for name, tensor in state_of(loaded.module()).items() if name != "norm.weight"}
    write_weights(root / "graphs/less.data", state, "float32")
    with pytest.raises(EngineError, match=r"the weights file holds no norm\.weight; build again"):
        Inductor().load(root, engine_of(BUCKETS[0], "graphs/less.data"), CONFIG, 1)


def test_a_package_for_another_cpu_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = inductor.cpu_features()
    if not features:
        pytest.skip("the kernel does not say what this CPU can do")
    # The CPU is the environment of the loader, so the test replaces its features.
    monkeypatch.setattr(inductor, "cpu_features", lambda: frozenset(sorted(features)[2:]))
    lacking = ", ".join(sorted(features)[:2])
    with pytest.raises(TargetError, match=rf"b1s32\.pt2: compiled for a CPU with {lacking}, which this one lacks"):
        Inductor().load(root, engine_of(BUCKETS[0]), CONFIG, 1)


def test_a_package_of_another_kind_of_machine_is_refused(root: Path, tmp_path: Path) -> None:
    """The same package with the code of another machine: the ELF header of its library names the processor."""
    path = engine_of(BUCKETS[0]).path
    (tmp_path / "engines").mkdir()
    here = inductor.this_machine()
    assert inductor.machine_of(root / path) == here
    with zipfile.ZipFile(root / path) as made, zipfile.ZipFile(tmp_path / path, "w") as changed:
        for name in made.namelist():
            content = made.read(name)
            if name.endswith(".so"):
                assert content.startswith(b"\x7fELF")
                content = content[:18] + AARCH64.to_bytes(2, "little") + content[20:]
            changed.writestr(name, content.replace(here.encode(), b"Linux aarch64") if "metadata" in name else content)
    expected = rf"b1s32\.pt2: compiled on Linux aarch64, and this is {here}; build again here$"
    with pytest.raises(TargetError, match=expected):
        Inductor().load(tmp_path, engine_of(BUCKETS[0]), CONFIG, 1)


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
    graph = Graph(path="", model="dense", bucket=bucket, dtype="float32", target=None, **ports(bucket, 1))
    program = captured_module(Doubles(), bucket, "dense").program
    job = EngineJob(root=tmp_path, graph=graph, program=lambda dtype: program)
    with (
        torch._inductor.config.patch({"cpp.cxx": (str(broken),)}),
        pytest.raises(EngineError, match=r"dense\.pt2: AOTInductor failed: "),
    ):
        Inductor().build(job, Variant(dtype="float32"), tmp_path / "dense.pt2", CONFIG)
    assert not (tmp_path / "dense.pt2").exists()


def test_without_a_compiler() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        availability = Inductor().availability()
    assert (availability.builds, availability.runs) == (False, True)
    assert availability.reason == "no C++ compiler; install g++ to build, running needs none"


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


def marked(*names: str) -> Callable[[], None]:
    """A function that leaves these marks in torch's profile."""

    def run() -> None:
        for name in names:
            with torch.profiler.record_function(name):
                torch.ones(1)

    return run


MARKS = ("aoti_torch_cpu_mm_out", "graph_0_cpp_fused_add_0", "aoti_torch_cpu_mm_out")
CALLS = (("aoti_torch_cpu_mm_out", ("a",)), ("cpp_fused_add_0", ("n",)), ("aoti_torch_cpu_mm_out", ("b",)))


@pytest.mark.parametrize(
    ("marks", "calls", "found"),
    [
        (MARKS, CALLS, CALLS),
        (MARKS, CALLS[:1], (("aoti_torch_cpu_mm_out", ()), ("cpp_fused_add_0", ()))),
        (("something_else",), (), ()),
    ],
    ids=["by their order", "other calls: no weights are known", "a package without marks"],
)
def test_calls_are_matched(marks: tuple[str, ...], calls: tuple[inductor.Call, ...], found: tuple) -> None:
    kernels = kernels_of_calls(marked(*marks), 2, calls, "test")
    assert tuple((kernel.name, kernel.weights) for kernel in kernels) == found


def test_runs_that_differ_are_refused() -> None:
    names = iter([("aoti_torch_cpu_mm_out",), ("cpp_fused_add_0",)])
    with pytest.raises(EngineError, match=r"saw 2 kernels in 2 runs, .*; build the engine again with this mod-export"):
        kernels_of_calls(lambda: marked(*next(names))(), 2, (), "test")
