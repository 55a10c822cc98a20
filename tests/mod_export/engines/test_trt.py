"""TensorRT-RTX really builds here, without a GPU; runs are tested where there is a GPU, and in test_trt_api.py."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_folders import write_graph
from observing import observed
from rtx_builds import BUCKET, CONFIG, RTX, build, needs_rtx
from small_graphs import make_model, make_spec

from mod_export.config import BuildConfig, config_from_toml
from mod_export.engines import protocol, trt
from mod_export.engines.protocol import EngineJob
from mod_export.engines.trt import TensorRT, TensorRTRTX, runner_from_engine
from mod_export.errors import EngineError, GraphError, TargetError
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.types import FLOAT_DTYPES, DType, Engine, Variant

GPU = {
    "version": "10.14",
    "devices": ["sm89"],
    "architectures": ["sm89", "sm120"],
    "build_problem": "",
    "run_problem": "",
}


def found(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    """Makes the probe report another machine."""
    monkeypatch.setattr(trt, "_probe", lambda library: GPU | facts)


def engine_of(path: str, arch: str | None = None, target: str = "tensorrt-rtx") -> Engine:
    return Engine(target=target, model="mod", bucket=BUCKET, dtype="float16", path=path, arch=arch)


def with_architectures(*names: str) -> BuildConfig:
    options = CONFIG.target.tensorrt_rtx.model_copy(update={"architectures": names})
    return CONFIG.model_copy(update={"target": CONFIG.target.model_copy(update={"tensorrt_rtx": options})})


@needs_rtx
@pytest.mark.fast("mod-float32", "dense-float16")
@pytest.mark.parametrize(("kind", "dtype"), [("mod", "float32"), ("dense", "float16"), ("mod", "bfloat16")])
def test_builds_ahead_of_time(tmp_path: Path, kind: str, dtype: DType) -> None:
    spec = make_spec() if kind == "mod" else make_spec().dense()
    build(write_graph(tmp_path, spec, BUCKET, RTX.limits, dtype), dtype, tmp_path / "plan.engine")
    assert (tmp_path / "plan.engine").stat().st_size > 100_000


@needs_rtx
@pytest.mark.slow
def test_builds_for_every_architecture_that_it_names_and_each_differs(tmp_path: Path) -> None:
    job = write_graph(tmp_path, make_spec(), BUCKET, RTX.limits, "float16")
    plans = set()
    for arch in trt._probe("tensorrt_rtx")["architectures"]:
        if RTX.problems(with_architectures(arch)):
            with pytest.raises(EngineError, match=r"Turing \(SM75\): FP32 GEMM is not supported"):
                build(job, "float16", tmp_path / arch, arch)
        else:
            build(job, "float16", tmp_path / arch, arch)
            plans.add((tmp_path / arch).read_bytes())
    assert len(plans) >= 3


@pytest.fixture
def portable(tmp_path: Path) -> EngineJob:
    """A graph without TensorRT's rewrites."""
    return write_graph(tmp_path, make_spec(), BUCKET, PORTABLE, "float32")


@needs_rtx
def test_a_graph_that_is_refused_is_named_with_the_vendors_reason(tmp_path: Path, portable: EngineJob) -> None:
    """The builder refuses float32 attention, which passes decompose; the parser refuses scatters with a reduction."""
    message = (
        r"^graphs/mod-b2s16\.float32\.onnx: TensorRT-RTX cannot build it: IBuilder::buildSerializedNetwork: Error"
        r".*Attention operation was not supported by a dedicated kernel"
    )
    with pytest.raises(EngineError, match=message):
        build(portable, "float32", tmp_path / "plan.engine")
    assert not (tmp_path / "plan.engine").exists()
    model = ir.load(tmp_path / portable.graph.path)
    apply_rewrites(model, RTX.limits, "float32")
    scatter = next(node for node in model.graph if node.op_type == "ScatterND")
    scatter.attributes["reduction"] = ir.AttrString("reduction", "add")
    (tmp_path / portable.graph.path).write_bytes(ir.to_proto(model).SerializeToString())
    with pytest.raises(EngineError, match=r"cannot build it: In node \d+ with name: \S+ and operator: ScatterND"):
        build(portable, "float32", tmp_path / "plan.engine")


def test_weights_behind_a_link_are_refused_before_the_parser_follows_it(tmp_path: Path, portable: EngineJob) -> None:
    weights = tmp_path / "graphs/weights-float32.data"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GraphError, match=r"lies in weights-float32\.data, which is a link or no regular file"):
        build(portable, "float32", tmp_path / "plan.engine")


def crashing_library(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a library that ends its process when it is loaded, as a vendor's library may."""
    (folder / "crashing.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.fast("killed")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", r"^crashing: .* process died \(signal SIGKILL\): "),
        ("raise SystemExit('out of licences')", r"the build process died \(exit 1\): out of licences$"),
    ],
    ids=["killed", "ends early"],
)
def test_a_builder_that_dies_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable: EngineJob, body: str, message: str
) -> None:
    crashing_library(tmp_path, body, monkeypatch)
    monkeypatch.setattr(TensorRTRTX, "library", "crashing")
    with pytest.raises(EngineError, match=message):
        build(portable, "float32", tmp_path / "plan.engine")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import os\nos._exit(7)", "the probe of crashing failed: crashing: the probe process died (exit 7): "),
        pytest.param("import time\ntime.sleep(60)", "timed out after 2 seconds", marks=pytest.mark.slow),
        ("import no_such_library", "crashing cannot be loaded: No module named 'no_such_library'"),
    ],
    ids=["dies", "hangs", "cannot be loaded"],
)
def test_a_probe_that_fails_makes_the_target_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, problem: str
) -> None:
    crashing_library(tmp_path, body, monkeypatch)
    monkeypatch.setattr(trt, "PROBE_SECONDS", 2 if "sleep" in body else trt.PROBE_SECONDS)
    assert problem in trt._probe.__wrapped__("crashing")["build_problem"]


@needs_rtx
def test_rtx_builds_on_any_machine() -> None:
    available = RTX.availability()
    assert available.builds
    assert available.reason.startswith("TensorRT-RTX 1.")
    assert available.runs == (trt._probe("tensorrt_rtx")["run_problem"] == "")
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(trt._probe("tensorrt_rtx")["architectures"])


@pytest.mark.parametrize(
    ("target", "facts", "builds", "runs", "reason"),
    [
        (TensorRT(), {}, True, True, "TensorRT 10.14 on sm89"),
        (TensorRT(), {"devices": [], "run_problem": "no CUDA device"}, True, False, "TensorRT 10.14, no CUDA device"),
        (TensorRT(), {"build_problem": "no builder"}, False, False, "TensorRT 10.14, no builder"),
        (TensorRT(), {"version": "", "build_problem": "cannot be loaded"}, False, False, "cannot be loaded"),
        (RTX, {"devices": ["sm90"]}, True, False, "TensorRT-RTX 10.14, which has no kernels for this GPU (sm90)"),
    ],
)
def test_availability_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, target: TensorRT | TensorRTRTX, facts: dict, builds: bool, runs: bool, reason: str
) -> None:
    monkeypatch.setattr(protocol, "package_version", lambda name: "1")
    found(monkeypatch, **facts)
    available = target.availability()
    assert (available.builds, available.runs, available.reason) == (builds, runs, reason)


@needs_rtx
def test_architectures_that_it_has_not_are_refused_before_anything_is_built() -> None:
    assert RTX.problems(with_architectures("sm89", "sm120")) == []
    problems = RTX.problems(with_architectures("sm90", "sm89", "sm75"))
    start = "target.tensorrt-rtx.architectures: TensorRT-RTX has no "
    assert [problem.removeprefix(start).partition("; it builds for sm80, ")[0] for problem in problems] == [
        "plans for sm90",
        "float32 matrix product on sm75, and routers are float32",
    ]


@pytest.mark.parametrize(
    ("facts", "arch", "weights", "error", "message"),
    [
        (
            {"devices": [], "run_problem": "no CUDA device to run on"}, None, None, TargetError,
            "tensorrt-rtx: cannot run e.engine here: TensorRT-RTX 10.14, no CUDA device to run on",
        ),
        ({}, "sm120", None, TargetError, "e.engine is built for sm120, this GPU is sm89; build it for sm89 too"),
        (
            {}, None, {"norm.weight": np.zeros(1)}, EngineError,
            "e.engine: a plan holds its own weights, which cannot be replaced",
        ),
    ],
    ids=["no device", "another device", "other weights"],
)  # fmt: skip
def test_what_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: dict, arch: str | None, weights: dict | None,
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    found(monkeypatch, **facts)
    with pytest.raises(error) as caught:
        RTX.load(tmp_path, engine_of("e.engine", arch), CONFIG, 1, weights)
    assert str(caught.value) == message


@needs_rtx
def test_a_file_that_is_no_engine_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "e.engine").write_bytes(b"not a plan")
    with pytest.raises(EngineError, match=r"^here: not a usable engine for tensorrt_rtx here: .*readHeader"):
        runner_from_engine("tensorrt_rtx", tmp_path / "e.engine", "here", "nowhere")


def test_nothing_of_the_vendor_is_loaded_until_it_is_needed() -> None:
    code = (
        "import sys, mod_export.engines.trt, mod_export.engines.trt_worker\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('tensorrt', 'tensorrt_rtx', 'polygraphy')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("builder", [TensorRT(), RTX], ids=lambda builder: builder.name)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_runs_as_the_model_does(tmp_path: Path, builder: TensorRT | TensorRTRTX, dtype: DType) -> None:
    available = builder.availability()
    if not available.runs:
        pytest.skip(f"{builder.name}: {available.reason}")
    device = trt._probe(builder.library)["devices"][0]
    spec = make_spec()
    module = make_model(spec)
    arch = device if builder.name == "tensorrt-rtx" else None
    job = write_graph(tmp_path, spec, BUCKET, builder.limits, dtype)
    builder.build(job, Variant(dtype=dtype, arch=arch), tmp_path / "e.engine", CONFIG)
    ids, lengths = torch.randint(0, 40, (2, 16)), torch.tensor([16, 5])
    with torch.no_grad():
        reference, selections = observed(module, ids, lengths)
    with builder.load(tmp_path, engine_of("e.engine", arch, builder.name), CONFIG, 1) as runner:
        results = runner.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})
        again = runner.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()}, ["logits"])
    assert again["logits"] is not results["logits"]
    np.testing.assert_array_equal(again["logits"], results["logits"])
    np.testing.assert_array_equal(results["routed_1"], selections[1].index_BK.numpy())
    scale = reference.abs().max().item()
    tolerance = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.08}[dtype] * scale
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(results["logits"][row, :length], reference[row, :length].numpy(), atol=tolerance)


def test_timings_of_kernels_are_kept_for_the_next_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = TensorRT()._options(config_from_toml(None))
    assert Path(str(options["timing_cache"])).parent == tmp_path / "cache/mod-export"
    assert Path(str(options["timing_cache"])).parent.is_dir()
    # Plans for another machine's GPU are built without timing anything.
    assert "timing_cache" not in TensorRTRTX()._options(config_from_toml(None))
