"""`response_format` of OpenAI's API: what the answer must look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ANY_OBJECT = {"type": "object"}


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]

    @property
    def grammar(self) -> None:
        return None


class ObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["json_object"]

    @property
    def grammar(self) -> Mapping[str, Any]:
        return ANY_OBJECT


class NamedSchema(BaseModel):
    """A JSON schema. Only `schema` matters: every answer follows it, whatever `strict` says."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = ANY_OBJECT
    strict: bool | None = None


class SchemaFormat(BaseModel):
    """A JSON text that follows a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def grammar(self) -> Mapping[str, Any]:
        return self.json_schema.schema_


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
