"""The profile stage of a real build, in the report and in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from mod_export.folder.workspace import read_manifest
from mod_export.measure.parts import NODE_PARTS
from mod_export.measure.profile import by_engine, gap_of
from mod_export.rows.report import BuildReport, report_from_json


@pytest.fixture
def report(built: Path) -> BuildReport:
    return report_from_json((built / "report.json").read_text(encoding="utf-8"))


def test_every_engine_has_its_parts(report: BuildReport) -> None:
    engines = {(a.target, a.bucket, a.dtype, a.model) for a in report.artifacts if a.kind == "engine"}
    assert {(row.target, row.bucket, row.dtype, row.model) for row in report.parts} == engines
    for engine in engines:
        parts = [r.part for r in report.parts if (r.target, r.bucket, r.dtype, r.model) == engine]
        assert parts == [part for part in NODE_PARTS if part in parts]
        assert "other" not in parts


def test_the_roofline_predicts_the_speedup(report: BuildReport) -> None:
    (roofline,) = report.roofline
    assert (roofline.dtype, roofline.threads) == ("float32", 1)
    assert roofline.gemm_gflops > 0
    assert roofline.bandwidth_gbs > 0
    engines = by_engine(report.parts)
    assert len(engines) == 2 * len(report.speedup) == 4
    for row in report.speedup:
        gap = gap_of(engines[row.setting.of("dense")], engines[row.setting])
        assert gap is not None
        assert row.predicted_roofline == pytest.approx(gap.predicted)
        # The prediction covers four layers, two of which run an eighth of the tokens.
        assert 1.1 < row.predicted_roofline < 2


def test_the_manifest_holds_the_work(built: Path) -> None:
    manifest = read_manifest(built)
    assert set(manifest["work"]) == {engine["path"] for engine in manifest["engines"]}
    for work in manifest["work"].values():
        assert {item["part"] for item in work} <= set(NODE_PARTS)
        assert all(item["nodes"] for item in work)
    names = [step for step in manifest["steps"] if step.startswith(("work/", "profile/"))]
    assert len(names) == 2 * len(manifest["engines"])
