"""One operator as an ONNX file, written without the onnx package: a server has ONNX Runtime alone.

The format is protobuf: fields of a number and a length or a varint. The field numbers are those of onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["one_operator"]

FLOAT = 1
IR_VERSION, OPSET = 10, 23
VARINT, LENGTH = 0, 2


def one_operator(op_type: str, shape: Sequence[int], constant: Sequence[int] | None, result: Sequence[int]) -> bytes:
    """A graph of opset 23 with one float32 node: y (`result`) = `op_type`(x (`shape`)[, ones (`constant`)])."""
    inputs = ["x", *(["c"] if constant else [])]
    node = b"".join(_bytes(1, name.encode()) for name in inputs) + _bytes(2, b"y") + _bytes(4, op_type.encode())
    initializer = _bytes(5, _ones("c", constant)) if constant else b""
    ends = _bytes(11, _value("x", shape)) + _bytes(12, _value("y", result))
    graph = _bytes(1, node) + _bytes(2, b"g") + initializer + ends
    return _number(1, IR_VERSION) + _bytes(8, _number(2, OPSET)) + _bytes(7, graph)


def _ones(name: str, shape: Sequence[int]) -> bytes:
    import numpy as np

    dims = b"".join(_number(1, size) for size in shape)
    return dims + _number(2, FLOAT) + _bytes(8, name.encode()) + _bytes(9, np.ones(shape, np.float32).tobytes())


def _value(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_bytes(1, _number(1, size)) for size in shape)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _number(1, FLOAT) + _bytes(2, dims)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | VARINT) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
