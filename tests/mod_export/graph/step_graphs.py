"""Prefill and decode graphs of the tiny text models, with their weights, as the rewrites for a target get them."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir
from generating import GENERATING, WINDOW
from tiny_models import lively_checkpoint

from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.weights import state_of
from mod_export.model.model import GraphSource
from mod_export.model.transformer import GeneratingTransformer
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ModelSpec


def step_graph(name: str, rows: int = 1, slots: str = "all", *, skip: bool = True) -> ir.Model:
    """The portable graph of one step of `generating.generating_model(name)`."""
    return step_graph_of(GENERATING[name], rows, slots, skip=skip)


def step_graph_of(spec: ModelSpec, rows: int = 1, slots: str = "all", *, skip: bool = True) -> ir.Model:
    """Like `step_graph`, of a spec."""
    return ir.from_proto(_step(spec, rows, slots, skip))


def prefill_graph(name: str, seq: int = WINDOW, rows: int = 1) -> ir.Model:
    """The portable graph that reads prompts of up to `seq` tokens."""
    return prefill_graph_of(GENERATING[name], seq, rows)


def prefill_graph_of(spec: ModelSpec, seq: int = WINDOW, rows: int = 1) -> ir.Model:
    """Like `prefill_graph`, of a spec."""
    return ir.from_proto(_prefill(spec, seq, rows))


@functools.cache
def _step(spec: ModelSpec, rows: int, slots: str, skip: bool) -> onnx.ModelProto:
    return _proto(spec, _writer(spec).step(rows, WINDOW, slots, skip=skip))


@functools.cache
def _prefill(spec: ModelSpec, seq: int, rows: int) -> onnx.ModelProto:
    return _proto(spec, _writer(spec).prefill(rows, seq, WINDOW, seq))


def _writer(spec: ModelSpec) -> GeneratingTransformer:
    return GeneratingTransformer(Checkpoint(spec=spec, weights={}), WINDOW)


def _proto(spec: ModelSpec, source: GraphSource) -> onnx.ModelProto:
    program = captured(source.module, source.examples[0], "text", strict=source.conditions)
    model = onnx_from_captured(program, state_of(source.module), source.inputs, source.outputs)
    apply_rewrites(model, PORTABLE, "float32")
    state = state_of(lively_checkpoint(spec, 1).module())
    for weight, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(state[weight].detach().numpy(), name=weight)
    return ir.to_proto(model)
