"""Tests our calls of TensorRT against the real bindings of the oldest and of the newest supported TensorRT.

TensorRT itself needs a GPU and gigabytes. Its Python bindings are small and on PyPI, and they load over empty shared
libraries. That is enough to see that every class, attribute and flag that we use exists, in both major versions, and
to run our own code with stand-ins for the objects that need a GPU. `make install` fetches the bindings.
"""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mod_export.engines import trt, trt_worker

VERSIONS = ("10.14.1.48.post1", "11.4.0.106")
FOLDER = Path(sys.prefix) / "trt-api"
SYMBOLS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
CUDART = """
#include <stdlib.h>
#include <string.h>
int cudaMalloc(void** p, size_t n) { if (getenv("FAIL_MALLOC")) return 2; *p = malloc(n); return 0; }
int cudaFree(void* p) { free(p); return 0; }
int cudaMemcpy(void* to, const void* from, size_t n, int kind) { memcpy(to, from, n); return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void* s) { memcpy(to, from, n); return 0; }
int cudaStreamCreate(void** s) { *s = malloc(1); return 0; }
int cudaStreamDestroy(void* s) { free(s); return 0; }
int cudaStreamSynchronize(void* s) { return getenv("FAIL_SYNCHRONIZE") ? 700 : 0; }
"""
DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("FAIL_INIT") ? 100 : 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 8 : 9; return 0; }
"""

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc, which compiles empty libraries, is missing")


HOLDERS = {
    trt: {"trt": "", "cuda_engine": "ICudaEngine", "self._context": "IExecutionContext", "runtime": "Runtime"},
    trt_worker: {"trt": "", "config": "IBuilderConfig"},
}
"""Names in our code that hold the vendor's objects -> the class of each; empty for the module itself."""


def used_by(module: Any) -> dict[str, dict[str, int | None]]:
    """Class (or the module itself) -> name -> number of arguments that we pass, None if we do not call it."""
    used: dict[str, dict[str, int | None]] = {}
    tree = ast.parse(inspect.getsource(module))
    calls = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            *path, name = ast.unparse(node).split(".")
            owner = HOLDERS[module].get(".".join(path))
            if owner is None and path[:1] == ["trt"]:
                owner = ".".join(path[1:])
            if owner is not None:
                used.setdefault(owner, {})[name] = calls.get(id(node), used.get(owner, {}).get(name))
    return used


def compiled(path: Path, source: str) -> None:
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(code)], check=True)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with empty TensorRT libraries, a driver, a CUDA runtime whose device is the host, and a damaged one."""
    root = tmp_path_factory.mktemp("libraries")
    for name in ("nvinfer", "cudart", "driver"):
        (root / name).mkdir()
    empty = "".join(f"void* {symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS)
    for major in {version.partition(".")[0] for version in VERSIONS}:
        for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
            compiled(root / "nvinfer" / f"lib{name}.so.{major}", empty)
    compiled(root / "cudart" / "libcudart.so.13", CUDART)
    compiled(root / "driver" / "libcuda.so.1", DRIVER)
    (root / "damaged").mkdir()
    (root / "damaged" / "libcudart.so.13").write_bytes(b"")
    return root


def process(libraries: Path, version: str, task: str, job: Mapping[str, Any], *extra: str, **environment: str) -> Any:
    bindings = FOLDER / version
    if not (bindings / "tensorrt_bindings").is_dir():
        pytest.fail(f"{bindings} does not hold the bindings of TensorRT {version}; run `make install`")
    folders = [str(libraries / name) for name in ("nvinfer", *extra)]
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("vendor_process.py")), task, json.dumps(job)],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(folders), "PYTHONPATH": str(bindings), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT")[2])


def test_the_newest_and_the_oldest_are_what_the_package_asks_for() -> None:
    from importlib.metadata import requires

    asked = [line for line in requires("mod-export") or [] if line.startswith("tensorrt>")]
    assert asked[0].startswith("tensorrt>=10.14;")
    assert [version.partition(".")[0] for version in VERSIONS] == ["10", "11"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("module", [trt, trt_worker], ids=lambda module: module.__name__.rpartition(".")[2])
def test_all_that_we_use_exists_and_takes_our_arguments(libraries: Path, module: Any, version: str) -> None:
    api = used_by(module)
    assert set(api) > set(HOLDERS[module].values())
    ranges = process(libraries, version, "surface", {"api": api})
    for owner, names in api.items():
        for name, arguments in names.items():
            accepted = ranges[owner][name]
            assert accepted is not None, f"TensorRT {version} has no {owner}.{name}"
            if arguments is not None:
                assert any(low <= arguments <= high for low, high in accepted), (owner, name, accepted)


def test_the_check_would_notice_a_name_or_an_argument_that_is_gone(libraries: Path) -> None:
    """FP16 is the flag that TensorRT 11 removed; `clear_flag` takes one argument."""
    api = {"BuilderFlag": {"FP16": None, "TF32": None}, "IBuilderConfig": {"clear_flag": 1}, "NoClass": {"x": None}}
    old, new = (process(libraries, version, "surface", {"api": api}) for version in VERSIONS)
    assert old["BuilderFlag"]["FP16"] is not None
    assert new["BuilderFlag"] == {"FP16": None, "TF32": []}
    assert new["IBuilderConfig"]["clear_flag"] == [[1, 1]]
    assert new["NoClass"] == {"x": None}


def build_job(tmp_path: Path, **other: Any) -> dict[str, Any]:
    return {
        "onnx": "graph.onnx", "engine": str(tmp_path / "plan.engine"), "workspace_mib": 7, "optimization_level": 4,
        "plan": "the plan", "parses": True, **other,
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_builds_strongly_typed_without_tf32(libraries: Path, tmp_path: Path, version: str) -> None:
    done = process(libraries, version, "build", build_job(tmp_path))
    assert done["result"] == ""
    assert (tmp_path / "plan.engine").read_bytes() == b"the plan"
    assert [flags & done["strongly_typed"] for flags in done["network_flags"]] == [done["strongly_typed"]]
    assert done["parsed"] == ["graph.onnx"]
    assert (done["cleared"], done["set"]) == (["TF32"], [])
    assert done["pools"] == [["WORKSPACE", 7 << 20]]
    assert done["level"] == 4


@pytest.mark.fast("no plan")
@pytest.mark.parametrize(
    ("version", "failure"),
    [(VERSIONS[0], {"plan": ""}), (VERSIONS[1], {"parses": False})],
    ids=["no plan", "no network"],
)
def test_a_build_that_fails_writes_nothing(libraries: Path, tmp_path: Path, version: str, failure: dict) -> None:
    done = process(libraries, version, "build", build_job(tmp_path, **failure))
    assert done["result"] != ""
    assert not (tmp_path / "plan.engine").exists()


@pytest.mark.fast(VERSIONS[1])
@pytest.mark.parametrize("version", VERSIONS)
def test_probe_without_a_gpu(libraries: Path, version: str) -> None:
    assert process(libraries, version, "probe", {}) == {
        "version": version,
        "devices": [],
        "architectures": [],
        "build_problem": "no builder without a CUDA device (pybind11::init(): factory function returned nullptr)",
        "run_problem": "no CUDA device to run on",
    }


@pytest.mark.fast("a GPU that the library cannot use")
@pytest.mark.parametrize(
    ("extra", "environment", "devices", "problem"),
    [
        (("driver", "cudart"), {}, ["sm89"], ""),
        (("driver",), {"FAIL_INIT": "1"}, [], "no CUDA device to run on"),
        (("driver", "damaged"), {}, ["sm89"], "no CUDA runtime library ("),
    ],
    ids=["a GPU that the library cannot use", "no GPU", "no CUDA runtime"],
)
def test_probe_with_a_driver(
    libraries: Path, extra: tuple[str, ...], environment: dict, devices: list[str], problem: str
) -> None:
    probed = process(libraries, VERSIONS[1], "probe", {}, *extra, **environment)
    assert probed["devices"] == devices
    assert probed["build_problem"].startswith("no builder ")
    assert probed["run_problem"].partition("(")[0] == problem.partition("(")[0]
    assert bool(probed["run_problem"]) == bool(problem)


@pytest.mark.fast(VERSIONS[0])
@pytest.mark.parametrize("version", VERSIONS)
def test_runs_with_buffers_of_its_own(libraries: Path, tmp_path: Path, version: str) -> None:
    done = process(libraries, version, "run", {"path": str(tmp_path / "e.engine")}, "cudart")
    assert done["about"] == [["input_ids", "lengths"], ["logits", "routed_0"], ["TensorRT on sm89"], 0]
    assert done["first"] == {
        "logits": ["float32", [[5, 7, 9], [11, 13, 15]]],
        "routed_0": ["int64", [[0, 1, 2], [3, 4, 5]]],
    }
    # The first results were read after the second run, so they are not views of one buffer.
    assert done["second"] == {"logits": [[25, 27, 29], [31, 33, 35]]}
    assert done["transposed"] == [[0, 2, 4], [1, 3, 5]]
    assert done["error"] == "EngineError: here: input lengths is int32 [2], expected int64 [2]"


@pytest.mark.fast(f"{VERSIONS[1]}-True")
@pytest.mark.parametrize(("version", "shares"), [(VERSIONS[0], False), (VERSIONS[1], True)])
def test_what_an_engine_updates_in_place_is_one_buffer(
    libraries: Path, tmp_path: Path, version: str, shares: bool
) -> None:
    job = {"path": str(tmp_path / "e.engine"), "aliased": {"routed_0": "input_ids"}}
    done = process(libraries, version, "run", job, "cudart")
    assert (done["addresses"]["routed_0"] == done["addresses"]["input_ids"]) is shares
    assert len(set(done["addresses"].values())) == (3 if shares else 4)
    assert done["routed"] == [[0, 1, 2], [3, 4, 5]]


def test_finds_the_cuda_runtime_of_pip(libraries: Path, tmp_path: Path) -> None:
    """The wheel nvidia-cuda-runtime 13 puts it into a folder that Polygraphy does not know."""
    wheel = tmp_path / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    shutil.copy(libraries / "cudart" / "libcudart.so.13", wheel)
    path = os.pathsep.join([str(FOLDER / VERSIONS[1]), str(tmp_path)])
    done = process(libraries, VERSIONS[1], "run", {"path": str(tmp_path / "e.engine")}, PYTHONPATH=path)
    assert done["second"] == {"logits": [[25, 27, 29], [31, 33, 35]]}


@pytest.mark.fast("broken file", "no CUDA runtime", "device fault")
@pytest.mark.parametrize(
    ("fault", "extra", "environment", "message"),
    [
        ("broken", ("cudart",), {}, "EngineError: here: not a usable engine for tensorrt here: said by the library"),
        ("no_runtime", ("cudart",), {}, "TargetError: here: tensorrt has no runtime here: pybind11::init(): factory"),
        ("no_context", ("cudart",), {}, "EngineError: here: no execution context; the GPU may be short of memory"),
        ("not_started", ("cudart",), {}, "EngineError: here: the engine did not start"),
        ("", ("damaged",), {}, "TargetError: here: no CUDA runtime library ("),
        ("", ("cudart",), {"FAIL_MALLOC": "1"}, "EngineError: here: CUDA Error: 2."),
        ("", ("cudart",), {"FAIL_SYNCHRONIZE": "1"}, "EngineError: here: CUDA Error: 700."),
    ],
    ids=["broken file", "no runtime", "no context", "not started", "no CUDA runtime", "no memory", "device fault"],
)
def test_what_goes_wrong_on_a_gpu_is_said(
    libraries: Path, tmp_path: Path, fault: str, extra: tuple[str, ...], environment: dict, message: str
) -> None:
    asked = {"path": str(tmp_path / "e.engine"), "fault": fault}
    assert process(libraries, VERSIONS[0], "run", asked, *extra, **environment).startswith(message)
