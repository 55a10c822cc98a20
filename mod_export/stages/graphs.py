"""Stages capture and onnx: one static graph per model and bucket, and the weights files that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.artifacts import DTYPES, Bucket, DType, Graph, ModelKind
from mod_export.environment import versions
from mod_export.errors import GraphError
from mod_export.graph.capture import prove_static
from mod_export.graph.digests import digests_of_tensors
from mod_export.graph.onnx_export import EXPORTERS, assert_capacity, check_model, onnx_from_exported
from mod_export.graph.passes import PORTABLE, run_passes
from mod_export.graph.weights import WeightsFile, bind_weights, state_of, write_weights
from mod_export.measure.cost import CostRow, cost_row
from mod_export.plan import KINDS
from mod_export.stages.context import Context
from mod_export.workspace import Step

__all__ = ["capture", "onnx", "save_graph"]

FLOATS: Mapping[DType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


def capture(context: Context) -> list[Step]:
    """Proves that every bucket is one static graph."""
    return [
        context.step(
            f"capture/{kind}-{bucket.name}",
            {**context.identity(kind), "bucket": asdict(bucket), "versions": versions("mod_export", "torch")},
            [],
            partial(_prove, context, kind, bucket),
        )
        for kind, bucket in context.plan.cells()
    ]


def _prove(context: Context, kind: ModelKind, bucket: Bucket, paths: Sequence[Path]) -> dict[str, int]:
    return asdict(prove_static(context.captures.module(kind), bucket, kind))


def onnx(context: Context) -> list[Step]:
    """Weights files, and the portable graph of every bucket."""
    steps = [_weights_step(context, prefix, dtype) for prefix in _prefixes(context) for dtype in _dtypes(context)]
    for kind, bucket in context.plan.cells():
        graph = Graph(
            path=f"graphs/{kind}-{bucket.name}.onnx",
            model=kind,
            bucket=bucket,
            dtype="float32",
            target=None,
            k_by_layer=context.plan.loaded(kind).k_by_layer(bucket.seq),
        )
        weights = context.weights_path(kind, "float32")
        inputs = {
            **context.identity(kind),
            "bucket": asdict(bucket),
            "weights": context.workspace.hash_of(weights),
            "versions": versions(*EXPORTERS),
        }
        step = context.step(
            f"graph/{kind}-{bucket.name}",
            inputs,
            [graph.path],
            partial(_export, context, graph),
        )
        context.graphs[kind, bucket] = graph
        context.cost.append(CostRow(**step.result["cost"]))
        steps.append(step)
    return steps


def _export(context: Context, graph: Graph, paths: Sequence[Path]) -> dict[str, Any]:
    routed = [layer for layer, k in graph.k_by_layer.items() if k]
    state = state_of(context.captures.module(graph.model))
    model = onnx_from_exported(context.captures.program(graph.model, graph.bucket), state, routed)
    applied = run_passes(model, PORTABLE, "float32")
    assert_capacity(model, graph.bucket, graph.k_by_layer)
    save_graph(context, model, graph, paths[0])
    return {
        "passes": {item.name: item.rewrites for item in applied},
        "cost": asdict(cost_row(model, graph.model, graph.bucket)),
    }


def save_graph(context: Context, model: ir.Model, graph: Graph, destination: Path) -> None:
    """Binds the weights, writes the graph, and has onnx.checker look at it where its weights are."""
    folder = context.root / "graphs"
    files = {
        FLOATS[dtype]: WeightsFile.open(context.root / context.weights_path(graph.model, dtype))
        for dtype in {graph.dtype, "float32"}
    }
    bind_weights(model, files, folder)
    unbound = [name for name, value in model.graph.initializers.items() if value.const_value is None]
    if unbound:
        raise GraphError(f"{graph.path}: no value for {', '.join(unbound[:3])}; the weights file does not hold it")
    data = ir.to_proto(model).SerializeToString()
    # External data must lie beside the graph, so the check runs on a copy there.
    probe = folder / f".partial-{destination.name}"
    try:
        probe.write_bytes(data)
        check_model(str(probe))
    finally:
        probe.unlink(missing_ok=True)
    destination.write_bytes(data)


def _weights_step(context: Context, prefix: str, dtype: DType) -> Step:
    kind: ModelKind = "dense" if prefix.endswith("baseline") else "mod"
    path = context.weights_path(kind, dtype)

    def make(paths: Sequence[Path]) -> dict[str, str]:
        state = state_of(context.captures.module(kind))
        # Of the tensors in memory, before they are written: what is in the file later has to be these.
        digests = digests_of_tensors(state, dtype)
        write_weights(paths[0], state, dtype)
        return digests

    inputs = {**context.identity(kind), "dtype": dtype, "versions": versions("mod_export")}
    step = context.step(f"weights/{prefix}-{dtype}", inputs, [path], make)
    context.weight_digests[path] = step.result
    return step


def _prefixes(context: Context) -> Sequence[str]:
    return list(dict.fromkeys(context.plan.weights_of(kind) for kind in KINDS))


def _dtypes(context: Context) -> Sequence[DType]:
    wanted = {"float32", *(variant.dtype for _, variant, _, _ in context.plan.variants())}
    return [dtype for dtype in DTYPES if dtype in wanted]
