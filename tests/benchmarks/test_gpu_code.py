"""`make gpu-code` without Triton: the pretended device, the libraries in the place of CUDA's, the rows and the page.

That everything compiles is on the page itself, which `make gpu-code` writes; the last tests read it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_code import run as run_gpu_code
from benchmarks.gpu_code import torch_device
from benchmarks.gpu_code.cuda_runtime import make_libraries
from benchmarks.gpu_code.generated_code import Generated
from benchmarks.gpu_code.interpreter import in_host_memory, row_of
from benchmarks.gpu_code.render import page, render
from benchmarks.gpu_code.run import RTX, SMALL, Work, do, main, works
from benchmarks.gpu_code.torch_device import GPUS, pretend
from benchmarks.gpu_code.triton_kernels import LAUNCH, LIBRARY
from mod_export.config import config_from_toml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

DEVICE = """
import sys, torch
from pathlib import Path
from benchmarks.gpu_code.interpreter import in_host_memory
from benchmarks.gpu_code.torch_device import GPUS, pretend
pretend(GPUS["sm89"], Path(sys.argv[1]))
x = torch.arange(6.0, device="cuda").view(2, 3)
y = x.t() @ x
z = torch.topk(y.flatten(), 2).indices
assert (x.device.type, y.device.type, z.device.type) == ("cuda", "cuda", "cuda")
a = torch.arange(6.0).view(2, 3)
assert torch.equal(y.cpu(), a.t() @ a)
assert z.tolist() == torch.topk((a.t() @ a).flatten(), 2).indices.tolist()
x.t()[1].fill_(7)
assert x.cpu().tolist() == [[0, 7, 2], [3, 7, 5]]
host = in_host_memory(x.t()[1:])
host[1] = 9
assert x.cpu().tolist() == [[0, 7, 9], [3, 7, 9]]
found = torch.cuda.get_device_properties(0)
print(torch.cuda.device_count(), torch.cuda.get_device_capability(), found.name, found.multi_processor_count)
"""


def test_a_torch_without_cuda_gets_a_device_whose_memory_is_the_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", DEVICE, str(tmp_path / "device.so")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.strip() == "1 (8, 9) RTX 4090 128", done.stderr[-2000:]


def test_what_prevents_a_pretended_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler is here; install g\+\+"):
        pretend(GPUS["sm90"], tmp_path / "device.so")
    monkeypatch.undo()
    (tmp_path / "wrong.cpp").write_text("int main(")
    monkeypatch.setattr(torch_device, "SOURCE", tmp_path / "wrong.cpp")
    with pytest.raises(RuntimeError, match=r"wrong\.cpp: g\+\+ failed: .*error"):
        pretend(GPUS["sm90"], tmp_path / "device.so")
    assert not (tmp_path / "device.so").exists()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="has CUDA; only one without it can be given such a device"):
        pretend(GPUS["sm90"], tmp_path / "device.so")


PROVIDER = """
#include <stddef.h>
int cudaGetDeviceCount(int *); int cudaDeviceGetAttribute(int *, int, int);
int cudaMalloc(void **, size_t); int cudaFree(void *); int cudaMemcpy(void *, const void *, size_t, int);
int cudaLaunchKernel(); const char *cudaGetErrorString(int); int cuTensorMapEncodeTiled();
int check(void) {
  int devices = 0, major = 0, in = 42, out = 0; void *p = 0;
  cudaGetDeviceCount(&devices); cudaDeviceGetAttribute(&major, 75, 0);
  if (devices != 1 || major != 9 || cudaMalloc(&p, sizeof in) || cudaMemcpy(p, &in, sizeof in, 1)) return 1;
  if (cudaLaunchKernel() || cuTensorMapEncodeTiled() || cudaMemcpy(&out, p, sizeof out, 2) || cudaFree(p)) return 2;
  return cudaGetErrorString(0)[0] == 'n' ? out : 3;
}
"""


def compile_library(folder: Path, name: str, code: str, *options: str) -> Path:
    (folder / f"{name}.c").write_text(code)
    command = ["gcc", "-w", "-shared", "-fPIC", "-o", str(folder / name), str(folder / f"{name}.c"), *options]
    subprocess.run(command, check=True)
    return folder / name


def test_libraries_have_the_functions_and_versions_that_a_provider_asks_for(tmp_path: Path) -> None:
    linked, made = tmp_path / "linked", tmp_path / "made"
    linked.mkdir()
    (linked / "map").write_text("libcudart.so.13 { global: *; };")
    names = (
        "cudaGetDeviceCount", "cudaMalloc", "cudaFree", "cudaDeviceGetAttribute", "cudaMemcpy", "cudaLaunchKernel",
        "cudaGetErrorString",
    )  # fmt: skip
    functions = "".join(f"int {name}() {{ return 1; }}\n" for name in names)
    versions = ("-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={linked / 'map'}")
    runtime = compile_library(linked, "libcudart.so.13", functions, *versions)
    driver = compile_library(
        linked, "libcuda.so.1", "int cuTensorMapEncodeTiled() { return 1; }", "-Wl,-soname,libcuda.so.1"
    )
    provider = compile_library(tmp_path, "provider.so", PROVIDER, str(runtime), str(driver))
    assert sorted(path.name for path in make_libraries(provider, made)) == ["libcuda.so.1", "libcudart.so.13"]
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).check())"
    for folder, result in ((linked, 1), (made, 42)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(provider)], env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == str(result), done.stderr


def test_calls_are_counted_in_the_code_that_inductor_writes() -> None:
    wrapper = """
        triton_poi_fused_add_0.run(arg0, buf0, 64, stream=raw_stream0)
        extern_kernels.mm(buf0, arg1, out=buf1)
        buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf0, buf1, buf2)
        del buf0
    """
    assert (LAUNCH.findall(wrapper), len(LIBRARY.findall(wrapper))) == (["triton_poi_fused_add_0"], 2)


def test_a_row_counts_differences_of_results_and_of_selections() -> None:
    wanted = (torch.tensor([1.0, -1.0, 1.0]), torch.tensor([[1, 2], [3, 4]]))
    found = (torch.tensor([1.0, -1.25, 1.0]), torch.tensor([[1, 2], [3, 5]]))
    row = row_of(Generated("inductor-cuda/mod.pt2", kernels={"a": ""}, wanted=wanted, found=found))
    assert row == {"engine": "inductor-cuda/mod.pt2", "kernels": 1, "error": 0.25, "selected": 4, "same": 3}
    assert in_host_memory(3) == 3


def test_all_work_has_a_name_and_a_valid_configuration(tmp_path: Path) -> None:
    every = list(works())
    assert len({work.name for work in every}) == len(every)
    assert {work.architecture for work in every if work.kind == "compiled"} == set(GPUS)
    for work in every:
        (tmp_path / "config.toml").write_text(work.config)
        assert config_from_toml(tmp_path / "config.toml").targets == (work.target,)


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_gpu_code, "NEEDED", ("torch", "no-such-package"))
    assert main([]) == 2
    assert "no-such-package is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["compiled", "nodes", "plans"])
def test_work_that_fails_is_named_with_its_reason(tmp_path: Path, kind: str) -> None:
    work = Work("wrong", kind, "small", SMALL, (1, 8), ("float9",), "sm90")
    reason = "error: " if kind == "plans" else "RuntimeError: the build ended with exit code 2"
    with pytest.raises(RuntimeError, match=f"^wrong: exit code [12]: {reason}"):
        do(work, tmp_path, tmp_path)
    assert not (tmp_path / "wrong.json").exists()


@pytest.mark.parametrize(
    ("kind", "row", "line"),
    [
        (
            "compiled",
            {"engine": "inductor-cuda/mod-b1s8-bfloat16.pt2", "kernels": 2, "variants": 5,
             "failed": {"t": "Error: a|b"}, "launches": 7, "library": 3, "shared": 2048, "stack": 8},
            "| mod bfloat16 | 2, 5 | 7 + 3 | 2.0 | 8 | t: Error: a\\|b | sm90 |",
        ),
        (
            "interpreted",
            {"engine": "inductor-cuda/mod-b1s8-float32.pt2", "kernels": 2, "error": 2.7e-7, "selected": 4, "same": 3},
            "| mod float32 | 2 | 3e-07 | 3 of 4 |",
        ),
        (
            "nodes", {"engine": "ort-cuda/mod-b1s8-float16.onnx", "nodes": 9, "views": 2, "copies": 1, "refused": ""},
            "| mod float16 | 7 | 2 | 1 |",
        ),
        (
            "nodes", {"engine": "ort-cuda/mod-b1s8-float16.onnx", "nodes": 0, "refused": "why"},
            "| mod float16 | why |",
        ),
        (
            "plans", {"engine": "tensorrt-rtx/mod-b1s8-float16-sm89.engine", "bytes": 3 * 2**20, "refused": ""},
            "| float16 | sm89 | 3.0 and 0.0 |",
        ),
        ("plans", {"engine": "", "bytes": 0, "refused": "could not be built"}, "| could not be built |"),
    ],
)  # fmt: skip
def test_the_page_shows_every_row(kind: str, row: dict[str, object], line: str) -> None:
    work = {"name": "a", "kind": kind, "model": "small, blocks", "shape": "1 x 8", "architecture": "sm90"}
    text = page({"versions": {"torch": "2"}, "work": [{**work, "rows": [row]}], "planned": ["a", "b"]})
    assert f"\n| small, blocks | 1 x 8 {line}\n" in text
    assert text.endswith("## Not finished\n\nb.\n")
    assert text.count("Nothing was compiled.") == 3


def test_models_of_a_size_share_the_line_of_their_dense_baseline() -> None:
    row = {"engine": "ort-cuda/dense-b1s8-float16.onnx", "nodes": 9, "views": 2, "copies": 0, "refused": ""}
    work = [
        {"name": name, "kind": "nodes", "model": f"small, {name}", "shape": "1 x 8", "architecture": "", "rows": [row]}
        for name in ("a", "b")
    ]
    text = page({"versions": {"torch": "2"}, "work": work, "planned": ["a", "b"]})
    assert text.count("| small | 1 x 8 | dense float16 | 7 | 2 | 0 |") == 1
    assert "Not finished" not in text


def test_the_page_is_what_its_results_say_and_nothing_failed(tmp_path: Path) -> None:
    results = json.loads((DOCS / "gpu-code.json").read_text(encoding="utf-8"))
    (tmp_path / "gpu-code.json").write_text(json.dumps(results))
    render(tmp_path)
    assert (tmp_path / "gpu-code.md").read_text(encoding="utf-8") == (DOCS / "gpu-code.md").read_text(encoding="utf-8")
    assert [item["name"] for item in results["work"]] == results["planned"] == [work.name for work in works()]
    planned = {work.name: work for work in works()}
    for item in results["work"]:
        work = planned[item["name"]]
        engines = 2 * len(work.dtypes) * (len(RTX) if work.kind == "plans" else 1)
        assert len(item["rows"]) == engines, item["name"]
        for row in item["rows"]:
            assert not row.get("failed"), item["name"]
            assert not row.get("refused"), item["name"]
            assert row.get("same") == row.get("selected"), item["name"]
            assert row.get("error", 0.0) < (0.05 if "bfloat16" in row["engine"] else 1e-6), item["name"]
