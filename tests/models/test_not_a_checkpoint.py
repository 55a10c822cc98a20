"""What is not a checkpoint is refused, in words, and nothing in it runs."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from checkpoint_files import DECLARE, SPEC, checkpoint, refuses, saved, with_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_spec
from torch import Tensor

from mod_models.checkpoint import (
    CheckpointError,
    ForeignArchitectureError,
    load_checkpoint,
    save_checkpoint,
)

# Files.


def test_missing(tmp_path: Path) -> None:
    refuses(tmp_path / "no.pt", r".*no\.pt: no such file or folder")
    refuses(tmp_path / "no" / "such" / "folder", ".*folder: no such file or folder")


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"")
    refuses(path, rf".*model\.pt: not a model\.pt as torch\.save writes it; it may be truncated, or a bare .*{DECLARE}")


def test_not_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")  # opening it would wait for ever
    refuses(tmp_path / "pipe.pt", r".*pipe\.pt: not a plain file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt")
    path.chmod(0)
    refuses(path, r".*model\.pt: cannot be read \(Permission denied\)")


def test_name_too_long(tmp_path: Path) -> None:
    refuses(tmp_path / ("x" * 300), r".*x: cannot be read \(File name too long\)")


def test_truncated_at_every_length(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "model.pt"
    for length in [*range(0, len(whole), 331), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refuses(path, r".*model\.pt: not a model\.pt as torch\.save writes it; it may be truncated.*")


@pytest.mark.parametrize(
    "data", [b"not a checkpoint\n", b"\x80\x02}q\x00.", b"PK\x03\x04", b"\x00" * 1000, bytes(range(256)) * 9]
)
def test_other_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    refuses(path, r".*not a model\.pt as torch\.save writes it.*")


def zip_of(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_zip_of_something_else(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "model.pt", {"readme.txt": b"hello"})
    refuses(path, rf".*model\.pt: a zip archive, but none that torch\.save wrote\. {DECLARE}")


def test_exported_program(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "model.pt2")
    (tmp_path / "model.pt2").rename(tmp_path / "model.pt")
    refuses(tmp_path / "model.pt", rf".*model\.pt: a zip archive, but none that torch\.save wrote\. {DECLARE}")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "model.pt")
    refuses(tmp_path / "model.pt", rf".*model\.pt: a TorchScript archive, which is code and no checkpoint\. {DECLARE}")


def test_a_whole_module(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    refuses(
        tmp_path / "model.pt", rf".*refused, its pickle asks for torch\.nn\.modules\.linear\.Linear, which.*{DECLARE}"
    )


def test_zip_that_spans_disks(tmp_path: Path) -> None:
    """One byte of the end record; Python's own `is_zipfile` raises on it."""
    data = bytearray(saved(tmp_path / "model.pt").read_bytes())
    data[data.rfind(b"PK\x06\x07") + 4] = 1
    (tmp_path / "model.pt").write_bytes(data)
    refuses(tmp_path / "model.pt", r".*not a model\.pt as torch\.save writes it.*")


def test_compressed_zip(tmp_path: Path) -> None:
    """Packed again by a zip tool: torch would take the compressed bytes for the numbers."""
    with zipfile.ZipFile(saved(tmp_path / "whole.pt")) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    path = zip_of(tmp_path / "model.pt", members, zipfile.ZIP_DEFLATED)
    refuses(path, r".*model\.pt: whole/data\.pkl in it is compressed, and torch\.save compresses nothing.*")


class _Payload:
    """Unpickling this makes a folder, if anything lets it."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_to_run_code(tmp_path: Path, zipped: bool) -> None:
    proof, path = tmp_path / "proof", tmp_path / "model.pt"
    torch.save({"spec": _Payload(proof), "weights": {}}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        refuses(
            path,
            rf".*model\.pt: refused, its pickle asks for (posix|nt)\.mkdir, which is more than plain data.*{DECLARE}",
        )
    else:
        refuses(path, rf".*model\.pt: not a model\.pt as .*, or a bare pickle, which could run code\. {DECLARE}")
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the same file in careless hands: the payload is a real one
    assert proof.exists()


def test_a_bare_pickle_that_wants_to_run_code(tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(_Payload(proof)))
    refuses(path, r".*or a bare pickle, which could run code.*")
    assert not proof.exists()


def test_damaged_pickle(tmp_path: Path) -> None:
    with zipfile.ZipFile(saved(tmp_path / "whole.pt")) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["whole/data.pkl"] = b"\x80\x02\xff"
    path = zip_of(tmp_path / "model.pt", members)
    refuses(path, r".*refused, its pickle is damaged or asks for more than plain data and tensors and could run.*")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@given(st.data())
@settings(max_examples=150)
def test_any_damage_is_a_checkpoint_error_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes overwritten, in the pickle or anywhere: the checkpoint loads, or the error is ours."""
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    if not (folder / "whole.pt").exists():
        saved(folder / "whole.pt")
    whole = bytearray((folder / "whole.pt").read_bytes())
    if data.draw(st.booleans()):
        with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        members["whole/data.pkl"] = bytes(damaged(bytearray(members["whole/data.pkl"]), data))
        path = zip_of(folder / "model.pt", members)
    else:
        path = folder / "model.pt"
        path.write_bytes(damaged(whole, data))
    try:
        load_checkpoint(path)
    except (CheckpointError, ForeignArchitectureError) as error:
        message = str(error)
    else:
        message = "sound"
    assert message


def damaged(content: bytearray, data: st.DataObject) -> bytearray:
    places = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for place, byte in data.draw(st.lists(places, min_size=1, max_size=8)):
        content[place] = byte
    return content


def test_not_a_table(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "model.pt")
    refuses(tmp_path / "model.pt", rf".*model\.pt: holds list, expected a table with a spec\. {DECLARE}")


def test_bare_state_dict(tmp_path: Path) -> None:
    torch.save(dict(checkpoint().weights), tmp_path / "model.pt")
    refuses(tmp_path / "model.pt", rf".*model\.pt: holds no table 'weights', so it is not a checkpoint.*{DECLARE}")


@pytest.mark.parametrize("weights", [..., None, [], "text"])
def test_no_weights(tmp_path: Path, weights: object) -> None:
    refuses(saved(tmp_path / "model.pt", weights=weights), rf".*holds no table 'weights'.*{DECLARE}")


@pytest.mark.parametrize("name", ["format_version", "architecture", "spec"])
def test_missing_header(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "model.pt", **{name: ...})
    refuses(path, rf".*model\.pt: holds no '{name}', so its routing is unknown\. {DECLARE}")


@pytest.mark.parametrize(
    ("version", "shown"),
    [(2, "2"), (None, "None"), (True, "True"), ("1", "'1'"), (1.0, "1.0"), (torch.ones(2), r"tensor\(\[1\., 1\.\]\)")],
)
def test_format_version(tmp_path: Path, version: object, shown: str) -> None:
    path = saved(tmp_path / "model.pt", format_version=version)
    refuses(path, rf".*model\.pt: format version {shown}, this release reads version 1")


def test_foreign_architecture(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"^someone_elses$"):
        load_checkpoint(saved(tmp_path / "model.pt", architecture="someone_elses"))


@pytest.mark.parametrize("architecture", [None, 1, ["mod_transformer"]])
def test_architecture_is_no_name(tmp_path: Path, architecture: object) -> None:
    path = saved(tmp_path / "model.pt", architecture=architecture)
    refuses(path, rf".*model\.pt: the architecture is .*, expected a name\. {DECLARE}")


def test_unsound_spec(tmp_path: Path) -> None:
    refuses(saved(tmp_path / "a.pt", spec=None), r".*a\.pt: spec: expected a table, got NoneType")
    spec = {**SPEC.to_dict(), "d_model": 0, "norm_eps": torch.zeros(2)}
    refuses(
        saved(tmp_path / "b.pt", spec=spec),
        r".*b\.pt: spec\.d_model: .*; spec\.norm_eps: .* got tensor\(\[0\., 0\.\]\)",
    )


def test_a_spec_of_enormous_sizes_costs_nothing(tmp_path: Path) -> None:
    """The largest sizes that a spec may have; building that would take petabytes."""
    spec = make_spec(vocab_size=2**24, d_model=2**20, n_layers=8, d_head=2**12, d_ff=2**20, max_positions=2**24)
    refuses(saved(tmp_path / "model.pt", spec=spec.to_dict()), r".*weights do not fit the spec: .*\(and \d+ more\)")


# Weights that do not fit.


def test_weights_of_another_shape(tmp_path: Path) -> None:
    path = with_weights(tmp_path / "model.pt", {"layers.0.attention.q_proj.weight": torch.zeros(3, 8)})
    expected = r"layers\.0\.attention\.q_proj\.weight has shape \[3, 8\], the spec says \[16, 8\]"
    refuses(path, rf".*model\.pt: weights do not fit the spec: {expected}")


def test_missing_and_surplus_weights(tmp_path: Path) -> None:
    path = with_weights(tmp_path / "model.pt", {"extra": torch.zeros(1), 7: torch.zeros(1)}, without="norm.weight")
    problems = r"missing norm\.weight \[8\]; 'extra' belongs to no layer of the spec; 7 belongs to no layer of the spec"
    refuses(path, rf".*weights do not fit the spec: {problems}")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refuses(saved(tmp_path / "model.pt", weights={}), r".*missing embedding\.weight \[16, 8\]; .* \(and \d+ more\)")


@pytest.mark.parametrize(
    "tensor",
    [
        [1.0] * 8,
        torch.ones(8, dtype=torch.int64),
        torch.ones(8, dtype=torch.complex64),
        torch.ones(8).to(torch.float8_e4m3fn),
        torch.ones(8).to_sparse(),
        torch.empty(8, device="meta"),
        torch.ones(1).expand(8),
    ],
    ids=["list", "integers", "complex", "float8", "sparse", "meta", "expanded"],
)
def test_weights_that_are_not_plain_numbers(tmp_path: Path, tensor: object) -> None:
    path = with_weights(tmp_path / "model.pt", {"norm.weight": tensor})
    refuses(path, r".*norm\.weight is not a dense tensor of 16, 32 or 64-bit floating-point numbers")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_weights(tmp_path: Path) -> None:
    """Even asking for the shape of such a tensor is an error in PyTorch."""
    path = with_weights(tmp_path / "model.pt", {"norm.weight": torch.nested.nested_tensor([torch.ones(8)])})
    refuses(path, r".*norm\.weight is not a dense tensor of 16, 32 or 64-bit floating-point numbers")


@pytest.mark.parametrize(
    ("values", "bad"),
    [
        (torch.tensor([1.0, float("nan")] + [0.0] * 6), 1),
        (torch.tensor([float("inf"), -float("inf")] + [0.0] * 6).half(), 2),
        (torch.full((8,), 1e300, dtype=torch.float64), 8),
    ],
    ids=["nan", "inf", "infinite in float32"],
)
def test_weights_that_are_not_finite(tmp_path: Path, values: Tensor, bad: int) -> None:
    path = with_weights(tmp_path / "model.pt", {"norm.weight": values})
    refuses(path, rf".*model\.pt: norm\.weight holds {bad} values that are NaN or infinite in float32, of 8")


# Folders.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "folder", checkpoint())
    return tmp_path / "folder"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_folder_without(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refuses(folder, rf".*folder: no {name} in this folder, expected config\.json and model\.safetensors")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe\xff", b"[" * 100_000, b'{"format_version": ' + b"9" * 5000 + b"}"]
)
def test_bad_json(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    refuses(folder, r".*config\.json: not readable JSON \(.+\)")


@pytest.mark.parametrize("value", [[], None, "text", 1])
def test_json_that_is_no_object(folder: Path, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(value))
    refuses(folder, rf".*config\.json: holds {type(value).__name__}, expected an object\. {DECLARE}")


def test_config_of_something_else(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    refuses(folder, rf".*folder: holds no 'format_version', so its routing is unknown\. {DECLARE}")


def test_truncated_safetensors(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in [*range(0, len(whole), 331), len(whole) - 1]:
        (folder / "model.safetensors").write_bytes(whole[:length])
        refuses(folder, r".*model\.safetensors: not readable, it may be truncated \(.+\)")


def test_safetensors_file_without_its_folder(folder: Path) -> None:
    expected = r".*model\.safetensors: weights without a spec; give the folder that holds it beside its config\.json"
    refuses(folder / "model.safetensors", expected)
