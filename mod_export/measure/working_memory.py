"""Says how much memory a runtime needs beside the weights of a graph, from the shapes in the graph."""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from mod_export.errors import GraphError
from mod_export.measure.cost import attention_sizes, bytes_of_value, is_attention


def attention_bytes(model: ir.Model) -> int:
    """Returns the bytes that a graph's largest attention needs if it holds all scores and probabilities in float32."""
    sizes = [0]
    for node in model.graph.all_nodes():
        if is_attention(node) and node.inputs[0] is not None and node.inputs[0].shape is not None:
            sizes.append(2 * 4 * attention_sizes(node, "attention").scores)
    return max(sizes)


def working_bytes(model: ir.Model) -> int:
    """Returns about how many bytes a runtime that holds whole scores needs at once: those of the largest attention, or
    twice the largest value, because attention may be written out as products.
    """
    sizes = [attention_bytes(model)]
    for node in model.graph.all_nodes():
        for value in node.outputs:
            with contextlib.suppress(GraphError):  # Its shape is not known, and neither is that of a sequence.
                sizes.append(2 * bytes_of_value(value, "value"))
    return max(sizes)
