"""The values inside an ONNX graph, as ONNX Runtime's CPU kernels compute them without any optimisation."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx

AT_ONCE = 64
"""Number of values held in memory at a time."""


def producers(model: ir.Model) -> dict[str, ir.Node]:
    """Maps the name of each value whose dtype the graph states to the node that computes it."""
    return {
        value.name: node for node in model.graph for value in node.outputs if value.name and value.dtype is not None
    }


@contextlib.contextmanager
def opened(model: ir.Model, root: Path, names: Sequence[str]) -> Iterator[OrtRunner]:
    """Opens a graph of the build folder `root` without fusion; `names` replace the outputs of `model`, in place."""
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [by_name[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.onnx"
        path.write_bytes(ir.to_proto(model).SerializeToString())
        session = session_from_onnx(path, root / "graphs", [CPU], 1, {}, optimized=False)
        with OrtRunner(session, "values of a graph", 1) as runner:
            yield runner
