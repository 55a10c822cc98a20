"""Stage engines: what each target runs, built from the graph of its dialect or from the captured program."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mod_export.engines.protocol import EngineBuilder, EngineJob
from mod_export.environment import free_bytes, versions
from mod_export.errors import BuildError, EngineError
from mod_export.pipeline.context import BuildContext, engine_step
from mod_export.rows.base import setting_fields
from mod_export.types import Engine, Graph, Variant

BUILDER_BYTES = 2**30
"""What a vendor's builder takes whatever the model."""
COPIES = 3
"""Of the weights, in float32: as they were read, as they are laid out, and as the plan is written."""


def build_engines(context: BuildContext) -> None:
    """Every engine of every target: those that are built in processes of their own beside the others.

    Raises:
        BuildError: there is no engine of the model.
    """
    jobs = [
        (builder, variant, _engine(context, builder, variant, portable))
        for builder, variant, portable in context.planned()
    ]
    _ = context.machine  # Looked at once, before several threads ask for it.
    with ThreadPoolExecutor(_at_once(context)) as pool:
        try:
            waiting = {job: pool.submit(_build, context, *job) for job in jobs if job[0].apart}
            here = {job: _build(context, *job) for job in jobs if not job[0].apart}
            errors = {**here, **{job: future.result() for job, future in waiting.items()}}
        except BaseException:  # Interrupted as well: what has not begun must not be waited for.
            pool.shutdown(cancel_futures=True)
            raise
    # In the order of the plan, whichever was done first.
    for job in jobs:
        error, (_, variant, engine) = errors[job], job
        if error is None:
            context.engines.append(engine)
        else:
            context.fail("engines", setting_fields(engine.setting), error, variant.arch)
    _leave_out_halves(context)
    context.require(context.engines)


def _leave_out_halves(context: BuildContext) -> None:
    """Text is written by engines that read prompts and by those that read one more token: neither is of use alone."""
    writing = [engine for engine in context.engines if engine.role != "forward"]
    sets = {(engine.target, engine.dtype, engine.model) for engine in writing}
    for target, dtype, model in sorted(sets):
        own = [engine for engine in writing if (engine.target, engine.dtype, engine.model) == (target, dtype, model)]
        built = {engine.role for engine in own}
        for engine in own:
            if len(built) == 1:
                other = "decode" if engine.role == "prefill" else "prefill"
                why = f"no {other} engine of {target} {dtype} could be built, and text is written by both together"
                context.leave_out(engine)
                context.fail("engines", setting_fields(engine.setting), EngineError(why), engine.arch)


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


def _build(context: BuildContext, builder: EngineBuilder, variant: Variant, engine: Engine) -> BuildError | None:
    """Builds one engine; why it cannot be built, if so."""
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
    try:
        context.step(
            engine_step(engine),
            inputs,
            [engine.path],
            lambda paths: builder.build(job, variant, paths[0], context.config),
        )
    except BuildError as error:
        return error
    return None


def _options(context: BuildContext, builder: EngineBuilder) -> dict[str, Any]:
    """The target's options that touch every engine; which engines there are is said by the variants."""
    options: dict[str, Any] = context.config.target.model_dump(mode="json", by_alias=True)[builder.name]
    # What only decides how a graph looks is in the graph.
    return {key: value for key, value in options.items() if key not in ("dtypes", "architectures", "query_block")}
