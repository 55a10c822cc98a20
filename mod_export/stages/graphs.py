"""Stages capture and onnx: one static graph per model and bucket, and the weights files that all of them share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.artifacts import DTYPES, PRIMARY, QUANTIZED, Bucket, DType, Graph, ModelKind
from mod_export.environment import versions
from mod_export.errors import GraphError
from mod_export.graph.capture import exported_from_module, prove_static
from mod_export.graph.onnx_export import EXPORTERS, assert_capacity, check_model, onnx_from_exported
from mod_export.graph.passes import PORTABLE, run_passes
from mod_export.graph.passes.quantize_weights import quantizable_weights
from mod_export.graph.weights import bind_weights, files_for, state_of, stored_state, write_weights
from mod_export.graph.weights_file import WeightsFile
from mod_export.measure.cost import CostRow, cost_row
from mod_export.plan import KINDS
from mod_export.stages.context import Context
from mod_export.workspace import Step

__all__ = ["capture", "onnx", "save_graph"]


def capture(context: Context) -> list[Step]:
    """Proves that every bucket is one static graph."""
    outputs, used = context.plan.config.outputs, versions("mod_export", "torch")
    return [
        context.step(
            f"capture/{kind}-{bucket.name}",
            {**context.identity(kind), "bucket": asdict(bucket), "outputs": outputs, "versions": used},
            [],
            partial(_prove, context, kind, bucket),
        )
        for kind, bucket in context.plan.cells()
    ]


def _prove(context: Context, kind: ModelKind, bucket: Bucket, paths: Sequence[Path]) -> dict[str, int]:
    return asdict(prove_static(context.captures.skeleton(kind), bucket, kind))


def onnx(context: Context) -> list[Step]:
    """Weights files, and the portable graph of every bucket."""
    dtypes = _dtypes(context)
    prefixes = list(dict.fromkeys(context.plan.weights_of(kind) for kind in KINDS))
    steps = [_weights_step(context, prefix, dtype) for prefix in prefixes for dtype in dtypes if dtype not in QUANTIZED]
    for kind, bucket in context.plan.cells():
        graph = Graph(
            path=f"graphs/{kind}-{bucket.name}.onnx",
            model=kind,
            bucket=bucket,
            dtype="float32",
            target=None,
            k_by_layer=context.plan.loaded(kind).k_by_layer(bucket.seq),
            outputs=context.plan.config.outputs,
        )
        weights = context.weights_path(kind, "float32")
        inputs = {
            **context.identity(kind),
            "bucket": asdict(bucket),
            "outputs": graph.outputs,
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
    # Which weights can become whole numbers is read from the graphs.
    return steps + [
        _weights_step(context, prefix, dtype, _quantized(context, prefix, dtype))
        for prefix in prefixes
        for dtype in dtypes
        if dtype in QUANTIZED
    ]


def _quantized(context: Context, prefix: str, dtype: DType) -> frozenset[str]:
    """The weights of one file that all graphs of it take as whole numbers."""
    found = [
        quantizable_weights(ir.load(context.root / graph.path), dtype)
        for (kind, _), graph in context.graphs.items()
        if context.plan.weights_of(kind) == prefix
    ]
    return frozenset.intersection(*found)


def _export(context: Context, graph: Graph, paths: Sequence[Path]) -> dict[str, Any]:
    routed = [layer for layer, k in graph.k_by_layer.items() if k]
    skeleton = context.captures.skeleton(graph.model)
    program = exported_from_module(skeleton, graph.bucket, graph.model)
    model = onnx_from_exported(program, state_of(skeleton), routed, PRIMARY[graph.outputs])
    applied = run_passes(model, PORTABLE, "float32")
    assert_capacity(model, graph.bucket, graph.k_by_layer, PRIMARY[graph.outputs])
    save_graph(context, model, graph, paths[0])
    return {
        "passes": {item.name: item.rewrites for item in applied},
        "cost": asdict(cost_row(model, graph.model, graph.bucket)),
    }


def save_graph(context: Context, model: ir.Model, graph: Graph, destination: Path) -> None:
    """Binds the weights, writes the graph, and has onnx.checker look at it where its weights are."""
    folder = context.root / "graphs"
    files = [
        WeightsFile.open(context.root / context.weights_path(graph.model, dtype)) for dtype in files_for(graph.dtype)
    ]
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


def _weights_step(context: Context, prefix: str, dtype: DType, quantized: Collection[str] = ()) -> Step:
    kind: ModelKind = "dense" if prefix.endswith("baseline") else "mod"
    path = context.weights_path(kind, dtype)

    def make(paths: Sequence[Path]) -> dict[str, str]:
        # The digests are of the tensors in memory, before they are written: what is in the file has to be these.
        return write_weights(paths[0], stored_state(context.plan.loaded(kind)), dtype, quantized)

    inputs = {
        **context.identity(kind),
        "dtype": dtype,
        "quantized": sorted(quantized),
        "versions": versions("mod_export"),
    }
    step = context.step(f"weights/{prefix}-{dtype}", inputs, [path], make)
    context.weight_digests[path] = step.result
    return step


def _dtypes(context: Context) -> Sequence[DType]:
    wanted = {"float32", *(variant.dtype for _, variant, _, _ in context.plan.variants())}
    return [dtype for dtype in DTYPES if dtype in wanted]
