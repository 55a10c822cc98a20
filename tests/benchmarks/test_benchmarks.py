"""Parts of the benchmark on the smallest models: all routes compute the same numbers, and measurements are rendered.
Rivals that only `make bench` installs are measured if they are installed; otherwise their row gives the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from example_routes import doubles, first, second

from benchmarks.rivals import measure_case, measure_text
from benchmarks.rivals import run as run_benchmarks
from benchmarks.rivals.cases import KINDS, Case
from benchmarks.rivals.prepared import prepare
from benchmarks.rivals.render import render
from benchmarks.rivals.routes import PRECISIONS, ROUTES
from benchmarks.rivals.text_models import TextCase
from benchmarks.rivals.text_routes import ROUTES as TEXT_ROUTES
from mod_export.measure.turns import RouteError, Worker, opened_workers, rounds

CASE = Case("XS", 64, vocab=256)
TEXT = TextCase("XS", prompt=16, new=8, window=64, judged=32)
FARTHEST = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.1, "int4": 0.3}
"""Largest error of the logits of whole rows, of any route in each precision."""
NEAREST = {"float32": 1.001, "bfloat16": 1.05, "int8": 1.1, "int4": 1.5}
"""Largest ratio of perplexities of random ids, in either direction."""
REFUSALS = (
    "not installed",
    "OpenVINO names no BF16",
    "mod-export build ended with 2: error: target.openvino.dtypes: bfloat16",
)
"""Accepted reasons for a route without times. The second and third mean that it cannot compute in bfloat16."""


def test_a_worker_answers_and_says_why_it_cannot(tmp_path: Path) -> None:
    openers = {"one": (doubles, (1,)), "two": (doubles, (-1,))}
    with opened_workers(tmp_path / "log", openers) as (workers, failed):
        assert failed == {"two": "ValueError: start: expected 0 or more, got -1"}
        seconds, value = workers["one"].ask("double", 4)
        assert value == 9
        assert 0 < seconds < 5
        with pytest.raises(RouteError, match="ZeroDivisionError: division by zero"):
            workers["one"].ask("fail")
    assert "ValueError" in (tmp_path / "log").read_text()


def test_a_worker_that_dies_is_a_reason(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "log", doubles, 0)
    worker.opened()
    with pytest.raises(RouteError, match="its process ended with code 3"):
        worker.ask("exit")
    worker.close()


def test_a_worker_that_was_killed_while_it_waited_is_a_reason(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "log", doubles, 0)
    worker.opened()
    assert worker._process.pid
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.join()
    with pytest.raises(RouteError, match="its process ended with code -9"):
        worker.ask("double", 4)
    worker.close()


def test_rounds_end_when_every_route_has_failed() -> None:
    def turn() -> tuple[float, int]:
        raise RouteError("out of memory")

    assert rounds({"one": turn}, 0, 1, 3600.0) == ({}, {"one": "out of memory"})
    assert rounds({}, 0, 1, 3600.0) == ({}, {})


def test_a_route_that_fails_in_a_later_round_leaves_the_others_their_times() -> None:
    count = {"good": 0, "bad": 0}

    def turn(name: str) -> tuple[float, int]:
        count[name] += 1
        if name == "bad" and count[name] == 3:
            raise RouteError("out of memory")
        return 0.5, count[name]

    taken, failed = rounds({name: lambda name=name: turn(name) for name in count}, 1, 4, 0.0)  # type: ignore[misc]
    assert taken == {"good": [(0.5, 2), (0.5, 3), (0.5, 4), (0.5, 5)]}
    assert failed == {"bad": "out of memory"}


def test_steps_are_done_once_and_in_order(tmp_path: Path) -> None:
    steps = {"two": ("one", second), "one": (None, first)}
    assert prepare(steps, ["two"], "right", tmp_path) == {}
    assert prepare(steps, ["one", "two"], "right", tmp_path) == {}
    assert (tmp_path / "written").read_text() == "12"
    assert prepare(steps, ["two"], "wrong", tmp_path / "other") == {"one": "ValueError: 1", "two": "ValueError: 1"}


def test_cells_are_named_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmarks.main(["--list", "--threads", "1,2", "--cases", "M-s512-b1-v8192", "--only", "*-int8-*"]) == 0
    assert capsys.readouterr().out.split() == [
        "rows-M-s512-b1-v8192-int8-t1", "rows-M-s512-b1-v8192-int8-t2", "text-M-int8-t1", "text-M-int8-t2",
    ]  # fmt: skip
    words = ["--list", "--threads", "1", "--text-model", "smol", "--text-name", "Smol", "--only", "text-*-int4-*"]
    assert run_benchmarks.main(words) == 0
    assert capsys.readouterr().out.split() == ["text-Smol-int4-t1", "text-M-int4-t1"]
    assert run_benchmarks.main(["--list", "--threads", "1", "--text-sizes", "1B", "--only", "text-*-int4-*"]) == 0
    assert capsys.readouterr().out.split() == ["text-1B-int4-t1"]
    with pytest.raises(SystemExit):
        run_benchmarks.main(["--cases", "Q-s1-b1-v1"])
    assert "expected a case such as M-s512-b1-v8192, of XS, S, M, L, 1B" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_benchmarks.main(["--text-sizes", "M,7B"])
    assert "7B: expected one of M, 1B" in capsys.readouterr().err


def test_what_bytes_predict() -> None:
    spec = CASE.spec
    layer = (2 * 128 + 2 * 64) * 128 + 3 * 192 * 128
    head = 256 * 128
    found = measure_text.gain_by_bytes(spec, "float32", {"1": 0.25})
    assert found == pytest.approx((head + 2 * layer) / (head + 1.25 * layer))
    assert measure_text.gain_by_bytes(spec, "int4", {"1": 0.25}) < found
    wide_head = head * (1 + 4 / 32) / (1 + 4 / 64)
    expected = (wide_head + 2 * layer) / (wide_head + 1.25 * layer)
    assert measure_text.gain_by_bytes(spec, "int8", {"1": 0.25}) == pytest.approx(expected)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


# The rivals warn about their own internals.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn
class TestMeasured:
    @pytest.fixture(scope="class")
    def results(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("results")

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_whole_rows(
        self, precision: str, files: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure_case, "FEWEST_ROUNDS", 2)
        found = measure_case.measure(CASE, precision, 1, 0.0, files / "rows")
        names = {route.name for route in ROUTES if route.precision == precision}
        assert names <= set(found["routes"])
        for name, route in found["routes"].items():
            if refused(route):
                continue
            assert {kind: len(ms) for kind, ms in route["ms"].items()} == dict.fromkeys(KINDS, 2), name
            for kind in KINDS:
                assert route["quality"][kind]["error"] < FARTHEST[route["precision"]], (name, kind)
        assert found["needed_flops"]["mod"] < found["needed_flops"]["dense"]
        text = rendered(found, f"rows-{precision}", tmp_path)
        assert f"### Whole rows in {precision}" in text
        assert all(f"| {name}" in text for name in names)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_text(self, precision: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure_text, "FEWEST_ROUNDS", 2)
        found = measure_text.measure(TEXT, precision, 1, 0.0, files / "text")
        names = {route.name for route in TEXT_ROUTES if route.precision == precision}
        assert names <= set(found["routes"])
        for name, route in found["routes"].items():
            if refused(route):
                continue
            assert {batch: len(each["tokens_per_s"]) for batch, each in route["batches"].items()} == {"1": 2, "8": 2}
            assert len(route["sample"]) == TEXT.new
            ratio = route["quality"]["perplexity_ratio"]
            assert max(ratio, 1 / ratio) < NEAREST[route["precision"]], name
        text = rendered(found, f"text-{precision}", tmp_path)
        assert f"### Text in {precision}" in text
        assert all(f"| {name} |" in text for name in names)


def refused(route: Mapping[str, Any]) -> bool:
    """Whether a route has no times; the reason must be in REFUSALS. The library of another route may crash on some
    processors, which its table reports: OpenVINO 2026.4 crashes with AMX, in bfloat16 on our portable graph.
    """
    reason: str | None = route["failed"]
    crashed = reason is not None and not route["ours"] and reason.startswith("its process ended with code -")
    assert reason is None or crashed or reason.removeprefix("RuntimeError: ").startswith(REFUSALS), reason
    return reason is not None


def rendered(found: dict[str, Any], name: str, folder: Path) -> str:
    results, docs = folder / "results", folder / "docs"
    results.mkdir()
    (results / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    render(results, docs)
    text = (docs / "results.md").read_text()
    figure = "latency.svg" if name.startswith("rows") else "text.svg"
    assert [path.name for path in (docs / "figures").iterdir()] == [figure]
    bytes_before = (docs / "figures" / figure).read_bytes()
    render(docs / "benchmarks", docs)
    assert (docs / "results.md").read_text() == text
    assert (docs / "figures" / figure).read_bytes() == bytes_before
    assert [path.name for path in (docs / "benchmarks").iterdir()] == [f"{name}.json"]
    return text


def test_the_page_is_current(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    render(docs / "benchmarks", tmp_path)
    for name in ("results.md", "figures/latency.svg", "figures/text.svg"):
        assert (docs / name).read_bytes() == (tmp_path / name).read_bytes(), "python -m benchmarks.rivals.render"


def test_the_page_names_every_machine(tmp_path: Path) -> None:
    """Virtual machines of one name may have processors of several generations."""
    docs = Path(__file__).parents[2] / "docs"
    (tmp_path / "benchmarks").mkdir()
    for name, cpu in (("rows-M-s512-b1-v8192-int8-t1", "AMD X (family 26)"), ("text-SmolLM2-135M-int8-t1", "AMD X")):
        cell = json.loads((docs / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
        cell["machine"] |= {"cpu": cpu, "cores": 2}
        (tmp_path / "benchmarks" / f"{name}.json").write_text(json.dumps(cell), encoding="utf-8")
    render(tmp_path / "benchmarks", tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "* **Machine.** AMD X (family 26), 2 cores; AMD X, 2 cores. " in page


def test_another_machine_gets_a_table_and_leaves_the_page(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    shutil.copytree(docs / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*-t2.json"))
    (tmp_path / "measured").mkdir()
    for name in ("rows-M-s512-b1-v8192-int8-t1.json", "text-SmolLM2-135M-int8-t1.json"):
        cell = json.loads((tmp_path / "benchmarks" / name).read_text(encoding="utf-8"))
        cell["machine"]["cpu"] = "Another Processor"
        (tmp_path / "measured" / name).write_text(json.dumps(cell), encoding="utf-8")
    options = ["--only", "rows-M-s512-b1-v8192-int8-*", "--threads", "1", "--results", str(tmp_path / "measured")]
    assert run_benchmarks.main([*options, "--docs", str(tmp_path), "--beside", "another"]) == 0
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    page, others = page.split("## Other machines")
    assert "AMD EPYC" in page
    assert "Another Processor" not in page
    rows, *texts = [line for line in others.splitlines() if "Another Processor" in line]
    assert "| another (Another Processor) | M, 512 tokens | 1 | int8 |" in rows
    # The ratios are those of the page, where the model is not named again.
    for batch, line in zip("18", texts, strict=True):
        assert line.startswith(f"| another (Another Processor) | SmolLM2-135M | int8 | 1 | {batch} |")
        assert "|".join(line.split("|")[4:-4]) in page
    # Results that were measured into the folder itself stay, and so do the other machine's in a later rendering.
    options[-1] = str(tmp_path / "benchmarks" / "another")
    assert run_benchmarks.main([*options, "--docs", str(tmp_path), "--beside", "another"]) == 0
    render(tmp_path / "benchmarks", tmp_path)
    assert (tmp_path / "results.md").read_text(encoding="utf-8").count("Another Processor") == 3


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    render(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
