"""/openapi.json: the API in OpenAPI 3.1, generated from the models that read requests and the shapes of answers.

What these models cannot say is added here: `null` means the same as a missing field, fields without an effect are
accepted, and errors have one of two formats. A server writes the description once, when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mod_export import __version__
from mod_export.serve import answer_shapes as shapes
from mod_export.serve.inference_protocol import JSON_LENGTH, LIVE, READY, InferRequest
from mod_export.serve.openai_formats import (
    IGNORED,
    NEUTRAL,
    PARTS,
    ChatRequest,
    CompletionRequest,
    Message,
    OpenAIRequest,
)

PATH = "/openapi.json"
JSON, TEXT, HTML, BINARY = "application/json", "text/plain", "text/html", "application/octet-stream"
EVENTS = "text/event-stream"
ABOUT = (
    "OpenAI's API for texts (/v1), the Open Inference Protocol for whole rows (/v2), metrics, and a page. Errors are "
    "objects of OpenAI's format, under /v2 of the protocol's."
)
REFERENCE = "#/components/schemas/{model}"
Json = dict[str, Any]
CONTENT: Json = {
    "description": "A text, or its parts. null only if the assistant called tools",
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"const": kind}, kind: {"type": "string"}},
                        "required": ["type", kind],
                    }
                    for kind in PARTS
                ]
            },
        },
    ],
}
"""Schema of the content of a message, which its model checks by itself."""


@dataclass(frozen=True)
class Operation:
    """A method of an address.

    Attributes:
        summary: what it does.
        answer: shape of its answer, or the media type of an answer that has none.
        reads: model of its body.
        chunk: shape of the lines of its streams.
        refusals: statuses of errors, besides those of every address.
        secured: whether it needs an API key, if the server has any.
        unready: whether a server that takes no requests gives the same answer with the status 503.
        binary: whether its body and its answer may be JSON with raw tensors after it.
    """

    summary: str
    answer: type[BaseModel] | str
    reads: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    refusals: tuple[int, ...] = ()
    secured: bool = True
    unready: bool = False
    binary: bool = False


EVERYWHERE = (400, 403, 500, 503)
"""Statuses that every address may answer: a bad head, a foreign host, a bug, too many connections."""
WRITING = (400, 404, 408, 413, 415, 429, 503)
"""Errors of addresses that read a body and may have to wait."""
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation("The model of this server", shapes.ModelList),
    ("GET", "/v1/models/{name}"): Operation("One model", shapes.ModelCard, refusals=(404,)),
    ("POST", "/v1/completions"): Operation(
        "Continues prompts", shapes.TextCompletion, CompletionRequest, shapes.TextChunk, WRITING
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answers a conversation", shapes.ChatCompletion, ChatRequest, shapes.ChatChunk, WRITING
    ),
    ("GET", "/v2"): Operation("What the server is", shapes.ServerMetadata),
    ("GET", "/metrics"): Operation("Metrics in the text format of Prometheus", TEXT),
    ("GET", "/"): Operation("A page that shows what the server does", HTML, secured=False),
    ("GET", PATH): Operation("This description", JSON, secured=False),
}
for _paths, _summary, _shape in (
    (LIVE, "Whether the server works", shapes.Live),
    (READY, "Whether it takes requests", shapes.Ready),
):
    OPERATIONS |= {("GET", path): Operation(_summary, _shape, secured=False, unready=True) for path in _paths}
for _model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
    OPERATIONS |= {
        ("GET", _model): Operation("Inputs and outputs of the model", shapes.ModelMetadata, refusals=(400, 404)),
        ("GET", f"{_model}/ready"): Operation(
            "Whether the model takes requests", shapes.ModelReady, refusals=(400, 404), unready=True
        ),
        ("POST", f"{_model}/infer"): Operation(
            "Runs whole rows", shapes.InferAnswer, InferRequest, refusals=WRITING, binary=True
        ),
    }
REASONS: Mapping[int, str] = {
    400: "The request cannot be read, or asks for what this server does not do; the message says what. A text that is "
    "too long for the model has the code `context_length_exceeded`",
    401: "No API key, or an unknown one",
    403: "The Host or Origin is none that this server answers",
    404: "The model is not served here",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body has a Content-Encoding",
    429: "Too many requests wait already (`queue_full`)",
    500: "The server failed to answer; its log says why",
    503: "No row became free in time (`waited_too_long`), no grammar could be compiled in time (`not_compiled`), the "
    "chat template could not be rendered now (`not_rendered`), the server is shutting down (`shutting_down`), or, with "
    "`--supervise`, its engines crashed and start again (`engine_restarting`)",
}
HEADERS: Mapping[int, str] = {401: "WWW-Authenticate", 415: "Accept-Encoding"}
RETRIED = (429, 503)
"""Errors that have Retry-After, unless a server has too many connections."""
PLAIN = (400, 503)
"""Errors that are plain text if the head of the request is no HTTP/1.1, or the server has too many connections."""


class _Schemas(GenerateJsonSchema):
    """Writes no titles, which would repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def description(*, keys: bool) -> Json:
    """Returns the description of a server; `keys` says whether it asks for API keys."""
    paths: Json = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, keys=keys)
    schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mod-export", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {"schemas": _schemas(), **schemes},
    }


def route(*, keys: bool) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of the description, which is the same for all requests but for the address of the server."""
    document = description(keys=keys)

    async def openapi(request: Request) -> Response:
        return JSONResponse({**document, "servers": [{"url": request.scope.get("root_path") or "/"}]})

    return openapi


def _operation(path: str, operation: Operation, *, keys: bool) -> Json:
    parameters = [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"{(\w+)}", path)]
    if operation.binary:
        parameters.append(_parameter(JSON_LENGTH, "header", {"type": "integer", "minimum": 0}))
    described: Json = {
        "summary": operation.summary,
        "responses": {"200": _answer(operation)},
        **({"parameters": parameters} if parameters else {}),
        **({"security": [{"key": []}]} if keys and operation.secured else {}),
    }
    if operation.reads is not None:
        content = {JSON: {"schema": _reference(operation.reads)}, **({BINARY: {}} if operation.binary else {})}
        described["requestBody"] = {"required": True, "content": content}
    key_statuses = (401,) if keys and operation.secured else ()
    error = shapes.ProtocolError if path.startswith("/v2") else shapes.ErrorAnswer
    for status in sorted({*EVERYWHERE, *key_statuses, *operation.refusals}):
        described["responses"][str(status)] = _refusal(status, operation, error)
    return described


def _parameter(name: str, where: str, schema: Json) -> Json:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _answer(operation: Operation) -> Json:
    if isinstance(operation.answer, str):
        schema = {} if operation.answer == JSON else {"schema": {"type": "string"}}
        return {"description": operation.summary, "content": {operation.answer: schema}}
    content: Json = {JSON: {"schema": _reference(operation.answer)}}
    if operation.chunk is not None:
        content[EVENTS] = {"schema": _event(operation.chunk)}
    if operation.binary:
        content[BINARY] = {}
    return {"description": operation.summary, "content": content}


def _event(chunk: type[BaseModel]) -> Json:
    """Schema of a server-sent event. OpenAPI 3.1 has no keyword for the items of a stream; tools read the schema of a
    stream as that of its items.
    """
    lines = {"anyOf": [_reference(chunk), _reference(shapes.ErrorAnswer)]}
    data = [{"const": "[DONE]"}, {"type": "string", "contentMediaType": JSON, "contentSchema": lines}]
    return {
        "description": "With `stream`: an event. The last one is [DONE], or an error if the text cannot be finished",
        "type": "object",
        "properties": {"data": {"anyOf": data}},
        "required": ["data"],
    }


def _refusal(status: int, operation: Operation, error: type[BaseModel]) -> Json:
    alike = operation.unready and status == HTTPStatus.SERVICE_UNAVAILABLE
    shape = operation.answer if alike and not isinstance(operation.answer, str) else error
    content: Json = {JSON: {"schema": _reference(shape)}}
    if status in PLAIN:
        content[TEXT] = {"schema": {"type": "string"}}
    names = [HEADERS[status]] if status in HEADERS else ["Retry-After"] if status in RETRIED and not alike else []
    headers = {name: {"schema": {"type": "string"}} for name in names}
    described = {"description": operation.summary if alike else REASONS[status], "content": content}
    return {**described, "headers": headers} if headers else described


# Schemas.


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _schemas() -> dict[str, Json]:
    read = {operation.reads for operation in OPERATIONS.values() if operation.reads is not None}
    answered = {
        shape
        for operation in OPERATIONS.values()
        for shape in (operation.answer, operation.chunk)
        if isinstance(shape, type)
    }
    answered |= {shapes.ErrorAnswer, shapes.ProtocolError}
    schemas = {**_generated(read), **{name: _without_null(schema) for name, schema in _generated(answered).items()}}
    for model in read:
        if issubclass(model, OpenAIRequest):
            _say_what_is_accepted(schemas[model.__name__])
    schemas[Message.__name__]["properties"]["content"] = CONTENT
    return dict(sorted(schemas.items()))


def _generated(models: Iterable[type[BaseModel]]) -> dict[str, Json]:
    listed = sorted(models, key=lambda model: model.__name__)
    _, generated = models_json_schema(
        [(model, "validation") for model in listed], ref_template=REFERENCE, schema_generator=_Schemas
    )
    schemas: dict[str, Json] = generated["$defs"]
    return schemas


def _without_null(schema: Json) -> Json:
    """Returns a schema without null for fields whose default is None: they may be missing, but are never null."""
    for name, item in schema.get("properties", {}).items():
        if "default" in item and item.pop("default") is None:
            (schema["properties"][name],) = (choice for choice in item["anyOf"] if choice != {"type": "null"})
    return schema


def _say_what_is_accepted(schema: Json) -> None:
    """Adds what a request may contain before its model simplifies it."""
    properties, required = schema["properties"], schema.get("required", ())
    properties["stop"] = {"anyOf": [properties["stop"], properties["stop"]["items"]]}
    for name, item in properties.items():
        if name not in required and {"type": "null"} not in item.get("anyOf", ()):
            properties[name] = {"anyOf": [item, {"type": "null"}]}
    for name in IGNORED - properties.keys():
        properties[name] = {"description": "Accepted, and without effect"}
    for name, values in NEUTRAL.items():
        properties.setdefault(
            name, {"enum": [*values, None], "description": "Not supported; these values change nothing"}
        )
    schema["additionalProperties"] = {"type": "null"}
    properties.setdefault("best_of", {"type": ["integer", "null"], "description": "Not supported, unless it equals n"})
