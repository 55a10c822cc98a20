"""Requests of OpenAI's API, validated field by field.

An unsupported field is accepted if its value has no effect, because client libraries send such fields. Any other value
is refused, because an answer that ignored it would not be what the client asked for.

Source: https://platform.openai.com/docs/api-reference/completions and .../chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_MESSAGES = 4096
LARGEST_SEED = 2**63 - 1
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
"""Fields that do not affect the text."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported field -> its values that have no effect, besides null."""

Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StreamOptions(BaseModel):
    """Options of a stream; `include_usage` asks for a last chunk with the token counts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported; leave it out")
        return self


class OpenAIRequest(BaseModel):
    """Common fields of completions and chat completions. null means the same as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] | None = None
    stop: Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)] = []
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, given: Any) -> Any:
        """Removes fields that have no effect, and refuses unsupported ones."""
        if not isinstance(given, dict):
            raise ValueError("expected a JSON object")
        fields = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
        for name in fields.keys() - cls.model_fields.keys():
            neutral = NEUTRAL.get(name)
            if name == "best_of" and fields[name] in (1, fields.get("n", 1)):
                continue
            if neutral is None and name != "best_of":
                raise ValueError(f"{name[:80]}: no such field is known here; leave it out")
            if fields[name] not in (neutral or ()):
                raise ValueError(f"{name}: is not supported, and this value would change the answer; leave it out")
        fields = {name: value for name, value in fields.items() if name in cls.model_fields}
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        return fields

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is about streams; give stream with it, or leave it out")
        return self

    @property
    def counts_tokens(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def cut(self) -> int | None:
        """top_k for generators: 0 in place of -1, which means all tokens in vLLM."""
        return 0 if self.top_k == -1 else self.top_k


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, given: Any) -> Any:
        """Replaces pydantic's four messages, one for each type, with a single one."""
        if isinstance(given, dict) and not _is_prompt(given.get("prompt")):
            raise ValueError("prompt: expected a text, a list of texts, a list of token ids, or a list of such lists")
        return given

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and not self.scored:
            raise ValueError("max_tokens: expected at least 1; 0 scores a prompt, with echo and logprobs")
        return self

    @property
    def scored(self) -> bool:
        """Whether log probabilities of the prompt's tokens are needed."""
        return self.echo and self.logprobs is not None

    @property
    def several(self) -> list[str] | list[list[int]]:
        """The prompts, as a list even if there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return cast("list[list[int]]", [self.prompt]) if isinstance(self.prompt[0], int) else cast("Any", self.prompt)


class Message(BaseModel):
    """One turn of a conversation. Other fields of a message (`name`, `refusal`) never reach the template."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: str
    content: str

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, given: Any) -> Any:
        """Joins parts of text into one text. Replaces the role `developer`, OpenAI's new name since o1, by `system`."""
        if not isinstance(given, dict):
            return given
        for name in ("tool_calls", "function_call", "audio"):
            if given.get(name):
                raise ValueError(f"{name}: is not supported in a message; leave it out")
        content = given.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise ValueError("content: only parts of type text are supported")
            content = "".join(str(part.get("text", "")) for part in content)
        role = "system" if given.get("role") == "developer" else given.get("role")
        return {"role": role, "content": "" if content is None else content}


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: is about logprobs; give logprobs: true with it")
        if 0 in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: expected at least 1")
        return self


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, str) for item in value) or _are_ids(value) or all(map(_are_ids, value))


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
