"""Inputs and outputs are read from ONNX files as by the package `onnx`; other files are refused."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from mod_export.errors import BuildFolderError
from mod_export.folder.ports import TYPES, ports_of


def test_every_graph_of_a_folder(written: Path) -> None:
    paths = sorted(written.glob("graphs/*.onnx"))
    assert paths
    for path in paths:
        graph = onnx.load(path, load_external_data=False).graph
        for found, listed in zip(ports_of(path), (graph.input, graph.output), strict=True):
            expected = [
                (
                    one.name,
                    TYPES[one.type.tensor_type.elem_type],
                    tuple(dim.dim_value for dim in one.type.tensor_type.shape.dim),
                )
                for one in listed
            ]
            assert [(port.name, port.dtype, port.dims) for port in found] == expected


def test_types_are_those_of_onnx() -> None:
    names = {"FP32": "FLOAT", "FP16": "FLOAT16", "FP64": "DOUBLE", "BF16": "BFLOAT16"}
    for number, name in TYPES.items():
        assert onnx.TensorProto.DataType.Name(number) == names.get(name, name)


def message(number: int, *fields: bytes) -> bytes:
    """Encodes a field that is a message or a string of at most 127 bytes."""
    data = b"".join(fields)
    return bytes([8 * number + 2, len(data)]) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "KeyError: 7"),
        (b"\x3a", "IndexError"),
        (b"\x3a\x7f", "the file ends within a field"),
        (b"\x3b", "wire type 3"),
        (b"\x38\x01", "a number where a message was expected"),
        (b"\x31" + bytes(8), "KeyError: 7"),
        (
            message(7, message(11, message(1), message(2, message(1, message(1), message(2))))),
            "a message where a number was",
        ),
    ],
)
def test_what_is_no_graph(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(BuildFolderError, match=f"expected an ONNX graph of static shapes, cannot read it .*{message}"):
        ports_of(path)


def test_a_shape_that_is_not_static(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [result])), tmp_path / "m.onnx")
    with pytest.raises(BuildFolderError, match="cannot read it"):
        ports_of(tmp_path / "m.onnx")
