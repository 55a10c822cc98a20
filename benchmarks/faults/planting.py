"""Plants a fault and validates the folder."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.base_folder import sign
from benchmarks.faults.fault_table import FAULTS, Fault
from mod_export.pipeline.rerun import Rerun, validate_folder
from mod_export.rows.correctness import ParityRow, StructureRow

for file in (
    "block_faults",
    "routing_faults",
    "skipped_faults",
    "nested_faults",
    "weight_faults",
    "folder_faults",
    "foreign_faults",
):
    importlib.import_module(f"benchmarks.faults.{file}")  # The import adds the module's faults to FAULTS.


@dataclass(frozen=True)
class Outcome:
    """Result of `validate` for one fault.

    `by_running`: an engine or a graph gave wrong results. `by_looking`: a file is not as it must be. `place` is the
    first place that was named. `named`: the right place and the right file are among those named.
    """

    by_running: bool
    by_looking: bool
    place: str | None
    named: bool
    reasons: tuple[str, ...]

    @property
    def caught(self) -> bool:
        return (self.by_running or self.by_looking) and self.named


def outcome_of(name: str, sound: Path, packages: Path, scratch: Path) -> Outcome:
    """Plants a fault into a copy of `sound`, signs it, and validates it as a user would."""
    fault, root = FAULTS[name], scratch / "planted"
    shutil.copytree(sound, root)
    try:
        fault.plant(root, packages)
        sign(root)
        return _outcome(validate_folder(root, None, ()), fault)
    finally:
        shutil.rmtree(root)


def _outcome(rerun: Rerun, fault: Fault) -> Outcome:
    failed = [row for row in rerun.rows(ParityRow) if not row.passed]
    looked = [f"{row.path}: {reason}" for row in rerun.rows(StructureRow) for reason in row.reasons if not row.passed]
    reasons = (*rerun.verdict.reasons,)
    assert bool(reasons) == (rerun.verdict.status == "fail")
    places = [str(row.located.layer) for row in failed if row.located]
    words = {fault.where, str(fault.where).replace("layers.", "layer ")}
    named = fault.where is None or any(word in reason for word in words if word for reason in reasons)
    artifacts = [row.artifact for row in failed if row.artifact]
    named &= fault.file is None or any(fault.file in text for text in (*reasons, *artifacts))
    # Comparison of values names the first place that differs, so that place must be the right one.
    blocks = fault.where is not None and fault.where.startswith(("layers.", "blocks."))
    wrong = blocks and bool(places) and fault.where not in places
    return Outcome(
        by_running=bool(failed),
        by_looking=bool(looked),
        place=places[0] if places else None,
        named=named and not wrong,
        reasons=reasons,
    )
