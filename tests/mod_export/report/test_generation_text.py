"""Token by token, on a console."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mod_export.report import BuildReport, render_text
from mod_export.report.generation_entries import GenerationEntry


def section(report: BuildReport, width: int = 10_000) -> str:
    text = render_text(report, "b", width=width)
    return text[text.index("Token by token") : text.index("built, not run here")]


def changed(report: BuildReport, **fields: Any) -> BuildReport:
    assert report.generation is not None
    return report.model_copy(update={"generation": report.generation.model_copy(update=fields)})


def line(text: str, start: str) -> str:
    return next(one for one in text.splitlines() if one.startswith(start))


def test_nothing_is_claimed_where_the_interval_covers_one(report: BuildReport) -> None:
    text = section(report)
    assert line(text, "ort-cpu  b1s512").split()[-6:] == ["1.62x", "[1.52,", "1.73]", "faster", "1.77x", "0.91"]
    assert line(text, "ort-cpu  b8s512").split()[-6:] == ["1.03x", "[0.96,", "1.09]", "inconclusive", "1.77x", "0.58"]
    assert line(text, "ort-cpu  128 tokens").split()[-1] == "inconclusive"
    assert line(text, "ort-cpu  512 tokens").split()[-1] == "faster"


def test_slower_is_said_too(report: BuildReport) -> None:
    assert report.generation is not None
    row = report.generation.decode[0].model_copy(update={"speedup": 0.9, "ci95": (0.85, 0.95)})
    assert "not faster" in line(section(changed(report, decode=(row,))), "ort-cpu  b1s512")


def test_the_cache_and_the_price_are_said(report: BuildReport) -> None:
    text = section(report)
    assert "ort-cpu b8s512: 9.0 MiB, dense 16.0 MiB; of routed layers 1.0 MiB, dense 8.0 MiB\n" in text
    assert (
        "quality: perplexity 3.1377 deciding one token at a time, 3.0938 by the checkpoint's own selection, on 2,044 "
        "held-out tokens; tokens that found all places taken: 50 in layer 3\n"
    ) in text
    assert "places of a text: 64 in layers 1, 3\n" in text


def test_a_model_that_cannot_write_says_why(report: BuildReport) -> None:
    reason = "routing.selection=topk: whether a token is among the k best depends on tokens after it"
    one = report.model_copy(update={"generation": GenerationEntry(reason=reason)})
    assert section(one) == f"Token by token  not built: {reason}\n\n"


def test_a_report_of_before_there_was_any_says_nothing(report: BuildReport) -> None:
    assert "Token by token" not in render_text(report.model_copy(update={"generation": None}), "b")


def test_a_row_that_failed_stands_with_its_reasons(report: BuildReport) -> None:
    assert report.generation is not None
    *rest, last = report.generation.parity
    bad = last.model_copy(update={"passed": False, "reasons": ("text: error \x1b[2J 0.3", "kl 2 above 1e-06")})
    text = section(changed(report, parity=(*rest, bad)))
    assert line(text, "ort-cpu  b8s512").split()[3] == "FAIL"
    assert line(text, "ort-cpu  b1s512").split()[3] == "pass"
    assert "  - ort-cpu decode b8s512 float32 dense: text: error \\x1b[2J 0.3\n" in text
    assert "  - ort-cpu decode b8s512 float32 dense: kl 2 above 1e-06\n" in text


def test_texts_that_are_not_pytorchs_are_counted(report: BuildReport) -> None:
    assert report.generation is not None
    first, *rest = report.generation.texts
    other = first.model_copy(update={"equal": 3, "first_difference": 17})
    text = section(changed(report, texts=(other, *rest)))
    assert "7 of 8" in line(text, "ort-cpu  b1s512")
    assert "mod: 1 of 4 texts are not PyTorch's, the first from new token 17 on\n" in text


def test_a_model_without_text_has_no_perplexity(report: BuildReport) -> None:
    text = section(changed(report, quality=None, texts=()))
    assert "quality: not measured, there is no text here for this model's vocabulary\n" in text
    assert "texts alike: greedy" not in text


def test_no_overflow_is_said(report: BuildReport) -> None:
    assert report.generation is not None
    assert report.generation.quality is not None
    quality = report.generation.quality.model_copy(update={"overflow": {"1": 0, "3": 0}})
    assert "every token that wanted to run found a place\n" in section(changed(report, quality=quality))


def test_what_was_judged_and_not_timed_has_dashes(report: BuildReport) -> None:
    text = section(changed(report, decode=(), first_token=(), texts=()))
    assert line(text, "ort-cpu  b1s512").split()[4:] == ["-"] * 8
    assert line(text, "ort-cpu  128 tokens").split()[5:] == ["-"] * 4
    assert "keys and values" not in text


def test_what_was_timed_and_not_judged_has_dashes(report: BuildReport) -> None:
    text = section(changed(report, parity=()))
    assert line(text, "ort-cpu  b1s512").split()[3] == "-"


def test_a_prompt_without_an_interval_is_not_judged(report: BuildReport) -> None:
    assert report.generation is not None
    rows = tuple(row.model_copy(update={"ci95": None}) for row in report.generation.first_token)
    assert line(section(changed(report, first_token=rows)), "ort-cpu  512 tokens").split()[-2:] == ["1.81x", "-"]


def test_a_model_without_routed_layers(report: BuildReport) -> None:
    assert report.generation is not None
    rows = tuple(
        row.model_copy(update={"share": {}, "executed": {}, "routed_kv_bytes": {"mod": 0, "dense": 0}})
        for row in report.generation.decode
    )
    text = section(changed(report, capacity={"2.expert0": 80}, decode=rows))
    assert "prompt and answer; no routed layers\n" in text
    assert "of routed layers" not in text


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_speed(report: BuildReport, number: float) -> None:
    assert report.generation is not None
    row = report.generation.decode[0].model_copy(
        update={
            "speedup": number, "ci95": (number, math.nan), "efficiency": number, "bound": number,
            "ms": {"mod": number, "dense": number}, "tokens_per_second": {"mod": number, "dense": number},
            "share": {"1": number},
        }
    )  # fmt: skip
    assert "inconclusive" in line(section(changed(report, decode=(row,))), "ort-cpu  b1s512")


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_stacks_columns(report: BuildReport, width: int) -> None:
    text = section(report, width)
    assert max(map(len, text.splitlines())) <= width
    for cell in ("b1s512", "8.3 to 10.4 %", "all 8", "1,950", "1.62x [1.52, 1.73]", "128 tokens", "9.88"):
        assert cell in text
