"""Files that are no checkpoint are refused with a reason, and nothing in them runs."""

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SPEC, checkpoint, refuses, saved, with_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_spec

from mod_models.checkpoint import CheckpointError, ForeignArchitectureError, load_checkpoint, save_checkpoint

DECLARE = ". Save it with mod_models.checkpoint.save_checkpoint(path, Checkpoint("
NOT_ONE = "model.pt: not a model.pt as torch.save writes it; it may be truncated"
NO_NUMBERS = "norm.weight is not a dense tensor of 16, 32 or 64-bit floating-point numbers"
UNFIT = "weights do not fit the spec: "
LARGEST = make_spec(vocab_size=2**24, d_model=2**20, n_layers=8, d_head=2**12, d_ff=2**20, max_positions=2**24)
"""A model that would need petabytes."""


def zip_of(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed_again(path: Path) -> None:
    """A zip tool compressed it: torch would read the compressed bytes as numbers."""
    zip_of(path, members_of(saved(path)), zipfile.ZIP_DEFLATED)


def with_a_damaged_pickle(path: Path) -> None:
    zip_of(path, {**members_of(saved(path)), "model/data.pkl": b"\x80\x02\xff"})


def spanning_disks(path: Path) -> None:
    """Changes one byte of the end record; Python's own `is_zipfile` raises on it."""
    data = bytearray(saved(path).read_bytes())
    data[data.rfind(b"PK\x06\x07") + 4] = 1
    path.write_bytes(data)


def an_exported_program(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


def header(**changes: Any) -> Callable[[Path], object]:
    return lambda path: saved(path, **changes)


def norm(weight: Any) -> Callable[[Path], object]:
    return lambda path: with_weights(path, {"norm.weight": weight})


def nested(path: Path) -> None:
    """Even reading the shape of such a tensor is an error in PyTorch."""
    with_weights(path, {"norm.weight": torch.nested.nested_tensor([torch.ones(8)])})


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "model.pt: no such file or folder"),
    "pipe": (os.mkfifo, "model.pt: not a plain file"),  # Opening it would wait for ever.
    "empty": (lambda path: path.write_bytes(b""), NOT_ONE + ", or a bare pickle, which could run code" + DECLARE),
    "text": (lambda path: path.write_bytes(b"not a checkpoint\n"), NOT_ONE),
    "zeros": (lambda path: path.write_bytes(b"\0" * 1000), NOT_ONE),
    "the beginning of a zip": (lambda path: path.write_bytes(b"PK\x03\x04"), NOT_ONE),
    "a bare pickle": (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "or a bare pickle, which could run code"),
    "another zip": (
        lambda path: zip_of(path, {"readme.txt": b"hello"}),
        "model.pt: a zip archive, but none that torch.save wrote" + DECLARE,
    ),
    "an exported program": (an_exported_program, "a zip archive, but none that torch.save wrote" + DECLARE),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path),
        "a TorchScript archive, which is code and no checkpoint" + DECLARE,
    ),
    "a module": (
        lambda path: torch.save(torch.nn.Linear(2, 2), path),
        "refused, its pickle asks for torch.nn.modules.linear.Linear, which is more than plain data and tensors",
    ),
    "spans disks": (spanning_disks, NOT_ONE),
    "compressed": (packed_again, "model/data.pkl in it is compressed, and torch.save compresses nothing"),
    "damaged pickle": (with_a_damaged_pickle, "refused, its pickle is damaged or asks for more than plain data and"),
    "a list": (lambda path: torch.save([1, 2], path), "model.pt: holds list, expected a table with a spec" + DECLARE),
    "a bare state_dict": (
        lambda path: torch.save(dict(checkpoint().weights), path),
        "model.pt: holds no table 'weights', so it is not a checkpoint with a spec" + DECLARE,
    ),
    "weights missing": (header(weights=...), "holds no table 'weights'"),
    "weights of another type": (header(weights=[]), "holds no table 'weights'"),
    **{
        f"no {name}": (header(**{name: ...}), f"holds no {name!r}, so its routing is unknown{DECLARE}")
        for name in ("format_version", "architecture", "spec")
    },
    **{
        f"version {version!r}": (header(format_version=version), f"format version {version!r}, this release reads vers")
        for version in (2, None, True, "1", 1.0)
    },
    "version of numbers": (header(format_version=torch.ones(2)), "format version tensor([1., 1.]), this release"),
    **{
        f"architecture {name!r}": (header(architecture=name), f"architecture is {name!r}, expected a name{DECLARE}")
        for name in (None, 1, ["mod_transformer"])
    },
    "spec of nothing": (header(spec=None), "model.pt: spec: expected a table, got NoneType"),
    "unsound spec": (
        header(spec={**SPEC.to_dict(), "d_model": 0, "norm_eps": torch.zeros(2)}),
        "from 1 to 1048576, got 0; spec.norm_eps: expected a number above 0, got tensor([0., 0.])",
    ),
    "the largest sizes": (header(spec=LARGEST.to_dict()), " more)"),
    "another shape": (
        lambda path: with_weights(path, {"layers.0.attention.q_proj.weight": torch.zeros(3, 8)}),
        UNFIT + "layers.0.attention.q_proj.weight has shape [3, 8], the spec says [16, 8]",
    ),
    "missing and surplus weights": (
        lambda path: with_weights(path, {"extra": torch.zeros(1), 7: torch.zeros(1)}, without="norm.weight"),
        UNFIT + "missing norm.weight [8]; 'extra' belongs to no layer of the spec; 7 belongs to no layer of the spec",
    ),
    "no weights at all": (header(weights={}), UNFIT + "missing embedding.weight [16, 8]; "),
    "a list as a weight": (norm([1.0] * 8), NO_NUMBERS),
    "integers": (norm(torch.ones(8, dtype=torch.int64)), NO_NUMBERS),
    "complex": (norm(torch.ones(8, dtype=torch.complex64)), NO_NUMBERS),
    "float8": (norm(torch.ones(8).to(torch.float8_e4m3fn)), NO_NUMBERS),
    "sparse": (norm(torch.ones(8).to_sparse()), NO_NUMBERS),
    "meta": (norm(torch.empty(8, device="meta")), NO_NUMBERS),
    "expanded": (norm(torch.ones(1).expand(8)), NO_NUMBERS),
    "nested": (nested, NO_NUMBERS),
    "NaN": (
        norm(torch.tensor([1.0, float("nan")] + [0.0] * 6)),
        "model.pt: norm.weight holds 1 values that are NaN or infinite in float32, of 8",
    ),
    "infinite": (norm(torch.tensor([float("inf"), -float("inf")] + [0.0] * 6).half()), "holds 2 values that are NaN"),
    "infinite in float32": (norm(torch.full((8,), 1e300, dtype=torch.float64)), "holds 8 values that are NaN"),
}
"""Fault -> (function that writes it to a path, words of the message)."""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("wrong", FILES)
def test_files(tmp_path: Path, wrong: str) -> None:
    write, words = FILES[wrong]
    write(tmp_path / "model.pt")
    refuses(tmp_path / "model.pt", words)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    refuses(tmp_path / "no" / "such" / "folder", "folder: no such file or folder")
    refuses(tmp_path / ("x" * 300), "x: cannot be read (File name too long)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt")
    path.chmod(0)
    refuses(path, "model.pt: cannot be read (Permission denied)")


def test_truncated_at_every_length(tmp_path: Path) -> None:
    intact = saved(tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "model.pt"
    for length in [*range(0, len(intact), 997), len(intact) - 1]:
        path.write_bytes(intact[:length])
        refuses(path, NOT_ONE)


class _Payload:
    """Unpickling this makes a folder, if it is allowed."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("form", ["zip", "older torch", "pickle"])
def test_a_pickle_that_wants_to_run_code(tmp_path: Path, form: str) -> None:
    proof, path = tmp_path / "proof", tmp_path / "model.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps(_Payload(proof)))
    else:
        data = {"spec": _Payload(proof), "weights": {}}
        torch.save(data, path, _use_new_zipfile_serialization=form == "zip")
    message = f"refused, its pickle asks for {os.mkdir.__module__}.mkdir, which is more than plain data and tensors"
    refuses(path, message if form == "zip" else "or a bare pickle, which could run code" + DECLARE)
    assert not proof.exists()
    # Unsafe loading of the same file runs the payload, so the payload is real.
    pickle.loads(path.read_bytes()) if form == "pickle" else torch.load(path, weights_only=False)
    assert proof.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@given(st.data())
@settings(max_examples=80)
def test_any_damage_is_a_checkpoint_error_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Overwrites bytes in the pickle or anywhere: the checkpoint loads, or raises our own error."""
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    path = folder / "model.pt"
    if not (folder / "whole.pt").exists():
        saved(folder / "whole.pt")
    intact = bytearray((folder / "whole.pt").read_bytes())
    if data.draw(st.booleans()):
        members = members_of(io.BytesIO(bytes(intact)))
        zip_of(path, {**members, "whole/data.pkl": bytes(damaged(bytearray(members["whole/data.pkl"]), data))})
    else:
        path.write_bytes(damaged(intact, data))
    with contextlib.suppress(CheckpointError, ForeignArchitectureError):
        load_checkpoint(path)


def damaged(content: bytearray, data: st.DataObject) -> bytearray:
    changes = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for at, byte in data.draw(st.lists(changes, min_size=1, max_size=8)):
        content[at] = byte
    return content


def test_foreign_architecture(tmp_path: Path) -> None:
    with pytest.raises(ForeignArchitectureError, match=r"^someone_elses$"):
        load_checkpoint(saved(tmp_path / "model.pt", architecture="someone_elses"))


# Folders.

UNREADABLE = "config.json: not readable JSON ("
CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", UNREADABLE),
    "cut": (b"{", UNREADABLE),
    "not UTF-8": (b"\xff\xfe\xff", UNREADABLE),
    "deep": (b"[" * 100_000, UNREADABLE),
    "a long number": (b'{"format_version": ' + b"9" * 5000 + b"}", UNREADABLE),
    "a list": (b"[]", "config.json: holds list, expected an object" + DECLARE),
    "null": (b"null", "config.json: holds NoneType, expected an object"),
    "another model": (b'{"model_type": "llama"}', "folder: holds no 'format_version', so its routing is unknown"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "folder", checkpoint())
    return tmp_path / "folder"


@pytest.mark.parametrize("wrong", CONFIGS)
def test_configs(folder: Path, wrong: str) -> None:
    content, words = CONFIGS[wrong]
    (folder / "config.json").write_bytes(content)
    refuses(folder, words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_folder_without(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refuses(folder, f"folder: no {name} in this folder, expected config.json and model.safetensors")


def test_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    refuses(path, "model.safetensors: weights without a spec; give the folder that holds it beside its config.json")
    intact = path.read_bytes()
    for length in [*range(0, len(intact), 997), len(intact) - 1]:
        path.write_bytes(intact[:length])
        refuses(folder, "model.safetensors: not readable, it may be truncated (")
