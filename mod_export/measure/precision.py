"""What a narrower dtype is worth: its size and its speed beside the float32 engine of the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from mod_export.artifacts import Bucket, DType, Engine, ModelKind, primary_output
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.inputs import timing_batch
from mod_export.measure.decision import SpeedVerdict, compare
from mod_export.measure.sampling import Rounds, garbage_collector_off, looks

__all__ = ["PrecisionRow", "measure_precision", "precision_pairs", "precision_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """An engine beside the float32 one that it can take the place of.

    Attributes:
        target: name of the engine family.
        bucket: name of the bucket.
        dtype: of the narrower engine.
        model: `mod` or `dense`.
        bytes: of the files that it needs: engine and weights.
        float32_bytes: of those that the float32 engine needs.
        p50_ms: its median latency.
        float32_p50_ms: that of the float32 engine, taken in the same rounds.
        measured: float32_p50_ms / p50_ms.
        ci95: interval of `measured` that holds with 95 %.
        verdict: as that of a speed-up.
    """

    target: str
    bucket: str
    dtype: DType
    model: ModelKind
    bytes: int
    float32_bytes: int
    p50_ms: float
    float32_p50_ms: float
    measured: float
    ci95: tuple[float, float]
    verdict: SpeedVerdict


def precision_row(data: Mapping[str, Any]) -> PrecisionRow:
    """The inverse of `dataclasses.asdict`, also after a round trip through JSON, which has lists only."""
    return TypeAdapter(PrecisionRow).validate_python(data)


def precision_pairs(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    """(engine, its float32 counterpart) for every engine of another dtype that has one."""
    places = {_place(engine): engine for engine in engines if engine.dtype == "float32"}
    return [
        (engine, places[_place(engine)]) for engine in engines if engine.dtype != "float32" and _place(engine) in places
    ]


def _place(engine: Engine) -> tuple[str, ModelKind, Bucket, str | None]:
    return engine.target, engine.model, engine.bucket, engine.arch


def measure_precision(root: Path, narrow: Engine, wide: Engine, vocab_size: int, config: BuildConfig) -> PrecisionRow:
    """Loads two engines of the build folder `root` and samples them in turn on the same tokens, `latency.samples` each.

    Args:
        root: the build folder.
        narrow: the engine that the row is about.
        wide: its float32 counterpart.
        vocab_size: the tokens are drawn below it.
        config: how to sample.

    Raises:
        TargetError: this machine cannot run them.
        EngineError: one of the files is not a usable engine.
    """
    builder, options = ENGINES[narrow.target], config.latency
    feeds = timing_batch(narrow.bucket, vocab_size, config.seed).feeds
    with builder.load(root, narrow, config) as other, builder.load(root, wide, config) as float32:
        rounds = Rounds([float32, other], feeds, seed=config.seed, outputs=[primary_output(other.outputs)])
        with garbage_collector_off():
            rounds.warm_up(options, time.perf_counter() + options.max_seconds)
            rounds.sample(looks(options, rounds.block)[0])
    found = compare(rounds.samples_ms(0), rounds.samples_ms(1), options, looks=1, seed=config.seed)
    p50_ms = float(np.median(rounds.samples_ms(1)))
    return PrecisionRow(
        target=narrow.target,
        bucket=narrow.bucket.name,
        dtype=narrow.dtype,
        model=narrow.model,
        bytes=_bytes(root, narrow),
        float32_bytes=_bytes(root, wide),
        p50_ms=p50_ms,
        float32_p50_ms=found.measured * p50_ms,
        measured=found.measured,
        ci95=found.ci95,
        verdict=found.verdict,
    )


def _bytes(root: Path, engine: Engine) -> int:
    return sum((root / path).stat().st_size for path in (engine.path, engine.weights) if path is not None)
