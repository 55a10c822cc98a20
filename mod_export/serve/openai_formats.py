"""Formats of OpenAI's API: requests, validated field by field; and answers, whole or as the chunks of a stream.

Completions and chat completions follow the same steps in different formats. An unsupported field is accepted if its
value has no effect, because client libraries send such fields. Any other value is refused, because an answer that
ignored it would not be what the client asked for.

Source: https://platform.openai.com/docs/api-reference/completions and .../chat.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mod_export.runtime.chat_template import ChatTemplate
from mod_export.runtime.grammar import Grammar
from mod_export.runtime.logits import MOST_BIAS, RANDOM_SEED, Logprob
from mod_export.runtime.rows import Completion, Piece, RowText
from mod_export.runtime.texts import Vocabulary
from mod_export.serve.response_format import ResponseFormat
from mod_export.serve.tool_calls import NamedChoice, Sent, Tool, ToolChoice, grammar_of_call

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_MESSAGES = 4096
MOST_BIASES = 300
MOST_TOOLS = 128
PARTS = ("text", "refusal")
"""Types of the parts of a message that are texts; each holds its text under its own name."""
LARGEST_SEED = 2**63 - 1
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields that do not affect the text."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported field -> its values that have no effect, besides null."""

Json = dict[str, Any]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StreamOptions(BaseModel):
    """Options of a stream. `include_usage` asks for a last chunk with the token counts, and `continuous_usage_stats`
    for the counts so far in every other chunk.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
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
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=RANDOM_SEED, le=LARGEST_SEED)] | None = None
    stop: Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)] = []
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]], Field(max_length=MOST_BIASES)
    ] = {}
    response_format: ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        """Removes fields that have no effect, and refuses unsupported ones."""
        if not isinstance(data, dict):
            raise ValueError("expected a JSON object")
        fields = {name: value for name, value in data.items() if value is not None and name not in IGNORED}
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

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ValueError("max_tokens: means the same as max_completion_tokens; give only one of them")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Limit of new tokens; None if the request has none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def streamed(self) -> StreamOptions:
        """What the stream shows beside the text."""
        return self.stream_options or StreamOptions()

    @property
    def grammar(self) -> Grammar | None:
        """What the text follows; None if it is free."""
        return None if self.response_format is None else self.response_format.grammar

    @property
    def cut(self) -> int | None:
        """top_k for generators: 0 in place of -1, which means all tokens in vLLM."""
        return 0 if self.top_k == -1 else self.top_k


class CalledFunction(BaseModel):
    """A function that the model called; `arguments` is a JSON text, as the model wrote it."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str
    arguments: str | dict[str, Any]


class ToolCall(BaseModel):
    """A call of a tool in an earlier answer."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, data: Any) -> Any:
        """Replaces pydantic's four messages, one for each type, with a single one."""
        if isinstance(data, dict) and not _is_prompt(data.get("prompt")):
            raise ValueError("prompt: expected a text, a list of texts, a list of token ids, or a list of such lists")
        return data

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.new_tokens == 0 and not self.scored:
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


class Message(Sent):
    """One turn of a conversation. Keys beyond these, such as `reasoning_content`, reach the template as they are."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Any = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model_extra or {}).get("audio"):
            raise ValueError("audio: is not supported in a message; leave it out")
        if isinstance(self.content, list):
            kinds = [part.get("type") if isinstance(part, dict) else None for part in self.content]
            if not kinds or not all(kind in PARTS for kind in kinds):
                raise ValueError("content: only parts of type text are supported")
            if not all(isinstance(part.get(part["type"]), str) for part in self.content):
                raise ValueError("content: expected a text in every part")
        elif not isinstance(self.content, str) and (self.content is not None or self.role != "assistant"):
            raise ValueError("content: expected a text, or a list of parts of type text")
        return self

    @property
    def text(self) -> str:
        """The content as one text; its parts follow each other without a character between them. An answer without
        content may have the text of a refusal.
        """
        if isinstance(self.content, list):
            return "".join(part[part["type"]] for part in self.content)
        return (self.refusal if self.content is None else self.content) or ""

    def for_template(self, template: ChatTemplate) -> Json:
        """Returns the message as it was sent, except for what this template does not know: the role `developer`,
        OpenAI's name of `system` since o1, becomes `system`; a list of parts becomes one text; and the arguments of
        calls, a JSON text in OpenAI's API, become an object. Refusals become content, which every template reads.
        """
        changed: Json = {}
        if self.content is None and self.refusal:
            changed["content"] = self.refusal
        elif isinstance(self.content, list):
            changed["content"] = [_with_text(part) for part in self.content]
        if self.tool_calls and not template.reads_argument_texts:
            changed["tool_calls"] = [_with_object(call) for call in self.sent["tool_calls"]]
        if isinstance(self.content, list) and not template.reads_parts:
            changed["content"] = self.text
        if self.role == "developer" and not template.names_developer:
            changed["role"] = "system"
        return {**self.sent, **changed}


def _with_text(part: Json) -> Json:
    """Returns a part of a message: as a part of type text if it is a refusal, otherwise unchanged."""
    return {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part


def _with_object(call: Json) -> Json:
    """Returns a call with its arguments as an object; unchanged if they are not the text of a JSON object."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"]) if isinstance(function["arguments"], str) else None
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_choice(cls, data: Any) -> Any:
        """Replaces pydantic's messages, one for each form of a choice, with a single one."""
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            raise ValueError("tool_choice: allowed_tools is not supported; give in tools only those that are allowed")
        named = isinstance(choice, dict) and choice.get("type") == "function" and "function" in choice
        if choice not in (None, "none", "auto", "required") and not named:
            raise ValueError('tool_choice: expected "none", "auto", "required", or a function, as in '
                             '{"type": "function", "function": {"name": "f"}}')  # fmt: skip
        return data

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tools: two functions are called {twice}; give each a name of its own")
        if self.tool_choice not in ("none", "auto") and not self.demanded:
            raise ValueError("tool_choice: expected one of the functions in tools")
        if self.offered and self.response_format is not None and self.response_format.grammar is not None:
            raise ValueError('response_format: an answer that follows it calls no tools; give tool_choice: "none"')
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def demanded(self) -> list[Tool]:
        """The tools of which the model must call one; none if it may answer with a text."""
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def grammar(self) -> Grammar | None:
        return grammar_of_call([tool.function for tool in self.demanded]) if self.demanded else super().grammar

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: is about logprobs; give logprobs: true with it")
        if self.new_tokens == 0:
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


# Answers.


class Answer(ABC):
    """Formats the answer to one request. It holds the texts of the request, and the head of every chunk."""

    def __init__(self, prefix: str, kind: str, model: str, texts: Sequence[RowText], names: TokenNames, n: int) -> None:
        """Each prompt has `n` consecutive texts."""
        self._texts, self._names, self._n = texts, names, n
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        self._head["model"] = model

    @abstractmethod
    def opening(self, row: int) -> list[Json]:
        """Returns the chunks before the first piece of a choice."""

    @abstractmethod
    def piece(self, piece: Piece) -> Json | None:
        """Returns the chunk of a piece; None if there is nothing to show."""

    @abstractmethod
    def closing(self, row: int, done: Completion) -> list[Json]:
        """Returns the last chunks of a choice."""

    @abstractmethod
    def _choices(self) -> list[Json]:
        """Returns the choices of `whole`."""

    def usage(self) -> Json:
        """Returns the chunk with the token counts."""
        return {**self._head, "choices": [], "usage": self.counted(self._written)}

    def counted(self, written: int) -> Json:
        """Returns token counts, of which `written` new tokens. A prompt with several continuations counts once."""
        prompts = self._completions[:: self._n]
        prompt = sum(len(completion.prompt_ids) for completion in prompts)
        cached = sum(completion.cached for completion in prompts)
        counted = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        return {**counted, "prompt_tokens_details": {"cached_tokens": cached}}

    def whole(self) -> Json:
        """Returns the answer to a request that does not stream, after all texts are complete."""
        return {**self._head, "choices": self._choices(), "usage": self.counted(self._written)}

    @property
    def _completions(self) -> list[Completion]:
        return [text.completion for text in self._texts]

    def _chunk(self, choice: Json) -> Json:
        return {**self._head, "choices": [choice]}

    @property
    def _written(self) -> int:
        """Number of new tokens, after all texts are complete."""
        return sum(len(completion.ids) for completion in self._completions)


class TextAnswer(Answer):
    """Answer of /v1/completions. With `echo`, each text begins with its prompt."""

    def __init__(
        self, model: str, texts: Sequence[RowText], names: TokenNames, n: int, echo: Sequence[str] | None
    ) -> None:
        """`echo` holds the text of each prompt, or None."""
        super().__init__("cmpl", "text_completion", model, texts, names, n)
        self._echo = echo
        self._offset = [0] * len(texts)
        # A text that continues what the answer does not show does not begin with its first token.
        self._begins = [echo is not None or not names.are_shown(text.completion.prompt_ids) for text in texts]

    def opening(self, row: int) -> list[Json]:
        if self._echo is None:
            return []
        return [self._chunk(self._choice(row, self._echo[row // self._n], self._of_prompt(row), None))]

    def piece(self, piece: Piece) -> Json | None:
        if not piece.text and piece.logprob is None:
            return None
        listed = self._listed(piece.row, [] if piece.logprob is None else [piece.logprob])
        return self._chunk(self._choice(piece.row, piece.text, listed, None))

    def closing(self, row: int, done: Completion) -> list[Json]:
        stop = self._listed(row, _stop(done)) if done.stop_logprob is not None else None
        return [self._chunk(self._choice(row, "", stop, done.finish))]

    def _choices(self) -> list[Json]:
        choices = []
        for row, completion in enumerate(self._completions):
            before = "" if self._echo is None else self._echo[row // self._n]
            listed = self._of_prompt(row) if self._echo is not None else None
            new = self._listed(row, [*completion.logprobs, *_stop(completion)])
            if listed is not None and new is not None:
                listed = {name: listed[name] + new[name] for name in listed}
            choices.append(self._choice(row, before + completion.text, listed or new, completion.finish))
        return choices

    def _choice(self, row: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _of_prompt(self, row: int) -> Json | None:
        """Log probabilities of all prompt tokens. The first token has none, because nothing comes before it."""
        text = self._texts[row]
        if text.logprobs is None:
            return None
        ids = text.completion.prompt_ids
        first = {"tokens": [self._names.of(ids[0])], "token_logprobs": [None], "top_logprobs": [None]}
        first["text_offset"] = self._offsets(row, [ids[0]])
        rest = self._listed(row, text.completion.prompt_logprobs) or {}
        return {name: first[name] + rest[name] for name in first}

    def _listed(self, row: int, logprobs: Sequence[Logprob]) -> Json | None:
        if self._texts[row].logprobs is None:
            return None
        return {
            "tokens": [self._names.of(entry.token) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [self._names.by_name(entry) for entry in logprobs],
            "text_offset": self._offsets(row, [entry.token for entry in logprobs]),
        }

    def _offsets(self, row: int, ids: Sequence[int]) -> list[int]:
        """Returns the character offset of each token in the text of its choice, and advances the offset of the row."""
        offsets = []
        for token in ids:
            offsets.append(self._offset[row])
            self._offset[row] += self._names.length(token, begins=self._begins[row])
            self._begins[row] = self._begins[row] and not self._names.are_shown([token])
        return offsets


def _stop(done: Completion) -> list[Logprob]:
    """Log probability of the stop id, if any. Clients that score continuations expect it after those of the text."""
    return [] if done.stop_logprob is None else [done.stop_logprob]


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    def __init__(self, model: str, texts: Sequence[RowText], names: TokenNames, n: int, *, streamed: bool) -> None:
        super().__init__("chatcmpl", f"chat.completion{'.chunk' if streamed else ''}", model, texts, names, n)

    def opening(self, row: int) -> list[Json]:
        return [self._chunk(self._delta(row, {"role": "assistant", "content": ""}, None, None))]

    def piece(self, piece: Piece) -> Json | None:
        if not piece.text and piece.logprob is None:
            return None
        listed = None if piece.logprob is None else self._listed([piece.logprob])
        return self._chunk(self._delta(piece.row, {"content": piece.text}, listed, None))

    def closing(self, row: int, done: Completion) -> list[Json]:
        return [self._chunk(self._delta(row, {}, None, done.finish))]

    def _choices(self) -> list[Json]:
        messages = [self._message(completion) for completion in self._completions]
        return [
            {
                "index": row,
                "message": messages[row],
                "logprobs": None if self._texts[row].logprobs is None else self._listed(completion.logprobs),
                "finish_reason": self._reason(completion, messages[row]),
            }
            for row, completion in enumerate(self._completions)
        ]

    def _message(self, completion: Completion) -> Json:
        return {"role": "assistant", "content": completion.text, "refusal": None}

    def _reason(self, completion: Completion, message: Json) -> str:
        return completion.finish

    def _delta(self, row: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": row, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _listed(self, logprobs: Sequence[Logprob]) -> Json:
        content = [{**self._token(*entry[:2]), "top_logprobs": self._top(entry)} for entry in logprobs]
        return {"content": content, "refusal": None}

    def _top(self, logprob: Logprob) -> list[Json]:
        return [self._token(token, value) for token, value in logprob.top]

    def _token(self, token: int, logprob: float) -> Json:
        name = self._names.of(token)
        return {"token": name, "logprob": logprob, "bytes": self._names.bytes_of(token)}


class TokenNames:
    """Names of single tokens: their text, or another form if the token is not a whole text."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    def of(self, token: int) -> str:
        r"""Returns its text, or `bytes:\xe2\x82` for a part of a character (OpenAI's format), or else `token_id:7`."""
        token_bytes = self.bytes_of(token)
        if token_bytes is None:
            return f"token_id:{token}"
        try:
            return bytes(token_bytes).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def by_name(self, entry: Logprob) -> Mapping[str, float]:
        """Returns name -> log probability of the most probable tokens, and of the token itself. If several tokens have
        the same name, all but the first are named by id.
        """
        logprobs: dict[str, float] = {}
        for token, logprob in dict([*entry.top, entry[:2]]).items():
            name = self.of(token)
            logprobs[f"token_id:{token}" if name in logprobs else name] = logprob
        return logprobs

    def are_shown(self, tokens: Sequence[int]) -> bool:
        """Whether a text shows any of these tokens."""
        vocabulary = self._vocabulary
        return vocabulary is not None and any(map(vocabulary.is_shown, tokens))

    def length(self, token: int, *, begins: bool) -> int:
        """Returns the number of characters that a token adds to a text; `begins` if no shown token is before it."""
        if self._vocabulary is None or not self._vocabulary.is_shown(token):
            return 0
        token_bytes = self.bytes_of(token)
        if token_bytes is None:
            return 0
        # Counts the first byte of each character: a token may hold only a part of one.
        characters = sum(byte & 0xC0 != 0x80 for byte in token_bytes)
        return characters - (begins and self._vocabulary.drops_space(token))

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the UTF-8 bytes of a token, which may be a part of a character; None if it represents no text."""
        token_bytes = None if self._vocabulary is None else self._vocabulary.token_bytes(token)
        return None if token_bytes is None else list(token_bytes)
