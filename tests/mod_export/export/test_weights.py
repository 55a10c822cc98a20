"""A weights file is safetensors with known fingerprints; rounding to eight and four bits stays near the weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_graphs import parsed

from mod_export.errors import BuildFolderError
from mod_export.export.weights import (
    BLOCK,
    Form,
    WeightsFile,
    bind_weights,
    digests_of_file,
    digests_of_tensors,
    forms_of,
    quantize,
    quantized_tensors,
    state_of,
    write_weights,
)
from mod_export.sources.model import Model
from mod_export.types import FLOAT_DTYPES, DType

TABLE = torch.arange(12.0).reshape(3, 4) / 7
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "b.weight": torch.tensor([1.5, -2.5]),
    "view": TABLE[:, 1:3],
    "parameter": torch.nn.Parameter(TABLE.T),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights-float32.data"
    write_weights(path, TENSORS, "float32")
    return path


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_file_is_safetensors_in_the_wanted_dtype(tmp_path: Path, dtype: DType) -> None:
    path = tmp_path / "weights.data"
    written = write_weights(path, TENSORS, dtype)
    assert digests_of_file(path) == written == digests_of_tensors(TENSORS, dtype)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))


def test_the_table_of_contents_points_at_the_bytes(file: Path) -> None:
    contents = WeightsFile.open(file)
    assert contents.name == "weights-float32.data"
    assert contents.entries.keys() == TENSORS.keys()
    data = file.read_bytes()
    for name, (dtype, shape, offset, length) in contents.entries.items():
        assert dtype == "F32"
        held = np.frombuffer(data[offset : offset + length], np.float32).reshape(shape)
        np.testing.assert_array_equal(held, TENSORS[name].detach().numpy())


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
    assert set(state_of(module)) == {*module.state_dict(), "rope_cos", "rope_sin"}


def test_a_link_is_no_weights_file(file: Path) -> None:
    link = file.with_name("link.data")
    link.symlink_to(file)
    for path in (link, file.with_name("absent.data"), file.parent):
        with pytest.raises(BuildFolderError, match=r": expected a regular file of weights; links are refused by ONNX"):
            digests_of_file(path)


def test_digests_show_one_bit_of_one_element_and_a_missing_end(file: Path) -> None:
    before, tensors = digests_of_file(file), load_file(file)
    tensors["a.weight"].view(torch.int32)[1, 2] ^= 1
    save_file(tensors, file)
    after = digests_of_file(file)
    assert {name for name in before if before[name] != after[name]} == {"a.weight"}
    file.write_bytes(file.read_bytes()[:-4])
    assert sum(digests_of_file(file)[name] != after[name] for name in after) == 1


@pytest.mark.parametrize(("size", "header"), [(0, b""), (10**9, b"{}"), (2, b"[]"), (4, b"{{{{"), (2, b"\xff\xff")])
def test_a_damaged_weights_file(tmp_path: Path, size: int, header: bytes) -> None:
    path = tmp_path / "weights.data"
    path.write_bytes(size.to_bytes(8, "little") + header)
    with pytest.raises(BuildFolderError, match=r"weights\.data: not a weights file, or damaged; delete it and build"):
        WeightsFile.open(path)


def test_metadata_of_other_writers_is_no_tensor(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "weights.data", {"format": "pt"})
    (entry,) = WeightsFile.open(tmp_path / "weights.data").entries.items()
    assert (entry[0], entry[1][:2], entry[1][3]) == ("x", ("F32", (1,)), 4)


@pytest.mark.parametrize(("path", "reason"), [("absent/weights.data", "No such file"), ("/dev/full", "No space left")])
def test_weights_that_cannot_be_written(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(BuildFolderError, match=rf"{path}: the weights could not be written \(.*{reason}"):
        write_weights(tmp_path / path, TENSORS, "float32")


def restored(whole: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], form: Form) -> torch.Tensor:
    """The weight (N, K) that the stored numbers stand for."""
    N, K = shape
    if form == "int8":
        return whole.float().T * scale[:, None]
    numbers = torch.stack((whole & 15, whole >> 4), -1) if form == "int4" else whole
    centred = numbers.reshape(N, -1, BLOCK).float() - (8 if form == "int4" else 128)
    return (centred * scale[..., None]).reshape(N, -1)[:, :K]


@pytest.mark.parametrize("form", ["int8", "int8_blocks", "int4"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (48, 33), (40, 100)])
def test_what_is_stored_stands_for_the_weight(shape: tuple[int, int], form: Form) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight_NK[-1] = 0  # Nothing is divided by the largest of these.
    whole, scale = quantize(weight_NK, form)
    stored = quantized_tensors("w", shape, form)
    assert [tuple(whole.shape), tuple(scale.shape)] == [kind[1] for kind in stored.values()]
    assert whole.is_contiguous()
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    # Half a step; in blocks a whole one at the end of the range that has one number less.
    steps = scale.abs()[:, None] if form == "int8" else scale.abs().repeat_interleave(BLOCK, 1)[:, : shape[1]]
    error = (restored(whole, scale, shape, form) - weight_NK).abs()
    assert bool((error <= (0.5 if form == "int8" else 1.0) * steps * 1.0001).all())


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40))
def test_no_two_neighbours_saturate_sixteen_bits(numbers: list[float]) -> None:
    """vpmaddubsw adds two products of an unsigned and a signed byte: 255 times both must fit into 16 bits."""
    whole_KN, _ = quantize(torch.tensor([numbers]), "int8")
    column = whole_KN[:, 0].int().abs().tolist()
    column += [0] * (len(column) % 2)
    assert max(first + second for first, second in zip(column[::2], column[1::2], strict=True)) * 255 <= 32_767


def test_finer_than_seven_bits_where_no_two_large_ones_meet() -> None:
    weight_NK = torch.tensor([[1.0, 0.0, 0.25, 0.0]])
    whole_KN, scale_N = quantize(weight_NK, "int8")
    assert whole_KN[:, 0].tolist() == [127, 0, 32, 0]
    assert math.isclose(scale_N.item(), 1 / 127, rel_tol=1e-6)


@pytest.mark.parametrize("form", ["int4", "int8_blocks"])
def test_the_largest_of_a_block_is_exact(form: Form) -> None:
    weight_NK = torch.zeros(2, 2 * BLOCK)
    weight_NK[0, 3], weight_NK[1, BLOCK] = -7.25, 3.5
    assert torch.equal(restored(*quantize(weight_NK, form), (2, 2 * BLOCK), form), weight_NK)


def test_the_forms_of_weights_are_read_from_names() -> None:
    names = [
        "a.weight.int8",
        "a.weight.int8_scale",
        "a.weight.int8_blocks",
        "a.weight.int8_blocks_scale",
        "b.int4",
        "c.d",
    ]
    assert forms_of(names) == {"a.weight": {"int8", "int8_blocks"}, "b": {"int4"}, "c.d": {"float"}}


def test_a_weight_is_stored_in_every_form_that_a_graph_reads(tmp_path: Path) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    forms: dict[str, set[Form]] = {"w": {"float", "int8", "int8_blocks"}}
    written = write_weights(tmp_path / "w.data", {"w": weight, "v": weight}, "int8", forms)
    file = WeightsFile.open(tmp_path / "w.data")
    assert forms_of(file.entries) == {**forms, "v": {"float"}}
    assert (
        written == digests_of_tensors({"w": weight, "v": weight}, "int8", forms) == digests_of_file(tmp_path / "w.data")
    )
