"""Describes a checkpoint, an ONNX graph, a .pt2 program or a build folder as text; a checkpoint also as HTML or PNG."""

from __future__ import annotations

from mod_export.inspect.describe import describe

__all__ = ["describe"]
