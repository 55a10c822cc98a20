"""Stage engines: what each target runs, built from the graph of its dialect or from the captured program."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mod_export.engines.protocol import EngineBuilder, EngineJob
from mod_export.environment import free_bytes, versions
from mod_export.stages.context import BuildContext
from mod_export.types import Engine, Graph, Variant

BUILDER_BYTES = 2**30
"""What a vendor's builder takes whatever the model."""
COPIES = 3
"""Of the weights, in float32: as they were read, as they are laid out, and as the plan is written."""


def build_engines(context: BuildContext) -> None:
    """Every engine of every target: those that are built in processes of their own beside the others."""
    planned = list(context.planned())
    _ = context.machine  # Looked at once, before several threads ask for it.
    context.engines += [_engine(context, builder, variant, portable) for builder, variant, portable in planned]
    with ThreadPoolExecutor(_at_once(context)) as pool:
        jobs = [(context, *one[:2], engine) for one, engine in zip(planned, context.engines, strict=True)]
        try:
            waiting = [pool.submit(_build, *job) for job in jobs if job[1].apart]
            for job in jobs:
                if not job[1].apart:
                    _build(*job)
            for future in waiting:
                future.result()
        except BaseException:  # Interrupted as well: what has not begun must not be waited for.
            pool.shutdown(cancel_futures=True)
            raise


def _at_once(context: BuildContext) -> int:
    """Builders in processes of their own that processor and memory have room for: each holds weights and plan."""
    room = free_bytes() // (BUILDER_BYTES + COPIES * 4 * context.plan.model.parameters)
    return max(1, min(os.cpu_count() or 1, int(room)))


def _engine(context: BuildContext, builder: EngineBuilder, variant: Variant, portable: Graph) -> Engine:
    engine = Engine(
        target=builder.name,
        model=portable.model,
        bucket=portable.bucket,
        dtype=variant.dtype,
        path="",
        weights=None if builder.embeds_weights else context.weights_path(portable.model, variant.dtype),
        arch=variant.arch,
        role=portable.role,
    )
    return replace(engine, path=f"engines/{builder.name}/{engine.stem}{builder.suffix}")


def _build(context: BuildContext, builder: EngineBuilder, variant: Variant, engine: Engine) -> None:
    graph = context.graph_of(engine)
    inputs = {
        "graph": context.hash_of(graph.path),
        "weights": context.hash_of(context.weights_path(engine.model, engine.dtype)),
        "variant": asdict(variant),
        "options": _options(context, builder),
        "versions": {**versions("mod_export"), **builder.versions()},
        # An engine that is built where it runs is native code for this machine.
        "machine": None if variant.arch else [context.machine["cpu"], context.machine["gpu"]],
    }
    job = EngineJob(root=context.root, graph=graph, program=partial(context.models.program, graph))
    context.step(
        f"engine/{builder.name}/{engine.stem}",
        inputs,
        [engine.path],
        lambda paths: builder.build(job, variant, paths[0], context.config),
    )


def _options(context: BuildContext, builder: EngineBuilder) -> dict[str, Any]:
    """The target's options that touch every engine; which engines there are is said by the variants."""
    options: dict[str, Any] = context.config.target.model_dump(mode="json", by_alias=True)[builder.name]
    # What only decides how a graph looks is in the graph.
    return {key: value for key, value in options.items() if key not in ("dtypes", "architectures", "query_block")}
