"""The profiles of built engines, and the rows of the cost model that follow from them, in a build or on a server.

Only engines that run on this machine's processor and can be profiled (`protocols.EngineProfiler`) have rows: the
roofline of a processor says nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mod_export.artifacts import DType, Engine, ModelKind
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.inputs import timing_batch
from mod_export.measure.kernel_parts import ms_by_part
from mod_export.measure.parts import PartRow, Profiled, part_rows
from mod_export.measure.roofline import Roofline, cached_roofline
from mod_export.measure.work import Work, flops_of
from mod_export.protocols import EngineProfiler

__all__ = [
    "can_profile",
    "flops_by_engine",
    "profile_engine",
    "profile_engines",
    "rooflines_of",
    "work_from_json",
]


def can_profile(engine: Engine) -> bool:
    """Whether engines of this target have rows in the cost model."""
    return isinstance(ENGINES[engine.target], EngineProfiler)


def profile_engine(
    root: Path, engine: Engine, work: Sequence[Work], vocab_size: int, config: BuildConfig
) -> Profiled | None:
    """Runs an engine of the build folder `root` under its own profiler.

    Returns:
        None when the configuration asks for no runs (cost.profile_runs = 0), and when the profiler saw no kernel.

    Raises:
        TargetError: this machine cannot run it.
        EngineError: the file is not a usable engine, or the profiler failed.
    """
    builder = ENGINES[engine.target]
    assert isinstance(builder, EngineProfiler), f"{engine.target}: the caller asks can_profile first"
    if config.cost.profile_runs == 0:
        return None
    feeds = timing_batch(engine.bucket, vocab_size, config.seed).feeds
    profile = builder.profile(root, engine, config, feeds, config.cost.profile_runs)
    if not profile.kernels:
        return None
    part_of_node = {name: one.part for one in work for name in one.nodes}
    return Profiled(profiler=profile.profiler, ms_by_part=ms_by_part(profile, part_of_node))


def rooflines_of(engines: Sequence[Engine], machine: Mapping[str, Any], config: BuildConfig) -> dict[DType, Roofline]:
    """The roofline that bounds engines of each dtype here, measured at most once.

    Args:
        engines: those that run here.
        machine: as `environment.describe_machine` says.
        config: the resolved configuration.
    """
    dtypes = dict.fromkeys(engine.dtype for engine in engines if can_profile(engine))
    found = {
        dtype: cached_roofline(machine, dtype, config.latency.threads, measure_again=config.cost.measure_again)
        for dtype in dtypes
    }
    return {dtype: roofline for dtype, roofline in found.items() if roofline is not None}


def profile_engines(
    root: Path, engines: Sequence[Engine], manifest: Mapping[str, Any], machine: Mapping[str, Any], config: BuildConfig
) -> tuple[tuple[Roofline, ...], tuple[PartRow, ...]]:
    """The cost model of a finished build folder on this machine. Needs no ONNX tools: the manifest holds the work.

    Args:
        root: the build folder.
        engines: those of its engines that run here.
        manifest: of the folder.
        machine: as `environment.describe_machine` says.
        config: the resolved configuration.

    Returns:
        The rooflines that were used, and the rows of every engine whose work is known and that can be profiled.

    Raises:
        EngineError: an engine is damaged, or its profiler failed.
    """
    known = manifest.get("work", {})
    countable = [engine for engine in engines if engine.path in known]
    rooflines = rooflines_of(countable, machine, config)
    rows: list[PartRow] = []
    for engine in countable:
        if can_profile(engine) and engine.dtype in rooflines:
            work = work_from_json(known[engine.path])
            profiled = profile_engine(root, engine, work, manifest["models"][engine.model]["vocab_size"], config)
            rows += part_rows(engine, work, rooflines[engine.dtype], profiled)
    return tuple(rooflines.values()), tuple(rows)


def flops_by_engine(
    engines: Sequence[Engine], work: Mapping[str, Sequence[Work]]
) -> dict[tuple[str, str, DType, ModelKind], int]:
    """(target, bucket, dtype, model) -> FLOPs of the graph that the engine runs, of those whose work was counted."""
    return {
        (engine.target, engine.bucket.name, engine.dtype, engine.model): flops_of(work[engine.path])
        for engine in engines
        if engine.path in work
    }


def work_from_json(items: Sequence[Mapping[str, Any]]) -> tuple[Work, ...]:
    """Work as a manifest holds it: `dataclasses.asdict`, with lists for tuples."""
    return tuple(Work(**{**item, "nodes": tuple(item["nodes"])}) for item in items)
