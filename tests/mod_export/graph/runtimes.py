"""The runtimes that run graphs in memory in these tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import openvino  # noqa: TID253 - a test may load what it tests on.
from small_graphs import session

Run = Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]]


def in_onnx_runtime(model: ir.Model) -> Run:
    opened = session(model)
    return lambda feeds: opened.run(None, feeds)


def in_openvino(model: ir.Model) -> Run:
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(ir.to_proto(model).SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return lambda feeds: list(compiled(feeds).values())


RUNTIMES: defaultdict[str, Callable[[ir.Model], Run]] = defaultdict(lambda: in_onnx_runtime, openvino=in_openvino)
"""The runtime that runs the graph of a target."""
