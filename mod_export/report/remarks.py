"""What must be read beside latency figures: why a model is not faster, what the control says, what disturbed them."""

from __future__ import annotations

from collections.abc import Sequence

from mod_export.report.latency_entries import LatencyEntry, SpeedupEntry
from mod_export.report.wording import setting_text

__all__ = ["control_text", "disturbance_lines", "reason_lines"]


def control_text(rows: Sequence[SpeedupEntry]) -> str:
    """In how many settings the control covers 1, and how far from 1 the worst is; empty without controls."""
    controls = [row.control for row in rows if row.control is not None]
    if not controls:
        return ""
    covering = sum(control.covers_one for control in controls)
    worst = max(controls, key=lambda control: abs(control.measured - 1))
    settings = "setting" if len(controls) == 1 else "settings"
    return (
        f"the MoD engine against itself covers 1 in {covering} of {len(controls)} {settings}; "
        f"farthest from it {worst.measured:.3f}x [{worst.ci99[0]:.3f}, {worst.ci99[1]:.3f}]"
    )


def reason_lines(rows: Sequence[SpeedupEntry]) -> list[str]:
    """One line for each setting that is not faster, or inconclusive."""
    return [f"{setting_text(row)}: {row.verdict}: {row.reason}" for row in rows if row.reason is not None]


def disturbance_lines(rows: Sequence[LatencyEntry]) -> list[str]:
    """One line for each flag; what holds for both models of a setting is said once."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for flag in row.flags:
            models.setdefault((setting_text(row), flag), []).append(row.model)
    return [
        f"{setting}: {flag}" if len(named) > 1 else f"{setting} {named[0]}: {flag}"
        for (setting, flag), named in models.items()
    ]
