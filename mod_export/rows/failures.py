"""What was wanted and failed, while everything else went on: rows of their own beside those of what was built."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mod_export.rows.base import Result
from mod_export.types import DType, Graph, ModelKind, Role

ABOUT = ("target", "dtype", "model", "role", "bucket")
"""The fields of a failure that say what it is about."""
MOST_CHARACTERS = 400
"""Of a reason where it stands in one line."""
NOT_DONE = {"validate": "judged", "benchmark": "timed", "profile": "profiled"}
"""Stage -> what it could not do. The stages before them build."""


class FailedRow(Result):
    """One step that failed, for one reason. Everything that its fields describe is missing; null stands for all."""

    stage: str
    """The stage that could not do it: `capture`, `onnx`, `passes` and `engines` build, `validate` judges, `benchmark`
    and `profile` time."""
    target: str | None
    """The engine family; null where nothing could be made for any."""
    dtype: DType | None
    """What the weights would be stored in; null for all."""
    model: ModelKind | None
    """`mod`, or its dense baseline `dense`; null for both."""
    role: Role | None
    """What the engine would do; null for all."""
    bucket: str | None
    """The static shape; null for all."""
    arch: str | None = None
    """The GPU architecture that an engine was to be built for, such as `sm89`."""
    reason: str
    """The message of the error, which can have several lines."""

    def covers(self, about: Mapping[str, Any]) -> bool:
        """Whether what has these fields (of ABOUT) is missing for this reason. An engine that was to be built for one
        architecture of several covers none but itself.
        """
        own = {name: getattr(self, name) for name in ABOUT}
        return self.arch is None and all(value is None or about.get(name) == value for name, value in own.items())

    @property
    def unbuilt(self) -> bool:
        """Whether there is no file of it; otherwise only evidence is missing."""
        return self.stage not in NOT_DONE

    @property
    def what(self) -> str:
        """What failed, in short: tensorrt-rtx b1s512 float16 sm89 mod."""
        role = None if self.role == "forward" else self.role
        parts = (self.target, role, self.bucket, self.dtype, self.arch, self.model)
        return " ".join(part for part in parts if part is not None)

    @property
    def why(self) -> str:
        """The reason in one line, shortened if need be."""
        return textwrap.shorten(self.reason, MOST_CHARACTERS, placeholder=" [...]")

    @property
    def sentence(self) -> str:
        """What failed and why, in one line."""
        return sentences([self])[0]


def sentences(failed: Iterable[FailedRow]) -> list[str]:
    """What failed and why, one line for each reason, with everything that failed for it."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in failed:
        by_reason.setdefault((row.stage, row.why), []).append(row.what)
    return [
        f"{', '.join(whats)}: could not be {NOT_DONE.get(stage, 'built')} (stage {stage}): {why}"
        for (stage, why), whats in by_reason.items()
    ]


def fields_of_graph(graph: Graph) -> dict[str, Any]:
    """The fields that say which portable graph a failure is about."""
    return {"model": graph.model, "role": graph.role, "bucket": graph.bucket.name}


def reason_for(failed: Iterable[FailedRow], about: Mapping[str, Any]) -> FailedRow | None:
    """The first failure for which what has these fields was not built; None where there is none."""
    return next((row for row in failed if row.unbuilt and row.covers(about)), None)
