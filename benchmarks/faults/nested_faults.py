"""Faults in routers that decide about several blocks, and select among the tokens of the router before.

Graphs are of `base_folder.NESTED_SPEC`: the router of layer 0 decides about layers 0 and 1, that of layer 2 about
layers 2 and 3. The nodes of all blocks of a router belong to the layer that has it. Its products are those of the
router, and for each block q, k, v, o, gate, up, down.
"""

from __future__ import annotations

from benchmarks.faults.fault_table import f32, faults
from benchmarks.faults.graph_surgery import Surgery

WHERE = "layers.2"


def _from_all(s: Surgery) -> None:
    """Lets the second router select from all real tokens, as the first one does."""
    s.node(2, "And", 0).replace_input_with(1, s.node(0, "And", 0).inputs[1])


def _without_stream(s: Surgery) -> None:
    """Combines with what the blocks added, in place of their whole result."""
    combined = s.node(2, "Mul", -1)
    x = s.node(2, "Add", -1).inputs[0]
    combined.replace_input_with(1, s.op(combined, "Sub", [combined.inputs[1], x]))


def _skips_second(s: Surgery) -> None:
    """Takes the result of the first block for that of both."""
    s.node(2, "Mul", -1).replace_input_with(1, s.nodes(2, "RMSNormalization")[2].inputs[0])


def _first_norm_twice(s: Surgery) -> None:
    first, second = s.nodes(2, "RMSNormalization")[0], s.nodes(2, "RMSNormalization")[2]
    second.replace_input_with(1, first.inputs[1])


faults(
    {
        "nested: the second router selects from all tokens": ("layers.0", _from_all),
        "nested: gate weighs what the blocks add": (WHERE, _without_stream),
        "nested: second block left out": (WHERE, _skips_second),
        "nested: second block with the first one's norm": (WHERE, _first_norm_twice),
        "nested: second block 1 % too large": (
            WHERE, lambda s: s.after(s.node(2, "MatMul", 14).outputs[0], "Mul", f32(1.01)),
        ),
        "nested: blocks read the weights of each other": (
            WHERE,
            lambda s: s.swap_inputs(s.node(2, "MatMul", 4), s.node(2, "MatMul", 11)),
        ),
        "nested: cosines of the second block are sines": (
            WHERE,
            lambda s: [
                rotary.replace_input_with(1, rotary.inputs[2]) for rotary in s.nodes(2, "RotaryEmbedding")[2:]
            ],
        ),
    },
    folder="nested",
)  # fmt: skip
