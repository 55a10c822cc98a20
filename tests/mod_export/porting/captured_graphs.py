"""The portable ONNX graph of a model, with its weights in it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from torch import Tensor, nn

from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.sites import RoutingSite
from mod_export.graph.weights import state_of


def portable(
    module: nn.Module, example: Sequence[Tensor], outputs: Sequence[str]
) -> tuple[ir.Model, Sequence[RoutingSite]]:
    """The graph, with inputs x0, x1, ..., and its sites."""
    capture = captured(module, tuple(example), "test")
    state = state_of(module)
    model = onnx_from_captured(capture, state, [f"x{number}" for number in range(len(example))], list(outputs))
    for name, value in model.graph.initializers.items():
        if name in state:
            value.const_value = ir.tensor(state[name].detach().numpy(), name=name)
    apply_rewrites(model, PORTABLE, "float32")
    return model, capture.sites
