"""Where the time of an engine should go, and where it goes: part by part, by the roofline and by the engine's profile.

Only engines that run on this machine's processor and can be profiled (`EngineProfiler`) have rows: the roofline of a
processor says nothing about a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mod_export.benchmark.cost import flops_of
from mod_export.benchmark.latency import timing_feeds
from mod_export.benchmark.model_parts import NODE_PARTS, ms_by_part
from mod_export.benchmark.roofline import cached_roofline
from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines.protocol import EngineProfiler
from mod_export.results.base import EngineKey
from mod_export.results.cost import PartRow, Roofline, Work
from mod_export.types import DType, Engine

__all__ = [
    "Profiled",
    "can_profile",
    "flops_by_engine",
    "part_rows",
    "profile_engine",
    "rooflines_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The profile of one engine: milliseconds of each part, `other` for kernels of no known part."""

    profiler: str
    ms_by_part: Mapping[str, float]


def part_rows(
    engine: Engine, work: Sequence[Work], roofline: Roofline, profiled: Profiled | None
) -> tuple[PartRow, ...]:
    """A row for every part that has work or was seen in the profile, in the order of NODE_PARTS."""
    flops: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    predicted: dict[str, float] = defaultdict(float)
    for one in work:
        flops[one.part] += one.flops * len(one.nodes)
        size[one.part] += one.bytes * len(one.nodes)
        # Node by node: what one node computes does not hide what another one moves.
        predicted[one.part] += roofline.milliseconds(one.flops, one.bytes) * len(one.nodes)
    measured = profiled.ms_by_part if profiled else {}
    total = sum(measured.values())
    return tuple(
        PartRow(
            target=engine.target,
            bucket=engine.bucket.name,
            dtype=engine.dtype,
            model=engine.model,
            part=part,
            flops=flops[part],
            bytes=size[part],
            predicted_ms=predicted[part],
            measured_ms=measured.get(part, 0.0) if profiled else None,
            share=measured.get(part, 0.0) / total if total > 0 else None,
            profiler=profiled.profiler if profiled else None,
        )
        for part in NODE_PARTS
        if part in predicted or part in measured
    )


def roofline_ms(parts: Iterable[PartRow]) -> dict[EngineKey, float]:
    """Engine -> predicted milliseconds of one run."""
    found: dict[EngineKey, float] = defaultdict(float)
    for row in parts:
        found[row.engine_key] += row.predicted_ms
    return dict(found)


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
    feeds = timing_feeds(engine.bucket, vocab_size, config.seed)
    profile = builder.profile(root, engine, config, config.latency.threads, feeds, config.cost.profile_runs)
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


def flops_by_engine(engines: Sequence[Engine], work: Mapping[str, Sequence[Work]]) -> dict[EngineKey, int]:
    """Engine -> FLOPs of the graph that it runs, of those whose work was counted."""
    return {
        (engine.target, engine.dtype, engine.role, engine.bucket.name, engine.model): flops_of(work[engine.path])
        for engine in engines
        if engine.path in work
    }
