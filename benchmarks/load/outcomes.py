"""Results of a scenario: measured values with the expected ones, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

HEAD = "| scenario | what | got | expected | verdict |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Check:
    """One measured value.

    Attributes:
        what: name of the value.
        got: the value, as tables show it.
        expected: the expected value, as tables show it; empty for a value that is only reported.
        passed: whether the value is as expected.
    """

    what: str
    got: str
    expected: str
    passed: bool

    @property
    def verdict(self) -> str:
        if not self.expected:
            return ""
        return "pass" if self.passed else "FAIL"


@dataclass
class Outcome:
    """All checks of one scenario."""

    scenario: str
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {"scenario": self.scenario, "passed": self.passed, "seconds": round(self.seconds, 1),
                "checks": [asdict(check) for check in self.checks]}  # fmt: skip


def at_most(what: str, got: float, most: float, unit: str = "", digits: int = 0) -> Check:
    """A value that must not be larger than `most`. NaN fails."""
    return Check(what, f"{got:,.{digits}f}{unit}", f"at most {most:,.{digits}f}{unit}", got <= most)


def at_least(what: str, got: float, least: float, unit: str = "", digits: int = 0) -> Check:
    """A value that must not be smaller than `least`. NaN fails."""
    return Check(what, f"{got:,.{digits}f}{unit}", f"at least {least:,.{digits}f}{unit}", got >= least)


def equal(what: str, got: object, expected: object) -> Check:
    """A value that must equal `expected`."""
    return Check(what, str(got), str(expected), got == expected)


def holds(what: str, passed: bool, got: str, expected: str) -> Check:
    """A value whose caller decides whether it passed."""
    return Check(what, got, expected, passed)


def told(what: str, got: str) -> Check:
    """A value that is only reported."""
    return Check(what, got, "", True)


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown table with a row for each value."""
    rows = [HEAD]
    for outcome in outcomes:
        for check in outcome.checks:
            cells = (outcome.scenario, check.what, check.got, check.expected or "-", check.verdict or "-")
            rows.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return "\n".join(rows)
