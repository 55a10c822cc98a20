"""Both forms of a checkpoint: it reads back as it was written, and a failed write changes nothing."""

import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMS, SPEC, assert_same, checkpoint, refuses
from tiny_models import lively_checkpoint, make_spec

from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint, written_beside
from mod_models.spec import EveryNth, ModelSpec
from mod_models.transformer import Transformer

# Round trips.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_round_trip(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    """Weights are stored unchanged, and computed in float32."""
    weights = {name: tensor.to(dtype) for name, tensor in checkpoint().weights.items()}
    save_checkpoint(tmp_path / form, Checkpoint(spec=SPEC, weights=weights))
    found = load_checkpoint(tmp_path / form)
    assert_same(found, Checkpoint(spec=SPEC, weights=weights))
    assert {parameter.dtype for parameter in found.module().parameters()} == {torch.float32}
    assert torch.equal(found.module().embedding.weight, weights["embedding.weight"].float())


@pytest.mark.parametrize("spec", [make_spec(routing=None), make_spec(layers=EveryNth(), capacity=0.5)])
def test_one_form_into_the_other(tmp_path: Path, spec: ModelSpec) -> None:
    first = lively_checkpoint(spec)
    save_checkpoint(tmp_path / "a.pt", first)
    save_checkpoint(tmp_path / "b", load_checkpoint(tmp_path / "a.pt"))
    assert_same(load_checkpoint(tmp_path / "b"), first)


def test_module_shares_float32_weights_and_is_ready_to_run() -> None:
    saved_checkpoint = checkpoint()
    module = saved_checkpoint.module()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == saved_checkpoint.weights[name].data_ptr()


def test_a_view_is_stored_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    """Tensors are views of a larger one, and one tensor has two names, as in a converted model."""
    original = checkpoint()
    fused = torch.cat([original.weights["embedding.weight"], torch.zeros(10_000, 8)])
    weights = {**original.weights, "embedding.weight": fused[:16], "head.weight": fused[:16]}
    weights["norm.weight"] = torch.nn.Parameter(fused[:8, 0])  # neither contiguous nor detached
    for form in FORMS:
        save_checkpoint(tmp_path / form, Checkpoint(spec=SPEC, weights=weights))
        loaded = load_checkpoint(tmp_path / form)
        assert all(torch.equal(loaded.weights[name], weights[name]) for name in weights)
    assert (tmp_path / "model.pt").stat().st_size < 100_000
    assert (tmp_path / "folder" / "model.safetensors").stat().st_size < 100_000


def test_random_checkpoint_is_a_function_of_spec_and_seed() -> None:
    before = torch.random.get_rng_state()
    assert_same(random_checkpoint(SPEC, 3), random_checkpoint(SPEC, 3))
    assert torch.equal(torch.random.get_rng_state(), before)
    other_seed = random_checkpoint(SPEC, 4).weights["embedding.weight"]
    assert not torch.equal(random_checkpoint(SPEC, 3).weights["embedding.weight"], other_seed)
    trained_from = Transformer(SPEC)
    trained_from.init_weights(torch.Generator().manual_seed(3))
    assert_same(random_checkpoint(SPEC, 3), Checkpoint(spec=SPEC, weights=trained_from.state_dict()))


# Writing.


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits files to `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 3000])  # not even the header; the header and some of the weights
@pytest.mark.parametrize("form", FORMS)
def test_a_failed_write_changes_nothing(tmp_path: Path, form: str, size: int) -> None:
    """The old checkpoint stays, and there is no other file."""
    save_checkpoint(tmp_path / form, checkpoint())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with largest_file(size), pytest.raises(OSError, match=r"File too large"):
        save_checkpoint(tmp_path / form, random_checkpoint(make_spec(), 0))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == [form]
    assert_same(load_checkpoint(tmp_path / form), checkpoint())


def test_a_failed_first_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    for form in FORMS:
        with largest_file(3000), pytest.raises(OSError, match=r"could not be written \(.*File too large"):
            save_checkpoint(tmp_path / form, checkpoint())
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
    refuses(tmp_path / "folder", "no config.json in this folder")


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "model.pt", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match=r"Not a directory|File exists"):
            save_checkpoint(path, checkpoint())


def test_an_interrupted_write_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("old")

    def write() -> None:
        with written_beside(path) as file:
            file.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


KILLED_BETWEEN_RENAMES = """
import os, pathlib, sys
from mod_models.checkpoint import load_checkpoint, save_checkpoint

def audit(event, arguments):  # as kill -9 would, once the weights are in their place and the config is not
    if event == "os.rename" and str(arguments[1]).endswith("config.json"):
        os._exit(9)

other = load_checkpoint(pathlib.Path(sys.argv[1]))
sys.addaudithook(audit)
save_checkpoint(pathlib.Path(sys.argv[2]), other)
"""


@pytest.mark.slow
def test_killed_between_weights_and_spec(tmp_path: Path) -> None:
    """After the kill, the folder is no checkpoint; it never has the weights of one and the spec of another."""
    save_checkpoint(tmp_path / "other.pt", random_checkpoint(SPEC, 1))
    save_checkpoint(tmp_path / "folder", checkpoint())
    command = [sys.executable, "-c", KILLED_BETWEEN_RENAMES, str(tmp_path / "other.pt"), str(tmp_path / "folder")]
    assert subprocess.run(command, check=False).returncode == 9
    refuses(tmp_path / "folder", "no config.json in this folder")
    save_checkpoint(tmp_path / "folder", random_checkpoint(SPEC, 1))
    assert_same(load_checkpoint(tmp_path / "folder"), random_checkpoint(SPEC, 1))


@pytest.mark.parametrize("form", FORMS)
def test_files_have_the_permissions_of_any_other_file(tmp_path: Path, form: str) -> None:
    (tmp_path / "other").write_text("")
    save_checkpoint(tmp_path / form, checkpoint())
    expected = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()} == {expected}
