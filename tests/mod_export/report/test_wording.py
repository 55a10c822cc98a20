from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import speedup_row

from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    causality_text,
    ci_text,
    count_text,
    difference_text,
    error_text,
    flops_text,
    interval_text,
    ms_text,
    percent_text,
    printable,
    ratio_text,
    share_text,
    threads_text,
    token_text,
    value_text,
    verdicts_text,
)
from mod_export.rows.correctness import InputAgreement

NUMBERS: list[tuple[Callable[[Any], str], dict[Any, str]]] = [
    (ms_text, {0.1234: "0.123", 2.0: "2.00", 20.14: "20.1", 99.96: "100", 671.6: "672", 4563.2: "4,563", 0: "0.00"}),
    # Only 1.0 becomes 100 percent.
    (share_text, {1.0: "100 %", 0.999999: "99.99 %", 0.5: "50.00 %", 0.0: "0.00 %", math.nan: "nan"}),
    (percent_text, {0.0123: "1.2 %", 0.0: "0.0 %", -0.01: "-1.0 %", None: "-"}),
    (count_text, {0: "0", 999: "999", 1_500: "1.50 k", 40_906_240: "40.91 M", 2.98e10: "29.80 G", 5e12: "5.00 T"}),
    (flops_text, {512: "512 FLOP", 29_770_000_000: "29.77 GFLOP"}),
    (bytes_text, {0: "0 B", 1023: "1023 B", 2048: "2.0 KiB", 163_624_960: "156.0 MiB", 3 * 2**30: "3.0 GiB"}),
    (error_text, {0.0: "0", 2.14e-6: "2.1e-06", math.nan: "nan", math.inf: "inf"}),
    (ratio_text, {1.678: "1.68x", math.nan: "nanx"}),
    (ci_text, {(112.4, 114.6): "[112, 115]", (1.0, 2.5): "[1.00, 2.50]", None: ""}),
    (threads_text, {0: "threads as the library chooses", 1: "1 thread", 4: "4 threads"}),
    (token_text, {"def": "def", "\n": "\u23ce\n", "": "\u2205", " ": " "}),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS, ids=lambda function: getattr(function, "__name__", ""))
def test_numbers_are_written_for_people(text: Callable[[Any], str], expected: dict[Any, str]) -> None:
    assert {value: text(value) for value in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (value_text([None, [1, None], "x", True]), "none, 1, none, x, True"),
        (interval_text(speedup_row(1.678, ci95=(1.655, 1.694))), "1.68x [1.66, 1.69]"),
        (difference_text(0, 0), "no token is routed differently"),
        (difference_text(8, 0), "every difference is a near-tie"),
        (difference_text(8, 2), "2 differences are not near-ties"),
        (difference_text(0, 1), "1 difference is not a near-tie"),
        (verdicts_text(["faster"]), "faster in 1 of 1 setting"),
        (verdicts_text(["inconclusive", "faster", "faster"]), "faster in 2 of 3 settings, inconclusive in 1"),
        (verdicts_text(["not faster", "inconclusive"]), "not faster in 1 of 2 settings, inconclusive in 1"),
        (causality_text([])[:8], "causal: "),
        (causality_text(["a=b", "c=d"])[:56], "not causal: a=b and c=d looks at the whole sequence, so "),
        (printable("a\nb\x00", keep="\n"), "a\nb\\x00"),
        (printable("\ud800"), "\\ud800"),
    ],
)
def test_sentences(text: str, expected: str) -> None:
    assert text == expected


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_all_is_called_all(agreed: int, missing: int) -> None:
    text = agreement_text(InputAgreement(input="text", routed=agreed + missing, agreed=agreed))
    assert text.startswith("all ") is (missing == 0 and agreed > 0)
    assert agreement_text(InputAgreement(input="text", routed=0, agreed=0)) == "-"


@given(st.text(), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252"]))
def test_printable_text_can_be_written_anywhere(text: str, encoding: str) -> None:
    shown = printable(text, encoding=encoding)
    assert shown.encode(encoding).decode(encoding) == shown
    assert shown.isprintable()
