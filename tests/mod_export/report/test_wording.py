from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
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
    place_text,
    printable,
    ratio_text,
    setting_text,
    share_text,
    threads_text,
    token_text,
    value_text,
    verdicts_text,
)
from mod_export.results.parity import InputAgreement


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.1234, "0.123"), (2.0, "2.00"), (20.14, "20.1"), (99.96, "100"), (671.6, "672"), (4563.2, "4,563"), (0, "0.00")],
)
def test_milliseconds_have_three_digits(ms: float, text: str) -> None:
    assert ms_text(ms) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100 %"), (0.999999, "99.99 %"), (0.5, "50.00 %"), (0.0, "0.00 %"), (math.nan, "nan")],
)
def test_only_all_is_a_hundred_percent(share: float, text: str) -> None:
    assert share_text(share) == text


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_all_is_called_all(agreed: int, missing: int) -> None:
    text = agreement_text(InputAgreement(input="text", routed=agreed + missing, agreed=agreed))
    assert text.startswith("all ") is (missing == 0 and agreed > 0)


@pytest.mark.parametrize(
    ("differing", "faults", "text"),
    [
        (0, 0, "no token is routed differently"),
        (8, 0, "every difference is a near-tie"),
        (8, 2, "2 differences are not near-ties"),
        (0, 1, "1 difference is not a near-tie"),
    ],
)
def test_differences_are_near_ties_or_counted(differing: int, faults: int, text: str) -> None:
    assert difference_text(differing, faults) == text


def test_nothing_routed_is_a_dash() -> None:
    assert agreement_text(InputAgreement(input="text", routed=0, agreed=0)) == "-"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1_500, "1.50 k"), (40_906_240, "40.91 M"), (2.98e10, "29.80 G"), (5e12, "5.00 T")],
)
def test_counts_have_decimal_prefixes(count: float, text: str) -> None:
    assert count_text(count) == text


def test_flops_have_their_unit() -> None:
    assert (flops_text(512), flops_text(29_770_000_000)) == ("512 FLOP", "29.77 GFLOP")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (163_624_960, "156.0 MiB"), (3 * 2**30, "3.0 GiB")],
)
def test_bytes_have_binary_prefixes(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_ratios_and_errors() -> None:
    assert interval_text(speedup_row(1.678, ci95=(1.655, 1.694))) == "1.68x [1.66, 1.69]"
    assert ratio_text(math.nan) == "nanx"
    assert [error_text(error) for error in (0.0, 2.14e-6, math.nan, math.inf)] == ["0", "2.1e-06", "nan", "inf"]


def test_threads_and_values() -> None:
    assert [threads_text(count) for count in (0, 1, 4)] == ["threads as the library chooses", "1 thread", "4 threads"]
    values: list[JsonValue] = [None, [1, None], "x", True]
    assert [value_text(value) for value in values] == ["none", "1, none", "x", "True"]


@given(st.text(), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252"]))
def test_printable_text_can_be_written_anywhere(text: str, encoding: str) -> None:
    shown = printable(text, encoding=encoding)
    assert shown.encode(encoding).decode(encoding) == shown
    assert shown.isprintable()


def test_printable_keeps_what_it_is_told_to() -> None:
    assert printable("a\nb\x00", keep="\n") == "a\nb\\x00"
    assert printable("\ud800") == "\\ud800"


def test_intervals_of_milliseconds() -> None:
    assert (ci_text((112.4, 114.6)), ci_text((1.0, 2.5)), ci_text(None)) == ("[112, 115]", "[1.00, 2.50]", "")


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        (["faster"], "faster in 1 of 1 setting"),
        (["inconclusive", "faster", "faster"], "faster in 2 of 3 settings, inconclusive in 1"),
        (["not faster", "inconclusive"], "not faster in 1 of 2 settings, inconclusive in 1"),
    ],
)
def test_verdicts_are_counted_and_none_is_left_out(verdicts: list[str], text: str) -> None:
    assert verdicts_text([speedup_row(verdict=verdict) for verdict in verdicts]) == text


def test_settings_have_a_name() -> None:
    assert setting_text(speedup_row()) == "ort-cpu b1s512 float32"
    assert setting_text(speedup_row(role="decode")) == "ort-cpu decode b1s512 float32"


def test_small_shares_and_their_absence() -> None:
    assert [percent_text(share) for share in (0.0123, 0.0, -0.01, None)] == ["1.2 %", "0.0 %", "-1.0 %", "-"]


@given(st.floats(min_value=0, max_value=100))
def test_places_are_short_and_near(place: float) -> None:
    assert abs(float(place_text(place)) - place) <= 0.005 + 1e-9
    assert len(place_text(place)) <= 5


def test_places_of_whole_percents_keep_their_zeros() -> None:
    assert [place_text(place) for place in (0.0, 10.0, 100.0, 12.5)] == ["0", "10", "100", "12.5"]


def test_a_token_can_be_seen() -> None:
    assert [token_text(text) for text in ("def", "\n", "", " ")] == ["def", "\u23ce\n", "\u2205", " "]


def test_whether_texts_can_be_generated() -> None:
    assert causality_text([]).startswith("causal: ")
    assert causality_text(["a=b", "c=d"]).startswith("not causal: a=b and c=d looks at the whole sequence")
