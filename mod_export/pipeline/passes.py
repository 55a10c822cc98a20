"""Stage passes: rewrites the portable graph for each target, and proves that it means the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.engines.ort_attention import AttentionShape, default_block, fastest_block, is_measured, time_blocks
from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.protocol import EngineBuilder
from mod_export.environment import free_bytes, package_version, versions
from mod_export.errors import GraphError, LimitError
from mod_export.graph.onnx_export import assert_capacity
from mod_export.graph.rewrites import apply_rewrites, needs_rewrite
from mod_export.graph.rewrites.attention import splittable_tokens
from mod_export.graph.target import check_limits
from mod_export.judge.inputs import parity_batches
from mod_export.judge.parity import judge_runner
from mod_export.measure.conditions import Watch
from mod_export.measure.working_memory import attention_bytes
from mod_export.pipeline.build import Build
from mod_export.pipeline.graphs import save_graph
from mod_export.rows.base import fields_of_graph
from mod_export.rows.correctness import worst_error
from mod_export.types import QUANTIZED, DType, Graph, Setting, TargetLimits


def passes(build: Build) -> None:
    """Makes the graph of each target, unless the portable graph already fits.

    Raises:
        BuildError: no target can take any graph of the model.
    """
    done: set[tuple[str, DType, str]] = set()
    for builder, variant, portable in list(build.planned()):
        key = (builder.name, variant.dtype, portable.path)
        if builder.from_onnx and key not in done:
            done.add(key)
            about = {**fields_of_graph(portable), "target": builder.name, "dtype": variant.dtype}
            with build.attempt("passes", about):
                _target_graph(build, builder, variant.dtype, portable)
    build.require([graph for _, _, graph in build.planned()])


def _target_graph(build: Build, builder: EngineBuilder, dtype: DType, portable: Graph) -> None:
    model = ir.load(build.root / portable.path)
    limits = _chosen_limits(build, builder, model)
    if not needs_rewrite(limits, dtype):
        check_limits(model, limits, dtype)
        check_memory(builder, portable, model)
        return
    graph = replace(
        portable,
        path=f"graphs/{portable.stem}.{builder.name}.{dtype}.onnx",
        dtype=dtype,
        target=builder.name,
        query_blocks=dict(limits.query_blocks),
        limits_of_machine=_limits_of_machine(builder),
    )
    _rewrite_step(build, builder, graph, portable)
    build.graphs.append(graph)


def _limits_of_machine(builder: EngineBuilder) -> dict[str, Any]:
    """Returns the limits of this machine that are not those of the target."""
    usual, here = asdict(builder.limits), asdict(builder.limits_here())
    return {name: value for name, value in here.items() if value != usual[name]}


def check_memory(builder: EngineBuilder, graph: Graph, model: ir.Model) -> None:
    """Refuses a graph that does not fit into memory, before the operating system kills the process minutes later.

    Raises:
        LimitError: running this graph would need more memory than is free.
    """
    free = free_bytes()
    needed = attention_bytes(model) if builder.limits.whole_scores else 0
    if needed > free:
        raise LimitError(
            f"{builder.name}, {graph.model} {graph.bucket.name}: attention over {graph.bucket.seq} tokens holds about "
            f"{needed / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB are free; build this bucket for other targets "
            "(--target), or a shorter one"
        )


def _rewrite_step(build: Build, builder: EngineBuilder, graph: Graph, portable: Graph) -> None:
    limits = asdict(graph.limits(builder.limits))
    proven = _is_proven(builder, graph)
    inputs = {
        "portable": build.hash_of(portable.path),
        "weights": build.weights_hashes(graph.model, graph.dtype),
        "dialect": {key: sorted(value) if isinstance(value, frozenset) else value for key, value in limits.items()},
        "dtype": graph.dtype,
        "gate": build.config.parity.gate(graph.dtype).model_dump() if proven else None,
        "versions": versions("mod_export", "onnx_ir", *(["onnxruntime"] if proven else [])),
    }
    name = f"rewrite/{builder.name}/{graph.stem}-{graph.dtype}"
    build.step(name, inputs, [graph.path], lambda paths: _rewrite(build, builder, graph, portable, paths[0]))


def _rewrite(build: Build, builder: EngineBuilder, graph: Graph, portable: Graph, destination: Path) -> dict[str, Any]:
    model = ir.load(build.root / portable.path)
    needed = attention_bytes(model)
    limits = graph.limits(builder.limits)
    applied = apply_rewrites(model, limits, graph.dtype)
    check_limits(model, limits, graph.dtype)
    check_memory(builder, graph, model)
    if not graph.writes_text:
        assert_capacity(model, graph.bucket, graph.k_by_layer, graph.results)
    save_graph(build, model, graph, destination)
    proof = _prove_rewrite(build, builder, graph, destination, needed)
    return {"passes": applied, "proof": proof}


def _prove_rewrite(build: Build, builder: EngineBuilder, graph: Graph, path: Path, needed: int) -> str:
    """Compares the rewritten graph with the reference on ONNX Runtime's CPU kernels, if they can run it.

    A graph that is an engine of this machine is left to the stage validate, which uses more inputs.

    Raises:
        GraphError: the rewrite changed what the graph means.
    """
    if graph.writes_text:
        return "not run: the stage validate judges it token by token"
    if not _is_proven(builder, graph):
        return "not run: the engine is this graph, and is validated here"
    if graph.dtype in QUANTIZED:
        return "not run: rounded weights change what the graph computes; the engine is judged where it runs"
    if graph.dtype == "bfloat16":
        return "not run: ONNX Runtime has no bfloat16 kernels on CPU; the engine is judged where it runs"
    if package_version("onnxruntime") is None:
        return "not run: onnxruntime is not installed"
    if needed > free_bytes() // 2:
        return f"not run: attention over {graph.bucket.seq} tokens needs about {needed / 2**30:.0f} GiB on the CPU"
    session = session_from_onnx(path, build.root / "graphs", [CPU], 1, {})
    reference = build.reference(graph.model)
    ks = reference.k_by_layer(graph.bucket).values()
    batches = parity_batches(reference.model, graph.bucket, ks, build.config.seed, 1)[:1]
    setting = Setting(
        target=str(graph.target), dtype=graph.dtype, model=graph.model, role=graph.role, bucket=graph.bucket
    )
    with OrtRunner(session, graph.path, 1) as runner:
        row = judge_runner([(runner, batches)], reference, build.config.parity.gate(graph.dtype), setting)
    if not row.passed:
        raise GraphError(f"{graph.path}: the rewrite changed the meaning of the graph: {'; '.join(row.reasons)}")
    worst = worst_error(row.errors)
    assert worst is not None
    return f"max abs error {worst.max_abs:.2g} on ONNX Runtime CPU"


def _is_proven(builder: EngineBuilder, graph: Graph) -> bool:
    """Says whether a rewritten graph is run before an engine is made of it."""
    return not graph.writes_text and not builder.limits.whole_scores


def _chosen_limits(build: Build, builder: EngineBuilder, model: ir.Model) -> TargetLimits:
    """Returns the target's limits on this machine with the query blocks in which this graph's attentions are
    fastest.
    """
    limits = builder.limits_here()
    if limits.query_blocks_from:
        tokens = {shape.tokens for shape in attention_shapes(model)}
        fixed = {T: fixed_block(limits, T) for T in sorted(tokens)}
        return replace(limits, query_blocks=tuple((T, block) for T, block in fixed.items() if block < T))
    if not limits.whole_scores:
        return limits
    option = build.config.target.of(builder.name).query_block
    blocks: dict[int, int] = {}
    for shape in sorted(attention_shapes(model)):
        if option != "measured":
            blocks[shape.tokens] = option or shape.tokens
        elif package_version("onnxruntime") is None or not is_measured(shape):
            blocks[shape.tokens] = default_block(shape.tokens)
        else:
            blocks[shape.tokens] = _measured(build, builder, shape)
    smaller = tuple((tokens, block) for tokens, block in sorted(blocks.items()) if block < tokens)
    return replace(limits, query_blocks=smaller)


def fixed_block(limits: TargetLimits, tokens: int) -> int:
    """Returns the number of queries in a block for a target that need not measure it."""
    return max(entry for entry in limits.query_blocks_from if entry[0] <= tokens)[1]


def attention_shapes(model: ir.Model) -> set[AttentionShape]:
    """Returns the shapes of a graph's causal attentions that can be split into blocks."""
    shapes = set()
    for node in model.graph.all_nodes():
        if splittable_tokens(node) is not None:
            # In a portable graph the heads are a dimension of their own.
            (B, H, T, E), (_, G, _, _) = (value.shape.numpy() for value in node.inputs[:2] if value and value.shape)
            shapes.add(AttentionShape(B, H, G, T, E))
    return shapes


def _measured(build: Build, builder: EngineBuilder, shape: AttentionShape) -> int:
    threads = build.config.latency.threads
    inputs = {
        "shape": asdict(shape),
        "threads": threads,
        "machine": [build.machine["cpu"], build.machine["usable_cores"]],
        "versions": {**versions("mod_export"), **builder.versions()},
    }
    make = partial(_measure, shape, threads)
    step = build.step(f"formulation/{builder.name}/{shape}", inputs, [], make, build.was_quiet)
    chosen: int = step.result["chosen"]
    return chosen


def _measure(shape: AttentionShape, threads: int, paths: Sequence[Path]) -> dict[str, Any]:
    watch = Watch()
    ms = time_blocks(shape, threads)
    return {
        "ms": {str(block): round(value, 3) for block, value in ms.items()},
        "chosen": fastest_block(shape, ms),
        "other_load": watch.conditions().other_load,
    }
