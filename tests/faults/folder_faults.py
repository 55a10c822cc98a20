"""Ways in which a build folder goes wrong around its graphs: weights, engines, buckets, twins.

Each plants one fault into a folder. `layer` is the module that must be named, None where the fault is not local.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from base_folder import BUCKET, CAPACITY_ONE_MORE, CAPACITY_ROUNDED_DOWN, SPEC, portable_graph_of
from graph_faults import GRAPH_FAULTS
from graph_surgery import Surgery

from mod_export.types import Bucket

__all__ = ["COMPILED_FAULTS", "FOLDER_FAULTS"]

ENGINE = f"engines/ort-cpu/mod-{BUCKET}-float32.onnx"
DENSE = f"engines/ort-cpu/dense-{BUCKET}-float32.onnx"
PORTABLE = f"graphs/mod-{BUCKET}.onnx"
HALF_GRAPH = f"graphs/mod-{BUCKET}.tensorrt-rtx.float16.onnx"
WEIGHTS = "graphs/weights-float32.data"
PACKAGE = f"engines/inductor/mod-{BUCKET}-float32.pt2"
FOLDER_FAULTS: dict[str, tuple[Callable[[Path], None], str | None]] = {}
COMPILED_FAULTS: dict[str, tuple[Callable[[Path, Path], None], str | None]] = {}
"""For compiled packages: given the folder and where packages of faulty models lie."""


def fault(name: str, where: str | None) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def listed(plant: Callable[[Path], None]) -> Callable[[Path], None]:
        FOLDER_FAULTS[name] = (plant, where)
        return plant

    return listed


class Tensors:
    """A weights file of a build folder, changed in place."""

    def __init__(self, path: Path, dtype: type[np.generic] = np.float32) -> None:
        self.path, self.dtype = path, dtype
        self.data = bytearray(path.read_bytes())
        size = int.from_bytes(self.data[:8], "little")
        self.base, self.header = 8 + size, json.loads(self.data[8 : 8 + size])

    def array(self, name: str) -> np.ndarray:
        begin, end = self.header[name]["data_offsets"]
        view = memoryview(self.data)[self.base + begin : self.base + end]
        return np.frombuffer(view, self.dtype).reshape(self.header[name]["shape"])

    def save(self) -> None:
        self.path.write_bytes(self.data)


# --- weights ------------------------------------------------------------------------------------------------------


@fault("weights file: one element of one weight changed by 1 %", "layers.2")
def one_element(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    tensors.array("layers.2.attention.k_proj.weight")[1, 2] *= np.float32(1.01)
    tensors.save()


@fault("weights file: last bit of one element", "layers.0")
def last_bit(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    tensors.array("layers.0.mlp_norm.weight").view(np.uint32)[4] ^= 1
    tensors.save()


@fault("weights file: weights of two layers swapped", "layers.1")
def two_layers(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    one, other = tensors.array("layers.1.mlp.up_proj.weight"), tensors.array("layers.3.mlp.up_proj.weight")
    one[:], other[:] = other.copy(), one.copy()
    tensors.save()


@fault("weights file: one weight transposed", "layers.3")
def transposed(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    array = tensors.array("layers.3.attention.q_proj.weight")
    array[:] = array.T.copy()
    tensors.save()


@fault("weights file: NaN in one element", "layers.2")
def nan_weight(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    tensors.array("layers.2.mlp.down_proj.weight")[0, 0] = np.nan
    tensors.save()


@fault("weights file: rotary table of another base", "rope_cos")
def rope_table(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    tensors.array("rope_cos")[:, 1] *= np.float32(0.999)
    tensors.save()


@fault("weights file: of another checkpoint", None)
def other_checkpoint(root: Path) -> None:
    tensors = Tensors(root / WEIGHTS)
    rng = np.random.default_rng(5)
    for name in tensors.header:
        if name != "__metadata__":
            array = tensors.array(name)
            array += rng.normal(0, 1e-3, array.shape).astype(np.float32)
    tensors.save()


@fault("float16 weights: one element off by one unit", "layers.2")
def half_weight(root: Path) -> None:
    tensors = Tensors(root / "graphs/weights-float16.data", np.float16)
    tensors.array("layers.2.mlp.up_proj.weight").view(np.uint16)[2, 3] += 1
    tensors.save()


@fault("float16 weights: cut instead of rounded", None)
def truncated_weights(root: Path) -> None:
    exact, tensors = Tensors(root / WEIGHTS), Tensors(root / "graphs/weights-float16.data", np.float16)
    for name in tensors.header:
        if name != "__metadata__":
            full, half = exact.array(name), tensors.array(name)
            larger = np.abs(half.astype(np.float32)) > np.abs(full)
            half.view(np.uint16)[larger] -= 1
    tensors.save()


# --- buckets and capacities ---------------------------------------------------------------------------------------


@fault("stale bucket", None)
def stale_bucket(root: Path) -> None:
    (root / ENGINE).write_bytes(portable_graph_of(root, SPEC, Bucket(2, 16)))


@fault("k is one too many", "layer 1")
def one_more(root: Path) -> None:
    (root / ENGINE).write_bytes(portable_graph_of(root, CAPACITY_ONE_MORE))


@fault("capacity rounded the other way", "layer 3")
def rounded_down(root: Path) -> None:
    (root / ENGINE).write_bytes(portable_graph_of(root, CAPACITY_ROUNDED_DOWN))


# --- twins --------------------------------------------------------------------------------------------------------


@fault("dense twin not dense", None)
def twin_routed(root: Path) -> None:
    shutil.copy(root / ENGINE, root / DENSE)


@fault("dense twin not dense, and silent about it", None)
def twin_silent(root: Path) -> None:
    surgery = Surgery(root / ENGINE)
    surgery.graph.outputs[:] = [surgery.output("logits")]
    surgery.path = root / DENSE
    surgery.save()


@fault("dense engine in place of the routed one", None)
def dense_as_mod(root: Path) -> None:
    shutil.copy(root / DENSE, root / ENGINE)


@fault("a layer of the dense twin left out, which makes it look slow to beat", "layers.1")
def twin_short(root: Path) -> None:
    surgery = Surgery(root / DENSE)
    start = surgery.node(1, "RMSNormalization", 0).inputs[0]
    assert start is not None
    surgery.replace(surgery.node(1, "Add", -1).outputs[0], start)
    surgery.save()


# --- files beside the engine --------------------------------------------------------------------------------------


@fault("portable graph: gate doubled", "layers.1")
def portable_gate(root: Path) -> None:
    surgery = Surgery(root / PORTABLE)
    GRAPH_FAULTS["gate doubled"][0](surgery)
    surgery.save()


@fault("float16 graph: gate missing", "layers.1")
def half_gate(root: Path) -> None:
    surgery = Surgery(root / HALF_GRAPH)
    mul = surgery.node(1, "Mul", -1)
    delta = mul.inputs[1]
    assert delta is not None
    surgery.replace(mul.outputs[0], delta)
    surgery.save()


@fault("float16 graph: router in half precision", "layers.1")
def half_router(root: Path) -> None:
    surgery = Surgery(root / HALF_GRAPH)
    halved = surgery.after(surgery.node(1, "MatMul", 0).outputs[0], "Cast", to=int(ir.DataType.FLOAT16))
    surgery.after(halved, "Cast", to=int(ir.DataType.FLOAT))
    surgery.save()


@fault("truncated engine", None)
def truncated(root: Path) -> None:
    data = (root / ENGINE).read_bytes()
    (root / ENGINE).write_bytes(data[: len(data) // 2])


@fault("empty engine", None)
def empty(root: Path) -> None:
    (root / ENGINE).write_bytes(b"")


@fault("outputs exchanged", None)
def exchanged(root: Path) -> None:
    surgery = Surgery(root / ENGINE)
    one, other = surgery.output("routed_1"), surgery.output("routed_3")
    one.name, other.name = "held", "routed_1"
    one.name = "routed_3"
    surgery.save()


@fault("an output missing", "layer 3")
def output_missing(root: Path) -> None:
    surgery = Surgery(root / ENGINE)
    surgery.graph.outputs[:] = [value for value in surgery.graph.outputs if value.name != "routed_3"]
    surgery.save()


@fault("a second definition of a weight before the real one", "layers.2")
def defined_twice(root: Path) -> None:
    name = "layers.2.mlp.up_proj.weight"
    array = Surgery(root / ENGINE).weight(name)
    array[0, 0] += np.float32(1e-6)
    proto = onnx.load(root / ENGINE, load_external_data=False)
    proto.graph.initializer.insert(0, onnx.numpy_helper.from_array(array, name))
    (root / ENGINE).write_bytes(proto.SerializeToString())


@fault("a function that stands in for an operator", None)
def shadowed(root: Path) -> None:
    proto = onnx.load(root / ENGINE, load_external_data=False)
    body = [onnx.helper.make_node("Tanh", ["x"], ["y"])]
    proto.functions.append(
        onnx.helper.make_function("", "Sigmoid", ["x"], ["y"], body, [onnx.helper.make_opsetid("", 23)])
    )
    (root / ENGINE).write_bytes(proto.SerializeToString())


# --- compiled packages --------------------------------------------------------------------------------------------


def compiled(name: str, source: str, where: str | None) -> None:
    def plant(root: Path, packages: Path) -> None:
        shutil.copy(packages / f"{source}.pt2", root / PACKAGE)

    COMPILED_FAULTS[name] = (plant, where)


compiled("package: residual doubled", "residual", "layers.1")
compiled("package: no causal mask", "mask", "layers.2")
compiled("package: ties to the later token", "ties", None)
compiled("package: pads admitted", "pads", None)


def dense_package(root: Path, packages: Path) -> None:
    shutil.copy(root / f"engines/inductor/dense-{BUCKET}-float32.pt2", root / PACKAGE)


def weights_of_package(root: Path, packages: Path) -> None:
    one_element(root)


COMPILED_FAULTS["package: the dense one"] = (dense_package, None)
COMPILED_FAULTS["package: one element of its weights changed by 1 %"] = (weights_of_package, "layers.2")
