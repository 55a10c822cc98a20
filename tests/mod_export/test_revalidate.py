"""`mod-export validate` on a finished build folder: moved, damaged, with and without its checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import command, contents, invoke
from manifests import file_entry, rewrite_manifest
from safetensors.torch import load_file, save_file

from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.errors import BuildFolderError, CheckpointError, TargetError
from mod_export.graph.digests import digests_of_file
from mod_export.revalidate import Validation, validate_folder
from mod_export.workspace import read_manifest
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec

ENGINE = "engines/ort-cpu/mod-b1s64-float32.onnx"
GRAPH = "graphs/dense-b2s32.onnx"
WEIGHTS = "graphs/weights-float32.data"
DOWN = "layers.2.mlp.down_proj.weight"


def failed(found: Validation) -> set[str]:
    """Files that something was found in."""
    return {row.path for row in found.structure if not row.passed}


def flip(path: Path) -> None:
    """Changes one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_moved_folder_passes_without_its_checkpoint(built_copy: Path) -> None:
    found = validate_folder(built_copy, None, ())
    assert found.verdict.status == "pass", found.verdict.reasons
    assert failed(found) == set()
    manifest = read_manifest(built_copy)
    checked: dict[str, set[str]] = {}
    for row in found.structure:
        checked.setdefault(row.path, set()).update(row.checked)
    assert checked.keys() == manifest["files"].keys()
    for path, what in checked.items():
        assert "the bytes that were built" in what
        assert ("what a fresh export gives" in what) == path.endswith(".onnx")
    assert any("tensors are the checkpoint's, bit for bit" in what for what in checked[WEIGHTS])
    cells = [("ort-cpu", bucket, kind) for bucket in ("b1s64", "b2s32") for kind in ("mod", "dense")]
    portable = [("portable", bucket, kind) for _, bucket, kind in cells]
    assert [(row.target, row.bucket, row.model) for row in found.parity] == cells + portable
    assert [(row.target, row.bucket, row.model) for row in found.causality] == cells
    assert [row.causal for row in found.causality] == [False, True] * 2
    # What was found at the time is found again.
    told = json.loads((built_copy / "report.json").read_text())
    for row, then in zip(found.parity, told["parity"], strict=True):
        assert row.routing["agreed"] == then["routing"]["agreed"]
        assert row.error["max_abs"] == pytest.approx(then["error"]["max_abs"])


def test_a_configuration_of_ones_own(built_copy: Path, config: BuildConfig) -> None:
    gate = config.parity.float32.model_copy(update={"noise_rms": 0.0})
    strict = config.model_copy(update={"parity": config.parity.model_copy(update={"float32": gate, "suffixes": 2})})
    found = validate_folder(built_copy, strict, ["ort-cpu"])
    assert found.verdict.status == "fail"
    assert all("root mean square error" in reason for reason in found.verdict.reasons)
    assert {row.suffixes for row in found.causality} == {2}
    # Nothing is wrong with the graph, so that no place is named.
    assert all(row.located is None for row in found.parity)


def test_the_command_prints_what_was_found(built_copy: Path) -> None:
    said = invoke("validate", built_copy)
    assert (said.exit_code, said.stderr) == (0, "")
    assert said.stdout.splitlines()[-1] == "PASS"
    assert "weights are the checkpoint's, bit for bit" in said.stdout
    assert "mod: must not be used for autoregressive sampling: " in said.stdout


@pytest.mark.parametrize("name", [ENGINE, "report.html"])
def test_a_changed_file_is_a_finding_with_its_path(name: str, built_copy: Path) -> None:
    flip(built_copy / name)
    said = invoke("validate", built_copy)
    assert (said.exit_code, said.stderr) == (4, ""), said.output
    assert f"  - {name}: has been changed since it was built (SHA-256 differs)\n" in said.stdout
    assert said.stdout.splitlines()[-1] == "FAIL"


@pytest.mark.parametrize("name", [ENGINE, GRAPH])
def test_a_missing_file_is_one_too(name: str, built_copy: Path) -> None:
    (built_copy / name).unlink()
    found = validate_folder(built_copy, None, ())
    assert f"{name}: is missing or not a regular file" in found.verdict.reasons
    assert failed(found) == {name}
    # What was not touched still passes.
    (row,) = [row for row in found.parity if not row.passed]
    assert (row.target, row.bucket, row.model) == (
        ("ort-cpu", "b1s64", "mod") if name == ENGINE else ("portable", "b2s32", "dense")
    )


def change_weight(root: Path, *, sign: bool) -> None:
    tensors = load_file(root / WEIGHTS)
    tensors[DOWN][1, 2] *= 1.01
    save_file(tensors, root / WEIGHTS)
    if sign:
        rewrite_manifest(root, lambda manifest: manifest["files"].update({WEIGHTS: file_entry(root / WEIGHTS)}))


@pytest.mark.parametrize("sign", [True, False])
def test_one_element_of_one_weight(built_copy: Path, sign: bool) -> None:
    """The reference is rebuilt from the same file, so that nothing but its fingerprint can give it away."""
    change_weight(built_copy, sign=sign)
    found = validate_folder(built_copy, None, ())
    assert f"{WEIGHTS}: {DOWN}: not the checkpoint's values" in found.verdict.reasons
    assert (f"{WEIGHTS}: has been changed since it was built (SHA-256 differs)" in found.verdict.reasons) != sign
    assert failed(found) == {WEIGHTS}
    assert all(row.passed for row in found.parity)


def test_with_the_checkpoint_a_changed_weight_is_seen_in_the_logits_too(built_copy: Path, checkpoint: Path) -> None:
    tensors = load_file(built_copy / WEIGHTS)
    tensors[DOWN] *= 1.5
    save_file(tensors, built_copy / WEIGHTS)
    found = validate_folder(built_copy, None, (), checkpoint)
    assert f"{WEIGHTS}: {DOWN}: not the checkpoint's values" in found.verdict.reasons
    assert not any(row.passed for row in found.parity)


def test_the_checkpoint_it_was_built_from(built_copy: Path, checkpoint: Path) -> None:
    said = invoke("validate", built_copy, "--model", checkpoint, "--target", "ort-cpu")
    assert (said.exit_code, said.stderr) == (0, ""), said.output


def test_another_checkpoint(built: Path, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(tiny_spec, 1))
    message = (
        r"other\.pt: is not the checkpoint that .*built was built from \(SHA-256 [0-9a-f]{12}, expected [0-9a-f]{12}\)$"
    )
    with pytest.raises(CheckpointError, match=message):
        validate_folder(built, None, (), tmp_path / "other.pt")
    said = invoke("validate", built, "--model", tmp_path / "other.pt")
    assert (said.exit_code, said.stdout) == (2, "")


def test_a_checkpoint_that_is_not_there(built: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.pt: no such file or folder"):
        validate_folder(built, None, (), tmp_path / "absent.pt")


def test_the_folder_says_which_capacity(built_copy: Path, checkpoint: Path) -> None:
    """A sweep builds a checkpoint at capacities that are not its own."""

    def quarter(manifest: dict[str, Any]) -> None:
        manifest["models"]["mod"]["spec"]["routing"]["capacity"] = 0.25
        manifest["exporters"]["torch"] = "1.0"

    rewrite_manifest(built_copy, quarter)
    found = validate_folder(built_copy, None, ["ort-cpu"], checkpoint)
    routed, whole = found.parity[:2]
    reason = "text: layer 1 routing: the engine gives routed positions of shape [1, 8], expected [1, 16]"
    assert reason in routed.reasons
    assert whole.passed


def unreadable(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def without(path: Path) -> None:
    tensors = load_file(path)
    del tensors[DOWN]
    save_file(tensors, path)


@pytest.mark.parametrize("damage", [Path.unlink, unreadable, without])
def test_without_its_weights_there_is_no_reference(built_copy: Path, damage: Callable[[Path], object]) -> None:
    damage(built_copy / WEIGHTS)
    message = rf"moved/{WEIGHTS}: the reference cannot be rebuilt from it \(.*\); build again$"
    with pytest.raises(BuildFolderError, match=message):
        validate_folder(built_copy, None, ())


@pytest.mark.parametrize("damage", [Path.unlink, unreadable])
def test_but_the_checkpoint_is_one(built_copy: Path, checkpoint: Path, damage: Callable[[Path], object]) -> None:
    damage(built_copy / WEIGHTS)
    found = validate_folder(built_copy, None, (), checkpoint)
    assert WEIGHTS in failed(found)
    assert not any(row.passed for row in found.parity)


def test_versions_that_would_export_otherwise_are_not_held_against_it(built_copy: Path) -> None:
    """Another torch writes other graphs. What can be said without it still is."""
    rewrite_manifest(built_copy, lambda manifest: manifest["exporters"].update(torch="1.0"))
    found = validate_folder(built_copy, None, ["ort-cpu"])
    assert found.verdict.status == "pass", found.verdict.reasons
    assert not any("what a fresh export gives" in row.checked for row in found.structure)
    flip(built_copy / ENGINE)
    assert ENGINE in failed(validate_folder(built_copy, None, ["ort-cpu"]))


def with_package(root: Path) -> Callable[[dict[str, Any]], None]:
    """A compiled engine beside the others, and not the one that was built."""
    path = "engines/inductor/mod-b1s64-float32.pt2"
    (root / path).parent.mkdir()
    (root / path).write_bytes(b"built")
    entry = file_entry(root / path)
    (root / path).write_bytes(b"other")

    def change(manifest: dict[str, Any]) -> None:
        (engine,) = [one for one in manifest["engines"] if one["path"] == ENGINE]
        manifest["engines"].append({**engine, "target": "inductor", "path": path})
        manifest["files"][path] = entry

    return change


def test_compiled_code_that_was_changed_is_not_run(built_copy: Path) -> None:
    if not ENGINES["inductor"].availability().runs:
        pytest.skip("torch is not here")
    rewrite_manifest(built_copy, with_package(built_copy))
    found = validate_folder(built_copy, None, ["inductor"])
    (row,) = found.parity
    assert row.reasons == ["not run: it is compiled code, and not the file that was built"]
    assert (row.target, row.artifact, row.passed) == ("inductor", "engines/inductor/mod-b1s64-float32.pt2", False)
    assert found.causality == []
    assert any(
        reason == "inductor b1s64 float32 mod: parity: not run: it is compiled code, and not the file that was built"
        for reason in found.verdict.reasons
    )


def test_a_target_that_is_not_in_the_folder(built: Path) -> None:
    with pytest.raises(TargetError, match=r"built: holds no engine for inductor, abacus; built for ort-cpu$"):
        validate_folder(built, None, ["inductor", "ort-cpu", "abacus"])


def test_a_target_that_cannot_run_here(built_copy: Path) -> None:
    found = ENGINES["ort-cuda"].availability()
    if found.runs:
        pytest.skip("CUDA runs here")

    def elsewhere(manifest: dict[str, Any]) -> None:
        for engine in manifest["engines"]:
            engine["target"] = "ort-cuda"

    rewrite_manifest(built_copy, elsewhere)
    with pytest.raises(TargetError, match=rf"moved: cannot run here: ort-cuda: {re.escape(found.reason)}$"):
        validate_folder(built_copy, None, ())


def test_an_unfinished_build(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest.pop("files"))
    with pytest.raises(
        BuildFolderError, match=r"moved: the build was not finished; run the same build again, it resumes"
    ):
        validate_folder(built_copy, None, ())


def test_an_architecture_that_is_not_installed(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest["models"]["mod"].update(architecture="mamba"))
    said = invoke("validate", built_copy)
    assert said.exit_code == 2
    assert said.stderr == "error: architecture 'mamba' is not installed here; known: mod_transformer\n"


def test_the_folder_is_left_as_it_was(built: Path, built_copy: Path) -> None:
    found = validate_folder(built_copy, None, ["ort-cpu"])
    assert {row.target for row in found.parity} == {"ort-cpu"}
    assert contents(built_copy) == contents(built)


def _forget_engine(manifest: dict[str, Any]) -> None:
    del manifest["files"][ENGINE]


def _forget_graphs(manifest: dict[str, Any]) -> None:
    manifest["graphs"] = []


def _relabel(manifest: dict[str, Any]) -> None:
    manifest["engines"][0]["dtype"] = "float16"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_forget_engine, re.escape(f"{ENGINE} is no file of it")),
        (_forget_graphs, r"graphs/dense-b1s64\.onnx is nothing that it describes; graphs/dense-b1s64\.ort-cpu"),
        (_relabel, r"\S+ is listed as float16 and its graph as float32"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    built_copy: Path, change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    rewrite_manifest(built_copy, change)
    with pytest.raises(BuildFolderError, match=rf"manifest\.json: contradicts itself: {problem}.*; build again"):
        validate_folder(built_copy, None, ())


def test_a_spec_that_the_weights_do_not_fit(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest["models"]["mod"]["spec"].update(tie_embeddings=False))
    message = r"manifest\.json: the reference cannot be rebuilt from spec and weights \(Error.*\); build again"
    with pytest.raises(BuildFolderError, match=message):
        validate_folder(built_copy, None, ())


def _no_exporters(manifest: dict[str, Any]) -> None:
    del manifest["exporters"]


def _no_twin(manifest: dict[str, Any]) -> None:
    del manifest["models"]["dense"]


def _seed_in_words(manifest: dict[str, Any]) -> None:
    manifest["config"]["seed"] = "one"


def _no_bucket(manifest: dict[str, Any]) -> None:
    manifest["engines"][0]["bucket"] = None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_no_exporters, "no 'exporters'"),
        (_no_twin, "no 'dense'"),
        (_seed_in_words, "1 validation error for BuildConfig"),
        (_no_bucket, "'NoneType' object is not subscriptable"),
    ],
)
def test_a_manifest_of_another_make(built_copy: Path, change: Callable[[dict[str, Any]], None], what: str) -> None:
    rewrite_manifest(built_copy, change)
    message = rf"manifest\.json: not as this release writes it \({what}\); validate it with the release that built it"
    with pytest.raises(BuildFolderError, match=message):
        validate_folder(built_copy, None, ())


def test_an_engine_without_weights(built_copy: Path) -> None:
    rewrite_manifest(built_copy, lambda manifest: manifest["engines"][0].update(weights=None))
    with pytest.raises(BuildFolderError, match=r"contradicts itself: engines/ort-cpu/\S+ has no weights file"):
        validate_folder(built_copy, None, ())


def test_weights_and_fingerprints_changed_together_are_found_with_the_checkpoint(
    built_copy: Path, checkpoint: Path
) -> None:
    tensors = load_file(built_copy / WEIGHTS)
    tensors[DOWN][0, 0] += 1e-6
    save_file(tensors, built_copy / WEIGHTS)

    def sign(manifest: dict[str, Any]) -> None:
        manifest["files"][WEIGHTS] = file_entry(built_copy / WEIGHTS)
        manifest["weight_digests"][WEIGHTS] = digests_of_file(built_copy / WEIGHTS)

    rewrite_manifest(built_copy, sign)
    assert validate_folder(built_copy, None, ()).verdict.status == "pass"
    found = validate_folder(built_copy, None, (), checkpoint)
    assert f"{WEIGHTS}: {DOWN}: not the checkpoint's values" in found.verdict.reasons


def test_what_was_not_looked_at_is_said(built_copy: Path) -> None:
    def other(manifest: dict[str, Any]) -> None:
        manifest["exporters"]["torch"] = "1.0"

    rewrite_manifest(built_copy, other)
    found = invoke("validate", built_copy)
    assert found.exit_code == 0, found.output
    note = "graphs were not compared with a fresh export: other versions are installed than those that built them"
    assert note in found.stdout
    assert not any(
        "what a fresh export gives" in row.checked for row in validate_folder(built_copy, None, ()).structure
    )


def test_validation_without_pytorch_says_what_is_missing(built_copy: Path) -> None:
    found = command("validate", built_copy, code="sys.modules['torch'] = None")
    assert found.returncode == 2, found.stderr
    assert re.match(
        r"error: validate compares with PyTorch, and torch cannot be imported here \(.*\); install "
        r"mod-export\[build\], or use bench",
        found.stderr,
    )


def test_engines_and_graphs_that_nothing_was_run_of_are_said(built_copy: Path) -> None:
    """A graph in bfloat16 has no kernels on a CPU: it is listed, and not passed over in silence."""
    half = "graphs/mod-b1s64.tensorrt-rtx.bfloat16.onnx"
    data = (built_copy / "graphs/mod-b1s64.onnx").read_bytes()
    (built_copy / half).write_bytes(data + b"\x00")

    def add(manifest: dict[str, Any]) -> None:
        manifest["files"][half] = file_entry(built_copy / half)
        graph = next(one for one in manifest["graphs"] if one["path"] == "graphs/mod-b1s64.onnx")
        manifest["graphs"].append({**graph, "path": half, "dtype": "bfloat16", "target": "tensorrt-rtx"})

    assert validate_folder(built_copy, None, ()).notes == []
    rewrite_manifest(built_copy, add)
    note = "not run: 1 bfloat16 graphs of tensorrt-rtx; of these only the files were looked at"
    assert note in validate_folder(built_copy, None, ()).notes
