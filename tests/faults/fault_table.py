"""The table of faults in graphs, and what planting them needs.

The graph is that of `base_folder.SPEC`: layers 0 and 2 are dense, 1 and 3 routed, gate `identity`, combine `paper`.
In a routed layer the products are router, q, k, v, o, gate, up, down; in a dense one the same without the router.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from graph_surgery import Surgery

__all__ = ["BFLOAT", "FLOAT", "GRAPH_FAULTS", "HALF", "f32", "fault", "gate_mul", "i64", "shape_of"]

FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
GRAPH_FAULTS: dict[str, tuple[Callable[[Surgery], None], str | None]] = {}
"""Name -> (how it is planted, the layer or module that must be named)."""


def fault(name: str, where: str | None) -> Callable[[Callable[[Surgery], None]], Callable[[Surgery], None]]:
    def listed(plant: Callable[[Surgery], None]) -> Callable[[Surgery], None]:
        assert name not in GRAPH_FAULTS
        GRAPH_FAULTS[name] = (plant, where)
        return plant

    return listed


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None
    assert value.shape is not None
    return value.shape.numpy()


def gate_mul(s: Surgery) -> ir.Node:
    """g * (attention delta + MLP delta), the last product of the layer."""
    return s.node(1, "Mul", -1)
