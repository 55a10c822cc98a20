"""The base of everything in report.json."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Entry"]


class Entry(BaseModel):
    """Frozen, closed, and readable from the frozen dataclasses of measure/ and validate/, whose fields have the same
    names. Numbers that are not finite are written as strings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True, ser_json_inf_nan="strings")
