"""Faults in builds of users' modules: blocks 1 and 3 are routed by `torch.topk`, `torch.sort` and `scatter_add`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.faults.base_folder import FOREIGN_SHAPES
from benchmarks.faults.fault_table import Change, add, f32, fault, faults, i64, shape_of
from benchmarks.faults.folder_faults import WEIGHTS, Tensors, folder_fault, weights_fault
from benchmarks.faults.graph_surgery import Surgery
from mod_export.types import Bucket

SHAPE, OTHER_SHAPE = (Bucket(*shape).name for shape in FOREIGN_SHAPES)
ENGINE = f"engines/ort-cpu/mod-{SHAPE}-float32.onnx"
OTHER_ENGINE = f"engines/ort-cpu/mod-{OTHER_SHAPE}-float32.onnx"
DENSE = f"engines/ort-cpu/dense-{SHAPE}-float32.onnx"
PORTABLE = f"graphs/mod-{SHAPE}.onnx"
PROGRAM, CONSTANTS = f"programs/mod-{SHAPE}.json", "programs/mod-constants.npz"
PACKAGE = f"engines/inductor/mod-{SHAPE}-float32.pt2"
ONE, DENSE_BLOCK, OTHER = "blocks.1", "blocks.2", "blocks.3"
TIES, HIDDEN = "foreign: ties go to the later token", "masked: second output negated, the first is right"


def foreign(name: str, where: str | None, path: str = ENGINE) -> Callable[[Change], Change]:
    return fault(f"foreign: {name}", where, path, "foreign")


def gate_mul(s: Surgery) -> ir.Node:
    """The product gate * block(selected tokens)."""
    return s.node(ONE, "Mul", -1)


def stream_gather(s: Surgery, block: str = ONE) -> ir.Node:
    """The node that gathers the selected tokens from the residual stream."""
    return next(node for node in s.nodes(block, "GatherElements") if shape_of(node.outputs[0])[-1] == 16)


def moved(s: Surgery, node: ir.Node, index: int) -> None:
    """Makes the positions that a node reads one too large."""
    seq = shape_of(node.inputs[0])[1]
    further = s.op(node, "Add", [node.inputs[index], i64(1)])
    node.replace_input_with(index, s.op(node, "Mod", [further, i64(seq)]))


# --- routing --------------------------------------------------------------------------------------------------------


@foreign("tokens of rank 2 to k + 1 are taken", ONE)
def next_ranks(s: Surgery) -> None:
    take = s.take(ONE)
    batch, k, _ = shape_of(take.outputs[1])
    s.set(take, sorted=1)
    take.replace_input_with(1, s.constant(i64(k + 1)))
    index = take.outputs[1]
    for value in take.outputs:
        value.shape = ir.Shape([batch, k + 1, 1])
    s.after(index, "Gather", i64(*range(1, k + 1)), axis=1).shape = ir.Shape([batch, k, 1])


@foreign("positions in the order of their scores, gates by position", ONE)
def unsorted_positions(s: Surgery) -> None:
    ascend = next(node for node in s.nodes(ONE, "TopK") if not node.attributes.get_int("largest", 1))
    s.replace(ascend.outputs[0], ascend.inputs[0])


@foreign("positions and gates in another order", ONE)
def descending(s: Surgery) -> None:
    s.set(next(node for node in s.nodes(ONE, "TopK") if not node.attributes.get_int("largest", 1)), largest=1)


@foreign("ties go to the later token", ONE)
def later_ties(s: Surgery) -> None:
    take = s.take(ONE)
    seq = shape_of(take.inputs[0])[1]
    s.feed(take, 0, "Gather", i64(*range(seq - 1, -1, -1)), axis=1)
    index = take.outputs[1]
    reader = next(use.node for use in index.uses())
    reader.replace_input_with(0, s.op(reader, "Sub", [s.constant(i64(seq - 1)), index], like=index))


@foreign("the selection that is returned is not the one that is used", ONE)
def other_output(s: Surgery) -> None:
    index = s.output("routed_blocks.1")
    last = s.op(index.producer(), "Sub", [s.constant(i64(shape_of(stream_gather(s).inputs[0])[1] - 1)), index])
    node = last.producer()
    s.graph.remove(node)
    s.graph.insert_after(index.producer(), node)
    place = next(place for place, value in enumerate(s.graph.outputs) if value is index)
    index.name, last.name = "used", index.name
    s.graph.outputs[place] = last


@foreign("the selections of two blocks are returned as each other's", None)
def exchanged(s: Surgery) -> None:
    first, second = s.output("routed_blocks.1"), s.output("routed_blocks.3")
    first.name, second.name = "held", "routed_blocks.1"
    first.name = "routed_blocks.3"


# --- the rest of a block --------------------------------------------------------------------------------------------


def masked(s: Surgery, mask_TT: np.ndarray) -> None:
    attention = s.node(DENSE_BLOCK, "Attention", 0)
    s.set(attention, is_causal=0)
    attributes = {name: value.value for name, value in attention.attributes.items()}
    made = s.op(attention, "Attention", [*attention.inputs[:3], mask_TT], attributes, like=attention.outputs[0])
    s.replace(attention.outputs[0], made)


@foreign("causal mask hides the token itself", DENSE_BLOCK)
def mask_narrow(s: Surgery) -> None:
    mask_TT = np.tri(16, k=-1, dtype=bool)
    mask_TT[0, 0] = True
    masked(s, mask_TT)


@foreign("one element of one weight changed by 1 %", DENSE_BLOCK)
def one_element(s: Surgery) -> None:
    array = s.weight("blocks.2.up.weight")
    array[3, 5] *= np.float32(1.01)
    s.embed("blocks.2.up.weight", array)


@foreign("one element of one weight changed by 1 %, under another name", ONE)
def one_element_renamed(s: Surgery) -> None:
    array = s.weight("blocks.1.block.down.weight")
    array[3, 5] *= np.float32(1.01)
    s.node(ONE, "MatMul", -1).replace_input_with(1, s.constant(array))


@foreign("one position of a constant is another", "position")
def other_position(s: Surgery) -> None:
    array = s.graph.initializers["arange"].const_value.numpy().copy()
    array[5] = 6
    s.embed("arange", array)


@foreign("two norms of a block swapped", ONE)
def swapped_norms(s: Surgery) -> None:
    s.swap_inputs(*s.nodes(ONE, "LayerNormalization"))


@foreign("a bias left out", DENSE_BLOCK)
def no_bias(s: Surgery) -> None:
    s.bypass(s.node(DENSE_BLOCK, "MatMul", -1).outputs[0].uses()[0].node, 0)


@foreign("one logit wrong by 0.001", None)
def one_logit(s: Surgery) -> None:
    wrong = np.zeros(shape_of(s.output("logits")), np.float32)
    wrong[-1, 9, 3] = 1e-3
    s.after(s.output("logits"), "Add", wrong)


faults(
    {
        f"foreign: {name}": row
        for name, row in {
            "gate 1 % too large": (ONE, lambda s: s.feed(gate_mul(s), 1, "Mul", f32(1.01))),
            "gate missing": (ONE, lambda s: s.bypass(gate_mul(s), 0)),
            "gates of the other row": (ONE, lambda s: s.feed(gate_mul(s), 1, "Gather", i64(1, 0), axis=0)),
            "gates in the order of the scores, positions ascending": (
                ONE,
                lambda s: s.replace(gate_mul(s).inputs[1], gate_mul(s).inputs[1].producer().inputs[0]),
            ),
            "the smallest scores are taken": (ONE, lambda s: s.set(s.take(ONE), largest=0)),
            "reads the token after the selected one": (ONE, lambda s: moved(s, stream_gather(s), 1)),
            "writes to the token after the selected one": (
                ONE,
                lambda s: moved(s, s.node(ONE, "ScatterElements", 0), 1),
            ),
            "scatter to the other row": (
                ONE,
                lambda s: s.feed(s.node(ONE, "ScatterElements", 0), 1, "Gather", i64(1, 0), axis=0),
            ),
            "scatter replaces instead of adding": (
                ONE,
                lambda s: s.set(s.node(ONE, "ScatterElements", 0), reduction="none"),
            ),
            "gathers the stream before the block below": (
                DENSE_BLOCK,  # The block whose output is left out.
                lambda s: stream_gather(s, OTHER).replace_input_with(0, s.node(ONE, "ScatterElements", 0).outputs[0]),
            ),
            "routers of two blocks swapped": (
                ONE,
                lambda s: s.swap_inputs(s.node(ONE, "MatMul", 0), s.node(OTHER, "MatMul", 0)),
            ),
            "weights of two blocks swapped": (
                "blocks.0",
                lambda s: s.swap_inputs(s.node("blocks.0", "MatMul", 2), s.node(DENSE_BLOCK, "MatMul", 2)),
            ),
            "a weight refers to the place of another": (
                DENSE_BLOCK,
                lambda s: s.repoint("blocks.2.up.weight", "blocks.0.up.weight"),
            ),
            "residual missing": (ONE, lambda s: s.bypass(s.node(ONE, "Add", 2), 1)),
            "norm's epsilon": (
                DENSE_BLOCK,
                lambda s: s.set(s.node(DENSE_BLOCK, "LayerNormalization", 0), epsilon=1e-3),
            ),
            "norm's epsilon 1 % larger": (
                DENSE_BLOCK,
                lambda s: s.set(s.node(DENSE_BLOCK, "LayerNormalization", 0), epsilon=1.01e-5),
            ),
            "causal mask admits the next token": (DENSE_BLOCK, lambda s: masked(s, np.tri(16, k=1, dtype=bool))),
            "no causal mask among routed tokens": (ONE, lambda s: s.set(s.node(ONE, "Attention", 0), is_causal=0)),
            "four heads instead of two": (
                ONE,
                lambda s: s.set(s.node(ONE, "Attention", 0), q_num_heads=4, kv_num_heads=4),
            ),
            "GELU by its approximation": (
                DENSE_BLOCK,
                lambda s: s.set(s.node(DENSE_BLOCK, "Gelu", 0), approximate="tanh"),
            ),
            "logits scaled": (None, lambda s: s.after(s.output("logits"), "Mul", f32(1.0005))),
        }.items()
    },
    ENGINE,
    "foreign",
)


# --- other files ----------------------------------------------------------------------------------------------------


@foreign("longer bucket: gate 1 % too large", ONE, OTHER_ENGINE)
def other_bucket(s: Surgery) -> None:
    s.feed(gate_mul(s), 1, "Mul", f32(1.01))


@foreign("portable graph: the smallest scores are taken", ONE, PORTABLE)
def portable_smallest(s: Surgery) -> None:
    s.set(s.take(ONE), largest=0)


@foreign("baseline: a block left out", ONE, DENSE)
def short_baseline(s: Surgery) -> None:
    s.replace(s.node(ONE, "Add", -1).outputs[0], s.node(ONE, "LayerNormalization", 0).inputs[0])


foreign_weights = partial(weights_fault, folder="foreign")


@foreign_weights("foreign weights file: one element of one weight changed by 1 %", "blocks.3.router.weight")
def router_element(tensors: Tensors) -> None:
    tensors["blocks.3.router.weight"][0, 2] *= np.float32(1.01)


@foreign_weights("foreign weights file: last bit of one element", "blocks.0.norm.bias")
def last_bit(tensors: Tensors) -> None:
    tensors["blocks.0.norm.bias"].view(np.uint32)[4] ^= 1


@foreign_weights("foreign weights file: two weights of equal shape swapped", "blocks.1.block.up.weight")
def equal_shapes(tensors: Tensors) -> None:
    first, second = tensors["blocks.1.block.up.weight"], tensors["blocks.3.block.up.weight"]
    first[:], second[:] = second.copy(), first.copy()


@folder_fault("foreign: engine of the longer bucket in place of the shorter's", None, "foreign", ENGINE)
def stale(root: Path) -> None:
    shutil.copy(root / OTHER_ENGINE, root / ENGINE)


@folder_fault("foreign: the baseline's engine in place of the routed one", None, "foreign", ENGINE)
def baseline_engine(root: Path) -> None:
    shutil.copy(root / DENSE, root / ENGINE)


# --- a mask, two outputs, tensors that are no parameters -------------------------------------------------------------

faults(
    {
        "masked: second output scaled by 1.0005, the first is right": (None, lambda s: second_output(s, f32(1.0005))),
        HIDDEN: (None, lambda s: second_output(s, f32(-1.0))),
        "masked: gate 1 % too large": (
            "block.block.down",
            lambda s: s.feed(s.node(None, "Mul", -1), 1, "Mul", f32(1.01)),
        ),
        "masked: the smallest scores are taken": ("block.router", lambda s: s.set(s.nodes(None, "TopK")[0], largest=0)),
        "masked: residual missing": (
            "block.block.out",
            lambda s: s.bypass(s.node("block.block.out", "Add", 1), 1),
        ),
        "masked: mask of the other row": (
            "embedding",
            lambda s: s.feed(s.node("embedding", "Mul", 1), 1, "Gather", i64(1, 0), axis=0),
        ),
        "masked: a constant in a product is another": (
            "embedding",
            lambda s: s.feed(s.node("embedding", "Mul", 0), 1, "Mul", f32(1.01)),
        ),
    },
    ENGINE,
    "two outputs",
)


def second_output(s: Surgery, factor: np.ndarray) -> None:
    """Multiplies the graph output `hidden` by `factor`. Nodes inside the graph still read the right value."""
    hidden = s.output("hidden")
    made = s.op(hidden.producer(), "Mul", [hidden, factor])
    node = made.producer()
    s.graph.remove(node)
    s.graph.insert_after(hidden.producer(), node)
    place = next(place for place, value in enumerate(s.graph.outputs) if value is hidden)
    hidden.name, made.name = "right", "hidden"
    s.graph.outputs[place] = made


@fault("masked: one element of the second output wrong by 0.001", None, ENGINE, "two outputs")
def one_hidden(s: Surgery) -> None:
    wrong = np.ones(shape_of(s.output("hidden")), np.float32)
    wrong[1, 7, 2] = 1.001
    second_output(s, wrong)


@fault("masked: second output missing", "hidden", ENGINE, "two outputs")
def no_hidden(s: Surgery) -> None:
    s.graph.outputs.remove(s.output("hidden"))


@weights_fault("masked: buffer that is not saved, one element changed", "scale", WEIGHTS, folder="two outputs")
def buffer_element(tensors: Tensors) -> None:
    tensors["scale"][3] *= np.float32(1.01)


@folder_fault("masked: constant of the captured program changed", None, "two outputs", CONSTANTS)
def constant_element(root: Path) -> None:
    with np.load(root / CONSTANTS) as archive:
        arrays = {name: archive[name] for name in archive}
    arrays["scale"] = arrays["scale"] * np.float32(1.01)
    written = io.BytesIO()
    np.savez(written, **arrays)
    (root / CONSTANTS).write_bytes(written.getvalue())


@folder_fault("masked: captured program with another epsilon", None, "two outputs", PROGRAM)
def program_epsilon(root: Path) -> None:
    # The reference is rebuilt from this file, so the engines are right and the reference is wrong.
    text = (root / PROGRAM).read_text(encoding="utf-8")
    assert text.count("1e-05") == 2
    (root / PROGRAM).write_text(text.replace("1e-05", "1e-03"), encoding="utf-8")


@folder_fault("masked: captured program that takes the smallest scores", None, "two outputs", PROGRAM)
def program_smallest(root: Path) -> None:
    graph = json.loads((root / PROGRAM).read_text(encoding="utf-8"))
    [take] = [node for node in graph["graph_module"]["graph"]["nodes"] if node["target"].endswith("topk.default")]
    assert take["inputs"][2]["arg"] == {"as_int": 1}
    take["inputs"] = [argument for argument in take["inputs"] if argument["name"] not in ("largest", "sorted")]
    take["inputs"] += [{"name": name, "arg": {"as_bool": False}, "kind": 1} for name in ("largest", "sorted")]
    (root / PROGRAM).write_text(json.dumps(graph), encoding="utf-8")


# --- compiled packages ----------------------------------------------------------------------------------------------

for name, source, where in (
    ("foreign package: gate 1 % too large", "foreign gate", ONE),
    ("foreign package: no causal mask", "foreign mask", DENSE_BLOCK),
):
    add(
        name,
        where,
        lambda root, packages, source=source: shutil.copy(packages / f"{source}.pt2", root / PACKAGE),
        "compiled foreign",
        PACKAGE,
    )
