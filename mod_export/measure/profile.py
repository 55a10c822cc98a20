"""Predicted and measured time of an engine, part by part: by the roofline and by the engine's own profile.

Only engines that run on this machine's processor and can be profiled (`EngineProfiler`) have rows: the roofline of a
processor says nothing about a GPU.

If measured and predicted speed-up differ, each part contributes to the difference. Let d and m be the milliseconds of a
part in the dense and in the MoD engine, D and M the sums over all parts, and ' mark predicted times. The speed-ups are
S = D / M and S' = D' / M'. Because D' - S' M' = 0,

    S - S' = (D - S' M) / M = ((D - D') - S' (M - M')) / M = sum over parts of ((d - d') - S' (m - m')) / M

So a part that takes as long as predicted in both engines contributes nothing. Time that the dense engine loses beyond
its prediction raises the speed-up; time that the MoD engine loses lowers it, S' times as much. The contributions add up
to the difference exactly. Times are those of the profiles, so S can differ from the ratio of latencies if a profile
does not include all of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines.protocol import Arrays, EngineProfiler
from mod_export.measure.parts import NODE_PARTS, ms_by_part
from mod_export.rows.base import setting_fields
from mod_export.rows.cost import PartRow, Roofline, Work
from mod_export.types import Engine, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The profile of one engine: milliseconds of each part, with `other` for kernels without a known part."""

    profiler: str
    ms_by_part: Mapping[str, float]


def part_rows(
    engine: Engine, work: Sequence[Work], roofline: Roofline, profiled: Profiled | None
) -> tuple[PartRow, ...]:
    """Returns a row for every part that has work or is in the profile, in the order of NODE_PARTS."""
    flops: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    predicted: dict[str, float] = defaultdict(float)
    not_counted: dict[str, int] = defaultdict(int)
    for item in work:
        flops[item.part] += item.flops * len(item.nodes)
        size[item.part] += item.bytes * len(item.nodes)
        # Node by node, because the computation of one node does not hide the memory traffic of another.
        predicted[item.part] += roofline.milliseconds(item.flops, item.bytes) * len(item.nodes)
        not_counted[item.part] += 0 if item.counted else len(item.nodes)
    measured = profiled.ms_by_part if profiled else {}
    total = sum(measured.values())
    return tuple(
        PartRow(
            **setting_fields(engine.setting),
            part=part,
            flops=flops[part],
            bytes=size[part],
            predicted_ms=predicted[part],
            measured_ms=measured.get(part, 0.0) if profiled else None,
            share=measured.get(part, 0.0) / total if total > 0 else None,
            profiler=profiled.profiler if profiled else None,
            not_counted=not_counted[part],
        )
        for part in NODE_PARTS
        if part in predicted or part in measured
    )


def can_profile(engine: Engine) -> bool:
    """Whether an engine's target has a profiler, so that the engine has rows in the cost model."""
    return isinstance(ENGINES[engine.target], EngineProfiler)


def profile_engine(
    root: Path, engine: Engine, work: Sequence[Work], feeds: Arrays, config: BuildConfig
) -> Profiled | None:
    """Runs an engine of the build folder `root` under its own profiler.

    Returns:
        None if the configuration asks for no runs (cost.profile_runs = 0), or if the profiler saw no kernel.

    Raises:
        TargetError: this machine cannot run it.
        EngineError: the file is not a usable engine, or the profiler failed.
    """
    builder = ENGINES[engine.target]
    assert isinstance(builder, EngineProfiler), f"{engine.target}: the caller asks can_profile first"
    if config.cost.profile_runs == 0:
        return None
    profile = builder.profile(root, engine, config, config.latency.threads, feeds, config.cost.profile_runs)
    if not profile.kernels:
        return None
    part_of_node = {name: item.part for item in work for name in item.nodes}
    return Profiled(profiler=profile.profiler, ms_by_part=ms_by_part(profile, part_of_node))


def by_engine(rows: Iterable[PartRow]) -> dict[Setting, dict[str, PartRow]]:
    """Groups rows: setting of an engine -> part -> row."""
    grouped: dict[Setting, dict[str, PartRow]] = defaultdict(dict)
    for row in rows:
        grouped[row.setting][row.part] = row
    return dict(grouped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The speed-up by the profiled times (`measured`) and by the roofline (`predicted`). The `contributions`, part ->
    units of the speed-up, add up to measured - predicted.
    """

    measured: float
    predicted: float
    contributions: Mapping[str, float]


def gap_of(dense: Mapping[str, PartRow], mod: Mapping[str, PartRow]) -> Gap | None:
    """Returns the gap of two engines by their parts; None if one of them was not profiled, or if not all of its work
    was counted. A part that an engine lacks takes 0 ms.
    """
    if any(row.not_counted for row in (*dense.values(), *mod.values())):
        return None
    D, M = _measured(dense.values()), _measured(mod.values())
    predicted_D, predicted_M = (sum(row.predicted_ms for row in engine.values()) for engine in (dense, mod))
    if not D or not M or not predicted_M:
        return None
    predicted = predicted_D / predicted_M

    def beyond(row: PartRow | None) -> float:
        return (row.measured_ms or 0.0) - row.predicted_ms if row else 0.0

    contributions = {
        part: (beyond(dense.get(part)) - predicted * beyond(mod.get(part))) / M for part in {**mod, **dense}
    }
    return Gap(measured=D / M, predicted=predicted, contributions=contributions)


def _measured(rows: Iterable[PartRow]) -> float | None:
    """Returns the milliseconds of a profiled engine; None if it was not profiled."""
    times = [row.measured_ms for row in rows]
    known = [ms for ms in times if ms is not None]
    return sum(known) if known and len(known) == len(times) else None
