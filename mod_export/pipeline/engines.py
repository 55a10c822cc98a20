"""Stage engines: builds what each target runs, from the graph of that target or from the captured program."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial

from mod_export.engines.protocol import EngineBuilder, EngineJob
from mod_export.environment import free_bytes, versions
from mod_export.errors import BuildError, EngineError
from mod_export.pipeline.build import Build, engine_step
from mod_export.pipeline.roles import WRITING
from mod_export.rows.base import setting_fields
from mod_export.types import Engine, Graph, Variant, having

BUILDER_BYTES = 2**30
"""Memory of a vendor's builder, besides the model."""
COPIES = 3
"""Float32 copies of the weights in a builder: as read, as laid out, and as written."""


def build_engines(build: Build) -> None:
    """Builds every engine of every target. Builders that run in a process of their own run beside the others.

    Raises:
        BuildError: there is no engine of the model.
    """
    jobs = [
        (builder, variant, _engine(build, builder, variant, portable)) for builder, variant, portable in build.planned()
    ]
    _ = build.machine  # Computed here once, because several threads will ask for it.
    with ThreadPoolExecutor(_at_once(build)) as pool:
        try:
            waiting = {job: pool.submit(_build, build, *job) for job in jobs if job[0].apart}
            local_errors = {job: _build(build, *job) for job in jobs if not job[0].apart}
            errors = {**local_errors, **{job: future.result() for job, future in waiting.items()}}
        except BaseException:  # Also on an interrupt: builds that have not begun are cancelled.
            pool.shutdown(cancel_futures=True)
            raise
    # Results are kept in the order of the plan, and not in the order in which they were done.
    for job in jobs:
        error, (_, variant, engine) = errors[job], job
        if error is None:
            build.engines.append(engine)
        else:
            build.fail("engines", setting_fields(engine.setting), error, variant.arch)
    _leave_out_halves(build)
    build.require(build.engines)


def _leave_out_halves(build: Build) -> None:
    """Leaves out prefill engines without decode engines, and the reverse: neither writes text alone."""
    writing = [engine for engine in build.engines if engine.writes_text]
    sets = {(engine.target, engine.dtype, engine.model) for engine in writing}
    for target, dtype, model in sorted(sets):
        group = having(writing, target=target, dtype=dtype, model=model)
        for missing in {stages.role for stages in WRITING} - {engine.role for engine in group}:
            for engine in group:
                why = f"no {missing} engine of {target} {dtype} could be built, and text is written by both together"
                build.leave_out(engine)
                build.fail("engines", setting_fields(engine.setting), EngineError(why), engine.arch)


def _at_once(build: Build) -> int:
    """Number of builder processes that cores and memory have room for; each holds the weights and its plan."""
    room = free_bytes() // (BUILDER_BYTES + COPIES * 4 * build.plan.model.parameters)
    return max(1, min(os.cpu_count() or 1, int(room)))


def _engine(build: Build, builder: EngineBuilder, variant: Variant, portable: Graph) -> Engine:
    engine = Engine(
        target=builder.name,
        model=portable.model,
        bucket=portable.bucket,
        dtype=variant.dtype,
        path="",
        weights=None if builder.embeds_weights else build.weights_path(portable.model, variant.dtype),
        arch=variant.arch,
        role=portable.role,
    )
    return replace(engine, path=f"engines/{builder.name}/{engine.stem}{builder.suffix}")


def _build(build: Build, builder: EngineBuilder, variant: Variant, engine: Engine) -> BuildError | None:
    """Builds one engine. Returns the error if it cannot be built."""
    graph = build.graph_of(engine)
    inputs = {
        "graph": build.hash_of(graph.path),
        "weights": build.weights_hashes(engine.model, engine.dtype),
        "variant": asdict(variant),
        "options": build.target_options(builder.name),
        "versions": {**versions("mod_export"), **builder.versions()},
        # Without a named architecture, the engine is native code for this machine.
        "machine": None if variant.arch else [build.machine["cpu"], build.machine["gpu"]],
    }
    job = EngineJob(root=build.root, graph=graph, program=partial(build.program, graph))
    try:
        build.step(
            engine_step(engine),
            inputs,
            [engine.path],
            lambda paths: builder.build(job, variant, paths[0], build.config),
        )
    except BuildError as error:
        return error
    return None
