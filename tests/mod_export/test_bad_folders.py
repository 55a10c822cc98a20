"""Folders that cannot be written or were damaged cause one clear message, and nothing in them is overwritten."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from build_folders import DOWN, WEIGHTS, failed, flip, rewrite_manifest
from command_line import command, contents, invoke, refused, uncovered
from safetensors.torch import load_file, save_file

from mod_export.engines import ENGINES
from mod_export.pipeline.rerun import validate_folder
from mod_export.rows.correctness import ParityRow
from mod_models.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("searching_few_rows")
ENGINE = "engines/ort-cpu/mod-b1s16-float32.onnx"
GRAPH = "graphs/mod-b1s16.onnx"


OUTS: dict[str, tuple[Mapping[str, str], str]] = {
    "out": ({"out": "mine"}, r"out: is a file; name a folder with -o"),
    "file/out": ({"file": "mine"}, r"file/out: cannot write in .*/file; name another folder with -o"),
    "theirs": (
        {"theirs/thesis.txt": "mine"},
        r"theirs: holds files that mod-export did not write \(thesis\.txt\); name",
    ),
    "app": ({"app/manifest.json": '{"name": "an app"}'}, r"manifest\.json: not a manifest of mod-export; name another"),
    "cut": (
        {"cut/manifest.json": '{"format": "mod-exp'},
        r"manifest\.json: damaged \(.*\); delete the folder and build",
    ),
    "/proc/self/out": ({}, r"/proc/self/out: cannot write "),
}
"""Folder in which a build is refused -> files that are there, and the message. The model and the rest are sound."""


@pytest.mark.parametrize("out", OUTS)
def test_bad_output_folder(out: str, tmp_path: Path, small_folder: Path) -> None:
    files, message = OUTS[out]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    refused(invoke("build", small_folder / "small.pt", "-o", tmp_path / out), message)
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_that_is_not_writable(tmp_path: Path, small_folder: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    message = r"closed/out: cannot write in .*/closed; name another folder with -o"
    refused(invoke("build", small_folder / "small.pt", "-o", tmp_path / "closed/out"), message)


@pytest.mark.slow
def test_full_disk(tmp_path: Path, small_folder: Path) -> None:
    # A file may not grow beyond 20 kB; the weights have 39 kB.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))"
    checkpoint, fast, out = small_folder / "small.pt", small_folder / "small.toml", tmp_path / "out"
    found = command(
        "build", checkpoint, "-c", fast, "-o", out, "--report", tmp_path / "r.json", code=limit, env=uncovered()
    )
    assert found.returncode == 2, found.stderr
    assert re.search(r"weights-float32\.data: .*File too large", found.stderr), found.stderr
    assert "stage onnx failed; done before it: load, capture" in found.stderr
    assert found.stdout == ""
    assert not (tmp_path / "r.json").exists()
    assert {path.name for path in out.iterdir()} == {"manifest.json", ".lock"}
    refused(invoke("validate", out), "out: the build was not finished; run the same build again, it resumes\n$")
    resumed = invoke("build", checkpoint, "-c", fast, "-o", out)
    assert resumed.exit_code == 0, resumed.output
    assert re.search(r"\* capture +reused", resumed.stderr)


# Build folders that were damaged after the build.


def _replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text((root / name).read_text().replace(old, new))


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
        _replace("manifest.json", '"format_version": 3', '"format_version": 4'),
        r"moved: format version 4, and this release reads 3; it needs a newer mod-export",
    ),
    "unfinished": (
        lambda root: rewrite_manifest(root, lambda manifest: manifest.pop("files")),
        "moved: the build was not finished; run the same build again, it resumes",
    ),
    "engine": (lambda root: flip(root / ENGINE), rf"moved: {ENGINE} has been changed since it was built"),
    "weights": (lambda root: flip(root / WEIGHTS), rf"moved: {WEIGHTS} has been changed since it was built"),
    "no graph": (
        lambda root: (root / GRAPH).unlink(),
        rf"moved: {GRAPH} is missing or not a regular file\. Build again to repair it",
    ),
    "cut report": (
        lambda root: os.truncate(root / "report.json", 1000),
        r"moved: report\.json has 1000 bytes, \d+ were written\. Build again to repair it",
    ),
    "no report": (
        lambda root: (root / "report.json").unlink(),
        r"moved: report\.json is missing or not a regular file",
    ),
}
OF_ENGINES = {"engine", "weights", "no graph"}
FINDINGS = {*OF_ENGINES, "cut report", "no report"}
"""`validate` reports these and continues, to find the place of the fault."""


# All commands open a folder with the same function, so each of them shows another fault of the manifest.
OPENING = ["no manifest", "cut manifest", "edited manifest", "other version", "unfinished"]
COMMANDS = ["bench", "report", "inspect", "validate"]
REFUSING = [(COMMANDS[i % 4], damage) for i, damage in enumerate(OPENING)]
REFUSING += [("validate", "unfinished"), ("inspect", "no manifest")]
REFUSING += [(name, damage) for name in ("bench", "report", "inspect") for damage in sorted(FINDINGS)]


@pytest.mark.parametrize(("name", "damage"), REFUSING)
def test_a_damaged_folder_is_refused(name: str, damage: str, small_copy: Path) -> None:
    change, message = DAMAGE[damage]
    change(small_copy)
    before = contents(small_copy)
    found = invoke(name, small_copy)
    if name == "report" and damage in OF_ENGINES:
        # Measurements can still be shown without the engines.
        assert found.exit_code == 0
        return
    if name == "inspect" and damage == "no manifest":
        message = r"moved: no config\.json in this folder"
    refused(found, message)
    assert contents(small_copy) == before


@pytest.mark.fast("damages1")
@pytest.mark.parametrize("damages", [("engine", "cut report"), ("weights", "no graph", "no report")])
def test_validate_reports_damaged_files(damages: tuple[str, ...], small_copy: Path) -> None:
    """Each file is listed with its path and its problem."""
    for damage in damages:
        DAMAGE[damage][0](small_copy)
    found = invoke("validate", small_copy, "--target", "ort-cpu")
    assert found.exit_code == 4, found.output
    for damage in damages:
        path, _, problem = DAMAGE[damage][1].removeprefix("moved: ").partition(r"\. ")[0].partition(" ")
        assert re.search(f"- {path}: {problem}", found.stdout), found.stdout
    assert found.stdout.endswith("FAIL\n")


def test_not_a_build_folder(checkpoint: Path, tmp_path: Path) -> None:
    for name, path in (("validate", tmp_path / "absent"), ("bench", checkpoint), ("report", checkpoint)):
        refused(invoke(name, path), f"{path}: no manifest.json here, so this is not a build folder of mod-export\n$")


# Sound folders that cannot be validated or measured.


@pytest.mark.parametrize("name", ["validate", "bench"])
def test_targets_that_are_not_in_the_folder_or_cannot_run(name: str, small_copy: Path) -> None:
    targets = ["--target", "inductor", "--target", "ort-cpu", "--target", "tensorrt"]
    refused(invoke(name, small_copy, *targets), r"moved: holds no engine for inductor, tensorrt; built for ort-cpu\n$")
    available = ENGINES["ort-cuda"].availability()
    if not available.runs:
        rewrite_manifest(small_copy, lambda manifest: [row.update(target="ort-cuda") for row in manifest["engines"]])
        refused(invoke(name, small_copy), rf"moved: no engine runs here: ort-cuda: {re.escape(available.reason)}\n$")


OTHER_MAKE = r"manifest\.json: not as this release writes it \({}\); open it with the release that built it"
CONTRADICTS = r"manifest\.json: contradicts itself: {}.*; build again"
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no such architecture": (
        lambda manifest: manifest["models"]["mod"].update(architecture="mamba"),
        "^error: architecture 'mamba' is not installed here; known: mod_transformer\n$",
    ),
    "an engine that is no file": (
        lambda manifest: manifest["files"].pop(ENGINE),
        CONTRADICTS.format(f"{ENGINE} is no file of it"),
    ),
    "graphs that it does not describe": (
        lambda manifest: manifest.update(graphs=[]),
        CONTRADICTS.format(r"graphs/dense-b1s16\.onnx is nothing that it describes; graphs/dense-b1s16\.ort-cpu"),
    ),
    "two dtypes for one engine": (
        lambda manifest: manifest["engines"][0].update(dtype="float16"),
        CONTRADICTS.format(r"\S+ is listed as float16 and its graph as float32"),
    ),
    "an engine without weights": (
        lambda manifest: manifest["engines"][0].update(weights=None),
        CONTRADICTS.format(r"engines/ort-cpu/\S+ has no weights file"),
    ),
    "a spec that the weights do not fit": (
        lambda manifest: manifest["models"]["mod"]["spec"].update(tie_embeddings=False),
        r"manifest\.json: the reference cannot be rebuilt from spec and weights \(Error.*\); build again",
    ),
    "no exporters": (lambda manifest: manifest.pop("exporters"), OTHER_MAKE.format("exporters: Field required")),
    "no dense model": (lambda manifest: manifest["models"].pop("dense"), CONTRADICTS.format("dense is not described")),
    "an engine of no graph": (
        lambda manifest: manifest["engines"][0].update(bucket={"batch": 7, "seq": 7}),
        CONTRADICTS.format(r"engines/ort-cpu/\S+ was built from no graph of it"),
    ),
    "weights that are no file": (
        lambda manifest: manifest["models"]["dense"].update(weights="graphs/other-float32.data"),
        CONTRADICTS.format(r"graphs/other-float32\.data is no file of it"),
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
"""Manifests that `validate` cannot work with, and the messages."""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_cannot_be_validated(name: str, small_copy: Path) -> None:
    change, message = MANIFESTS[name]
    rewrite_manifest(small_copy, change)
    refused(invoke("validate", small_copy), message)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors[DOWN.replace("layers.2", "layers.0")]
    save_file(tensors, path)


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _without_a_tensor])
def test_without_its_weights_there_is_no_reference(small_copy: Path, damage: Callable[[Path], object]) -> None:
    damage(small_copy / WEIGHTS)
    message = rf"moved/{WEIGHTS}: the reference cannot be rebuilt from it \(.*\); build again\n$"
    refused(invoke("validate", small_copy), message)


def test_but_the_checkpoint_is_one(small_copy: Path, small_folder: Path) -> None:
    (small_copy / WEIGHTS).unlink()
    found = validate_folder(small_copy, None, ["ort-cpu"], small_folder / "small.pt")
    assert WEIGHTS in failed(found)
    assert not any(row.passed for row in found.rows(ParityRow))


def test_another_checkpoint(small_folder: Path, tmp_path: Path) -> None:
    spec = load_checkpoint(small_folder / "small.pt").spec
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(spec, 1))
    message = (
        r"other\.pt: is not the checkpoint that .*build was built from "
        r"\(SHA-256 [0-9a-f]{12}, expected [0-9a-f]{12}\)\n$"
    )
    refused(invoke("validate", small_folder / "build", "--model", tmp_path / "other.pt"), message)
    absent = invoke("validate", small_folder / "build", "--model", tmp_path / "absent.pt")
    refused(absent, r"absent\.pt: no such file or folder")
