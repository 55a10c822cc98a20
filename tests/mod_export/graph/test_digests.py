from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mod_export.artifacts import FLOAT_DTYPES, DType
from mod_export.errors import BuildFolderError
from mod_export.graph.digests import digests_of_file, digests_of_tensors
from mod_export.graph.weights import write_weights

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "vector": torch.tensor([1.5, -2.5]),
    "transposed": (torch.arange(12, dtype=torch.float32).reshape(3, 4) / 3).T,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_file_has_the_digests_of_the_tensors_that_were_written_to_it(tmp_path: Path, dtype: DType) -> None:
    write_weights(tmp_path / "w.data", TENSORS, dtype)
    expected = digests_of_tensors(TENSORS, dtype)
    assert digests_of_file(tmp_path / "w.data") == expected
    assert list(expected) == list(TENSORS)


def test_a_digest_is_of_the_bytes_row_by_row() -> None:
    tensor = TENSORS["transposed"]
    assert digests_of_tensors({"t": tensor}, "float32") == {
        "t": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    }


def test_dtypes_have_digests_of_their_own() -> None:
    assert len({digests_of_tensors(TENSORS, dtype)["matrix"] for dtype in FLOAT_DTYPES}) == 3


@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_one_element(tmp_path: Path, bit: int) -> None:
    write_weights(tmp_path / "w.data", TENSORS, "float32")
    before = digests_of_file(tmp_path / "w.data")
    tensors = load_file(tmp_path / "w.data")
    tensors["matrix"].view(torch.int32)[1, 2] ^= (1 << bit) if bit < 31 else -(2**31)
    save_file(tensors, tmp_path / "w.data")
    after = digests_of_file(tmp_path / "w.data")
    assert {name for name in before if before[name] != after[name]} == {"matrix"}


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.data", TENSORS, "float32")
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
