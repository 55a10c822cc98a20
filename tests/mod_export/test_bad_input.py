"""Whatever is wrong with a request gets one clear message, and leaves and overwrites nothing."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Payload, command, contents, invoke, raw_checkpoint, toml_file
from uncovered import uncovered

from mod_export.engine import ENGINES
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint

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
    return [checkpoint, "-c", toml_file(folder, "buckets = [[1, 64], [1, 512]]")]


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
    return [checkpoint, "-c", toml_file(folder, "buckts = [[1, 64]]")]


@case(r"c\.toml: not valid TOML")
def brokentoml_file(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", toml_file(folder, "buckets = [[1, 64]")]


@case(r"absent\.toml: no such configuration file")
def absent_config(folder: Path, checkpoint: Path) -> list[object]:
    return [checkpoint, "-c", folder / "absent.toml"]


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
    found = command(
        "build", checkpoint, "-c", fast, "-o", out, "--report", tmp_path / "r.json", code=limit, env=uncovered()
    )
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
FINDINGS = {*OF_OTHERS, _better_report, _cut_report, _no_report}
"""What `validate` reports, and goes on to look where the fault is."""


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("name", ["validate", "bench", "report", "inspect"])
def test_damaged_build_folder(name: str, damage: Callable[[Path], None], built_copy: Path) -> None:
    damage(built_copy)
    if name == "report" and damage in OF_OTHERS:
        # What was measured can still be shown where the engines no longer are.
        assert invoke(name, built_copy).exit_code == 0
        return
    if name == "validate" and damage in FINDINGS:
        found = invoke(name, built_copy)
        assert found.exit_code == 4, found.output
        path, _, problem = DAMAGE[damage].removeprefix("moved: ").partition(r"\. ")[0].partition(" ")
        assert re.search(f"- {path}: {problem}", found.stdout), found.stdout
        assert found.stdout.endswith("FAIL\n")
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
