"""What all results share: their base class, the fields that say what they are about, and the row of a failure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from mod_export.types import Bucket, DType, Graph, ModelKind, Role, Setting, writes_text

ABOUT = ("target", "dtype", "model", "role", "bucket")
"""Fields of a failure that say what it is about."""
MOST_CHARACTERS = 400
"""Longest reason, in characters, where it is shown in one line."""
NOT_DONE = {"validate": "judged", "benchmark": "timed", "profile": "profiled"}
"""Stage -> what it failed to do. The stages before these build."""


class Result(BaseModel):
    """A frozen result without unknown fields.

    It is written to JSON unchanged and read back to an equal value: `row.model_dump(mode="json")` and
    `Row.model_validate(...)`. Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True)


def setting_fields(setting: Setting) -> dict[str, Any]:
    """Returns the fields of an `EngineRow` that say which engine it is about."""
    return {**pair_fields(setting), "model": setting.model}


def pair_fields(setting: Setting) -> dict[str, Any]:
    """Returns the fields of a `PairRow` that say which two engines it compares."""
    return {"target": setting.target, "dtype": setting.dtype, "role": setting.role, "bucket": setting.bucket.name}


class PairRow(Result):
    """A result that compares the MoD engine with the dense baseline of the same target, dtype, role and bucket."""

    target: str
    """Engine family, such as `ort-cpu`."""
    dtype: DType
    """Dtype in which the weights of the engine are stored."""
    role: Role = "forward"
    """Task of the engine: `forward` reads whole rows, `prefill` a part of a prompt, `decode` one more token of each
    row."""
    bucket: str
    """Static shape: `b1s512` is one row of 512 tokens. For a decode engine, the second number is the length of its
    cache."""

    @property
    def setting(self) -> Setting:
        """Setting of the MoD engine."""
        bucket = Bucket.named(self.bucket)
        return Setting(target=self.target, dtype=self.dtype, model="mod", role=self.role, bucket=bucket)


class EngineRow(PairRow):
    """A result about one engine."""

    model: ModelKind
    """`mod`, or its dense baseline `dense`."""

    @property
    def setting(self) -> Setting:
        """Setting of the engine."""
        return super().setting.of(self.model)


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
        role = self.role if self.role is not None and writes_text(self.role) else None
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
