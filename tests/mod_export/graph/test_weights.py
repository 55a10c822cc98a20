"""A weights file is safetensors with known digests, and holds each weight in every form that a graph reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_graphs import parsed

from mod_export.errors import BuildFolderError
from mod_export.graph.rounding import rounded
from mod_export.graph.weights import (
    BELOW,
    Form,
    WeightsFile,
    bind_weights,
    digests_expected,
    digests_of_file,
    digests_of_tensors,
    forms_of,
    quantized_tensors,
    state_of,
    write_weights,
)
from mod_export.model.model import Model
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
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor.to(getattr(torch, dtype)))


def test_the_table_of_contents_points_at_the_bytes(file: Path) -> None:
    contents = WeightsFile.open(file)
    assert contents.name == "weights-float32.data"
    assert contents.entries.keys() == TENSORS.keys()
    data = file.read_bytes()
    for name, (dtype, shape, offset, length) in contents.entries.items():
        assert dtype == "F32"
        array = np.frombuffer(data[offset : offset + length], np.float32).reshape(shape)
        np.testing.assert_array_equal(array, TENSORS[name].detach().numpy())


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
    module = model.module()
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
    assert written == digests_of_file(tmp_path / "w.data")
    assert written == digests_expected(tmp_path / "w.data", {"w": weight, "v": weight}, "int8")


def test_numbers_of_four_bits_may_be_rounded_either_way_and_no_further(tmp_path: Path) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    forms: dict[str, set[Form]] = {"w": {"int4"}}
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)) + 1
    written = write_weights(
        tmp_path / "w.data", {"w": weight}, "int4", forms, [("w", rounded(weight, "int4", rows.T @ rows))]
    )
    assert written != write_weights(tmp_path / "nearest.data", {"w": weight}, "int4", forms)
    assert digests_expected(tmp_path / "w.data", {"w": weight}, "int4") == written
    changed = weight.clone()
    changed[7, 11] += 4 * weight[7, :32].abs().max() / 8
    assert digests_expected(tmp_path / "w.data", {"w": changed}, "int4") != written


def test_a_file_of_four_bits_that_is_cut_or_holds_another_shape_is_not_the_weight(tmp_path: Path) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "w.data"
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)) + 1
    written = write_weights(
        path, {"w": weight}, "int4", {"w": {"int4"}}, [("w", rounded(weight, "int4", rows.T @ rows))]
    )
    assert digests_expected(path, {"w": weight[:8]}, "int4") != written
    whole = path.read_bytes()
    for kept in (-1, -100, 8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:kept])
        assert digests_expected(path, {"w": weight}, "int4") != written


def test_weights_below_each_other_hold_the_numbers_that_each_has_alone(tmp_path: Path) -> None:
    state = {name: torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for name, rows in SIZES.items()}
    rows_NK = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)) + 1
    elsewhere = [(name, rounded(state[name], "int4", rows_NK.T @ rows_NK)) for name in reversed(SIZES)]
    joined = BELOW.join(SIZES)
    for form, dtype in FORMS_OF_TEXT.items():
        alone: dict[str, set[Form]] = {name: {form} for name in SIZES}
        together = {joined: {form}, **{name: set[Form]() for name in SIZES}}
        for path, forms in (("alone", alone), ("together", together)):
            written = write_weights(tmp_path / path, state, dtype, forms, elsewhere if dtype == "int4" else None)
            assert written == digests_expected(tmp_path / path, state, dtype) == digests_of_file(tmp_path / path)
            assert forms_of(WeightsFile.open(tmp_path / path).entries) == forms
        files = [WeightsFile.open(tmp_path / path) for path in ("alone", "together")]
        assert files[0].quantized_bytes(state) == files[1].quantized_bytes(state)
        for kind in (name.removeprefix("w.") for name in quantized_tensors("w", (8, 64), form)):
            parts = [part_of(tmp_path / "alone", f"{name}.{kind}") for name in SIZES]
            assert b"".join(parts) == part_of(tmp_path / "together", f"{joined}.{kind}")


SIZES = {"a.weight": 40, "b.weight": 8}
FORMS_OF_TEXT: dict[Form, DType] = {"int8_blocks64": "int8", "int4": "int4"}


def part_of(path: Path, name: str) -> bytes:
    _, _, offset, length = WeightsFile.open(path).entries[name]
    return path.read_bytes()[offset : offset + length]
