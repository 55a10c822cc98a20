"""Which of several ways a target's graph computes its attention in, chosen for each shape by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mod_export.artifacts import Dialect
from mod_export.engine.ort_attention import AttentionShape, default_block, fastest_block, is_measured, time_blocks
from mod_export.environment import package_version
from mod_export.graph.passes.query_blocks import splittable_tokens
from mod_export.protocols import EngineBuilder
from mod_export.stages.context import Context
from mod_export.workspace import Step

__all__ = ["attention_shapes", "chosen_dialect"]


def chosen_dialect(context: Context, builder: EngineBuilder, model: ir.Model) -> tuple[Dialect, list[Step]]:
    """The dialect of a target for one graph: with the blocks that its attentions are computed in, where blocks help.

    Args:
        context: of the build.
        builder: of the target.
        model: the portable graph.
    """
    if not builder.dialect.whole_scores:
        return builder.dialect, []
    option = context.plan.config.target.ort_cpu.query_block
    steps, blocks = [], {}
    for shape in sorted(attention_shapes(model)):
        if option != "measured":
            blocks[shape.tokens] = option or shape.tokens
        elif package_version("onnxruntime") is None or not is_measured(shape):
            blocks[shape.tokens] = default_block(shape.tokens)
        else:
            step = _measured(context, builder, shape)
            blocks[shape.tokens] = step.result["chosen"]
            steps.append(step)
    smaller = tuple((tokens, block) for tokens, block in sorted(blocks.items()) if block < tokens)
    return replace(builder.dialect, query_blocks=smaller), steps


def attention_shapes(model: ir.Model) -> set[AttentionShape]:
    """The shapes of the causal attentions of a graph that can be split into blocks."""
    shapes = set()
    for node in model.graph:
        if splittable_tokens(node) is not None:
            # Of the portable graph, where heads are a dimension.
            (B, H, T, E), (_, G, _, _) = (value.shape.numpy() for value in node.inputs[:2] if value and value.shape)
            shapes.add(AttentionShape(B, H, G, T, E))
    return shapes


def _measured(context: Context, builder: EngineBuilder, shape: AttentionShape) -> Step:
    threads = context.plan.config.latency.threads
    inputs = {
        "shape": asdict(shape),
        "threads": threads,
        "machine": context.machine["cpu"],
        "versions": dict(builder.versions()),
    }
    return context.step(f"formulation/{builder.name}/{shape}", inputs, [], partial(_measure, shape, threads))


def _measure(shape: AttentionShape, threads: int, paths: Sequence[Path]) -> dict[str, Any]:
    ms = time_blocks(shape, threads)
    return {"ms": {str(block): round(value, 3) for block, value in ms.items()}, "chosen": fastest_block(shape, ms)}
