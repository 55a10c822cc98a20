"""The values inside an ONNX graph, as ONNX Runtime's CPU kernels compute them without any optimisation."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx

AT_ONCE = 64
"""Values that are held in memory together."""


def producers(model: ir.Model) -> dict[str, ir.Node]:
    """Name of a value whose type the graph states -> the node that computes it."""
    return {
        value.name: node for node in model.graph for value in node.outputs if value.name and value.dtype is not None
    }


@contextlib.contextmanager
def opened(model: ir.Model, root: Path, names: Sequence[str]) -> Iterator[OrtRunner]:
    """A graph of the build folder `root` with these values as its outputs, nothing fused."""
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [by_name[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.onnx"
        path.write_bytes(ir.to_proto(model).SerializeToString())
        session = session_from_onnx(path, root / "graphs", [CPU], 1, {}, optimized=False)
        with OrtRunner(session, "values of a graph", 1) as runner:
            yield runner
