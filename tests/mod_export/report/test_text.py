"""The console report, character by character, and on consoles that are none."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from mod_export.report import print_report, render_text
from mod_export.results.report import BuildReport

GOLDENS = Path(__file__).parent / "goldens"
Renamed = Callable[[BuildReport, str], BuildReport]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def golden(name: str) -> str:
    return (GOLDENS / name).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_passing_report(report: BuildReport) -> None:
    assert render_text(report, "build/medium") == golden("passed.txt")


def test_a_failing_report_on_a_narrow_terminal(failed_report: BuildReport) -> None:
    text = render_text(failed_report, "build/medium", width=80)
    assert text == golden("failed-80-columns.txt")
    assert max(map(len, text.splitlines())) <= 80


def test_the_last_line_is_the_verdict_and_the_folder(report: BuildReport, failed_report: BuildReport) -> None:
    assert render_text(report, "build/x").splitlines()[-1] == "PASS  every gate met: build/x"
    assert render_text(failed_report, "build/x").splitlines()[-1] == "FAIL  2 reasons, listed above: build/x"


def test_what_did_not_run_is_listed_with_its_reason(report: BuildReport) -> None:
    text = render_text(report, "b")
    built, _, missing = text.partition("not built\n")
    assert "built, but not run here: no claim is made about these\n  tensorrt-rtx  builds ahead of time" in built
    assert "ort-cuda  onnxruntime has no CUDAExecutionProvider" in missing
    assert "tensorrt-rtx" not in missing


def test_a_report_without_results_is_still_a_report(report: BuildReport) -> None:
    verdict = report.verdict.model_copy(update={"status": "fail", "reasons": ("nothing can run",)})
    empty = report.model_copy(
        update={
            "verdict": verdict, "parity": (), "latency": (), "speedup": (), "targets": (), "artifacts": (),
            "generation": None,
        }
    )  # fmt: skip
    lines = render_text(empty, "b").splitlines()
    assert lines[-2:] == ["  - nothing can run", "FAIL  1 reason, listed above: b"]
    assert len(lines) == 4


def test_a_setting_that_was_only_validated_has_dashes(report: BuildReport) -> None:
    only = report.model_copy(update={"latency": (), "speedup": ()})
    row = next(line for line in render_text(only, "b").splitlines() if line.startswith("ort-cpu"))
    assert row.split()[-5:] == ["-"] * 5
    assert "speed-up: median" not in render_text(only, "b")


def test_a_setting_that_was_only_timed_has_dashes(report: BuildReport) -> None:
    only = report.model_copy(update={"parity": ()})
    row = next(line for line in render_text(only, "b").splitlines() if line.startswith("ort-cpu"))
    assert row.split()[3:6] == ["-"] * 3


def test_how_many_samples_were_taken_is_said_as_a_range(report: BuildReport) -> None:
    first, *rest = report.latency
    more = first.model_copy(update={"samples_ms": first.samples_ms * 40})
    assert "latency: ort-cpu on CPUExecutionProvider, 1 thread, 30 to 1,200 interleaved samples\n" in render_text(
        report.model_copy(update={"latency": (more, *rest)}), "b"
    )


def test_no_gate_is_said(report: BuildReport) -> None:
    rows = tuple(row.model_copy(update={"gate": None, "passed": None}) for row in report.speedup)
    assert "; no gate on speed-up\n" in render_text(report.model_copy(update={"speedup": rows}), "b")


def test_a_pipe_gets_no_colour_and_no_wrapping(report: BuildReport) -> None:
    file = io.StringIO()
    print_report(report, "build/medium", file)
    assert file.getvalue() == golden("passed.txt")


def test_stdout_is_the_default(report: BuildReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, "build/medium")
    assert capsys.readouterr().out == golden("passed.txt")


def test_a_terminal_gets_colour_unless_it_wants_none(report: BuildReport, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    print_report(report, "b", terminal)
    assert "\x1b[32mPASS" in terminal.getvalue()

    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    print_report(report, "b", terminal)
    assert "\x1b[3" not in terminal.getvalue()
    assert "PASS" in terminal.getvalue()


def test_colour_can_be_asked_for(report: BuildReport) -> None:
    assert "\x1b[32mPASS" in render_text(report, "b", color=True)
    assert "\x1b" not in render_text(report, "b")


def test_a_name_cannot_steer_the_terminal(report: BuildReport, renamed: Renamed) -> None:
    hostile = "\x1b[2J[bold]x[/bold] :warning: \u202egpj"
    text = render_text(renamed(report, hostile), "b\x07")
    assert text.startswith("\\x1b[2J[bold]x[/bold] :warning: \\u202egpj  mod_transformer")
    assert text.endswith("b\\x07\n")


def test_an_ascii_stream_takes_any_name(report: BuildReport, renamed: Renamed) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_report(renamed(report, "modèle"), "b", file)
    file.flush()
    assert raw.getvalue().startswith(b"mod\\xe8le  mod_transformer")
