"""Every exit code of the command line, from real runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from build_folders import STAGES
from command_line import FAST_TOML, commands, invoke, raw_checkpoint, toml_file

from mod_export.folder.workspace import read_manifest
from mod_export.rows.report import report_from_json
from mod_models.checkpoint import load_checkpoint

PLUGIN = '''
"""An architecture that fails where it is told to."""

import torch
from mod_export.model.transformer import TransformerModel, ModTransformer
from mod_models.checkpoint import load_checkpoint, read_plain
from mod_models.spec import ModelSpec
from mod_models.checkpoint import Checkpoint


class Uncapturable(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, lengths):
        return self.inner(input_ids + int(lengths.sum()) * 0, lengths)


class Loaded(TransformerModel):
    def skeleton(self, outputs="logits"):
        return Uncapturable(super().skeleton(outputs))


class Faulty(ModTransformer):
    name = "faulty"

    def read(self, path):
        data = read_plain(path)
        if data["architecture"] == "surprising":
            raise RuntimeError("nobody expected this")
        if data["architecture"] != self.name:
            raise LookupError(data["architecture"])
        return Loaded(Checkpoint(spec=ModelSpec.from_dict(data["spec"]), weights=data["weights"]))


FAULTY = Faulty()
'''


def build_of_faulty(architecture: str, small_folder: Path, folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a build where another package has the architecture `faulty`."""
    info = folder / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mod_export.architectures]\nfaulty = faulty:FAULTY\n")
    (folder / "faulty.py").write_text(PLUGIN)
    path = raw_checkpoint(folder / "m.pt", load_checkpoint(small_folder / "small.pt"), architecture=architecture)
    arguments = ["build", path, "-o", folder / "out", "-q", "-c", small_folder / "small.toml"]
    (found,) = commands([arguments], f"sys.path.insert(0, {str(folder)!r})")
    return found


def test_0_all_gates_passed(
    tmp_path: Path, small_folder: Path, small_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argued = ["build", small_folder / "small.pt", "-c", small_folder / "small.toml", "-o", small_copy]
    argued += ["--report", tmp_path / "deep/rows.json"]
    monkeypatch.setattr(sys, "argv", ["mod-export", *map(str, argued)])  # The report contains it.
    found = invoke(*argued)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("small  mod_transformer")
    assert found.stdout.endswith(f"PASS  every gate met: {small_copy}\n")
    lines = found.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [["*", name] for name in STAGES]
    written = (tmp_path / "deep/rows.json").read_text()
    assert written == (small_copy / "report.json").read_text()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.json"]
    report = report_from_json(written)
    assert report.command == shlex.join(["mod-export", *map(str, argued)])
    sources = [str(small_folder / "small.pt"), "-c", "config.toml", "-o", "BUILD"]
    assert report.rebuild == shlex.join(["mod-export", "build", *sources])


def test_1_a_bug_says_so(small_folder: Path, tmp_path: Path) -> None:
    """It is in the reader of the architecture."""
    code, stdout, stderr = build_of_faulty("surprising", small_folder, tmp_path)
    assert not (tmp_path / "out").exists()
    assert (code, stdout) == (1, "")
    assert "Traceback (most recent call last)" in stderr
    assert "RuntimeError: nobody expected this" in stderr
    assert re.search(r"\nbug in mod-export \S+: RuntimeError; please report the text above\n$", stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], r"Missing argument 'MODEL\.\.\.'"),
        (["build", "m.pt", "--nonsense"], "No such option.*--nonsense"),
        (["nonsense"], "No such command.*nonsense"),
        (["report", "DIR", "--format", "xml"], "'xml' is not one of"),
    ],
)
def test_2_wrong_usage(arguments: list[str], message: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert re.search(message, found.stderr)


@pytest.mark.parametrize(
    "line",
    [
        "build LONG",
        "build m.pt -o LONG",
        "build m.pt --baseline LONG",
        "bench LONG",
        "config show LONG",
        "demo -o LONG",
    ],
)
def test_2_a_name_that_is_too_long(line: str) -> None:
    found = invoke(*line.replace("LONG", "x" * 300).split())
    assert found.exit_code == 2
    assert re.search(r"\nError: Invalid value for .*x: File name too long\n$", found.stderr)


@pytest.mark.slow
def test_3_a_stage_could_not_build(small_folder: Path, tmp_path: Path) -> None:
    code, stdout, stderr = build_of_faulty("faulty", small_folder, tmp_path)
    assert list(read_manifest(tmp_path / "out")["steps"]) == ["load"]
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {"manifest.json", ".lock"}
    assert (code, stdout) == (3, "")
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ")
    assert stderr.endswith("\n       stage capture failed; done before it: load\n")


def test_3_a_graph_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_text("nonsense")
    found = invoke("inspect", tmp_path / "g.onnx")
    assert found.exit_code == 3
    assert re.match(r"error: .*g\.onnx: not a readable ONNX graph", found.stderr)


def test_4_a_gate_failed(small_folder: Path, small_copy: Path, tmp_path: Path) -> None:
    strict = toml_file(tmp_path, FAST_TOML.replace("min_speedup = 0.0", "min_speedup = 50.0"))
    found = invoke("build", small_folder / "small.pt", "-c", strict, "-o", small_copy, "-q")
    assert found.exit_code == 4
    assert found.stderr == ""
    assert "FAIL" in found.stdout
    # On a busy machine the control may not cover 1; then the gate of 50 fails for that reason.
    missed = r"(does not reach|cannot be compared with) the gate of 50\.00x"
    assert re.search(missed, found.stdout)
    report = report_from_json((small_copy / "report.json").read_text())
    assert report.verdict.status == "fail"
    for name in ("bench", "report"):
        again = invoke(name, small_copy)
        assert re.search(missed, again.stdout)
        # Showing a failed build succeeds; measuring it again fails.
        assert again.exit_code == (4 if name == "bench" else 0)


@pytest.mark.slow
def test_130_interrupted_and_resumed(tmp_path: Path, small_folder: Path) -> None:
    checkpoint, fast, out = small_folder / "small.pt", small_folder / "small.toml", tmp_path / "out"
    # The parent of the tests may ignore this signal, and the process would inherit that.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from mod_export.cli import main\nmain()"
    arguments = [sys.executable, "-c", code, "build", str(checkpoint), "-c", str(fast), "-o", str(out), "-v"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    progress = "".join(_until(process.stderr, "graph/dense-b1s16"))
    process.send_signal(2)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, progress + stderr
    assert stdout == ""
    assert "Traceback" not in progress + stderr
    assert stderr.endswith("interrupted; finished steps are kept, and the same command resumes after them\n")
    done = read_manifest(out)["steps"]
    finished = {"load", "capture/mod-b1s16", "capture/dense-b1s16", "weights/weights-float32", "graph/mod-b1s16"}
    assert set(done) == finished
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"manifest.json", ".lock", "graphs/mod-b1s16.onnx", "graphs/weights-float32.data"}
    again = invoke("validate", out)
    assert again.exit_code == 2
    assert "the build was not finished; run the same build again, it resumes" in again.stderr

    resumed = invoke("build", checkpoint, "-c", fast, "-o", out)
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"\* load +reused.*\n\* capture +reused.*\n\* onnx +built", resumed.stderr)
    steps = read_manifest(out)["steps"]
    assert {name: steps[name] for name in finished} == done


def _until(stream: IO[str], text: str) -> Iterator[str]:
    for line in stream:
        yield line
        if text in line:
            return
