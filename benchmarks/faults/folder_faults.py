"""Faults in the files of a build folder: weights, engines, buckets, dense baselines, graphs and packages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from benchmarks.faults.base_folder import (
    BUCKET,
    CAPACITY_ONE_MORE,
    CAPACITY_ROUNDED_DOWN,
    SPEC,
    FolderName,
    portable_graph_of,
)
from benchmarks.faults.fault_table import ENGINE, add, f32, fault, gate_mul
from benchmarks.faults.graph_surgery import Surgery
from mod_export.types import Bucket

DENSE = f"engines/ort-cpu/dense-{BUCKET}-float32.onnx"
PORTABLE = f"graphs/mod-{BUCKET}.onnx"
HALF_GRAPH = f"graphs/mod-{BUCKET}.tensorrt-rtx.float16.onnx"
WEIGHTS, HALF_WEIGHTS = "graphs/weights-float32.data", "graphs/weights-float16.data"
PACKAGE = f"engines/inductor/mod-{BUCKET}-float32.pt2"


def folder_fault(
    name: str, where: str | None, folder: FolderName = "graphs", file: str | None = None
) -> Callable[[Callable[[Path], object]], None]:
    return lambda plant: add(name, where, lambda root, _packages: plant(root), folder, file)


class Tensors:
    """A weights file of a build folder, changed in place."""

    def __init__(self, path: Path, dtype: type[np.generic] = np.float32) -> None:
        self.path, self.dtype = path, dtype
        self.data = bytearray(path.read_bytes())
        size = int.from_bytes(self.data[:8], "little")
        self.base, self.header = 8 + size, json.loads(self.data[8 : 8 + size])
        self.names = [name for name in self.header if name != "__metadata__"]

    def __getitem__(self, name: str) -> np.ndarray:
        begin, end = self.header[name]["data_offsets"]
        view = memoryview(self.data)[self.base + begin : self.base + end]
        return np.frombuffer(view, self.dtype).reshape(self.header[name]["shape"])

    def save(self) -> None:
        self.path.write_bytes(self.data)


# --- weights ------------------------------------------------------------------------------------------------------


def weights_fault(
    name: str,
    where: str | None,
    file: str = WEIGHTS,
    dtype: type[np.generic] = np.float32,
    folder: FolderName = "graphs",
) -> Callable[[Callable[[Tensors], object]], Callable[[Path, Path], None]]:
    """Adds a change of a weights file to the table."""

    def listed(change: Callable[[Tensors], object]) -> Callable[[Path, Path], None]:
        def plant(root: Path, _packages: Path) -> None:
            tensors = Tensors(root / file, dtype)
            change(tensors)
            tensors.save()

        add(name, where, plant, folder, file)
        return plant

    return listed


@weights_fault("weights file: one element of one weight changed by 1 %", "layers.2")
def one_element(tensors: Tensors) -> None:
    tensors["layers.2.attention.k_proj.weight"][1, 2] *= np.float32(1.01)


@weights_fault("weights file: last bit of one element", "layers.0")
def last_bit(tensors: Tensors) -> None:
    tensors["layers.0.mlp_norm.weight"].view(np.uint32)[4] ^= 1


@weights_fault("weights file: weights of two layers swapped", "layers.1")
def two_layers(tensors: Tensors) -> None:
    first, second = tensors["layers.1.mlp.up_proj.weight"], tensors["layers.3.mlp.up_proj.weight"]
    first[:], second[:] = second.copy(), first.copy()


@weights_fault("weights file: one weight transposed", "layers.3")
def transposed(tensors: Tensors) -> None:
    array = tensors["layers.3.attention.q_proj.weight"]
    array[:] = array.T.copy()


@weights_fault("weights file: NaN in one element", "layers.2")
def nan_weight(tensors: Tensors) -> None:
    tensors["layers.2.mlp.down_proj.weight"][0, 0] = np.nan


@weights_fault("weights file: rotary table of another base", "rope_cos")
def rope_table(tensors: Tensors) -> None:
    tensors["rope_cos"][:, 1] *= np.float32(0.999)


@weights_fault("weights file: of another checkpoint", None)
def other_checkpoint(tensors: Tensors) -> None:
    rng = np.random.default_rng(5)
    for name in tensors.names:
        array = tensors[name]
        array += rng.normal(0, 1e-3, array.shape).astype(np.float32)


@weights_fault("float16 weights: one element off by one unit", "layers.2", HALF_WEIGHTS, np.float16)
def half_weight(tensors: Tensors) -> None:
    tensors["layers.2.mlp.up_proj.weight"].view(np.uint16)[2, 3] += 1


@weights_fault("float16 weights: cut instead of rounded", None, HALF_WEIGHTS, np.float16)
def truncated_weights(tensors: Tensors) -> None:
    exact = Tensors(tensors.path.with_name("weights-float32.data"))
    for name in tensors.names:
        full, half = exact[name], tensors[name]
        half.view(np.uint16)[np.abs(half.astype(np.float32)) > np.abs(full)] -= 1


# --- whole files of something else ----------------------------------------------------------------------------------

for name, where, spec, bucket in (
    ("stale bucket", None, SPEC, Bucket(2, 16)),
    ("k is one too many", "layer 1", CAPACITY_ONE_MORE, Bucket(2, 32)),
    ("capacity rounded the other way", "layer 3", CAPACITY_ROUNDED_DOWN, Bucket(2, 32)),
):
    folder_fault(name, where)(
        lambda root, spec=spec, bucket=bucket: (root / ENGINE).write_bytes(portable_graph_of(root, spec, bucket))
    )

folder_fault("dense twin not dense", None)(lambda root: shutil.copy(root / ENGINE, root / DENSE))
folder_fault("dense engine in place of the routed one", None)(lambda root: shutil.copy(root / DENSE, root / ENGINE))
folder_fault("empty engine", None)(lambda root: (root / ENGINE).write_bytes(b""))


@folder_fault("dense twin not dense, and silent about it", None)
def twin_silent(root: Path) -> None:
    surgery = Surgery(root / ENGINE)
    surgery.graph.outputs[:] = [surgery.output("logits")]
    surgery.path = root / DENSE
    surgery.save()


@folder_fault("truncated engine", None)
def truncated(root: Path) -> None:
    data = (root / ENGINE).read_bytes()
    (root / ENGINE).write_bytes(data[: len(data) // 2])


# --- graphs -------------------------------------------------------------------------------------------------------


@fault("a layer of the dense twin left out, which makes it look slow to beat", "layers.1", DENSE)
def twin_short(s: Surgery) -> None:
    s.replace(s.node(1, "Add", -1).outputs[0], s.node(1, "RMSNormalization", 0).inputs[0])


@fault("portable graph: gate doubled", "layers.1", PORTABLE)
def portable_gate(s: Surgery) -> None:
    s.feed(gate_mul(s), 0, "Mul", f32(2.0))


@fault("float16 graph: gate missing", "layers.1", HALF_GRAPH)
def half_gate(s: Surgery) -> None:
    s.bypass(gate_mul(s), 1)


@fault("float16 graph: router in half precision", "layers.1", HALF_GRAPH)
def half_router(s: Surgery) -> None:
    s.rounded(s.node(1, "MatMul", 0).outputs[0], ir.DataType.FLOAT16)


@fault("outputs exchanged", None)
def exchanged(s: Surgery) -> None:
    first, second = s.output("routed_1"), s.output("routed_3")
    first.name, second.name = "held", "routed_1"
    first.name = "routed_3"


@fault("an output missing", "layer 3")
def output_missing(s: Surgery) -> None:
    s.graph.outputs.remove(s.output("routed_3"))


@folder_fault("a second definition of a weight before the real one", "layers.2")
def defined_twice(root: Path) -> None:
    name = "layers.2.mlp.up_proj.weight"
    array = Surgery(root / ENGINE).weight(name)
    array[0, 0] += np.float32(1e-6)
    proto = onnx.load(root / ENGINE, load_external_data=False)
    proto.graph.initializer.insert(0, onnx.numpy_helper.from_array(array, name))
    (root / ENGINE).write_bytes(proto.SerializeToString())


@folder_fault("a function that stands in for an operator", None)
def shadowed(root: Path) -> None:
    proto = onnx.load(root / ENGINE, load_external_data=False)
    body = [onnx.helper.make_node("Tanh", ["x"], ["y"])]
    proto.functions.append(
        onnx.helper.make_function("", "Sigmoid", ["x"], ["y"], body, [onnx.helper.make_opsetid("", 23)])
    )
    (root / ENGINE).write_bytes(proto.SerializeToString())


# --- compiled packages --------------------------------------------------------------------------------------------

for name, source, where in (
    ("package: residual doubled", "residual", "layers.1"),
    ("package: no causal mask", "mask", "layers.2"),
    ("package: ties to the later token", "ties", None),
    ("package: pads admitted", "pads", None),
):
    add(
        name,
        where,
        lambda root, packages, source=source: shutil.copy(packages / f"{source}.pt2", root / PACKAGE),
        "compiled",
        PACKAGE,
    )


def dense_package(root: Path, _packages: Path) -> None:
    shutil.copy(root / PACKAGE.replace("mod-", "dense-"), root / PACKAGE)


add("package: the dense one", None, dense_package, "compiled", PACKAGE)
add("package: one element of its weights changed by 1 %", "layers.2", one_element, "compiled", WEIGHTS)
