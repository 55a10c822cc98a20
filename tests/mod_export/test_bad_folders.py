"""Folders that cannot be written to or were damaged get one clear message, and nothing in them is overwritten."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_folders import DOWN, ENGINE, WEIGHTS, failed, rewrite_manifest
from click.testing import Result
from command_line import command, contents, invoke, uncovered
from safetensors.torch import load_file, save_file

from mod_export.engines import ENGINES
from mod_export.rerun import validate_folder
from mod_export.results.parity import ParityRow
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

GRAPH = "graphs/mod-b1s64.onnx"

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
    refused(invoke("build", checkpoint, "-c", config_file, "-o", out), OUTS[make])
    assert contents(tmp_path) == before


@pytest.mark.slow
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


# Build folders that were damaged after they were built.


def _replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text((root / name).read_text().replace(old, new))


def _flip(name: str) -> Callable[[Path], object]:
    """Changes one bit in the middle."""

    def flip(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[len(data) // 2] ^= 1
        (root / name).write_bytes(data)

    return flip


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda root: (root / "manifest.json").unlink(),
        r"moved: no manifest\.json here, so this is not a build folder of mod-export",
    ),
    "cut manifest": (
        lambda root: os.truncate(root / "manifest.json", 200),
        r"manifest\.json: damaged \(.*\); delete the folder and build again",
    ),
    "edited manifest": (
        _replace("manifest.json", '"ort-cpu"', '"ort-cuda"'),
        r"manifest\.json: has been changed since it was written; delete the folder and build again",
    ),
    "other version": (
        _replace("manifest.json", '"format_version": 2', '"format_version": 3'),
        r"moved: format version 3, and this release reads 2; it needs a newer mod-export",
    ),
    "engine": (_flip(ENGINE), rf"moved: {ENGINE} has been changed since it was built"),
    "weights": (_flip(WEIGHTS), rf"moved: {WEIGHTS} has been changed since it was built"),
    "no graph": (
        lambda root: (root / GRAPH).unlink(),
        rf"moved: {GRAPH} is missing or not a regular file\. Build again to repair it",
    ),
    "better report": (
        _replace("report.json", '"near_ties": ', '"near_ties": 1'),
        r"moved: report\.json has \d+ bytes, \d+ were written\. Build again to repair it",
    ),
    "cut report": (
        lambda root: os.truncate(root / "report.json", 1000),
        r"moved: report\.json has 1000 bytes, \d+ were written",
    ),
    "no report": (
        lambda root: (root / "report.json").unlink(),
        r"moved: report\.json is missing or not a regular file",
    ),
}
OF_OTHERS = {"engine", "weights", "no graph"}
FINDINGS = {*OF_OTHERS, "better report", "cut report", "no report"}
"""What `validate` reports, and goes on to look where the fault is."""


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["bench", "report", "inspect"])
def test_a_damaged_folder_is_refused(name: str, damage: str, built_copy: Path) -> None:
    change, message = DAMAGE[damage]
    change(built_copy)
    before = contents(built_copy)
    found = invoke(name, built_copy)
    if name == "report" and damage in OF_OTHERS:
        # What was measured can still be shown where the engines no longer are.
        assert found.exit_code == 0
        return
    if name == "inspect" and damage == "no manifest":
        message = r"moved: no config\.json in this folder"
    refused(found, message)
    assert contents(built_copy) == before


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - FINDINGS))
def test_validate_refuses_a_damaged_manifest(damage: str, built_copy: Path) -> None:
    change, message = DAMAGE[damage]
    change(built_copy)
    refused(invoke("validate", built_copy), message)


@pytest.mark.parametrize(
    "damages", [("engine", "better report"), ("weights", "no graph"), ("cut report",), ("no report",)]
)
def test_validate_reports_damaged_files(damages: tuple[str, ...], built_copy: Path) -> None:
    """Each with its path and what is wrong with it."""
    for damage in damages:
        DAMAGE[damage][0](built_copy)
    found = invoke("validate", built_copy, "--target", "ort-cpu")
    assert found.exit_code == 4, found.output
    for damage in damages:
        path, _, problem = DAMAGE[damage][1].removeprefix("moved: ").partition(r"\. ")[0].partition(" ")
        assert re.search(f"- {path}: {problem}", found.stdout), found.stdout
    assert found.stdout.endswith("FAIL\n")


def refused(found: Result, message: str) -> None:
    assert found.exit_code == 2, found.output
    assert re.search(message, found.stderr), found.stderr
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize("name", ["validate", "bench", "report"])
def test_not_a_build_folder(name: str, checkpoint: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", checkpoint):
        found = invoke(name, path)
        assert found.exit_code == 2
        assert found.stderr == f"error: {path}: no manifest.json here, so this is not a build folder of mod-export\n"


# Sound folders that cannot be validated or measured.


@pytest.mark.parametrize("name", ["validate", "bench"])
def test_a_target_that_is_not_in_the_folder(name: str, built: Path) -> None:
    arguments = ["--target", "inductor", "--target", "ort-cpu", "--target", "tensorrt"]
    refused(invoke(name, built, *arguments), r"built: holds no engine for inductor, tensorrt; built for ort-cpu\n$")


@pytest.mark.parametrize("name", ["validate", "bench"])
def test_a_target_that_cannot_run_here(name: str, built_copy: Path) -> None:
    available = ENGINES["ort-cuda"].availability()
    if available.runs:
        pytest.skip("CUDA runs here")
    rewrite_manifest(built_copy, lambda manifest: [one.update(target="ort-cuda") for one in manifest["engines"]])
    refused(invoke(name, built_copy), rf"moved: cannot run here: ort-cuda: {re.escape(available.reason)}\n$")


@pytest.mark.parametrize("name", ["validate", "bench"])
def test_an_unfinished_build(name: str, built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest.pop("files"))
    refused(invoke(name, built_copy), "moved: the build was not finished; run the same build again, it resumes")


OTHER_MAKE = r"manifest\.json: not as this release writes it \({}\); open it with the release that built it"
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no such architecture": (
        lambda manifest: manifest["models"]["mod"].update(architecture="mamba"),
        "^error: architecture 'mamba' is not installed here; known: mod_transformer\n$",
    ),
    "an engine that is no file": (
        lambda manifest: manifest["files"].pop(ENGINE),
        rf"manifest\.json: contradicts itself: {ENGINE} is no file of it.*; build again",
    ),
    "graphs that it does not describe": (
        lambda manifest: manifest.update(graphs=[]),
        r"contradicts itself: graphs/dense-b1s64\.onnx is nothing that it describes; graphs/dense-b1s64\.ort-cpu",
    ),
    "two dtypes for one engine": (
        lambda manifest: manifest["engines"][0].update(dtype="float16"),
        r"contradicts itself: \S+ is listed as float16 and its graph as float32",
    ),
    "an engine without weights": (
        lambda manifest: manifest["engines"][0].update(weights=None),
        r"contradicts itself: engines/ort-cpu/\S+ has no weights file",
    ),
    "a spec that the weights do not fit": (
        lambda manifest: manifest["models"]["mod"]["spec"].update(tie_embeddings=False),
        r"manifest\.json: the reference cannot be rebuilt from spec and weights \(Error.*\); build again",
    ),
    "no exporters": (lambda manifest: manifest.pop("exporters"), OTHER_MAKE.format("exporters: Field required")),
    "no dense model": (
        lambda manifest: manifest["models"].pop("dense"),
        r"manifest\.json: contradicts itself: dense is not described; build again",
    ),
    "an engine of no graph": (
        lambda manifest: manifest["engines"][0].update(bucket={"batch": 7, "seq": 7}),
        r"manifest\.json: contradicts itself: engines/ort-cpu/\S+ was built from no graph of it; build again",
    ),
    "weights that are no file": (
        lambda manifest: manifest["engines"][0].update(weights="graphs/other.data"),
        r"manifest\.json: contradicts itself: graphs/other\.data is no file of it; build again",
    ),
    "a model without weights": (
        lambda manifest: manifest["models"]["dense"].update(weights="graphs/other-float32.data"),
        r"manifest\.json: contradicts itself: graphs/other-float32\.data is no file of it; build again",
    ),
    "a seed in words": (
        lambda manifest: manifest["config"].update(seed="one"),
        OTHER_MAKE.format(r"config\.seed: Input should be a valid integer"),
    ),
    "no bucket": (
        lambda manifest: manifest["engines"][0].update(bucket=None),
        OTHER_MAKE.format(r"engines\.0\.bucket: Input should be a dictionary or an instance of Bucket"),
    ),
}
"""What `validate` cannot work with, and its message."""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_cannot_be_validated(name: str, built_copy: Path) -> None:
    change, message = MANIFESTS[name]
    rewrite_manifest(built_copy, change)
    refused(invoke("validate", built_copy), message)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors[DOWN]
    save_file(tensors, path)


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _without_a_tensor])
def test_without_its_weights_there_is_no_reference(built_copy: Path, damage: Callable[[Path], object]) -> None:
    damage(built_copy / WEIGHTS)
    message = rf"moved/{WEIGHTS}: the reference cannot be rebuilt from it \(.*\); build again\n$"
    refused(invoke("validate", built_copy), message)


def test_but_the_checkpoint_is_one(built_copy: Path, checkpoint: Path) -> None:
    (built_copy / WEIGHTS).unlink()
    found = validate_folder(built_copy, None, (), checkpoint)
    assert WEIGHTS in failed(found)
    assert not any(row.passed for row in found.rows(ParityRow))


def test_another_checkpoint(built: Path, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(tiny_spec, 1))
    message = (
        r"other\.pt: is not the checkpoint that .*built was built from "
        r"\(SHA-256 [0-9a-f]{12}, expected [0-9a-f]{12}\)\n$"
    )
    refused(invoke("validate", built, "--model", tmp_path / "other.pt"), message)
    absent = invoke("validate", built, "--model", tmp_path / "absent.pt")
    refused(absent, r"absent\.pt: no such file or folder")


def test_validation_without_pytorch_says_what_is_missing(built: Path) -> None:
    found = command("validate", built, code="sys.modules['torch'] = None")
    assert found.returncode == 2, found.stderr
    assert re.match(
        r"error: `mod-export validate` needs torch, which cannot be imported here \(.*\)\n"
        r" +install it: pip install \"mod-export\[build\]\"",
        found.stderr,
    )
