"""Rows for the requested work that failed while everything else went on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mod_export.rows.base import Result
from mod_export.types import DType, Graph, ModelKind, Role

ABOUT = ("target", "dtype", "model", "role", "bucket")
"""Fields of a failure that say what it is about."""
MOST_CHARACTERS = 400
"""Longest reason, in characters, where it is shown in one line."""
NOT_DONE = {"validate": "judged", "benchmark": "timed", "profile": "profiled"}
"""Stage -> what it failed to do. The stages before these build."""


class FailedRow(Result):
    """One step that failed, and the reason. Everything that matches its fields is missing; a field that is null matches
    all.
    """

    stage: str
    """Stage that failed: `capture`, `onnx`, `passes` and `engines` build, `validate` judges, `benchmark` and `profile`
    time."""
    target: str | None
    """Engine family; null if nothing could be made for any target."""
    dtype: DType | None
    """Dtype in which the weights would be stored; null for all dtypes."""
    model: ModelKind | None
    """`mod`, or its dense baseline `dense`; null for both."""
    role: Role | None
    """Role that the engine would have; null for all roles."""
    bucket: str | None
    """Static shape; null for all buckets."""
    arch: str | None = None
    """GPU architecture that the engine was to be built for, such as `sm89`."""
    reason: str
    """Message of the error; it can have several lines."""

    def covers(self, about: Mapping[str, Any]) -> bool:
        """Whether this failure is the reason that something with these fields (those of `ABOUT`) is missing. A failure
        for a single GPU architecture covers nothing else, because other architectures may have been built.
        """
        fields = {name: getattr(self, name) for name in ABOUT}
        return self.arch is None and all(value is None or about.get(name) == value for name, value in fields.items())

    @property
    def unbuilt(self) -> bool:
        """Whether the file itself is missing. Otherwise only evidence is missing."""
        return self.stage not in NOT_DONE

    @property
    def what(self) -> str:
        """Short name of what failed: tensorrt-rtx b1s512 float16 sm89 mod."""
        role = None if self.role == "forward" else self.role
        parts = (self.target, role, self.bucket, self.dtype, self.arch, self.model)
        return " ".join(part for part in parts if part is not None)

    @property
    def why(self) -> str:
        """Reason in one line, shortened if necessary."""
        return textwrap.shorten(self.reason, MOST_CHARACTERS, placeholder=" [...]")

    @property
    def sentence(self) -> str:
        """One line that says what failed and why."""
        return sentences([self])[0]


def sentences(failed: Iterable[FailedRow]) -> list[str]:
    """Returns one line for each reason, with everything that failed for this reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in failed:
        by_reason.setdefault((row.stage, row.why), []).append(row.what)
    return [
        f"{', '.join(whats)}: could not be {NOT_DONE.get(stage, 'built')} (stage {stage}): {why}"
        for (stage, why), whats in by_reason.items()
    ]


def fields_of_graph(graph: Graph) -> dict[str, Any]:
    """Returns the fields that say which portable graph a failure is about."""
    return {"model": graph.model, "role": graph.role, "bucket": graph.bucket.name}


def reason_for(failed: Iterable[FailedRow], about: Mapping[str, Any]) -> FailedRow | None:
    """Returns the first failure because of which something with these fields was not built; None if there is none."""
    return next((row for row in failed if row.unbuilt and row.covers(about)), None)
