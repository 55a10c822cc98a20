"""The benchmark's parts on the smallest models: routes compute the same, and what was measured is rendered."""

from __future__ import annotations

import json
from pathlib import Path

import measure_case
import pytest
from measure_case import LAST, measure
from render import render
from routes import OURS, OURS_INT8, ROUTES

# The rivals warn of their own insides.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_head": 32, "d_ff": 96}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure_case.SIZES, "S", sizes)
        patch.setattr(measure_case, "FEWEST_ROUNDS", 2)
        measured = measure("S", 128, 1, 64, 1, 0.0)
    path = tmp_path_factory.mktemp("results") / "S-s128-b1-v64.json"
    path.write_text(json.dumps(measured), encoding="utf-8")
    return path


def test_every_route_computes_the_same(found: Path) -> None:
    measured = json.loads(found.read_text())
    assert max(measured["largest_difference"].values()) < 1e-4
    for kind in ("mod", "dense"):
        assert set(measured["ms"][kind]) == {*ROUTES, LAST}
        assert {len(times) for times in measured["ms"][kind].values()} == {2}
        assert measured["needed_flops"][kind] < measured["flops"][kind]
    assert measured["versions"].keys() >= {"torch", "openvino"}


def test_what_was_measured_is_rendered(found: Path, tmp_path: Path) -> None:
    render(found.parent, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "S, 128 tokens, batch 1, vocabulary 64" in text
    assert all(name in text for name in ("plain ORT", "OpenVINO", "torch.compile", "roofline", "int8"))
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"latency.svg", "gflops.svg"}
    render(found.parent, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == text


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    render(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_the_routes_that_are_ours_come_first() -> None:
    assert list(ROUTES)[:2] == [OURS, OURS_INT8]
