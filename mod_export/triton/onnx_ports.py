"""Reads the inputs and outputs of an ONNX file without the package `onnx`, which only a build needs.

A protocol buffer is a list of fields: a number, a wire type and a value. Other fields are skipped. The field numbers
are from onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mod_export.errors import BuildFolderError
from mod_export.triton.config import Port

TYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "FP16",
    11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip
"""TensorProto.DataType -> Triton's data type."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
GRAPH = 7
INPUT, OUTPUT = 11, 12
NAME, TYPE = 1, 2
TENSOR, ELEMENT, SHAPE, DIMENSION, SIZE = 1, 1, 2, 1, 1

Fields = Iterator[tuple[int, int | memoryview]]


def ports_of(path: Path) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Returns the inputs and outputs of a graph with static shapes, in order.

    Raises:
        BuildFolderError: the file is not such a graph.
    """
    try:
        model = dict(_fields(memoryview(path.read_bytes())))
        graph = list(_fields(_message(model[GRAPH])))
        inputs, outputs = (
            tuple(_port(_message(value)) for number, value in graph if number == wanted) for wanted in (INPUT, OUTPUT)
        )
    except (KeyError, IndexError, ValueError) as error:
        raise BuildFolderError(
            f"{path}: expected an ONNX graph of static shapes, cannot read it ({type(error).__name__}: {error}); "
            "build again"
        ) from error
    return inputs, outputs


def _port(value: memoryview) -> Port:
    fields = dict(_fields(value))
    tensor = dict(_fields(_message(dict(_fields(_message(fields[TYPE])))[TENSOR])))
    shape = [
        dict(_fields(_message(dimension)))
        for number, dimension in _fields(_message(tensor[SHAPE]))
        if number == DIMENSION
    ]
    dims = tuple(_number(dimension[SIZE]) for dimension in shape)
    return Port(bytes(_message(fields[NAME])).decode(), TYPES[_number(tensor[ELEMENT])], dims)


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a message was expected")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a message where a number was expected")
    return value


def _fields(data: memoryview) -> Fields:
    """Yields number and value of each field. The value is an int, or the bytes of a string or message."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            whole, offset = _varint(data, offset)
            yield number, whole
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if size is None:
            if wire != BYTES:
                raise ValueError(f"wire type {wire}")
            size, offset = _varint(data, offset)
        if offset + size > len(data):
            raise ValueError("the file ends within a field")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Reads a varint (7 bits per byte, lowest first); returns it and the offset after it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
