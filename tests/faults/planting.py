"""Every planted fault in one table, and what `validate` made of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from base_folder import sign
from folder_faults import COMPILED_FAULTS, ENGINE, FOLDER_FAULTS
from graph_faults import GRAPH_FAULTS
from graph_surgery import Surgery

from mod_export.rerun import Rerun, validate_folder
from mod_export.results.parity import ParityRow
from mod_export.results.structure import StructureRow

__all__ = ["FAULTS", "Fault", "Outcome", "outcome_of"]


@dataclass(frozen=True)
class Fault:
    """`plant` changes a copy of a sound folder; `where` is the module that must be named, None if it is not local."""

    name: str
    where: str | None
    compiled: bool
    plant: Callable[[Path, Path], None]


@dataclass(frozen=True)
class Outcome:
    """What was seen of one fault.

    `by_running`: an engine or graph gave wrong results; `by_looking`: a file is not what it must be. `place` is the
    first place that was named, `named` whether the right one is among those named.
    """

    by_running: bool
    by_looking: bool
    place: str | None
    named: bool
    reasons: tuple[str, ...]

    @property
    def caught(self) -> bool:
        return (self.by_running or self.by_looking) and self.named


def _faults() -> Iterator[Fault]:
    for name, (change, where) in GRAPH_FAULTS.items():

        def into_engine(root: Path, packages: Path, change: Callable[[Surgery], None] = change) -> None:
            surgery = Surgery(root / ENGINE)
            change(surgery)
            surgery.save()

        yield Fault(name, where, False, into_engine)
    for name, (plant, where) in FOLDER_FAULTS.items():
        # mypy infers no type of a lambda with a default.
        yield Fault(name, where, False, lambda root, packages, plant=plant: plant(root))  # type: ignore[misc]  # mypy infers no lambda with a default.
    for name, (place, where) in COMPILED_FAULTS.items():
        yield Fault(name, where, True, place)


FAULTS = {fault.name: fault for fault in _faults()}


def outcome_of(fault: Fault, sound: Path, packages: Path, scratch: Path) -> Outcome:
    """Plants a fault into a copy of `sound`, signs it, and validates it as a user would."""
    root = scratch / "planted"
    shutil.copytree(sound, root)
    try:
        fault.plant(root, packages)
        sign(root)
        return _outcome(validate_folder(root, None, ()), fault)
    finally:
        shutil.rmtree(root)


def _outcome(found: Rerun, fault: Fault) -> Outcome:
    failed = [row for row in found.rows(ParityRow) if not row.passed]
    looked = [f"{row.path}: {reason}" for row in found.rows(StructureRow) for reason in row.reasons if not row.passed]
    reasons = (*found.verdict.reasons,)
    assert bool(reasons) == (found.verdict.status == "fail")
    places = [str(row.located.layer) for row in failed if row.located]
    words = {fault.where, str(fault.where).replace("layers.", "layer ")}
    named = fault.where is None or any(word in reason for word in words if word for reason in reasons)
    # What is looked for by running is blamed on the first place that differs, so that one has to be right.
    wrong = fault.where is not None and fault.where.startswith("layers.") and bool(places) and fault.where not in places
    return Outcome(
        by_running=bool(failed),
        by_looking=bool(looked),
        place=places[0] if places else None,
        named=named and not wrong,
        reasons=reasons,
    )
