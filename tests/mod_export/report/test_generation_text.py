"""Token by token, on a console."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sample_rows import changed

from mod_export.report import render_text
from mod_export.results.generation import GenerationReport
from mod_export.results.report import BuildReport


def section(report: BuildReport, width: int = 10_000, **fields: Any) -> str:
    """The section of a report of which these fields of `generation` were changed."""
    if fields:
        assert report.generation is not None
        report = changed(report, generation=changed(report.generation, **fields))
    text = render_text(report, "b", width=width)
    return text[text.index("Token by token") : text.index("built, but not run here")]


def line(text: str, start: str) -> str:
    return next(one for one in text.splitlines() if one.startswith(start))


def row_of(report: BuildReport, **fields: Any) -> str:
    """The line of the first decode bucket, of whose timing these fields were changed."""
    assert report.generation is not None
    return line(section(report, decode=(changed(report.generation.decode[0], **fields),)), "ort-cpu  b1s512")


def test_nothing_is_claimed_where_the_interval_covers_one(report: BuildReport) -> None:
    text = section(report)
    assert line(text, "ort-cpu  b1s512").split()[-6:] == ["1.62x", "[1.52,", "1.73]", "faster", "1.77x", "0.91"]
    assert line(text, "ort-cpu  b8s512").split()[-6:] == ["1.03x", "[0.96,", "1.09]", "inconclusive", "1.77x", "0.58"]
    assert line(text, "ort-cpu  128 tokens").split()[-1] == "inconclusive"
    assert line(text, "ort-cpu  512 tokens").split()[-1] == "faster"
    assert "not faster" in row_of(report, measured=0.9, ci95=(0.85, 0.95))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_speed(report: BuildReport, number: float) -> None:
    both = {"mod": number, "dense": number}
    found = row_of(
        report, measured=number, ci95=(number, math.nan), efficiency=number, predicted_bytes=number, ms=both,
        tokens_per_second=both, selected={"1": number},
    )  # fmt: skip
    assert "inconclusive" in found


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "ort-cpu b8s512: 9.0 MiB, dense 16.0 MiB; of routed layers 1.0 MiB, dense 8.0 MiB\n"),
        ({}, "quality: perplexity 3.1377 selecting one token at a time, 3.0938 by the checkpoint's own selection, on "
             "2,044 held-out tokens; tokens that found no free slot: 50 in layer 3\n"),
        ({}, "slots of a text: 64 in layers 1, 3\n"),
        ({"quality": None}, "quality: not measured, there is no text here for this model's vocabulary\n"),
        ({"capacity": {"2.expert0": 80}}, "prompt and answer; no routed layers\n"),
    ],
)  # fmt: skip
def test_what_stands_below_the_tables(report: BuildReport, fields: dict[str, Any], told: str) -> None:
    assert told in section(report, **fields)


def test_a_model_that_cannot_write_says_why(report: BuildReport) -> None:
    reason = "routing.selection=topk: whether a token is among the k best depends on tokens after it"
    one = changed(report, generation=GenerationReport(reason=reason))
    assert section(one) == f"Token by token  not built: {reason}\n\n"
    assert "Token by token" not in render_text(changed(report, generation=None), "b")


def test_a_row_that_failed_stands_with_its_reasons(report: BuildReport) -> None:
    *rest, last = report.parity
    bad = changed(last, passed=False, reasons=("text: error \x1b[2J 0.3", "kl 2 above 1e-06"))
    text = section(changed(report, parity=(*rest, bad)))
    assert line(text, "ort-cpu  b8s512").split()[3] == "FAIL"
    assert line(text, "ort-cpu  b1s512").split()[3] == "pass"
    assert "  - ort-cpu decode b8s512 float32 dense: text: error \\x1b[2J 0.3\n" in text
    assert "  - ort-cpu decode b8s512 float32 dense: kl 2 above 1e-06\n" in text


def test_texts_that_are_not_pytorchs_are_counted(report: BuildReport) -> None:
    assert report.generation is not None
    first, *rest = report.generation.texts
    text = section(report, texts=(changed(first, identical=3, first_difference=17), *rest))
    assert "7 of 8" in line(text, "ort-cpu  b1s512")
    assert "mod: 1 of 4 texts differ from PyTorch's, the first from new token 17 on\n" in text


def test_no_overflow_is_said(report: BuildReport) -> None:
    assert report.generation is not None
    assert report.generation.quality is not None
    quality = changed(report.generation.quality, overflow={"1": 0, "3": 0})
    assert "every token that wanted a slot found one\n" in section(report, quality=quality)


def test_what_was_not_timed_or_not_judged_has_dashes(report: BuildReport) -> None:
    text = section(report, decode=(), first_token=(), texts=())
    assert line(text, "ort-cpu  b1s512").split()[4:] == ["-"] * 8
    assert line(text, "ort-cpu  128 tokens").split()[5:] == ["-"] * 4
    assert "keys and values" not in text
    assert line(section(changed(report, parity=())), "ort-cpu  b1s512").split()[3] == "-"


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_stacks_columns(report: BuildReport, width: int) -> None:
    text = section(report, width)
    assert max(map(len, text.splitlines())) <= width
    for cell in ("b1s512", "8.3 to 10.4 %", "all 8", "1,950", "1.62x [1.52, 1.73]", "128 tokens", "9.88"):
        assert cell in text
