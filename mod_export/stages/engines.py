"""Stages passes and engines: each target's own graph, proven to mean the same, and what the target runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from mod_export.artifacts import PRIMARY, Bucket, Engine, Graph, ModelKind, Variant, engine_stem
from mod_export.engine.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.environment import package_version, versions
from mod_export.errors import GraphError, LimitError
from mod_export.graph.dialect import check_dialect
from mod_export.graph.onnx_export import assert_capacity
from mod_export.graph.passes import needs_rewrite, run_passes
from mod_export.inputs import parity_batches
from mod_export.measure.products import attention_sizes
from mod_export.memory import free_bytes
from mod_export.protocols import EngineBuilder
from mod_export.stages.context import Context
from mod_export.stages.formulation import chosen_dialect
from mod_export.stages.graphs import save_graph
from mod_export.validate.rows import judge_runner
from mod_export.workspace import Step

if TYPE_CHECKING:
    import torch

__all__ = ["build_engines", "check_memory", "engine_options", "passes"]

BUILDER_BYTES = 2**30
"""What a vendor's builder takes whatever the model."""
COPIES = 3
"""Of the weights, in float32: as they were read, as they are laid out, and as the plan is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine's builder may draw on."""

    root: Path
    graph: Graph
    weights: str
    program: Callable[[], torch.export.ExportedProgram]

    def exported_program(self) -> torch.export.ExportedProgram:
        return self.program()


def passes(context: Context) -> list[Step]:
    """The graph of each target's dialect, where the portable one is not already it."""
    steps = []
    for builder, variant, kind, bucket in context.plan.variants():
        key = (builder.name, variant.dtype, kind, bucket)
        if not builder.from_onnx or key in context.target_graphs:
            continue
        portable = context.graphs[kind, bucket]
        model = ir.load(context.root / portable.path)
        dialect, chosen = chosen_dialect(context, builder, model)
        steps += chosen
        if not needs_rewrite(dialect, variant.dtype):
            check_dialect(model, dialect, variant.dtype)
            check_memory(builder, portable, model)
            context.target_graphs[key] = portable
            continue
        path = f"graphs/{kind}-{bucket.name}.{builder.name}.{variant.dtype}.onnx"
        graph = Graph(
            path=path,
            model=kind,
            bucket=bucket,
            dtype=variant.dtype,
            target=builder.name,
            k_by_layer=portable.k_by_layer,
            query_blocks=dict(dialect.query_blocks),
            outputs=portable.outputs,
        )
        steps.append(_rewrite_step(context, builder, graph, portable))
        context.target_graphs[key] = graph
    return steps


def check_memory(builder: EngineBuilder, graph: Graph, model: ir.Model) -> None:
    """Better an error now than a process that the kernel kills minutes later.

    Raises:
        LimitError: running this graph would need more memory than is free.
    """
    free = free_bytes()
    needed = _attention_bytes(model) if builder.dialect.whole_scores else 0
    if needed > free:
        raise LimitError(
            f"{builder.name}, {graph.model} {graph.bucket.name}: attention over {graph.bucket.seq} tokens holds about "
            f"{needed / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB are free; build this bucket for other targets "
            "(--target), or a shorter one"
        )


def _rewrite_step(context: Context, builder: EngineBuilder, graph: Graph, portable: Graph) -> Step:
    dialect = asdict(graph.dialect(builder.dialect))
    dialect = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in dialect.items()}
    inputs = {
        "portable": context.workspace.hash_of(portable.path),
        "weights": context.workspace.hash_of(context.weights_path(graph.model, graph.dtype)),
        "dialect": dialect,
        "dtype": graph.dtype,
        "gate": context.plan.config.parity.gate(graph.dtype).model_dump() if _is_proven(builder) else None,
        "versions": versions("mod_export", "onnx_ir", *(["onnxruntime"] if _is_proven(builder) else [])),
    }
    name = f"rewrite/{builder.name}-{engine_stem(graph.model, graph.bucket, graph.dtype)}"
    return context.step(name, inputs, [graph.path], lambda paths: _rewrite(context, builder, graph, portable, paths[0]))


def _rewrite(
    context: Context, builder: EngineBuilder, graph: Graph, portable: Graph, destination: Path
) -> dict[str, Any]:
    model = ir.load(context.root / portable.path)
    needed = _attention_bytes(model)
    dialect = graph.dialect(builder.dialect)
    applied = run_passes(model, dialect, graph.dtype)
    check_dialect(model, dialect, graph.dtype)
    check_memory(builder, graph, model)
    assert_capacity(model, graph.bucket, graph.k_by_layer, PRIMARY[graph.outputs])
    save_graph(context, model, graph, destination)
    proof = _prove_rewrite(context, builder, graph, destination, needed)
    return {"passes": {item.name: item.rewrites for item in applied}, "proof": proof}


def _prove_rewrite(context: Context, builder: EngineBuilder, graph: Graph, path: Path, needed: int) -> str:
    """Runs the rewritten graph on ONNX Runtime's CPU kernels against the reference, where they exist for it.

    A graph that is itself what runs here is judged by the stage validate, on more inputs than one.

    Raises:
        GraphError: the rewrite changed what the graph means.
    """
    if not _is_proven(builder):
        return "not run: the engine is this graph, and is validated here"
    if graph.dtype == "bfloat16":
        return "not run: ONNX Runtime has no bfloat16 kernels on CPU; the float16 graph is rewritten by the same passes"
    if package_version("onnxruntime") is None:
        return "not run: onnxruntime is not installed"
    if needed > free_bytes() // 2:
        return f"not run: attention over {graph.bucket.seq} tokens needs about {needed / 2**30:.0f} GiB on the CPU"
    session = session_from_onnx(path, context.root / "graphs", [CPU], 1, {})
    batches = parity_batches(context.plan.loaded(graph.model), graph.bucket, context.plan.config.seed, 1)[:1]
    gate = context.plan.config.parity.gate(graph.dtype)
    with OrtRunner(session, graph.path, 1) as runner:
        row = judge_runner(
            runner,
            context.reference(graph.model),
            batches,
            gate,
            target=str(graph.target),
            bucket=graph.bucket,
            dtype=graph.dtype,
            model=graph.model,
        )
    if not row.passed:
        raise GraphError(f"{graph.path}: the rewrite changed the meaning of the graph: {'; '.join(row.reasons)}")
    return f"max abs error {row.error['max_abs']:.2g} on ONNX Runtime CPU"


def _is_proven(builder: EngineBuilder) -> bool:
    """Whether the rewritten graph is run before an engine is made of it."""
    return not builder.dialect.whole_scores


def build_engines(context: Context) -> list[Step]:
    """Every engine of every target: those that are built in processes of their own beside the others."""
    cells = list(context.plan.variants())
    engines = [_engine(context, *cell) for cell in cells]
    context.engines += engines
    with ThreadPoolExecutor(_at_once(context)) as pool:
        try:
            waiting = {
                cell: pool.submit(_engine_step, context, *cell, engine)
                for cell, engine in zip(cells, engines, strict=True)
                if cell[0].apart
            }
            done = {
                cell: _engine_step(context, *cell, engine)
                for cell, engine in zip(cells, engines, strict=True)
                if cell not in waiting
            }
            done |= {cell: future.result() for cell, future in waiting.items()}
        except BaseException:  # Interrupted as well: what has not begun must not be waited for.
            pool.shutdown(cancel_futures=True)
            raise
    return [done[cell] for cell in cells]


def _at_once(context: Context) -> int:
    """Builders in processes of their own that processor and memory have room for: each holds weights and plan."""
    parameters = sum(tensor.numel() for tensor in context.plan.model.loaded.weights.values())
    room = free_bytes() // (BUILDER_BYTES + COPIES * 4 * parameters)
    return max(1, min(os.cpu_count() or 1, int(room)))


def _engine(context: Context, builder: EngineBuilder, variant: Variant, kind: ModelKind, bucket: Bucket) -> Engine:
    return Engine(
        target=builder.name,
        model=kind,
        bucket=bucket,
        dtype=variant.dtype,
        path=f"engines/{builder.name}/{engine_stem(kind, bucket, variant.dtype, variant.arch)}{builder.suffix}",
        weights=None if builder.suffix == ".engine" else context.weights_path(kind, variant.dtype),
        arch=variant.arch,
    )


def _engine_step(
    context: Context, builder: EngineBuilder, variant: Variant, kind: ModelKind, bucket: Bucket, engine: Engine
) -> Step:
    graph = context.target_graphs.get((builder.name, variant.dtype, kind, bucket), context.graphs[kind, bucket])
    weights = context.weights_path(kind, variant.dtype)
    inputs = {
        "graph": context.workspace.hash_of(graph.path),
        "weights": context.workspace.hash_of(weights),
        "variant": asdict(variant),
        "options": engine_options(context, builder),
        "versions": {**versions("mod_export"), **builder.versions()},
        # An engine that is built where it runs is native code for this machine.
        "machine": None if variant.arch else [context.machine["cpu"], context.machine["gpu"]],
    }
    job = Job(
        root=context.root,
        graph=graph,
        weights=weights,
        program=lambda: context.captures.program(kind, bucket),
    )
    stem = engine_stem(kind, bucket, variant.dtype, variant.arch)
    return context.step(
        f"engine/{builder.name}/{stem}",
        inputs,
        [engine.path],
        lambda paths: builder.build(job, variant, paths[0], context.plan.config),
    )


def engine_options(context: Context, builder: EngineBuilder) -> dict[str, Any]:
    """The target's options that touch every engine; which engines there are is said by the variants."""
    options: dict[str, Any] = context.plan.config.target.model_dump(mode="json", by_alias=True)[builder.name]
    # What only decides how a graph looks is in the graph.
    return {key: value for key, value in options.items() if key not in ("dtypes", "architectures", "query_block")}


def _attention_bytes(model: ir.Model) -> int:
    """Most memory that one attention of a graph needs where scores and probabilities are held in full, as float32."""
    sizes = [0]
    for node in model.graph:
        if node.op_type == "Attention" and node.inputs[0] is not None and node.inputs[0].shape is not None:
            scores, _ = attention_sizes(node, "attention")
            sizes.append(2 * 4 * scores)
    return max(sizes)
