"""Reading ONNX files that may be anything."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from mod_export.errors import GraphError

__all__ = ["graph_from_bytes", "graph_from_file"]


def graph_from_file(path: Path) -> ir.Model:
    """Reads a graph; its external data stays where it is.

    Raises:
        GraphError: not a readable ONNX graph.
    """
    try:
        model = ir.load(path)
    except (DecodeError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GraphError(f"{path}: not a readable ONNX graph ({reason})") from error
    if not len(model.graph):
        raise GraphError(f"{path}: not a readable ONNX graph (no operator in it)")
    return model


def graph_from_bytes(data: bytes) -> ir.Model:
    """A graph that this process has made itself."""
    return ir.from_proto(onnx.load_from_string(data))
