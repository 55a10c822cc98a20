from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from command_line import uncovered
from safetensors.torch import load_file, save_file
from small_graphs import parsed

from mod_export.errors import BuildFolderError
from mod_export.export.weights import bind_weights, digests_of_file, digests_of_tensors, state_of, write_weights
from mod_export.export.weights_file import WeightsFile
from mod_export.sources.checkpoint import Model
from mod_export.types import FLOAT_DTYPES, DType

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.tensor([1.5, -2.5]),
    "unused": torch.zeros(5),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights-float32.data"
    write_weights(path, TENSORS, "float32")
    return path


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_file_is_safetensors_in_the_wanted_dtype(tmp_path: Path, dtype: DType) -> None:
    path = tmp_path / "weights.data"
    write_weights(path, TENSORS, dtype)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))


def test_views_and_parameters_are_written(tmp_path: Path) -> None:
    path = tmp_path / "weights.data"
    table = torch.arange(12.0).reshape(3, 4)
    write_weights(path, {"view": table[:, 1:3], "parameter": torch.nn.Parameter(table.T)}, "float32")
    found = load_file(path)
    assert torch.equal(found["view"], table[:, 1:3])
    assert torch.equal(found["parameter"], table.T)


def test_the_table_of_contents_points_at_the_bytes(file: Path) -> None:
    contents = WeightsFile.open(file)
    assert contents.name == "weights-float32.data"
    assert contents.entries.keys() == TENSORS.keys()
    data = file.read_bytes()
    for name, (dtype, shape, offset, length) in contents.entries.items():
        assert dtype == "F32"
        held = np.frombuffer(data[offset : offset + length], np.float32).reshape(shape)
        np.testing.assert_array_equal(held, TENSORS[name].numpy())


def test_initializers_are_bound_by_name_and_dtype(file: Path) -> None:
    model = parsed("g (float[1] x) => (float[1] y) <float[1] other = {2.0}> { y = Mul(x, other) }")
    for name, dtype in (("a.weight", ir.DataType.FLOAT), ("b.weight", ir.DataType.FLOAT16)):
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(TENSORS[name].shape)))
        model.graph.initializers.add(value)
    assert bind_weights(model, [WeightsFile.open(file)], file.parent) == 1
    bound = model.graph.initializers["a.weight"].const_value
    assert isinstance(bound, ir.ExternalTensor)
    assert bound.location == "weights-float32.data"
    np.testing.assert_array_equal(bound.numpy(), TENSORS["a.weight"].numpy())
    assert model.graph.initializers["b.weight"].const_value is None


def test_the_state_holds_all_buffers(model: Model) -> None:
    module = model.loaded.module()
    state = state_of(module)
    assert set(state) == {*module.state_dict(), "rope_cos", "rope_sin"}


def test_a_link_is_no_weights_file(file: Path) -> None:
    link = file.with_name("link.data")
    link.symlink_to(file)
    for path in (link, file.with_name("absent.data"), file.parent):
        with pytest.raises(BuildFolderError, match=r": expected a regular file of weights; links are refused by ONNX"):
            WeightsFile.open(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (2).to_bytes(8, "little") + b"\xff\xff",
    ],
)
def test_a_damaged_weights_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.data"
    path.write_bytes(content)
    with pytest.raises(BuildFolderError, match=r"weights\.data: not a weights file, or damaged; delete it and build"):
        WeightsFile.open(path)


def test_metadata_of_other_writers_is_no_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    path = tmp_path / "weights.data"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert WeightsFile.open(path).entries == {"x": ("F32", (1,), 8 + len(text), 4)}


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BuildFolderError, match=r"absent/weights\.data: the weights could not be written \(.*No such"):
        write_weights(tmp_path / "absent" / "weights.data", TENSORS, "float32")


def test_weights_that_do_not_fit_on_the_disk(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from mod_export.errors import BuildFolderError
from mod_export.export.weights import write_weights
try:
    write_weights(Path(sys.argv[1]), {"large": torch.zeros(2**20)}, "float32")
except BuildFolderError as error:
    print(error)
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "weights.data")],
        capture_output=True,
        text=True,
        check=False,
        env=uncovered(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)),
    )
    assert "weights.data: the weights could not be written (" in found.stdout, found
    assert "File too large" in found.stdout


DIGESTED = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "vector": torch.tensor([1.5, -2.5]),
    "transposed": (torch.arange(12, dtype=torch.float32).reshape(3, 4) / 3).T,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_file_has_the_digests_of_the_tensors_that_were_written_to_it(tmp_path: Path, dtype: DType) -> None:
    write_weights(tmp_path / "w.data", DIGESTED, dtype)
    expected = digests_of_tensors(DIGESTED, dtype)
    assert digests_of_file(tmp_path / "w.data") == expected
    assert list(expected) == list(DIGESTED)


def test_a_digest_is_of_the_bytes_row_by_row() -> None:
    tensor = DIGESTED["transposed"]
    assert digests_of_tensors({"t": tensor}, "float32") == {
        "t": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    }


def test_dtypes_have_digests_of_their_own() -> None:
    assert len({digests_of_tensors(DIGESTED, dtype)["matrix"] for dtype in FLOAT_DTYPES}) == 3


@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_one_element(tmp_path: Path, bit: int) -> None:
    write_weights(tmp_path / "w.data", DIGESTED, "float32")
    before = digests_of_file(tmp_path / "w.data")
    tensors = load_file(tmp_path / "w.data")
    tensors["matrix"].view(torch.int32)[1, 2] ^= (1 << bit) if bit < 31 else -(2**31)
    save_file(tensors, tmp_path / "w.data")
    after = digests_of_file(tmp_path / "w.data")
    assert {name for name in before if before[name] != after[name]} == {"matrix"}


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.data", DIGESTED, "float32")
    before = digests_of_file(tmp_path / "w.data")
    data = (tmp_path / "w.data").read_bytes()
    (tmp_path / "w.data").write_bytes(data[:-4])
    after = digests_of_file(tmp_path / "w.data")
    assert sum(before[name] != after[name] for name in before) == 1


@pytest.mark.parametrize(
    ("data", "message"), [(None, "expected a regular file"), (b"no weights", "not a weights file")]
)
def test_what_is_no_weights_file(tmp_path: Path, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / "w.data").write_bytes(data)
    with pytest.raises(BuildFolderError, match=message):
        digests_of_file(tmp_path / "w.data")
