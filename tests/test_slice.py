"""A commit's hash selects a part of the slow tests; over time every test is selected."""

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
    found = folder.runpytest_inprocess("-m", "slow", "--slice", commit, "--collect-only", "-q", "-p", "no:randomly")
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


def test_what_is_no_hash(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    found = pytester.runpytest_inprocess("--slice", "main")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*argument --slice: invalid *value: 'main'*"])
