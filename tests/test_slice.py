"""A commit's hash selects a part of the slow tests, and over time all of them. Single cases of a test may be slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
SLICES = int(re.findall(r"^SLICES = (\d+)$", CONFTEST, re.MULTILINE)[0])
SLOW = 2 * SLICES + 3
TESTS = f"""
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range({SLOW}))
def test_slow(number): ...

def test_fast(): ...
"""


def drawn(folder: pytest.Pytester, commit: str) -> list[str]:
    found = folder.runpytest_inprocess(
        "-m", "slow", "--slice", "--commit", commit, "--collect-only", "-q", "-p", "no:randomly"
    )
    assert found.ret == 0
    return [line for line in found.outlines if "::" in line]


def test_every_slow_test_is_drawn_by_one_hash_in_so_many(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = slow\n")
    pytester.makepyfile(TESTS)
    parts = [drawn(pytester, f"{commit:040x}") for commit in range(0xABC * SLICES, 0xABC * SLICES + SLICES)]
    everything = [name for part in parts for name in part]
    assert len(everything) == len(set(everything)) == SLOW
    assert all("test_slow" in name for name in everything)
    assert {len(part) for part in parts} == {2, 3}
    # The same hash selects the same tests everywhere.
    assert drawn(pytester, f"{0xABC * SLICES:040X}") == parts[0]


def test_a_commit_draws_a_third_of_what_a_make_target_of_its_own_runs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    fast\n    drawn\n")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.drawn
        @pytest.mark.fast("0")
        @pytest.mark.parametrize("number", range(10))
        def test_many(number): ...

        @pytest.mark.slow
        def test_other(): ...
    """)
    parts = []
    for commit in range(3):
        outcome = pytester.runpytest_inprocess(
            "--commit", f"{commit << 16:x}", "--collect-only", "-q", "-p", "no:randomly"
        )
        parts.append(re.findall(r"::test_(\w+\[?\d?)", "\n".join(outcome.outlines)))
    assert all({"many[0", "other"} <= set(part) and len(part) == 5 for part in parts)
    assert set().union(*parts) == {"other", *(f"many[{number}" for number in range(10))}
    assert len(pytester.runpytest_inprocess("--collect-only", "-q").outlines) > 11


@pytest.mark.parametrize(("marker", "expected"), [("slow", ["two"]), ("not slow", ["one", "three", "four"])])
def test_the_cases_that_are_not_fast_are_slow(pytester: pytest.Pytester, marker: str, expected: list[str]) -> None:
    folder_with_cases(pytester, '"one", "three"')
    outcome = pytester.runpytest_inprocess("-m", marker, "--collect-only", "-q", "-p", "no:randomly")
    assert re.findall(r"::test_\w+\[(\w+)\]", "\n".join(outcome.outlines)) == expected


def test_fast_cases_exist(pytester: pytest.Pytester) -> None:
    folder_with_cases(pytester, '"one", "six"')
    outcome = pytester.runpytest_inprocess("-p", "no:randomly")
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
    outcome.stderr.fnmatch_lines(["*cases that are marked as fast and do not exist: *test_cases': {'six'}*"])
    alone = pytester.runpytest_inprocess("test_fast_cases_exist.py::test_cases[three]", "-p", "no:randomly")
    alone.assert_outcomes(passed=1)


def folder_with_cases(pytester: pytest.Pytester, fast: str) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    fast\n")
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.fast({fast})
        @pytest.mark.parametrize("case", ["one", "two", "three"])
        def test_cases(case): ...

        @pytest.mark.parametrize("case", ["four"])
        def test_others(case): ...
    """)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--commit", "main"], "*argument --commit: invalid *value: 'main'*"),
        (["--slice"], "*--slice needs --commit, which draws the slice*"),
    ],
)
def test_what_draws_nothing(pytester: pytest.Pytester, arguments: list[str], message: str) -> None:
    pytester.makeconftest(CONFTEST)
    found = pytester.runpytest_inprocess(*arguments)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([message])
