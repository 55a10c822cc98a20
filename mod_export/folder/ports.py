"""Inputs and outputs of models: read from an ONNX file, and merged over buckets.

The file is read without the package `onnx`, which only a build needs. A protocol buffer is a list of fields: a number,
a wire type and a value. Other fields are skipped. The field numbers are from onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mod_export.errors import BuildFolderError
from mod_export.types import PRIMARY, TOKEN_INPUTS

ANY = -1
"""Size of a dimension that may have any size."""

TYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "FP16",
    11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip
"""TensorProto.DataType -> data type of the Open Inference Protocol, which Triton has too; BF16 is Triton's own."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
GRAPH = 7
INPUT, OUTPUT = 11, 12
NAME, TYPE = 1, 2
TENSOR, ELEMENT, SHAPE, DIMENSION, SIZE = 1, 1, 2, 1, 1

Fields = Iterator[tuple[int, int | memoryview]]


@dataclass(frozen=True, slots=True)
class TensorPort:
    """An input or output of a model.

    Attributes:
        name: name in requests and responses.
        dtype: name of the data type in the protocol, such as INT64 or BYTES.
        dims: shape, with `ANY` for a dimension of any size.
        optional: whether a request may leave the input out.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def data_type(self) -> str:
        """Name of the data type in config.pbtxt."""
        return "TYPE_STRING" if self.dtype == "BYTES" else f"TYPE_{self.dtype}"


def ports_of(path: Path) -> tuple[tuple[TensorPort, ...], tuple[TensorPort, ...]]:
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


def _port(value: memoryview) -> TensorPort:
    fields = dict(_fields(value))
    tensor = dict(_fields(_message(dict(_fields(_message(fields[TYPE])))[TENSOR])))
    shape = [
        dict(_fields(_message(dimension)))
        for number, dimension in _fields(_message(tensor[SHAPE]))
        if number == DIMENSION
    ]
    dims = tuple(_number(dimension[SIZE]) for dimension in shape)
    return TensorPort(bytes(_message(fields[NAME])).decode(), TYPES[_number(tensor[ELEMENT])], dims)


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


def any_rows(buckets: Sequence[Sequence[TensorPort]]) -> tuple[TensorPort, ...]:
    """Ports of a model of token ids: any batch and length, padded to a bucket by the model; `lengths` is optional."""
    ports = []
    for port in buckets[0]:
        free = 1 if port.name in (TOKEN_INPUTS[1], PRIMARY["last"]) else 2
        dims = (ANY,) * free + port.dims[free:]
        ports.append(TensorPort(port.name, port.dtype, dims, optional=port.name == TOKEN_INPUTS[1]))
    return tuple(ports)


def any_size(buckets: Sequence[Sequence[TensorPort]]) -> tuple[TensorPort, ...]:
    """Merges the ports of all buckets; a dimension is `ANY` if its sizes differ."""
    return tuple(
        TensorPort(ports[0].name, ports[0].dtype, tuple(sizes[0] if len(set(sizes)) == 1 else ANY for sizes in dims))
        for ports in zip(*buckets, strict=True)
        for dims in [list(zip(*(port.dims for port in ports), strict=True))]
    )
