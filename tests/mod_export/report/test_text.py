"""Results as text: the console report, character by character, also without a console; `validate`; `bench`."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from sample_report import NO_BASELINE, renamed
from sample_rows import causality_row, changed, parity_row, precision_row

from mod_export.report import print_report, render_text
from mod_export.report.text import render_bench, render_validation
from mod_export.report.wording import error_text
from mod_export.rows.base import PairRow
from mod_export.rows.correctness import (
    ErrorNumbers,
    OutputParity,
    ParityRow,
    RoutingAgreement,
    StructureRow,
    TextQuality,
)
from mod_export.rows.report import BuildReport, Verdict
from mod_export.rows.speed import Control, GenerationReport

GOLDENS = Path(__file__).parent / "goldens"

PASSED = Verdict(status="pass", reasons=())
FAILED = Verdict(status="fail", reasons=("one", "two \x1b[31m"))
TEXT = TextQuality(
    tokens=8, perplexity=7.3891, reference_perplexity=7.0, own_perplexity=7.0, next_token_agreement=1.0
)  # fmt: skip
ROUTING = RoutingAgreement(layers=(), routed=8, agreed=7, near_ties=1, min_margin=None, by_input=())
BAD = parity_row(
    passed=False, reasons=("kl",), error=ErrorNumbers(max_abs=math.nan, mean_abs=0, max_rel=0, rms=0), kl=math.nan,
    ties_exact=False, routing=ROUTING, rounding_error=None,
)  # fmt: skip


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def structure(path: str, *reasons: str) -> StructureRow:
    return StructureRow(path=path, checked=("bytes",), passed=not reasons, reasons=reasons)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def section(report: BuildReport, **fields: Any) -> str:
    """Section on generation, after a change of these fields."""
    if fields:
        assert report.generation is not None
        report = changed(report, generation=changed(report.generation, **fields))
    text = render_text(report, "b")
    return text[text.index("Token by token") : text.index("built, but not run here")]


def line(text: str, start: str) -> str:
    return next(text_line for text_line in text.splitlines() if text_line.startswith(start))


def test_a_passing_report_goes_to_stdout_or_a_pipe_without_colour_and_wrapping(
    report: BuildReport, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.StringIO()
    print_report(report, "build/medium", file)
    print_report(report, "build/medium")
    assert file.getvalue() == capsys.readouterr().out == (GOLDENS / "passed.txt").read_text(encoding="utf-8")


def test_a_failing_report_on_a_narrow_terminal(failed_report: BuildReport) -> None:
    text = render_text(failed_report, "build/medium", width=80)
    assert text == (GOLDENS / "failed-80-columns.txt").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80


def test_of_several_texts_it_says_how_often_a_routed_layer_is_read_for_few_rows(report: BuildReport) -> None:
    """With one text, the two shares are equal."""
    assert report.generation is not None
    lines = [text_line for text_line in section(report).splitlines() if text_line.startswith("routed layers")]
    assert [text_line.partition(":")[0] for text_line in lines] == ["routed layers ort-cpu b8s512 float32"]
    # Experts do not count: some tokens choose each of them in every step.
    expert = {"3.expert0": 0.5}
    experts = [
        changed(row, executed={**row.executed, **expert}, selected={**row.selected, **expert})
        for row in report.generation.decode
    ]
    assert lines[0] in section(report, decode=tuple(experts)).splitlines()
    only = [changed(row, executed=expert, selected=expert) for row in report.generation.decode]
    assert "routed layers ort-cpu" not in section(report, decode=tuple(only))
    dense = [changed(row, executed={}, selected={}) for row in report.generation.decode]
    assert "routed layers ort-cpu" not in section(report, decode=tuple(dense))


def test_without_a_baseline_latency_stands_alone(alone_report: BuildReport) -> None:
    text = render_text(alone_report, "b")
    head = next(one for one in text.splitlines() if one.startswith("target"))
    assert cells(head)[3:] == ["parity", "routing agreement", "max error", "ms [95 %]", "p90 ms", "p99 ms"]
    row = next(row for row in alone_report.latency if (row.target, row.bucket) == ("ort-cpu", "b1s512"))
    assert row.p50_ci95 is not None
    interval = f"{row.p50_ms:.0f} [{row.p50_ci95[0]:.0f}, {row.p50_ci95[1]:.0f}]"
    assert cells(line(text, "ort-cpu   b1s512"))[6:] == [interval, f"{row.p90_ms:.0f}", f"{row.p99_ms:.0f}"]
    assert "latency: ort-cpu on CPUExecutionProvider, 1 thread, 30 samples\n" in text
    assert f"\n\nnot compared: {NO_BASELINE}\n\n" in text
    assert text.count("dense") == 2  # Both are in that line.
    assert "speed-up" not in text
    steps = line(text, "ort-cpu  b8s512")
    assert cells(steps)[3:] == ["pass", "all 4", "8.3 to 10.4 %", "3.48", "2,301"]
    heads = [cells(one) for one in text.splitlines() if "identical texts  " in one or one.startswith("target   prompt")]
    assert [head[-3:] for head in heads] == [["selected tokens", "ms a token", "tok/s"], ["dtype", "parity", "ms"]]
    assert cells(line(text, "ort-cpu  128 tokens"))[3:] == ["pass", "8.22"]
    timed = "mean over 48 positions in 4 or 8 texts (held-out text of the model), 1 thread"
    assert f"tok/s: of all of them, {timed}\n" in text
    assert "keys and values ort-cpu b1s512: 1.1 MiB\n" in text
    narrow = render_text(alone_report, "b", width=60)
    assert max(map(len, narrow.splitlines())) <= 60


def test_a_model_without_a_known_selection_is_told_so(report: BuildReport) -> None:
    """If no site was found in a routed model, the first page says so."""
    warning = "routing agreement: no routing site was found, so no selection is judged by itself; if the model selects"
    unrouted = tuple(changed(row, routing=parity_row().routing) for row in report.parity)
    assert warning not in render_text(report, "b")
    assert "given the same routing" in render_text(report, "b")
    seen = "a top-k of 4 of 16 in [2, 16] scores at model.py:31, whose indices go to aten.foo at model.py:35"
    text = render_text(changed(report, parity=unrouted, unfollowed=(seen,)), "b", width=400)
    assert warning in text
    assert f"no routing site: {seen}\n" in text
    assert "given the same routing" not in text
    dense = tuple(row for row in unrouted if row.model == "dense")
    assert dense
    assert warning not in render_text(changed(report, parity=dense), "b")


def test_a_report_without_results_is_still_a_report(report: BuildReport) -> None:
    nothing = dict.fromkeys(("parity", "latency", "speedup", "targets", "artifacts"), ())
    verdict = Verdict(status="fail", reasons=("nothing can run",))
    lines = render_text(changed(report, verdict=verdict, generation=None, **nothing), "b").splitlines()
    assert lines[-2:] == ["  - nothing can run", "FAIL  1 reason, listed above: b"]
    assert len(lines) == 4


def test_operators_that_were_not_counted_are_named(report: BuildReport) -> None:
    assert "not counted" not in render_text(report, "b")
    cost = tuple(changed(row, not_counted={"ConvTranspose": 1, "Loop": 2}) for row in report.cost)
    speedup = tuple(changed(row, predicted_flops=None, efficiency=None) for row in report.speedup)
    text = render_text(changed(report, cost=cost, speedup=speedup), "b")
    graphs = ", ".join(f"{row.model} {row.bucket}" for row in cost)
    named = f"FLOPs not counted: ConvTranspose (1), Loop (2) in {graphs}; nothing is predicted from the others"
    assert named in text.splitlines()
    assert cells(line(text, "ort-cpu"))[-2:] == ["-", "-"]


def test_what_was_only_validated_or_only_timed_has_dashes(report: BuildReport) -> None:
    validated = render_text(changed(report, latency=(), speedup=()), "b")
    timed = render_text(changed(report, parity=()), "b")
    assert line(validated, "ort-cpu").split()[-5:] == ["-"] * 5
    assert "speed-up: median" not in validated
    assert line(timed, "ort-cpu").split()[3:6] == ["-"] * 3
    assert line(timed, "ort-cpu  b8s512").split()[3] == "-"
    unwritten = section(report, decode=(), first_token=(), texts=())
    assert line(unwritten, "ort-cpu  b1s512").split()[4:] == ["-"] * 8
    assert line(unwritten, "ort-cpu  128 tokens").split()[5:] == ["-"] * 4
    assert "keys and values" not in unwritten


def test_conditions_are_said(report: BuildReport) -> None:
    first, second, *rest = report.latency
    busy, outliers = "others took 40 % of the machine's CPU time", "6 of 40 samples are outliers"
    slow = changed(report.speedup[0], gate=None, passed=None, verdict="not faster", reason="FLOPs predict 1.02x")
    more = changed(first, samples_ms=first.samples_ms * 40, flags=(busy,))
    latency = (more, changed(second, flags=(outliers, busy)), *rest)
    lines = render_text(changed(report, latency=latency, speedup=(slow,)), "b").splitlines()
    for expected in (
        "latency: ort-cpu on CPUExecutionProvider, 1 thread, 30 to 1,200 interleaved samples",
        "speed-up: median dense / median MoD, with a 95 % bootstrap interval; no gate on speed-up",
        "ort-cpu b1s128 float32: not faster: FLOPs predict 1.02x",
        # A statement about both models appears once.
        f"ort-cpu b1s128 float32: {busy}",
        f"ort-cpu b1s128 float32 mod: {outliers}",
    ):
        assert lines.count(expected) == 1, expected


def test_the_largest_error_is_that_of_any_output(report: BuildReport) -> None:
    row, *rest = report.parity
    error = changed(row.error, max_abs=0.25)
    further = OutputParity(name="pooled", error=error, rounding_error=None, allowed_max_abs=1.0)
    several = changed(report, parity=(changed(row, further_outputs=(further,)), *rest))
    for found, value_name, told in ((report, "a logit", False), (several, "any output", True)):
        text = render_text(found, "b", width=400)
        assert f"max error of {value_name} given the same routing, the worse of MoD and dense" in text
        assert (error_text(0.25) in cells(next(row for row in text.splitlines() if "b1s128" in row))) is told


@pytest.mark.parametrize(
    ("controls", "told"),
    [
        ([1.04, 1.0], "covers 1 in 1 of 2 settings; farthest from it 1.040x [1.030, 1.050]"),
        ([0.9], "covers 1 in 0 of 1 setting; farthest from it 0.900x [0.890, 0.910]"),
    ],
)
def test_the_control_farthest_from_one_is_named(report: BuildReport, controls: list[float], told: str) -> None:
    rows = [
        changed(report.speedup[0], control=Control(measured=one, ci99=(one - 0.01, one + 0.01), covers_one=one == 1.0))
        for one in controls
    ]
    text = render_text(changed(report, speedup=tuple(rows)), "b")
    assert f"control: the interval of the MoD engine against itself {told}\n" in text


def test_narrower_dtypes_stand_in_a_table_of_their_own(report: BuildReport, failed_report: BuildReport) -> None:
    assert "Lower precision" not in render_text(report, "b")
    precision_rows = [
        precision_row(**{name: getattr(row, name) for name in ("target", "bucket", "dtype", "model")})
        for row in (report.parity[0], next(row for row in failed_report.parity if not row.passed))
    ]
    text = render_text(changed(failed_report, precision=(*precision_rows, precision_row())), "b")
    table = text.partition("Lower precision")[2].partition("Token by token")[0]
    good, bad, unknown = [cells(one) for one in table.splitlines() if one.startswith(("ort", "ind"))]
    size = ["MoD", "976.6 KiB", "3.8 MiB", "2.00x [1.90, 2.10]", "faster"]
    assert good[3:] == [*size, "100 %", "18.2914", "18.2914", "pass"]
    assert bad[-1] == "FAIL"
    assert unknown[3:] == [*size, "-", "-", "-", "-"]


def test_a_terminal_gets_colour_unless_it_wants_none(report: BuildReport, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    print_report(report, "b", terminal)
    assert "\x1b[32mPASS" in terminal.getvalue()

    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    print_report(report, "b", terminal)
    assert "\x1b[3" not in terminal.getvalue()
    assert "PASS" in terminal.getvalue()
    assert "\x1b[32mPASS" in render_text(report, "b", color=True)


def test_a_name_cannot_steer_the_terminal_and_can_be_written_to_any(report: BuildReport) -> None:
    text = render_text(renamed(report, "\x1b[2J[bold]x[/bold] :warning: \u202egpj"), "b\x07")
    assert text.startswith("\\x1b[2J[bold]x[/bold] :warning: \\u202egpj  mod_transformer")
    assert text.endswith("b\\x07\n")
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_report(renamed(report, "modèle"), "b", file)
    file.flush()
    assert raw.getvalue().startswith(b"mod\\xe8le  mod_transformer")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_speed(report: BuildReport, number: float) -> None:
    assert report.generation is not None
    both = {"mod": number, "dense": number}
    first = report.generation.decode[0]
    compared = changed(
        first.compared, verdict="inconclusive", measured=number, ci95=(number, math.nan), efficiency=number,
        predicted_bytes=number,
    )  # fmt: skip
    row = changed(first, ms=both, tokens_per_second=both, selected={"1": number}, compared=compared)
    assert "inconclusive" in line(section(report, decode=(row,)), "ort-cpu  b1s512")


def test_what_is_not_known_of_generation_is_said(report: BuildReport) -> None:
    reason = "routing.selection=topk: whether a token is among the k best depends on tokens after it"
    changed_report = changed(report, generation=GenerationReport(reason=reason))
    assert section(changed_report) == f"Token by token  not built: {reason}\n\n"
    assert "Token by token" not in render_text(changed(report, generation=None), "b")
    text = section(report, quality=None, capacity={"2.expert0": 80})
    assert "quality: not measured, there is no text here for this model's vocabulary\n" in text
    assert "prompt and answer; no routed layers\n" in text
    assert report.generation is not None
    assert report.generation.quality is not None
    unknown = [changed(row, texts=None, text=None) for row in report.generation.decode]
    assert "mean over 48 positions in a text, interleaved" in section(report, decode=tuple(unknown))
    read = [changed(row, text=None) for row in report.generation.decode]
    text = section(report, quality=changed(report.generation.quality, text="documentation"), decode=tuple(read))
    assert "mean over 48 positions in 4 or 8 texts, interleaved" in text
    assert "tokens of Python's documentation, which the model may have been trained on; " in text
    selects_nothing = changed(report.generation.quality, wanted={}, selected={}, overflow={})
    match = re.search(
        r"quality: perplexity [\d.]+ on [\d,]+ tokens of held-out text of the model\n",
        section(report, quality=selects_nothing),
    )
    assert match is not None
    assert "held-out" not in text


def test_what_failed_or_differs_of_generation_is_said(report: BuildReport) -> None:
    generation = report.generation
    assert generation is not None
    assert generation.quality is not None
    *rest, last = report.parity
    bad = changed(last, passed=False, reasons=("text: error \x1b[2J 0.3", "kl 2 above 1e-06"))
    first, *others = generation.texts
    text = section(
        changed(report, parity=(*rest, bad)),
        texts=(changed(first, identical=3, first_difference=17, same=160), *others),
        quality=changed(generation.quality, overflow={"1": 0, "3": 0}),
    )
    assert line(text, "ort-cpu  b8s512").split()[3] == "FAIL"
    assert line(text, "ort-cpu  b1s512").split()[3] == "pass"
    for expected in (
        "  - ort-cpu decode b8s512 float32 dense: text: error \\x1b[2J 0.3\n",
        "  - ort-cpu decode b8s512 float32 dense: kl 2 above 1e-06\n",
        "mod: 1 of 4 texts differ from PyTorch's, the first from new token 17 on; 83% of the new tokens come before a "
        "difference\n",
        "every token that wanted a slot found one\n",
    ):
        assert expected in text
    assert "7 of 8" in line(text, "ort-cpu  b1s512")


@pytest.mark.parametrize(
    ("row", "causal", "expected"),
    [
        (parity_row(text=TEXT, ties_exact=True), False,
         "ort-cpu forward b1s512 float32 MoD pass 512 - 0 1.0e-06 1.0e-06 1.0e-07 100_% 1.0e-12 7.3891 yes NO"),
        (parity_row(role="decode", model="dense"), True,
         "ort-cpu decode b1s512 float32 dense pass 512 - 0 1.0e-06 1.0e-06 1.0e-07 100_% 1.0e-12 - - yes"),
        (BAD, None, "ort-cpu forward b1s512 float32 MoD FAIL 512 7_of_8 1 nan - 0 100_% nan - NO -"),
    ],
)  # fmt: skip
def test_validate_has_one_line_for_each_candidate(row: ParityRow, causal: bool | None, expected: str) -> None:
    probed = [] if causal is None else [causality_row(role=row.role, model=row.model, causal=causal)]
    head, rule, found, *_ = render_validation([], [row], probed, [], [], PASSED).splitlines()
    assert len(cells(head)) == len(cells(found))
    assert set(rule) == {"-"}
    assert cells(found) == [cell.replace("_", " ") for cell in expected.split()]


def test_files_statements_and_the_verdict_follow() -> None:
    good = [structure("a.onnx"), structure("a.onnx"), structure("b.onnx")]
    probed = [
        causality_row(statement="nothing speaks against it"),
        causality_row(statement="must not be used", causal=False, target="inductor"),
        causality_row(statement="causal", model="dense"),
    ]
    lines = render_validation(good, [], probed, [], [], FAILED, ["not run: 2 graphs"]).splitlines()
    assert lines[-8:] == [
        "files: all 2 are as they were built; weights are the checkpoint's, bit for bit", "not run: 2 graphs",
        "mod: must not be used (inductor b1s512)", "dense: causal (ort-cpu b1s512)", "", "  - one", "  - two \\x1b[31m",
        "FAIL",
    ]  # fmt: skip
    bad = [*good, structure("a.onnx", "no output logits"), structure("a.onnx", "changed")]
    assert "files: 1 of 2 are not what they must be, see below" in render_validation(bad, [], [], [], [], PASSED)
    assert "files:" not in render_validation([], [], [], [], [], PASSED)


def bench_rows(report: BuildReport) -> list[PairRow]:
    assert report.generation is not None
    return [*report.latency, *report.speedup, *report.generation.decode, *report.generation.first_token, *report.parts]


def test_bench_has_one_line_for_each_comparison(report: BuildReport) -> None:
    head, rule, *lines = render_bench(bench_rows(report), PASSED).splitlines()
    assert set(rule) == {"-"}
    for found, row in zip(map(cells, lines[:4]), report.speedup, strict=True):
        assert len(found) == len(cells(head))
        assert found[:3] == [row.target, row.bucket, row.dtype]
        assert float(found[3]) > float(found[4])
        assert found[5].startswith(f"{row.measured:.2f}x [")
        # Only the largest bucket has a gate.
        assert found[6:] == [
            "faster", "1.002x [0.996, 1.009]", f"{row.predicted_flops:.2f}x", f"{row.predicted_roofline:.2f}x",
            f"{row.efficiency:.2f}", "1.00x pass" if row.bucket == "b1s512" else "-",
        ]  # fmt: skip
    assert lines[4:6] == ["", "PASS"]


def test_bench_tells_of_steps_prompts_and_narrower_dtypes(report: BuildReport) -> None:
    text = render_bench([*bench_rows(report), precision_row()], PASSED)
    tables = {part.splitlines()[0]: [cells(row) for row in part.splitlines()[3:]] for part in text.split("\n\n")[2:]}
    assert list(tables) == ["lower precision", "token by token", "first token"]
    assert tables["token by token"][0] == [
        "ort-cpu", "b1s512", "float32", "8.3 to 10.4 %", "1,203", "1,950", "1.62x [1.52, 1.73]", "faster", "1.77x",
        "0.91",
    ]  # fmt: skip
    assert [found[:3] for found in tables["first token"]] == [
        ["ort-cpu", "128 tokens", "float32"], ["ort-cpu", "512 tokens", "float32"],
    ]  # fmt: skip
    assert tables["lower precision"][0][-2:] == ["2.00x [1.90, 2.10]", "faster"]
    assert render_bench([], PASSED).splitlines()[-1] == "PASS"


def test_bench_without_a_baseline_has_one_line_for_each_engine(alone_report: BuildReport) -> None:
    table, remarks, verdict, steps, prompts = render_bench(bench_rows(alone_report), PASSED, NO_BASELINE).split("\n\n")
    head, _, *lines = map(cells, table.splitlines())
    assert head == ["target", "bucket", "dtype", "ms [95 %]", "p90 ms", "p99 ms"]
    assert [found[:2] for found in lines] == [[row.target, row.bucket] for row in alone_report.latency]
    assert (remarks, verdict) == (f"not compared: {NO_BASELINE}", "PASS")
    assert [cells(text_line) for text_line in steps.splitlines()[3:]] == [
        ["ort-cpu", "b1s512", "float32", "8.3 to 10.4 %", "0.513", "1,950"],
        ["ort-cpu", "b8s512", "float32", "8.3 to 10.4 %", "3.48", "2,301"],
    ]
    assert cells(prompts.splitlines()[3]) == ["ort-cpu", "128 tokens", "float32", "8.22"]


def test_bench_says_what_failed_and_why(failed_report: BuildReport) -> None:
    table, remarks, verdict, *_ = render_bench(bench_rows(failed_report), FAILED).split("\n\n")
    assert [text_line.endswith("1.80x FAIL") for text_line in table.splitlines()].count(True) == 1
    assert verdict == "  - one\n  - two \\x1b[31m\nFAIL"
    assert [text_line.partition(": ")[0] for text_line in remarks.splitlines()] == [
        "ort-cpu b1s128 float32", "inductor b1s128 float32", *["inductor b1s512 float32 mod"] * 2,
    ]  # fmt: skip


def test_lines_of_a_log_are_never_wrapped_and_end_without_blanks(report: BuildReport) -> None:
    row = parity_row(target="tensorrt-rtx graph with a name that is rather long, " * 5 + "end")
    assert report.generation is not None
    texts = render_validation([], [row], [], report.generation.texts, [], PASSED).splitlines()
    assert "long, end" in texts[2]
    assert all(text == text.rstrip() for text in texts)
    assert "texts: 16 of 16 are those of eager PyTorch, token for token" in texts
