"""`make gpu` without a GPU: the plan, its processes and how they end, the page, and a whole run over CPU targets."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import run as run_gpu
from benchmarks.gpu.device import measured, without_cuda_graphs
from benchmarks.gpu.plan import DECODE, Step, planned, steps_of, why_not
from benchmarks.gpu.render import page, render
from benchmarks.gpu.run import main, run_all, run_step
from mod_export.config import config_from_toml
from mod_export.engines import ENGINES
from mod_export.types import Availability
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

DOCS = Path(__file__).parents[2] / "docs"
NOT_RUN = "It has not finished on a GPU yet"
GPU_TARGETS = {name for name, engine in ENGINES.items() if engine.nvidia}
HERE = Availability(builds=True, runs=True, reason="found")
TINY = ModelSpec(
    vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=48, max_positions=64,
    routing=RoutingSpec(),
)  # fmt: skip


def python(code: str, *, name: str = "one", seconds: float = 60.0, needs: str | None = None) -> Step:
    return Step(
        name=name, title=f"step {name}", target="a", needs=needs, seconds=seconds, files={"given.txt": "given"},
        command=[sys.executable, "-c", code], collect=lambda folder: json.loads((folder / "out.json").read_text()),
    )  # fmt: skip


WRITES = (
    "import pathlib; p = pathlib.Path('out.json'); p.write_text('{\"n\": ' + str(len(open('given.txt').read())) + '}')"
)


def later(seconds: float = 600.0) -> float:
    return time.monotonic() + seconds


def test_the_plan_has_every_target_for_gpus_and_configurations_that_are_valid(tmp_path: Path) -> None:
    steps = planned("sm89", tmp_path / "model.pt")
    assert len({step.name for step in steps}) == len(steps)
    assert {step.target for step in steps} - {""} == GPU_TARGETS
    names = [step.name for step in steps]
    for step in steps:
        assert step.needs is None or names.index(step.needs) < names.index(step.name)
        for name, content in step.files.items():
            (tmp_path / name).write_text(content)
            config = config_from_toml(tmp_path / name)
            assert config.targets == (step.target,)
            assert config.latency.min_speedup == 0
            assert ENGINES[step.target].variants(config)
            if step.target == "tensorrt-rtx":
                assert config.target.tensorrt_rtx.architectures == ("sm89",)


def test_why_a_step_is_not_run() -> None:
    step = python(WRITES, needs="before")
    absent = Availability(builds=False, runs=False, reason="a is not installed")
    unfit = Availability(builds=True, runs=False, reason="a 1.0, which has no kernels for this GPU (sm90)")
    assert why_not(step, {"a": HERE}, {"before": True}) == ""
    assert why_not(step, {"a": absent}, {"before": True}) == "a: a is not installed"
    assert why_not(step, {"a": unfit}, {"before": True}) == "a: a 1.0, which has no kernels for this GPU (sm90)"
    assert why_not(step, {"a": HERE}, {"before": False}) == why_not(step, {"a": HERE}, {}) == "before left no engines"
    decode = planned("sm90", Path("m.pt"))[-1]
    assert why_not(decode, {}, {}) == DECODE


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("import os; print('before'); os.abort()", 60, "signal SIGABRT: "),
        ("raise SystemExit('no such thing')", 60, "exit 1: no such thing"),
        ("pass", 60, "what it left cannot be read: FileNotFoundError: "),
        pytest.param(
            "import time; print('begun'); time.sleep(60)", 3, "stopped after 3 s: begun", marks=pytest.mark.slow
        ),
    ],
    ids=["crash", "error", "nothing left", "too long"],
)
def test_whatever_becomes_of_a_process_is_a_row(tmp_path: Path, code: str, seconds: float, reason: str) -> None:
    row = run_step(python(code), tmp_path, seconds)
    assert (row["status"], row["name"], row["found"]) == ("failed", "one", {})
    assert row["reason"].startswith(reason)
    assert row["seconds"] < 30


def test_a_build_whose_gate_failed_has_been_run(tmp_path: Path) -> None:
    row = run_step(python(WRITES + "; raise SystemExit(4)"), tmp_path, 60)
    assert (row["status"], row["reason"], row["found"]) == ("ran", "", {"n": 5})


def test_a_second_start_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps the steps that ran, and retries those that failed, were skipped or were left."""
    (tmp_path / "steps").mkdir()
    steps = [python(WRITES, name="good"), python("raise SystemExit(1)", name="bad"),
             python(WRITES, name="after", needs="bad"), python(WRITES, name="late")]  # fmt: skip
    rows = run_all(steps[:3], {"a": HERE}, tmp_path, later())
    rows += run_all(steps[3:], {"a": HERE}, tmp_path, later(0))
    assert [row["status"] for row in rows] == ["ran", "failed", "skipped", "left"]
    assert rows[2]["reason"] == "bad left no engines"
    assert rows[3]["reason"] == "the time was over; start again to go on"
    capsys.readouterr()
    mended = [python("raise SystemExit('never run again')", name="good"), python(WRITES, name="bad"), *steps[2:]]
    again = run_all(mended, {"a": HERE}, tmp_path, later())
    assert [row["status"] for row in again] == ["ran"] * 4
    assert again[0] == rows[0]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "[1/4] step good: done before"
    assert shown[3].startswith("[4/4] step late: ran, ")


def test_without_a_gpu_it_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The driver finds no GPU.
    monkeypatch.setattr(run_gpu, "cuda_devices", lambda: [])
    assert main(["--results", str(tmp_path / "results"), "--docs", str(tmp_path)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == (
        "make gpu: no NVIDIA GPU is here (the CUDA driver finds no device); run it on a machine that has one\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_target_whose_probe_dies_leaves_the_others_available() -> None:
    found = run_gpu.availability_of_all({"no such target", "ort-cpu"})
    assert list(found) == ["no such target", "ort-cpu"]
    assert found["ort-cpu"] == ENGINES["ort-cpu"].availability()
    assert (found["no such target"].builds, found["no such target"].runs) == (False, False)
    assert found["no such target"].reason == "the probe failed: KeyError: 'no such target'"


def test_paths_of_modules_hold_in_the_folder_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("n = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    code = "import only_here; open('out.json', 'w').write('{\"n\": ' + str(only_here.n) + '}')"
    assert run_step(python(code), tmp_path, 60)["found"] == {"n": 7}


def test_cuda_graphs_are_turned_off_where_there_are_any() -> None:
    config = config_from_toml(None)
    plain = without_cuda_graphs(config, "inductor-cuda")
    assert plain is not None
    assert not plain.target.inductor_cuda.cuda_graph
    assert plain.target.ort_cuda.cuda_graph
    assert without_cuda_graphs(plain, "inductor-cuda") is None
    assert without_cuda_graphs(config, "tensorrt") is None
    assert without_cuda_graphs(config, "ort-cpu") is None


def test_what_nvidia_smi_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 1234\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_device.used_mib() == 1234


def test_the_page_is_current() -> None:
    """Until `make gpu` has run, there is no page, and the guide says so."""
    results, path = DOCS / "gpu.json", DOCS / "gpu.md"
    assert path.is_file() == results.is_file()
    if results.is_file():
        assert path.read_text(encoding="utf-8") == page(json.loads(results.read_text(encoding="utf-8")))
    assert (NOT_RUN in (DOCS / "guide.md").read_text(encoding="utf-8")) != results.is_file()


def test_engines_that_could_not_be_built_leave_gaps_in_the_page() -> None:
    def row(model: str, ms: float) -> dict[str, Any]:
        return {"target": "ort-cuda", "dtype": "float16", "bucket": "b1s512", "model": model, "p50_ms": ms}

    def step(name: str, found: dict[str, Any]) -> dict[str, Any]:
        return {"title": name, "status": "ran", "seconds": 1.0, "reason": "", "found": found}

    both, alone = [row("dense", 3.0), row("mod", 2.0)], [row("dense", 4.0), row("mod", 5.0)]
    found = {
        "machine": {"gpu": "A GPU", "architectures": ["sm90"], "cpu": "A CPU", "cores": 2, "torch": "2",
                    "onnxruntime": "1", "tensorrt": None, "tensorrt_rtx": None},
        "steps": [
            step("engines", {"engines": [], "failed": ["ort-cuda | dense: no memory"]}),
            step("both", {"memory": [], "times": both, "one_by_one": alone}),
            step("one", {"memory": [], "times": both[1:], "one_by_one": []}),
        ],
    }  # fmt: skip
    lines = page(found).splitlines()
    assert "| ort-cuda | float16 | b1s512 | 3 | 2 | 1.50 | 4 | 5 |" in lines
    assert "| ort-cuda | float16 | b1s512 |  | 2 |  |  |  |" in lines
    assert "| engines | ran, but ort-cuda \\| dense: no memory | 1 |  |" in lines


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose steps build for this machine's CPU with the functions that otherwise build for a GPU.

    Returns:
        Folder of results; docs/ lies beside it.
    """
    checkpoint = tmp_path / "tiny.pt"
    save_checkpoint(checkpoint, random_checkpoint(TINY, 0))

    def small(arch: str, given: Path) -> list[Step]:
        assert given.name == "model.pt"
        failing = python("raise SystemExit('it | <failed>')", name="failing")
        absent = steps_of("tensorrt", ["float16"], (1, 32), checkpoint)[0]
        return [*steps_of("ort-cpu", ["float32"], (1, 32), checkpoint), absent, failing]

    monkeypatch.setattr(run_gpu, "planned", small)
    monkeypatch.setattr(run_gpu, "SPEC", TINY)
    monkeypatch.setattr(run_gpu, "cuda_devices", lambda: ["sm90"])
    # The step that measures GPU memory finds a tool that always reports the same number.
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor one in $*; do case $one in *driver*) echo 'A GPU, 580'; exit;; esac; done\necho 500\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(
        run_gpu, "_availability_apart", lambda name: HERE if name == "a" else ENGINES[name].availability()
    )
    (tmp_path / "docs").mkdir()
    return tmp_path / "results"


@pytest.mark.slow
def test_a_whole_run(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = on_cpu.parent / "docs"
    arguments = ["--results", str(on_cpu), "--docs", str(docs)]
    assert main(arguments) == 1
    found = json.loads((docs / "gpu.json").read_text())
    steps: list[dict[str, Any]] = found["steps"]
    assert [step["status"] for step in steps] == ["ran"] * 3 + ["skipped", "failed"], [one["reason"] for one in steps]
    assert found["machine"]["gpu"] == "A GPU, 580"
    assert found["machine"]["architectures"] == ["sm90"]
    assert found["targets"]["tensorrt"]["builds"] is False
    engines, device, build = (step["found"] for step in steps[:3])
    assert {(row["dtype"], row["model"]) for row in build["parity"]} >= {("float32", "mod"), ("float32", "dense")}
    assert {row["model"]: row["passed"] for row in build["parity"] if row["dtype"] == "float32"} == {
        "mod": True, "dense": True
    }  # fmt: skip
    assert len(build["latency"]) == len(engines["engines"]) == 2
    assert "samples_ms" not in build["latency"][0]
    # The first engine is loaded twice. The tool always reports the same memory, so every difference is 0.
    assert [row["mib"] for row in device["memory"]] == [0] * 3
    assert {row["model"] for row in device["times"]} == {"mod", "dense"}
    assert device["one_by_one"] == []
    text = (docs / "gpu.md").read_text()
    assert text.count("| ort-cpu | float32 | b1s32 |") == 4
    assert "| step failing | failed | 0 | exit 1: it \\| &lt;failed> |" in text
    assert "* **Machine.** A GPU, 580 (sm90); " in text
    assert "tensorrt: tensorrt is not installed; install mod-export[tensorrt]" in text
    capsys.readouterr()
    main(arguments)
    assert capsys.readouterr().out.splitlines()[0].endswith(": done before")
    _times_without_cuda_graphs(on_cpu / "ort-cpu-1x32/build")
    main([*arguments, "--again", "--minutes", "0"])
    left = json.loads((docs / "gpu.json").read_text())["steps"]
    assert [step["status"] for step in left] == ["left", "skipped", "skipped", "skipped", "left"]
    render(docs)
    assert "## Latency\n\nNothing was run." in (docs / "gpu.md").read_text()


def _times_without_cuda_graphs(folder: Path) -> None:
    """Runs the measurements of targets with CUDA graphs on a target that has none."""
    used = iter(range(100, 2000, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_device, "without_cuda_graphs", lambda config, target: config)
        found = measured(folder, lambda: next(used))
    assert [row["mib"] for row in found["memory"]] == [100] * 3
    assert [row["what"] for row in found["memory"]] == ["with context and libraries", *["one more engine"] * 2]
    assert {row["model"] for row in found["one_by_one"]} == {"mod", "dense"}
    assert all(row["p50_ms"] > 0 for row in found["one_by_one"])
