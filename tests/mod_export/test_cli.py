"""The command line: exit codes by real runs, a clear message for all that is wrong, and nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from mod_export.cli import cli
from mod_export.config import BuildConfig, config_from_toml
from mod_export.engine import ENGINES
from mod_export.report import report_from_json
from mod_export.workspace import read_manifest
from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

OPTIONS = {
    "build": ["--baseline", "--config", "--help", "--out", "--quiet", "--report", "--target", "--verbose", "-c", "-h",
              "-o", "-q", "-v", "model"],
    "validate": ["--config", "--help", "--target", "--verbose", "-c", "-h", "-v", "folder"],
    "bench": ["--config", "--help", "--target", "--verbose", "-c", "-h", "-v", "folder"],
    "report": ["--format", "--help", "--verbose", "-h", "-v", "folder"],
    "inspect": ["--help", "--verbose", "-h", "-v", "path"],
    "targets": ["--help", "--verbose", "-h", "-v"],
    "config show": ["--help", "--verbose", "-h", "-v", "config_file"],
    "demo": ["--help", "--out", "--quiet", "--verbose", "-h", "-o", "-q", "-v"],
}  # fmt: skip
"""What users script against: a name is added on purpose, and none is taken away."""

FAST_TOML = """
buckets = [[1, 16]]
targets = ["ort-cpu"]

[latency]
samples = 5
warmup = 1
bootstrap = 100
min_speedup = 0.0
"""

PLUGIN = '''
"""An architecture that fails where it is told to."""

import torch
from mod_models.architecture import LoadedTransformer, ModTransformer
from mod_models.checkpoint import load_checkpoint, read_plain
from mod_models.spec import ModelSpec
from mod_models.checkpoint import Checkpoint


class Uncapturable(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, lengths):
        return self.inner(input_ids + int(lengths.sum()) * 0, lengths)


class Loaded(LoadedTransformer):
    def module(self):
        return Uncapturable(super().module())


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


def invoke(*arguments: object) -> Result:
    """The command in this process, which has PyTorch loaded already."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def command(*arguments: object, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; `code` runs before it there."""
    script = f"import sys\n{code}\nfrom mod_export.cli import main\nmain()"
    listed = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
    return subprocess.run(listed, capture_output=True, text=True, check=False, **options)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, but for the lock that a build leaves."""
    found = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def raw_checkpoint(path: Path, checkpoint: Checkpoint, **header: Any) -> Path:
    """A model.pt with a header that `save_checkpoint` would not write."""
    spec = checkpoint.spec.to_dict() | header.pop("spec", {})
    data = {"format_version": 1, "architecture": "mod_transformer", "spec": spec, "weights": dict(checkpoint.weights)}
    torch.save(data | header, path)
    return path


class Payload:
    """Makes a folder when it is unpickled: a pickle that wants to run code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    path = tmp_path / "fast.toml"
    path.write_text(FAST_TOML, encoding="utf-8")
    return path


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """Environment of a process that has an architecture of somebody else's installed."""
    folder = tmp_path / "plugin"
    (folder / "faulty-1.0.dist-info").mkdir(parents=True)
    (folder / "faulty-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (folder / "faulty-1.0.dist-info/entry_points.txt").write_text(
        "[mod_export.architectures]\nfaulty = faulty:FAULTY\n"
    )
    (folder / "faulty.py").write_text(PLUGIN)
    return {**os.environ, "PYTHONPATH": str(folder)}


# What is refused, and how. Each case writes what it needs into the folder and gives the arguments of `build`.

Case = Callable[[Path, Path], list[object]]
CASES: dict[str, tuple[Case, str]] = {}


def case(message: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, message)
        return function

    return register


@case(r"absent\.pt: no such file or folder")
def absent(folder: Path, checkpoint: Path) -> list[object]:
    return [folder / "absent.pt"]


@case(r"notes\.pt: not a model\.pt as torch\.save writes it: truncated, or not a checkpoint, or a bare pickle")
def not_a_checkpoint(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "notes.pt").write_text("my notes")
    return [folder / "notes.pt"]


@case(r"folder: no config\.json in this folder; expected config\.json and model\.safetensors, or a model\.pt")
def folder_without_config(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "folder").mkdir()
    return [folder / "folder"]


@case(r"model\.safetensors: weights without a spec; give the folder that holds it beside its config\.json")
def weights_alone(folder: Path, checkpoint: Path) -> list[object]:
    save_checkpoint(folder / "model", load_checkpoint(checkpoint))
    return [folder / "model/model.safetensors"]


@case(r"model\.safetensors: not readable, it may be truncated")
def truncated_safetensors(folder: Path, checkpoint: Path) -> list[object]:
    save_checkpoint(folder / "model", load_checkpoint(checkpoint))
    os.truncate(folder / "model/model.safetensors", 5000)
    return [folder / "model"]


def _truncated(size: Callable[[int], int]) -> Case:
    def truncated(folder: Path, checkpoint: Path) -> list[object]:
        shutil.copy(checkpoint, folder / "cut.pt")
        os.truncate(folder / "cut.pt", size(checkpoint.stat().st_size))
        return [folder / "cut.pt"]

    return truncated


LENGTHS: dict[str, Callable[[int], int]] = {
    "nothing": lambda size: 0, "one_byte": lambda size: 1, "first_kilobyte": lambda size: 1024,
    "half": lambda size: size // 2, "all_but_the_directory": lambda size: size - 100, "all_but_a_byte": lambda n: n - 1,
}  # fmt: skip
CASES |= {
    f"truncated_to_{name}": (_truncated(size), r"cut\.pt: not a model\.pt as torch\.save writes it")
    for name, size in LENGTHS.items()
}


@case(r"evil\.pt: not a model\.pt as torch\.save writes it: .*or a bare pickle, which could run code and is not read")
def bare_pickle_with_code(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "evil.pt").write_bytes(pickle.dumps(Payload(folder / "ran")))
    return [folder / "evil.pt"]


@case(r"evil\.pt: refused, its pickle asks for posix\.mkdir, which is more than plain data and tensors")
def pickle_with_code(folder: Path, checkpoint: Path) -> list[object]:
    return [raw_checkpoint(folder / "evil.pt", load_checkpoint(checkpoint), payload=Payload(folder / "ran"))]


@case(r"m\.pt: weights do not fit the spec: layers\.0\.attention\.q_proj\.weight has shape \[32, 31\], "
      r"the spec says \[32, 32\]")  # fmt: skip
def weight_of_wrong_shape(folder: Path, checkpoint: Path) -> list[object]:
    return [_with_weight(folder, checkpoint, "layers.0.attention.q_proj.weight", lambda tensor: tensor[:, 1:].clone())]


@case(r"m\.pt: weights do not fit the spec: missing layers\.1\.router\.projection\.weight \[1, 32\]")
def missing_weight(folder: Path, checkpoint: Path) -> list[object]:
    found = load_checkpoint(checkpoint)
    weights = {name: tensor for name, tensor in found.weights.items() if name != "layers.1.router.projection.weight"}
    return [raw_checkpoint(folder / "m.pt", replace(found, weights=weights))]


@case(r"m\.pt: norm\.weight holds 1 values that are NaN or infinite in float32, of 32")
def nan_weight(folder: Path, checkpoint: Path) -> list[object]:
    return [_with_weight(folder, checkpoint, "norm.weight", lambda tensor: tensor.index_fill(0, FIRST, float("nan")))]


@case(r"m\.pt: norm\.weight holds 1 values that are NaN or infinite in float32, of 32")
def infinite_weight(folder: Path, checkpoint: Path) -> list[object]:
    return [_with_weight(folder, checkpoint, "norm.weight", lambda tensor: tensor.index_fill(0, FIRST, float("-inf")))]


FIRST = torch.tensor([0])


def _with_weight(folder: Path, checkpoint: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    found = load_checkpoint(checkpoint)
    weights = {**found.weights, name: change(found.weights[name])}
    return raw_checkpoint(folder / "m.pt", replace(found, weights=weights))


def _capacity(value: float) -> Case:
    def capacity(folder: Path, checkpoint: Path) -> list[object]:
        found = load_checkpoint(checkpoint)
        routing = found.spec.to_dict()["routing"] | {"capacity": value}
        return [raw_checkpoint(folder / "m.pt", found, spec={"routing": routing})]

    return capacity


CASES |= {
    f"capacity_{value}": (_capacity(value), rf"m\.pt: spec\.routing\.capacity.*{re.escape(str(value))}")
    for value in (0.0, -0.125, 1.25, float("nan"))
}


@case(r"buckets: 1 x 512 is longer than the model's 256 positions; shorten it or drop it")
def bucket_too_long(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", _toml(folder, "buckets = [[1, 64], [1, 512]]")]


@case(r"unknown target 'ort-cup', did you mean 'ort-cpu'\?; known: ort-cpu, ort-cuda, inductor, tensorrt, tensorrt-rtx")
def unknown_target(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "--target", "ort-cup"]


@case(r"unknown target 'abacus'; known: ort-cpu,")
def unknown_target_like_no_other(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "--target", "abacus"]


@case(r"cannot build here for (ort-cuda|tensorrt|tensorrt-rtx|inductor): .+")
def unavailable_target(folder: Path, checkpoint: Path) -> list[object]:
    absent = [name for name, engine in ENGINES.items() if not engine.availability().builds]
    if not absent:
        pytest.skip("every target can build on this machine")
    return [checkpoint, "--target", absent[0]]


@case(r"buckts: unknown key, did you mean 'buckets'\?")
def unknown_key(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", _toml(folder, "buckts = [[1, 64]]")]


@case(r"c\.toml: not valid TOML")
def broken_toml(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", _toml(folder, "buckets = [[1, 64]")]


@case(r"absent\.toml: no such configuration file")
def absent_config(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", folder / "absent.toml"]


def _toml(folder: Path, text: str) -> Path:
    (folder / "c.toml").write_text(text, encoding="utf-8")
    return folder / "c.toml"


@case(r"dense: no layer is routed, so there is nothing to compare with a dense twin")
def dense_model(folder: Path, checkpoint: Path) -> list[object]:
    save_checkpoint(folder / "dense.pt", load_checkpoint(checkpoint).dense())
    return [folder / "dense.pt"]


@case(r"base\.pt: no such file or folder")
def absent_baseline(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "--baseline", folder / "base.pt"]


@case(r"base\.pt: not a model\.pt")
def baseline_that_is_none(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "base.pt").write_bytes(b"PK")
    return [checkpoint, "--baseline", folder / "base.pt"]


@case(r"baseline tiny: has routed layers; a baseline is a dense model")
def routed_baseline(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "--baseline", checkpoint]


@case(r"baseline base: has a vocabulary of 300 instead of 256 and positions up to 128 instead of 256")
def baseline_for_another_job(folder: Path, checkpoint: Path) -> list[object]:
    spec = replace(load_checkpoint(checkpoint).spec.dense(), vocab_size=300, max_positions=128)
    save_checkpoint(folder / "base.pt", random_checkpoint(spec, 0))
    return [checkpoint, "--baseline", folder / "base.pt"]


@case(r"rows: is a folder; name another file with --report")
def report_over_a_folder(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "rows").mkdir()
    return [checkpoint, "--report", folder / "rows"]


@case(r"file/rows\.json: cannot write in .*; name another file with --report")
def report_below_a_file(folder: Path, checkpoint: Path) -> list[object]:
    (folder / "file").write_text("mine")
    return [checkpoint, "--report", folder / "file/rows.json"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("existing", [False, True], ids=["into_a_new_folder", "into_a_finished_one"])
def test_bad_input(name: str, existing: bool, tmp_path: Path, checkpoint: Path, built: Path) -> None:
    make, message = CASES[name]
    arguments = make(tmp_path, checkpoint)
    if existing:
        shutil.copytree(built, tmp_path / "out")
    before = contents(tmp_path)
    found = invoke("build", *arguments, "-o", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert re.search(message, found.stderr), found.stderr
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    assert found.stdout == ""
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [bare_pickle_with_code, pickle_with_code])
def test_the_payloads_would_have_run(make: Case, tmp_path: Path, checkpoint: Path) -> None:
    path = Path(str(make(tmp_path, checkpoint)[0]))
    if make is bare_pickle_with_code:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert (tmp_path / "ran").is_dir()


# Output folders. The model and the rest are sound.

Out = Callable[[Path], Path]


def out_is_a_file(folder: Path) -> Path:
    (folder / "out").write_text("mine")
    return folder / "out"


def out_below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file/out"


def out_is_somebody_elses(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out/thesis.txt").write_text("mine")
    return folder / "out"


def out_has_a_foreign_manifest(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out/manifest.json").write_text('{"name": "an app"}')
    return folder / "out"


def out_has_a_damaged_manifest(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out/manifest.json").write_text('{"format": "mod-exp')
    return folder / "out"


def out_is_not_writable(folder: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (folder / "closed").mkdir(mode=0o500)
    return folder / "closed/out"


def out_where_nobody_can_write(folder: Path) -> Path:
    return Path("/proc/self/out")


OUTS: dict[Out, str] = {
    out_is_a_file: r"out: is a file; name a folder with -o",
    out_below_a_file: r"file/out: cannot write in .*/file; name another folder with -o",
    out_is_somebody_elses: r"out: holds files that mod-export did not write \(thesis\.txt\); name an empty or new",
    out_has_a_foreign_manifest: r"manifest\.json: not a manifest of mod-export; name another folder",
    out_has_a_damaged_manifest: r"manifest\.json: damaged \(.*\); delete the folder and build again",
    out_is_not_writable: r"closed/out: cannot write in .*/closed; name another folder with -o",
    out_where_nobody_can_write: r"/proc/self/out: cannot write ",
}


@pytest.mark.parametrize("make", OUTS, ids=lambda make: make.__name__)
def test_bad_output_folder(make: Out, tmp_path: Path, checkpoint: Path, config_file: Path) -> None:
    out = make(tmp_path)
    before = contents(tmp_path)
    found = invoke("build", checkpoint, "-c", config_file, "-o", out)
    assert found.exit_code == 2, found.output
    assert re.search(OUTS[make], found.stderr), found.stderr
    assert found.stdout == ""
    assert contents(tmp_path) == before


def test_full_disk(tmp_path: Path, checkpoint: Path, fast: Path) -> None:
    # A file may not grow beyond 100 kB: the weights have 190 kB.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"
    out = tmp_path / "out"
    found = command("build", checkpoint, "-c", fast, "-o", out, "--report", tmp_path / "r.json", code=limit)
    assert found.returncode == 2, found.stderr
    assert re.search(r"weights-float32\.data: .*File too large", found.stderr), found.stderr
    assert "stage onnx failed; done before it: load, capture" in found.stderr
    assert found.stdout == ""
    assert not (tmp_path / "r.json").exists()
    assert {path.name for path in out.iterdir()} == {"manifest.json", ".lock"}
    again = command("validate", out)
    assert again.returncode == 2
    assert again.stderr == f"error: {out}: the build was not finished; run the same build again, it resumes\n"
    resumed = invoke("build", checkpoint, "-c", fast, "-o", out)
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"\* capture +reused", resumed.stderr)


NEEDS_NO_TORCH = (
    "absent", "not_a_checkpoint", "folder_without_config", "weights_alone", "truncated_to_half",
    "bare_pickle_with_code", "unknown_target", "unknown_key", "absent_config", "absent_baseline", "report_below_a_file",
)  # fmt: skip
WITHOUT_TORCH = "sys.modules['torch'] = None  # whoever imports it now gets an ImportError"


@pytest.mark.parametrize("name", NEEDS_NO_TORCH)
def test_what_needs_no_torch_does_not_load_it(name: str, tmp_path: Path, checkpoint: Path) -> None:
    make, message = CASES[name]
    arguments = make(tmp_path, checkpoint)
    before = contents(tmp_path)
    found = command("build", *arguments, "-o", tmp_path / "out", code=WITHOUT_TORCH)
    assert found.returncode == 2, found.stderr
    assert re.search(message, found.stderr)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "DIR"], ["report", "DIR", "--format", "html"], ["bench", "DIR"], ["config", "show"], ["--help"],
        ["build", "--help"], ["--version"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_commands_without_torch(arguments: list[str], built: Path) -> None:
    found = command(*(built if argument == "DIR" else argument for argument in arguments), code=WITHOUT_TORCH)
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert found.stdout


# Build folders that were damaged after they were built.


def _no_manifest(root: Path) -> None:
    (root / "manifest.json").unlink()


def _cut_manifest(root: Path) -> None:
    os.truncate(root / "manifest.json", 200)


def _edited_manifest(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text(text.replace('"ort-cpu"', '"ort-cuda"'))


def _other_version(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))


def _flip(root: Path, name: str) -> None:
    data = bytearray((root / name).read_bytes())
    data[len(data) // 2] ^= 1
    (root / name).write_bytes(data)


def _engine_byte(root: Path) -> None:
    _flip(root, "engines/ort-cpu/mod-b1s64-float32.onnx")


def _weights_byte(root: Path) -> None:
    _flip(root, "graphs/weights-float32.data")


def _no_graph(root: Path) -> None:
    (root / "graphs/mod-b1s64.onnx").unlink()


def _better_report(root: Path) -> None:
    text = (root / "report.json").read_text()
    (root / "report.json").write_text(text.replace('"near_ties": ', '"near_ties": 1'))


def _cut_report(root: Path) -> None:
    os.truncate(root / "report.json", 1000)


def _no_report(root: Path) -> None:
    (root / "report.json").unlink()


DAMAGE: dict[Callable[[Path], None], str] = {
    _no_manifest: r"moved: no manifest\.json here, so this is not a build folder of mod-export",
    _cut_manifest: r"manifest\.json: damaged \(.*\); delete the folder and build again",
    _edited_manifest: r"manifest\.json: has been changed since it was written; delete the folder and build again",
    _other_version: r"manifest\.json: format version 2, this release reads 1",
    _engine_byte: r"moved: engines/ort-cpu/mod-b1s64-float32\.onnx has been changed since it was built",
    _weights_byte: r"moved: graphs/weights-float32\.data has been changed since it was built",
    _no_graph: r"moved: graphs/mod-b1s64\.onnx is missing or not a regular file\. Build again to repair it",
    _better_report: r"moved: report\.json has \d+ bytes, \d+ were written\. Build again to repair it",
    _cut_report: r"moved: report\.json has 1000 bytes, \d+ were written",
    _no_report: r"moved: report\.json is missing or not a regular file",
}
OF_OTHERS = {_engine_byte, _weights_byte, _no_graph}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("name", ["validate", "bench", "report", "inspect"])
def test_damaged_build_folder(name: str, damage: Callable[[Path], None], built_copy: Path) -> None:
    damage(built_copy)
    if name == "report" and damage in OF_OTHERS:
        # What was measured can still be shown where the engines no longer are.
        assert invoke(name, built_copy).exit_code == 0
        return
    if name == "inspect" and damage is _no_manifest:
        message = r"moved: no config\.json in this folder"
    else:
        message = DAMAGE[damage]
    before = contents(built_copy)
    found = invoke(name, built_copy)
    assert found.exit_code == 2, found.output
    assert re.search(message, found.stderr), found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stdout == ""
    assert contents(built_copy) == before


@pytest.mark.parametrize("name", ["validate", "bench", "report"])
def test_not_a_build_folder(name: str, checkpoint: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", checkpoint):
        found = invoke(name, path)
        assert found.exit_code == 2
        assert found.stderr == f"error: {path}: no manifest.json here, so this is not a build folder of mod-export\n"


# Exit codes.


def test_0_all_gates_passed(tmp_path: Path, checkpoint: Path, config_file: Path, built_copy: Path) -> None:
    argued = ["build", checkpoint, "-c", config_file, "-o", built_copy, "--report", tmp_path / "deep/rows.json"]
    found = command(*argued)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("tiny  mod_transformer")
    assert found.stdout.endswith(f"PASS  every gate met: {built_copy}\n")
    lines = found.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["*", name] for name in ("load", "capture", "onnx", "passes", "engines", "validate", "measure", "report")
    ]
    written = (tmp_path / "deep/rows.json").read_text()
    assert written == (built_copy / "report.json").read_text()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.json"]
    report = report_from_json(written)
    assert report.command == " ".join(["mod-export", *map(str, argued)])


def test_1_a_bug_says_so(tmp_path: Path, checkpoint: Path, plugin: dict[str, str]) -> None:
    path = raw_checkpoint(tmp_path / "m.pt", load_checkpoint(checkpoint), architecture="surprising")
    found = command("build", path, "-o", tmp_path / "out", env=plugin)
    assert found.returncode == 1
    assert found.stdout == ""
    assert "Traceback (most recent call last)" in found.stderr
    assert "RuntimeError: nobody expected this" in found.stderr
    assert re.search(r"\nbug in mod-export \S+: RuntimeError; please report the text above\n$", found.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], "Missing argument 'MODEL'"),
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
    "arguments",
    [
        ["build", "LONG"],
        ["build", "MODEL", "-o", "LONG"],
        ["build", "MODEL", "-c", "LONG"],
        ["build", "MODEL", "--baseline", "LONG"],
        ["build", "MODEL", "--report", "LONG"],
        ["validate", "LONG"],
        ["bench", "LONG"],
        ["report", "LONG"],
        ["inspect", "LONG"],
        ["config", "show", "LONG"],
        ["demo", "-o", "LONG"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_2_a_name_that_is_too_long(arguments: list[str], checkpoint: Path) -> None:
    names = {"LONG": "x" * 300, "MODEL": checkpoint}
    found = invoke(*(names.get(argument, argument) for argument in arguments))
    assert found.exit_code == 2
    assert re.search(r"\nError: Invalid value for .*x: File name too long\n$", found.stderr)


def test_3_a_stage_could_not_build(tmp_path: Path, checkpoint: Path, fast: Path, plugin: dict[str, str]) -> None:
    path = raw_checkpoint(tmp_path / "m.pt", load_checkpoint(checkpoint), architecture="faulty")
    out = tmp_path / "out"
    found = command("build", path, "-c", fast, "-o", out, "-q", env=plugin)
    assert found.returncode == 3, found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.endswith("\n       stage capture failed; done before it: load\n")
    assert list(read_manifest(out)["steps"]) == ["load"]
    assert {entry.name for entry in out.iterdir()} == {"manifest.json", ".lock"}


def test_3_a_graph_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_text("nonsense")
    found = invoke("inspect", tmp_path / "g.onnx")
    assert found.exit_code == 3
    assert re.match(r"error: .*g\.onnx: not a readable ONNX graph", found.stderr)


def test_4_a_gate_failed(checkpoint: Path, config_file: Path, built_copy: Path, tmp_path: Path) -> None:
    text = config_file.read_text().replace("min_speedup = 0.0", "min_speedup = 50.0")
    (tmp_path / "strict.toml").write_text(text)
    found = invoke("build", checkpoint, "-c", tmp_path / "strict.toml", "-o", built_copy, "-q")
    assert found.exit_code == 4
    assert found.stderr == ""
    assert "FAIL" in found.stdout
    assert "does not reach the gate of 50.00x" in found.stdout
    report = report_from_json((built_copy / "report.json").read_text())
    assert report.verdict.status == "fail"
    for name in ("bench", "report"):
        again = invoke(name, built_copy)
        assert "does not reach the gate of 50.00x" in again.stdout
        # Showing a failed build is no failure; measuring it again is.
        assert again.exit_code == (4 if name == "bench" else 0)


@pytest.mark.slow
def test_130_interrupted_and_resumed(tmp_path: Path, checkpoint: Path, fast: Path) -> None:
    out = tmp_path / "out"
    # Whoever started the tests may have had this signal ignored, and that is inherited.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from mod_export.cli import main\nmain()"
    arguments = [sys.executable, "-c", code, "build", str(checkpoint), "-c", str(fast), "-o", str(out), "-v"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = "".join(_until(process.stderr, "graph/dense-b1s16"))
    process.send_signal(2)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, said + stderr
    assert stdout == ""
    assert "Traceback" not in said + stderr
    assert stderr.endswith("interrupted; what was whole is kept, and the same command resumes there\n")
    done = read_manifest(out)["steps"]
    whole = {"load", "capture/mod-b1s16", "capture/dense-b1s16", "weights/weights-float32", "graph/mod-b1s16"}
    assert set(done) == whole
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"manifest.json", ".lock", "graphs/mod-b1s16.onnx", "graphs/weights-float32.data"}
    again = invoke("validate", out)
    assert again.exit_code == 2
    assert "the build was not finished; run the same build again, it resumes" in again.stderr

    resumed = invoke("build", checkpoint, "-c", fast, "-o", out)
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"\* load +reused.*\n\* capture +reused.*\n\* onnx +built", resumed.stderr)
    steps = read_manifest(out)["steps"]
    assert {name: steps[name] for name in whole} == done


def _until(stream: IO[str], text: str) -> Iterator[str]:
    for line in stream:
        yield line
        if text in line:
            return


# Output.


def test_quiet(checkpoint: Path, config_file: Path, built_copy: Path) -> None:
    found = invoke("build", checkpoint, "-c", config_file, "-o", built_copy, "-q")
    assert found.exit_code == 0
    assert found.stderr == ""
    assert found.stdout.endswith(f"PASS  every gate met: {built_copy}\n")


def test_verbose_names_every_step(checkpoint: Path, config_file: Path, built_copy: Path) -> None:
    found = invoke("build", checkpoint, "-c", config_file, "-o", built_copy, "-v")
    named = [line.strip() for line in found.stderr.splitlines() if line.startswith("    ")]
    assert named == list(read_manifest(built_copy)["steps"])


@pytest.mark.parametrize("name", ["build", "validate", "bench", "report", "inspect"])
def test_a_traceback_only_when_asked_for(name: str, tmp_path: Path) -> None:
    plain, verbose = invoke(name, tmp_path / "absent.pt"), invoke(name, tmp_path / "absent.pt", "-v")
    assert plain.exit_code == verbose.exit_code == 2
    assert "Traceback" not in plain.stderr
    assert verbose.stderr.startswith("Traceback (most recent call last)")
    assert verbose.stderr.endswith(plain.stderr)


def test_results_on_stdout_and_nothing_else(built: Path) -> None:
    for name in ("validate", "bench", "report", "inspect"):
        found = invoke(name, built)
        assert found.exit_code == 0, found.output
        assert found.stderr == ""
        assert found.stdout.endswith("\n")


@pytest.mark.parametrize("name", ["report", "validate", "bench"])
def test_no_color(name: str, built: Path) -> None:
    found = command(name, built, env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"})
    assert found.returncode == 0, found.stderr
    assert not re.search(r"\x1b\[(\d+;)*(3|4|9|10)\d", found.stdout)


def test_color_where_it_is_wanted(built: Path) -> None:
    wanted = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    found = command("report", built, env={**wanted, "FORCE_COLOR": "1", "TERM": "xterm"})
    assert re.search(r"\x1b\[(\d+;)*32m", found.stdout)


def test_report_formats(built: Path) -> None:
    shown = invoke("report", built)
    assert shown.stdout.endswith(f"PASS  every gate met: {built}\n")
    assert invoke("report", built, "--format", "text").stdout == shown.stdout
    assert invoke("report", built, "--format", "json").stdout == (built / "report.json").read_text()
    page = invoke("report", built, "--format", "html").stdout
    assert page == (built / "report.html").read_text()
    assert page.startswith("<!doctype html>")


def test_formats_for_machines_are_utf8(tmp_path: Path, checkpoint: Path, built_copy: Path, config_file: Path) -> None:
    shutil.copy(checkpoint, tmp_path / "模型.pt")
    renamed = invoke("build", tmp_path / "模型.pt", "-c", config_file, "-o", built_copy, "-q")
    assert renamed.exit_code == 0, renamed.output
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for form, name in (("json", "report.json"), ("html", "report.html")):
        script = "from mod_export.cli import main; main()"
        listed = [sys.executable, "-c", script, "report", str(built_copy), "--format", form]
        found = subprocess.run(listed, capture_output=True, check=True, env=env)
        assert found.stdout == (built_copy / name).read_bytes()
    for name in ("report", "inspect"):
        shown = command(name, built_copy, env=env)
        assert shown.returncode == 0, shown.stderr
        assert "模型" not in shown.stdout


def test_nobody_reads_the_result(built: Path) -> None:
    script = "from mod_export.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "report", str(built)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert said == b""


def test_bench_and_validate_take_a_config(built: Path, config_file: Path, tmp_path: Path) -> None:
    text = config_file.read_text() + "\n[parity.float32]\nmax_abs = 0.0\n"
    (tmp_path / "strict.toml").write_text(text)
    found = invoke("validate", built, "-c", tmp_path / "strict.toml", "--target", "ort-cpu")
    assert found.exit_code == 4
    assert "FAIL" in found.stdout
    (tmp_path / "gated.toml").write_text(config_file.read_text().replace("min_speedup = 0.0", "min_speedup = 90.0"))
    found = invoke("bench", built, "-c", tmp_path / "gated.toml", "--target", "ort-cpu")
    assert found.exit_code == 4
    assert "90.00x FAIL" in found.stdout


@pytest.mark.slow
def test_a_baseline_of_ones_own(tmp_path: Path, checkpoint: Path, fast: Path, tiny_spec: ModelSpec) -> None:
    # Fewer layers: the numbers can only be those of the baseline.
    spec = replace(tiny_spec.dense(), n_layers=2)
    save_checkpoint(tmp_path / "base", random_checkpoint(spec, 3))
    out = tmp_path / "out"
    found = invoke("build", checkpoint, "-c", fast, "-o", out, "--baseline", tmp_path / "base")
    assert found.exit_code == 0, found.output
    manifest = read_manifest(out)
    assert manifest["models"]["dense"]["name"] == "base"
    assert manifest["models"]["dense"]["spec"]["n_layers"] == 2
    assert set(manifest["files"]) >= {"graphs/weights-float32.data", "graphs/weights-baseline-float32.data"}
    report = report_from_json((out / "report.json").read_text())
    assert [row.model for row in report.parity if row.passed] == ["mod", "dense"]
    flops = {row.model: row.flops for row in report.cost}
    assert flops["dense"] < flops["mod"]
    # The baseline's own weights are in the folder, so it needs neither checkpoint any more.
    moved = out.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "base")
    assert invoke("validate", moved).exit_code == 0


def test_targets_lists_all_with_reasons() -> None:
    found = invoke("targets")
    assert found.exit_code == 0
    rows = [re.split(r"  +", line.strip(), maxsplit=2) for line in found.stdout.splitlines()]
    assert [row[0] for row in rows] == ["ort-cpu", "ort-cuda", "inductor", "tensorrt", "tensorrt-rtx"]
    for name, can, reason in rows:
        availability = ENGINES[name].availability()
        verbs = [verb for verb, able in (("builds", availability.builds), ("runs", availability.runs)) if able]
        assert can == (", ".join(verbs) or "-")
        assert reason == availability.reason != ""


def test_config_show_round_trip(tmp_path: Path, config_file: Path) -> None:
    for arguments, expected in (([], config_from_toml(None)), ([config_file], config_from_toml(config_file))):
        found = invoke("config", "show", *arguments)
        assert found.exit_code == 0
        assert found.stderr == ""
        (tmp_path / "again.toml").write_text(found.stdout)
        assert config_from_toml(tmp_path / "again.toml") == expected
        assert set(tomllib.loads(found.stdout)) == set(BuildConfig.model_fields)
        assert invoke("config", "show", tmp_path / "again.toml").stdout == found.stdout


def test_config_show_names_every_problem(tmp_path: Path) -> None:
    found = invoke("config", "show", _toml(tmp_path, "sead = 1\n[latency]\nsamples = 1\n"))
    assert found.exit_code == 2
    assert "sead: unknown key, did you mean 'seed'?" in found.stderr
    assert "latency.samples: " in found.stderr
    assert found.stdout == ""


def test_inspect_of_each_kind(checkpoint: Path, built: Path) -> None:
    for path, text in (
        (checkpoint, "tokens that each routed layer runs"),
        (built / "graphs/mod-b1s64.onnx", "FLOPs"),
        (built, "every file is as it was built"),
    ):
        found = invoke("inspect", path)
        assert found.exit_code == 0, found.output
        assert text in found.stdout


def test_the_default_folder_has_the_models_name(
    tmp_path: Path, checkpoint: Path, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/tiny").write_text("in the way")
    found = invoke("build", checkpoint, "-c", fast)
    assert found.stderr == "error: build/tiny: is a file; name a folder with -o\n"


@pytest.mark.parametrize("out", [".", "deep/.."])
def test_demo_looks_at_both_folders_first(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    monkeypatch.chdir(here)
    (tmp_path / "here-timed").write_text("in the way")
    found = invoke("demo", "-o", out)
    assert found.exit_code == 2
    assert found.stderr == f"error: {tmp_path / 'here-timed'}: is a file; name a folder with -o\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "here", "here-timed"]


def test_commands_and_options_are_frozen() -> None:
    assert {name: sorted(_names(command)) for name, command in _commands(cli.commands)} == OPTIONS
    assert _names(cli) == ["--version", "-h", "--help"]


def _commands(found: Mapping[str, click.Command], prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, one in found.items():
        if isinstance(one, click.Group):
            yield from _commands(one.commands, f"{name} ")
        else:
            yield prefix + name, one


def _names(one: click.Command) -> list[str]:
    context = click.Context(one, help_option_names=["-h", "--help"])
    return [name for parameter in one.get_params(context) for name in (parameter.opts or [parameter.name])]


def test_help_and_version() -> None:
    shown = invoke("--help").stdout
    for name in ("build", "validate", "bench", "report", "inspect", "targets", "config", "demo"):
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
    assert re.fullmatch(r"mod-export, version \S+\n", invoke("--version").stdout)
    module = subprocess.run(
        [sys.executable, "-m", "mod_export.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout == invoke("--version").stdout


def test_json_can_be_read_by_anybody(built: Path) -> None:
    assert json.loads(invoke("report", built, "--format", "json").stdout)["schema_version"] == 1
