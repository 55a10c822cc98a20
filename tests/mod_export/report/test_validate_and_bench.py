"""What `validate` and `bench` print, from results."""

from __future__ import annotations

import math

import pytest
from sample_rows import causality_row, changed, parity_row, precision_row

from mod_export.report.summary import Precision, precision_text
from mod_export.report.text import control_text, disturbance_lines, reason_lines
from mod_export.report.validate_and_bench import (
    PROMPTS,
    SPEEDUPS,
    VALIDATED,
    render_precision,
    render_prompts,
    render_speedup,
    render_steps,
    render_validation,
    text_lines,
)
from mod_export.results.latency import Control
from mod_export.results.parity import ErrorNumbers, ParityRow, RoutingAgreement, TextQuality
from mod_export.results.report import BuildReport, Verdict
from mod_export.results.structure import StructureRow

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


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def structure(path: str, *reasons: str) -> StructureRow:
    return StructureRow(path=path, checked=("bytes",), passed=not reasons, reasons=reasons)


@pytest.mark.parametrize(
    ("row", "causal", "expected"),
    [
        (parity_row(text=TEXT, ties_exact=True), False,
         "ort-cpu forward b1s512 float32 mod pass - 0 1.0e-06 1.0e-06 100_% 1.0e-12 7.3891 yes NO"),
        (parity_row(role="decode", model="dense"), True,
         "ort-cpu decode b1s512 float32 dense pass - 0 1.0e-06 1.0e-06 100_% 1.0e-12 - - yes"),
        (BAD, None, "ort-cpu forward b1s512 float32 mod FAIL 7_of_8 1 nan - 100_% nan - NO -"),
    ],
)  # fmt: skip
def test_one_line_for_each_candidate(row: ParityRow, causal: bool | None, expected: str) -> None:
    probed = [] if causal is None else [causality_row(role=row.role, model=row.model, causal=causal)]
    head, rule, line, *_ = render_validation([], [row], probed, PASSED).splitlines()
    assert cells(head) == list(VALIDATED)
    assert set(rule) == {"-"}
    assert cells(line) == [cell.replace("_", " ") for cell in expected.split()]


def test_files_statements_and_the_verdict_follow() -> None:
    good = [structure("a.onnx"), structure("a.onnx"), structure("b.onnx")]
    probed = [
        causality_row(statement="nothing speaks against it"),
        causality_row(statement="must not be used", causal=False, target="inductor"),
        causality_row(statement="causal", model="dense"),
    ]
    lines = render_validation(good, [], probed, FAILED, ["not run: 2 graphs"]).splitlines()
    assert lines[-8:] == [
        "files: all 2 are as they were built; weights are the checkpoint's, bit for bit", "not run: 2 graphs",
        "mod: must not be used (inductor b1s512)", "dense: causal (ort-cpu b1s512)", "", "  - one", "  - two \\x1b[31m",
        "FAIL",
    ]  # fmt: skip
    bad = [*good, structure("a.onnx", "no output logits"), structure("a.onnx", "changed")]
    assert "files: 1 of 2 are not what they must be, see below" in render_validation(bad, [], [], PASSED)
    assert "files:" not in render_validation([], [], [], PASSED)


def test_one_line_for_each_comparison(report: BuildReport) -> None:
    head, rule, *lines = render_speedup(report.latency, report.speedup, PASSED).splitlines()
    assert cells(head) == list(SPEEDUPS)
    assert set(rule) == {"-"}
    for line, row in zip(lines[:-2], report.speedup, strict=True):
        found = cells(line)
        assert found[:3] == [row.target, row.bucket, row.dtype]
        assert float(found[3]) > float(found[4])
        assert found[5].startswith(f"{row.measured:.2f}x [")
        assert found[6:10] == [
            "faster", "1.002x [0.996, 1.009]", f"{row.predicted_flops:.2f}x", f"{row.efficiency:.2f}"
        ]  # fmt: skip
        # The gate is for the largest bucket.
        assert found[10] == ("1.00x pass" if row.bucket == "b1s512" else "-")
    assert lines[-2:] == ["", "PASS"]


def test_what_failed_and_why(failed_report: BuildReport) -> None:
    text = render_speedup(failed_report.latency, failed_report.speedup, FAILED)
    assert [line.endswith("1.80x FAIL") for line in text.splitlines()].count(True) == 1
    assert text.endswith("\n\n  - one\n  - two \\x1b[31m\nFAIL\n")
    assert text.split("\n\n")[1].splitlines() == [
        *reason_lines(failed_report.speedup), *disturbance_lines(failed_report.latency)
    ]  # fmt: skip
    assert render_speedup([], [], FAILED).endswith("FAIL\n")


def test_steps_of_decode_buckets(report: BuildReport) -> None:
    assert report.generation is not None
    assert render_steps([]) == ""
    _, head, rule, first, second = render_steps(report.generation.decode).splitlines()
    assert cells(head)[-2:] == ["predicted (bytes)", "efficiency"]
    assert set(rule) == {"-"}
    assert cells(first) == ["ort-cpu", "b1s512", "float32", "1,203", "1,950", "1.62x [1.52, 1.73]", "1.77x", "0.91"]
    assert cells(second)[1] == "b8s512"


def test_prompts_narrower_dtypes_and_texts(report: BuildReport) -> None:
    """Everything that `bench` and `validate` measure is told."""
    assert report.generation is not None
    assert render_prompts([]) == render_precision([]) == ""
    assert text_lines([], []) == []
    prompts = report.generation.first_token
    _, head, _, *lines = render_prompts(prompts).splitlines()
    assert cells(head) == list(PROMPTS)
    assert [cells(line)[:3] for line in lines] == [[row.target, f"{row.tokens:,} tokens", row.dtype] for row in prompts]
    narrow = precision_row()
    assert render_precision([narrow]) == f"\n{precision_text(Precision(row=narrow, passed=None))}\n"
    compared, *others = text_lines(report.generation.texts, [])
    counts = [(row.identical, row.texts) for row in report.generation.texts]
    assert compared.startswith(f"texts: {sum(one for one, _ in counts)} of {sum(of for _, of in counts)} are those of")
    assert others == []
    assert report.generation.quality is not None
    assert "perplexity" in text_lines([], [report.generation.quality])[0]


def test_lines_are_never_wrapped_and_end_without_blanks() -> None:
    """A log has no width."""
    row = parity_row(target="tensorrt-rtx graph with a name that is rather long, " * 5 + "end")
    lines = render_validation([], [row], [], PASSED).splitlines()
    assert "long, end" in lines[2]
    assert all(line == line.rstrip() for line in lines)


def test_the_control_farthest_from_one_is_named(report: BuildReport) -> None:
    text = "the interval of the MoD engine against itself covers 1 in "
    first = report.speedup[0]
    above = changed(first, control=Control(measured=1.04, ci99=(1.02, 1.06), covers_one=False))
    below = changed(first, control=Control(measured=0.9, ci99=(0.85, 0.95), covers_one=False))
    assert control_text(report.speedup) == f"{text}4 of 4 settings; farthest from it 1.002x [0.996, 1.009]"
    assert control_text([first, above]) == f"{text}1 of 2 settings; farthest from it 1.040x [1.020, 1.060]"
    assert control_text([below]) == f"{text}0 of 1 setting; farthest from it 0.900x [0.850, 0.950]"


def test_reasons_and_disturbances_name_their_setting(report: BuildReport) -> None:
    first, *rest = report.speedup
    slow = changed(first, verdict="not faster", reason="FLOPs predict 1.02x")
    assert reason_lines([*rest, slow]) == ["ort-cpu b1s128 float32: not faster: FLOPs predict 1.02x"]
    dense, mod, *_ = report.latency
    busy, outliers = "others took 40 % of the machine's CPU time", "6 of 40 samples are outliers"
    assert disturbance_lines([changed(dense, flags=(busy,)), changed(mod, flags=(outliers, busy))]) == [
        f"ort-cpu b1s128 float32: {busy}", f"ort-cpu b1s128 float32 mod: {outliers}"
    ]  # fmt: skip
