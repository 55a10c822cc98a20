"""A narrower engine beside the float32 one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mod_export.benchmark.speedup import measure_precision, precision_pairs
from mod_export.build_folder.manifest import open_folder
from mod_export.config import BuildConfig
from mod_export.types import Engine


def engines(built: Path) -> list[Engine]:
    return open_folder(built, verify=False).engines


def test_every_other_dtype_has_its_float32_counterpart(built: Path) -> None:
    wide = engines(built)
    narrow = [replace(engine, dtype="int8") for engine in wide]
    assert precision_pairs([*wide, *narrow]) == list(zip(narrow, wide, strict=True))
    assert precision_pairs(wide) == []
    assert precision_pairs(narrow) == []
    # Another GPU's float32 engine is no counterpart.
    assert precision_pairs([replace(wide[0], arch="sm89"), narrow[0]]) == []


def test_an_engine_beside_itself_is_as_large_and_as_fast(built: Path, config: BuildConfig) -> None:
    wide = engines(built)[0]
    row = measure_precision(built, replace(wide, dtype="int8"), wide, 256, config)
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", wide.bucket.name, "int8", wide.model)
    files = [built / wide.path, built / str(wide.weights)]
    assert row.bytes == row.float32_bytes == sum(path.stat().st_size for path in files)
    assert row.ci95[0] <= row.measured <= row.ci95[1]
    assert 0.2 < row.measured < 5
    assert row.float32_p50_ms / row.p50_ms == row.measured
