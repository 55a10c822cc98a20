"""Faults in what skipped tokens leave behind: their keys and values, and their adapter.

Graphs are of `base_folder.SKIPPED_SPEC`. The products of a routed layer are those of the router (2), k, v, those of the
adapter (3), q, o, gate, up, down.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from benchmarks.faults.fault_table import f32, fault, faults, i64
from benchmarks.faults.graph_surgery import Surgery

WHERE = "layers.1"


def _share(s: Surgery) -> None:
    """Weighs the adapter by g in place of 1 - g."""
    rest = s.node(1, "Sub", -1)
    s.bypass(rest, 1)


def _left(s: Surgery) -> None:
    """Skips the adapter of the tokens that the scatter does not write."""
    s.node(1, "ScatterND", 0).replace_input_with(0, s.node(1, "Gather", 0).inputs[0])


def _empty_slots(s: Surgery) -> None:
    """Skips the adapter of the tokens in empty slots."""
    where = s.node(1, "Where", -1)
    where.replace_input_with(2, s.node(1, "Add", -2).inputs[0])


@fault("skipped: keys of tokens that skip are hidden", WHERE, folder="skipped")
def hidden(s: Surgery) -> None:
    """Only the tokens that want to run have a key."""
    mask, wanted = s.node(1, "LessOrEqual", 0), s.node(1, "And", 0).outputs[0]
    node = next(use.node for use in mask.outputs[0].uses())
    keys = s.op(node, "Unsqueeze", [wanted, i64(1)], like=mask.outputs[0])
    keys.shape = ir.Shape((2, 1, 32))
    node.replace_input_with(0, s.op(node, "And", [mask.outputs[0], keys], like=mask.outputs[0]))


@fault("skipped: keys and values of the layer before", WHERE, folder="skipped")
def earlier(s: Surgery) -> None:
    attention, before = s.node(1, "Attention", 0), s.node(0, "Attention", 0)
    for number in (1, 2):
        attention.replace_input_with(number, before.inputs[number])


faults(
    {
        "skipped: adapter weighs g": (WHERE, _share),
        "skipped: adapter without its weight": (
            WHERE, lambda s: s.bypass(s.node(1, "Sub", -1).outputs[0].uses()[0].node, 1),
        ),
        "skipped: no adapter in rows that the scatter leaves": (WHERE, _left),
        "skipped: no adapter in empty slots": (WHERE, _empty_slots),
        "skipped: adapter 1 % too large": (
            WHERE, lambda s: s.after(s.node(1, "MatMul", 6).outputs[0], "Mul", f32(1.01)),
        ),
        "skipped: adapter's gate and up swapped": (WHERE, lambda s: s.swap_inputs(*s.nodes(1, "MatMul")[4:6])),
        "skipped: adapter reads the norm of attention": (
            WHERE,
            lambda s: [
                node.replace_input_with(0, s.node(1, "RMSNormalization", 0).outputs[0])
                for node in s.nodes(1, "MatMul")[4:6]
            ],
        ),
        "skipped: a token sees the next one": (
            WHERE, lambda s: s.feed(s.node(1, "LessOrEqual", 0), 1, "Add", i64(1)),
        ),
        "skipped: a token does not see itself": (
            WHERE, lambda s: setattr(s.node(1, "LessOrEqual", 0), "op_type", "Less"),
        ),
        "skipped: keys one position too far": (
            WHERE,
            lambda s: [
                s.feed(s.node(1, "RotaryEmbedding", 0), table, "Gather", i64(*range(1, 32), 31), axis=1)
                for table in (1, 2)
            ],
        ),
        "skipped: key of one token hidden": (
            WHERE,
            lambda s: s.after(s.node(1, "LessOrEqual", 0).outputs[0], "And", np.arange(32) != 5),
        ),
    },
    folder="skipped",
)  # fmt: skip
