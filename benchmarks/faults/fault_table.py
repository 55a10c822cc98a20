"""The table of planted faults, and helpers to plant them in graphs.

Graphs are of `base_folder.SPEC`: layers 0 and 2 are dense, 1 and 3 routed, gate `identity`, combine `paper`. The
products of a routed layer are router, q, k, v, o, gate, up, down; a dense layer has no router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.faults.base_folder import BUCKET, FolderName
from benchmarks.faults.graph_surgery import Surgery, plant

ENGINE = f"engines/ort-cpu/mod-{BUCKET}-float32.onnx"
FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
Change = Callable[[Surgery], object]


@dataclass(frozen=True)
class Fault:
    """One fault: `plant(root, packages)` changes `root`, a copy of the sound folder `folder`; `packages` has compiled
    faulty models. `where` is the layer or module that `validate` must name, None if the fault is not local. `file` is
    the file that it must name, None if several files could be at fault.
    """

    name: str
    where: str | None
    plant: Callable[[Path, Path], object]
    folder: FolderName = "graphs"
    file: str | None = None


FAULTS: dict[str, Fault] = {}
"""All faults by name."""


def add(
    name: str,
    where: str | None,
    plant: Callable[[Path, Path], object],
    folder: FolderName = "graphs",
    file: str | None = None,
) -> None:
    assert name not in FAULTS
    FAULTS[name] = Fault(name, where, plant, folder, file)


def fault(
    name: str, where: str | None, path: str = ENGINE, folder: FolderName = "graphs"
) -> Callable[[Change], Change]:
    """Adds a change of a graph, by default the engine's, to the table."""

    def listed(change: Change) -> Change:
        add(name, where, lambda root, _packages: plant(root / path, change), folder, path)
        return change

    return listed


def faults(changes: Mapping[str, tuple[str | None, Change]], path: str = ENGINE, folder: FolderName = "graphs") -> None:
    """Adds faults that are one operation each: name -> (where, change)."""
    for name, (where, change) in changes.items():
        fault(name, where, path, folder)(change)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    return value.shape.numpy()


def gate_mul(s: Surgery) -> ir.Node:
    """Returns the node g * (attention delta + MLP delta), the last Mul of layer 1."""
    return s.node(1, "Mul", -1)
