"""Prefill and decode graphs of every bucket, proven static, rewritten for each target, and the engines made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.artifacts import Bucket, Dialect, DType, Engine, Graph, ModelKind, Role, Variant, engine_stem
from mod_export.environment import versions
from mod_export.errors import GraphError
from mod_export.graph.capture import exported_with, prove_static_with
from mod_export.graph.dialect import check_dialect
from mod_export.graph.onnx_export import EXPORTERS, onnx_with_names
from mod_export.graph.passes import PORTABLE, run_passes
from mod_export.graph.weights import state_of
from mod_export.plan import KINDS, GenerationPlan
from mod_export.protocols import EngineBuilder, GraphSource
from mod_export.stages.context import Context
from mod_export.stages.engines import Job, engine_options
from mod_export.stages.formulation import chosen_dialect
from mod_export.stages.graphs import save_graph
from mod_export.workspace import TOKENIZER, Step

__all__ = ["build_decoding", "keep_tokenizer"]


def build_decoding(context: Context, plan: GenerationPlan) -> list[Step]:
    """Portable graphs, graphs of targets, and engines."""
    steps: list[Step] = []
    for kind, role, bucket in _cells(plan):
        portable = Graph(
            path=f"graphs/{kind}-{role}-{bucket.name}.onnx",
            model=kind,
            bucket=bucket,
            dtype="float32",
            target=None,
            k_by_layer=plan.models[kind].loaded.k_by_layer(bucket.seq),
            role=role,
        )
        steps.append(_portable(context, plan, portable))
        context.generation.graphs.append(portable)
        for builder in plan.targets.values():
            steps += _engines(context, builder, portable)
    return steps


def _variants(context: Context, builder: EngineBuilder) -> list[Variant]:
    if builder.binds:
        # Not int8: one scale for all rows would let a text depend on those that are written beside it.
        return [Variant(dtype="float32")]
    return list(builder.variants(context.plan.config))


def _cells(plan: GenerationPlan) -> Iterator[tuple[ModelKind, Role, Bucket]]:
    for kind in KINDS:
        yield from ((kind, "prefill", bucket) for bucket in plan.prefills)
        yield from ((kind, "decode", bucket) for bucket in plan.decodes)


def keep_tokenizer(context: Context) -> list[Step]:
    """A copy of the tokenizer's file, if the model has one."""
    path = context.plan.tokenizer
    if not isinstance(path, Path):
        return []
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [context.step("tokenizer", {"sha256": digest}, [TOKENIZER], lambda paths: _copy(path, paths[0]))]


def _copy(path: Path, destination: Path) -> None:
    destination.write_bytes(path.read_bytes())


def _portable(context: Context, plan: GenerationPlan, graph: Graph) -> Step:
    inputs = {
        **context.identity(graph.model),
        "generation": plan.models[graph.model].loaded.spec,
        "window": plan.window,
        "places": context.plan.config.generation.places,
        "role": graph.role,
        "bucket": asdict(graph.bucket),
        "weights": context.workspace.hash_of(context.weights_path(graph.model, "float32")),
        "versions": versions(*EXPORTERS),
    }
    stem = f"{graph.model}-{graph.role}-{graph.bucket.name}"
    return context.step(f"graph/{stem}", inputs, [graph.path], partial(_export, context, plan, graph))


def _source(context: Context, plan: GenerationPlan, graph: Graph) -> GraphSource:
    model, bucket = plan.models[graph.model], graph.bucket
    if graph.role == "prefill":
        return model.prefill(bucket.batch, bucket.seq)
    return model.step(bucket.batch, bucket.seq, context.plan.config.generation.places)


def _export(context: Context, plan: GenerationPlan, graph: Graph, paths: Sequence[Path]) -> dict[str, Any]:
    source, where = _source(context, plan, graph), f"{graph.model} {graph.role} at {graph.bucket.name}"
    proof = prove_static_with(source.module, source.examples, where)
    program = exported_with(source.module, source.examples[0], where, strict=graph.role == "decode")
    model = onnx_with_names(program, state_of(source.module), source.inputs, source.outputs)
    applied = run_passes(model, PORTABLE, "float32")
    _check_ports(graph, model, source)
    save_graph(context, model, graph, paths[0])
    return {"proof": asdict(proof), "passes": {item.name: item.rewrites for item in applied}}


def _check_ports(graph: Graph, model: ir.Model, source: GraphSource) -> None:
    """Names are how a runtime finds the cache, and sizes how it makes one.

    Raises:
        GraphError: an input or output is missing, or has no fixed size.
    """
    names = [value.name for value in model.graph.outputs]
    if names != list(source.outputs) or not {value.name for value in model.graph.inputs} <= set(source.inputs):
        raise GraphError(f"{graph.path}: has the outputs {', '.join(map(str, names))}, not {', '.join(source.outputs)}")
    loose = [value.name for value in model.graph.outputs if value.shape is None or not value.shape.is_static()]
    if loose:
        raise GraphError(f"{graph.path}: {', '.join(map(str, loose))} has no fixed size; write the step without one")


def _engines(context: Context, builder: EngineBuilder, portable: Graph) -> list[Step]:
    """The graph of each dtype of a target, and the engines made of it."""
    model = ir.load(context.root / portable.path)
    dialect, steps = chosen_dialect(context, builder, model)
    graphs: dict[DType, Graph] = {}
    for variant in _variants(context, builder):
        if variant.dtype not in graphs:
            graphs[variant.dtype], rewritten = _graph(context, builder, portable, dialect, variant.dtype)
            steps.append(rewritten)
        steps.append(_engine(context, builder, graphs[variant.dtype], variant))
    context.generation.graphs += graphs.values()
    return steps


def _graph(
    context: Context, builder: EngineBuilder, portable: Graph, dialect: Dialect, dtype: DType
) -> tuple[Graph, Step]:
    graph = Graph(
        path=f"graphs/{portable.model}-{portable.role}-{portable.bucket.name}.{builder.name}.{dtype}.onnx",
        model=portable.model,
        bucket=portable.bucket,
        dtype=dtype,
        target=builder.name,
        k_by_layer=portable.k_by_layer,
        query_blocks=dict(dialect.query_blocks),
        role=portable.role,
    )
    stem = engine_stem(graph.model, graph.bucket, graph.dtype, role=graph.role)
    chosen = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(dialect).items()}
    hash_of = context.workspace.hash_of
    step = context.step(
        f"passes/{builder.name}/{stem}",
        {
            "portable": hash_of(portable.path),
            "weights": hash_of(context.weights_path(graph.model, graph.dtype)),
            "dialect": chosen,
            "dtype": graph.dtype,
            **context.versions("onnx_ir"),
        },
        [graph.path],
        partial(_rewrite, context, builder, graph, portable),
    )
    return graph, step


def _engine(context: Context, builder: EngineBuilder, graph: Graph, variant: Variant) -> Step:
    weights, hash_of = context.weights_path(graph.model, graph.dtype), context.workspace.hash_of
    stem = engine_stem(graph.model, graph.bucket, variant.dtype, variant.arch, graph.role)
    engine = Engine(
        target=builder.name,
        model=graph.model,
        bucket=graph.bucket,
        dtype=graph.dtype,
        path=f"engines/{builder.name}/{stem}{builder.suffix}",
        weights=None if builder.suffix == ".engine" else weights,
        arch=variant.arch,
        role=graph.role,
    )
    job = Job(root=context.root, graph=graph, weights=weights, program=lambda: _program(context, graph))
    context.generation.engines.append(engine)
    return context.step(
        f"engine/{builder.name}/{stem}",
        {
            "graph": hash_of(graph.path),
            "weights": hash_of(weights),
            "variant": asdict(variant),
            "options": engine_options(context, builder),
            "versions": {**versions("mod_export"), **builder.versions()},
            "machine": None if variant.arch else [context.machine["cpu"], context.machine["gpu"]],
        },
        [engine.path],
        lambda paths: builder.build(job, variant, paths[0], context.plan.config),
    )


def _program(context: Context, graph: Graph) -> Any:
    assert isinstance(context.plan.generation, GenerationPlan)
    source = _source(context, context.plan.generation, graph)
    return exported_with(source.module, source.examples[0], graph.path)


def _rewrite(
    context: Context, builder: EngineBuilder, graph: Graph, portable: Graph, paths: Sequence[Path]
) -> dict[str, Any]:
    model = ir.load(context.root / portable.path)
    dialect = graph.dialect(builder.dialect)
    applied = run_passes(model, dialect, graph.dtype)
    check_dialect(model, dialect, graph.dtype)
    save_graph(context, model, graph, paths[0])
    return {"passes": {item.name: item.rewrites for item in applied}}
