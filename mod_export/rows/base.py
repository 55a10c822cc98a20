"""The base class of every result, and the fields that say which engine a result is about."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from mod_export.types import Bucket, DType, ModelKind, Role, Setting


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
    """Task of the engine: `forward` reads whole texts, `prefill` reads a prompt, `decode` adds one token."""
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
