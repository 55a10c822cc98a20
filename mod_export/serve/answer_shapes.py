"""Shapes of answers, from which the description of the API is generated. A field with a default may be
missing; if the default is None, it is never null. One whose default is made by a function may be missing or null.

Answers themselves are plain dictionaries: checking a chunk for every token would take longer than a small model's step.
Tests compare them with these shapes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length"]
Count = Annotated[int, Field(ge=0)]
Byte = Annotated[int, Field(ge=0, le=255)]


class Shape(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CachedTokens(Shape):
    """How many tokens of the prompts did not have to be read, because earlier texts began with them."""

    cached_tokens: Count


class Usage(Shape):
    """Numbers of tokens. A prompt with several continuations counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | None = None


class TextLogprobs(Shape):
    """Log probabilities, one entry for each token. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextPart(Shape):
    """New characters of a text; the last part has `finish_reason`."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChoice(TextPart):
    """A text."""

    finish_reason: Finish


class _Answer(Shape):
    id: str
    created: Count
    model: str


class TextCompletion(_Answer):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class _Chunk(_Answer):
    """A line of a stream. If token counts are asked for, the last line has them and no choices. In the others, `usage`
    is null or the counts so far.
    """

    usage: Usage | None = Field(default_factory=lambda: None)


class TextChunk(_Chunk):
    """A line of the stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextPart]


class TokenLogprob(Shape):
    """Log probability of a token. `bytes` is null if the token stands for no text."""

    token: str
    logprob: float
    bytes: list[Byte] | None


class ChosenLogprob(TokenLogprob):
    """Log probability of a token of the text, and of the most probable tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    """Log probabilities, one entry for each token."""

    content: list[ChosenLogprob]
    refusal: None


class FunctionCall(Shape):
    """The function that the model calls. `arguments` is a JSON text."""

    name: str
    arguments: str


class AnsweredCall(Shape):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionPart(Shape):
    """A part of a call: the name of the function, or new characters of its arguments, or both."""

    name: str | None = None
    arguments: str | None = None


class CallPart(Shape):
    """A part of a call. The first one has `id` and `type`."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPart


class ChatMessage(Shape):
    """An answer of the model. `content` is null if it only calls functions."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Shape):
    """An answer, and how it ended."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | Literal["tool_calls"]


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class Delta(Shape):
    """New characters of an answer, or new parts of calls. The first part has the role, and null if calls may follow."""

    role: Literal["assistant"] | None = None
    content: str | None = ""
    tool_calls: list[CallPart] | None = None


class ChatPart(Shape):
    """A part of an answer; the last one has `finish_reason`."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | Literal["tool_calls"] | None


class ChatChunk(_Chunk):
    """A line of the stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]


class ModelCard(Shape):
    """The model. `root` is its name too. `max_model_len` is the longest text, prompt and answer together, in tokens."""

    id: str
    root: str
    parent: None
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count | None = None


class ModelList(Shape):
    """The models of this server."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorObject(Shape):
    """Why a request is not answered."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """An error in the format of OpenAI's API."""

    error: ErrorObject


# The Open Inference Protocol.


class ProtocolError(Shape):
    """An error in the format of the Open Inference Protocol."""

    error: str


class ServerMetadata(Shape):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class Live(Shape):
    """Whether the server works; if not, only a restart helps."""

    live: bool


class Ready(Shape):
    """Whether the server takes requests."""

    ready: bool


class ModelReady(Ready):
    """Whether the model takes requests."""

    name: str


class PortMetadata(Shape):
    """An input or output. A size of -1 means any size that fits a bucket."""

    name: str
    datatype: str
    shape: list[Annotated[int, Field(ge=-1)]]


class ModelMetadata(Shape):
    """Inputs and outputs of the model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[PortMetadata]
    outputs: list[PortMetadata]


class OutputTensor(Shape):
    """A result, in row-major order."""

    name: str
    datatype: str
    shape: list[Count]
    data: list[Any] | None = None


class InferAnswer(Shape):
    """Results of a request."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
