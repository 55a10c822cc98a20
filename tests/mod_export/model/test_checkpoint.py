from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from packages import register

from mod_export.environment import source_digest
from mod_export.errors import CheckpointError
from mod_export.folder.workspace import Workspace
from mod_export.model.architecture import Architecture
from mod_export.model.checkpoint import (
    architectures,
    look_at_checkpoint,
    model_from_checkpoint,
    model_from_weights,
    sha256_of,
)
from mod_export.model.model import Model
from mod_export.model.request import Request
from mod_export.model.transformer import ModTransformer
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec


@pytest.fixture(scope="session")
def folder_checkpoint(shared_folder: Path, tiny_spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as config.json and model.safetensors."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    save_checkpoint(path, random_checkpoint(tiny_spec, 0))
    return path


def test_the_registered_architectures() -> None:
    registered = architectures()
    assert "mod_transformer" in registered
    for name, architecture in registered.items():
        assert isinstance(architecture, Architecture)
        assert architecture.name == name


def test_no_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        CheckpointError, match=r"no architecture is registered in the entry-point group mod_export\.arch"
    ):
        architectures()


def test_an_architecture_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from mod_export.model.transformer import ModTransformer\nARCHITECTURE = ModTransformer()\n"
    register(monkeypatch, tmp_path, "other", "other_architecture", code)
    assert isinstance(architectures()["other"], ModTransformer)


@pytest.mark.parametrize(
    ("module", "code", "reason"),
    [("absent_module", None, "No module named 'absent_module'"), ("empty_module", "", "no attribute 'ARCHITECTURE'")],
)
def test_a_broken_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, code: str | None, reason: str
) -> None:
    register(monkeypatch, tmp_path, "broken", module, code)
    with pytest.raises(
        CheckpointError,
        match=rf"architecture 'broken' cannot be loaded from {module}:ARCHITECTURE \(.*{reason}.*\); repair or remove",
    ):
        architectures()


def test_an_object_of_another_class_is_no_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, tmp_path, "another", "another_module", "ARCHITECTURE = object()\n")
    with pytest.raises(
        CheckpointError,
        match=r"'another': another_module:ARCHITECTURE is no mod_export\.model\.architecture\.Architecture; repair or",
    ):
        architectures()


def test_a_file_and_a_folder_give_the_same_model(model: Model, folder_checkpoint: Path) -> None:
    restored = model_from_checkpoint(folder_checkpoint)
    assert (restored.name, model.name) == ("tiny", "tiny")
    assert restored.origin.architecture == model.origin.architecture == "mod_transformer"
    assert restored.parameters == model.parameters == sum(t.numel() for t in model.weights.values())
    assert restored.spec == model.spec
    assert all(torch.equal(restored.weights[name], tensor) for name, tensor in model.weights.items())
    assert restored.origin.checkpoint_sha256 != model.origin.checkpoint_sha256
    assert model.origin.code_sha256 == source_digest("mod_models")


def test_a_model_that_routes_no_depth_has_no_dense_baseline_but_itself(
    model: Model, tiny_spec: ModelSpec, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "dense.pt", random_checkpoint(tiny_spec.dense(), 0))
    assert model.dense() is not None
    assert model_from_checkpoint(tmp_path / "dense.pt").dense() is None


def test_the_dense_baseline_has_the_same_weights_without_routers(model: Model) -> None:
    dense = model.dense()
    assert dense is not None
    assert model.k_by_layer(64) == {1: 8, 3: 8}
    assert dense.k_by_layer(64) == {}
    assert set(model.weights) - set(dense.weights) == {f"layers.{layer}.router.projection.weight" for layer in (1, 3)}


def test_another_capacity_is_the_same_checkpoint(model: Model, checkpoint: Path) -> None:
    changed, baseline = Request.checkpoint(checkpoint, capacity=0.5).models()
    assert changed.origin == model.origin
    assert (changed.capacity, baseline) == (0.5, None)


def test_weights_restore_the_model(model: Model) -> None:
    again = model_from_weights("mod_transformer", model.spec, model.weights)
    ids_BS, lengths_B = torch.arange(32)[None] * 7 % 256, torch.tensor([30])
    with torch.no_grad():
        expected, restored = (source.module()(ids_BS, lengths_B) for source in (model, again))
    assert all(torch.equal(a, b) for a, b in zip(expected, restored, strict=True))


def test_weights_that_restore_nothing(model: Model) -> None:
    for name, changes, message in (
        ("gone", {}, "architecture 'gone' is not installed here; known: mod_transformer"),
        ("mod_transformer", {"n_heads": 0}, r"the build folder's spec cannot be restored: spec\.n_heads: expected"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_from_weights(name, {**model.spec, **changes}, model.weights)


def test_an_unknown_architecture_is_named(tmp_path: Path, checkpoint: Path, folder_checkpoint: Path) -> None:
    message = (
        r": names the architecture 'mixture_of_sunsets', which nothing here provides; known: mod_transformer\. "
        r"Install the package that registers it in the entry-point group mod_export\.architectures"
    )
    data = torch.load(checkpoint, weights_only=True)
    torch.save({**data, "architecture": "mixture_of_sunsets"}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=message):
        model_from_checkpoint(tmp_path / "foreign.pt")
    foreign = shutil.copytree(folder_checkpoint, tmp_path / "foreign")
    header = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**header, "architecture": "mixture_of_sunsets"}))
    with pytest.raises(CheckpointError, match=message):
        model_from_checkpoint(foreign)


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)"):
        look_at_checkpoint(tmp_path / ("x" * 300))
    secret = tmp_path / "secret.pt"
    shutil.copy(checkpoint, secret)
    secret.chmod(0)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        with pytest.raises(CheckpointError, match=r"secret\.pt: cannot be read \(Permission denied\)"):
            look_at_checkpoint(secret)
    finally:
        os.seteuid(user)


def test_the_hash_of_a_folder_is_of_names_and_contents(folder_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()
    copy = shutil.copytree(folder_checkpoint, tmp_path / "copy")
    assert sha256_of(copy) == sha256_of(folder_checkpoint)
    (copy / "deep").mkdir()
    (copy / "deep/shard").write_text("a")
    first = sha256_of(copy)
    (copy / "deep/shard").rename(copy / "deep/other")
    second = sha256_of(copy)
    (copy / "deep/other").write_text("b")
    assert len({sha256_of(folder_checkpoint), first, second, sha256_of(copy)}) == 4


def test_a_build_folder_is_no_part_of_the_checkpoint_that_holds_it(folder_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder_checkpoint, tmp_path / "copy")
    (copy / "manifest.json").write_text("{}")  # It is not a build's, so it belongs to the checkpoint.
    (copy / "shards").mkdir()
    (copy / "shards/manifest.json").write_text("{}")
    before = sha256_of(copy)
    with Workspace(copy / "build/copy") as workspace:
        workspace.step("one", {}, ["graphs/a"], lambda paths: paths[0].write_text("a"))
        workspace.close({})
    assert sha256_of(copy) == before
    (copy / "shards/manifest.json").write_text("[]")
    assert sha256_of(copy) != before


def test_the_checkpoint_keeps_its_name(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copy(checkpoint, tmp_path / "my.model.v2.pt")
    assert model_from_checkpoint(tmp_path / "my.model.v2.pt").name == "my.model.v2"
