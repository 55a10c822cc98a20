"""The description of the API: it is valid, complete, and what the server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import hypothesis.strategies as st
import jsonschema
import pytest
import schemathesis
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from serving import PATIENCE_S, Server, serving
from starlette.routing import Route

from mod_export.serve.app import create_app, shown
from mod_export.serve.openai_formats import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from mod_export.serve.openapi import OPERATIONS, PATH, description

pytestmark = pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")
CASES = 25
"""Requests for each operation and each way to make them; operations that read nothing get one."""


@pytest.fixture(scope="module")
def server(chat_folder: Path) -> Iterator[Server]:
    with serving(chat_folder, max_wait_s=PATIENCE_S) as found:
        yield found


@pytest.mark.parametrize("keys", [False, True])
def test_it_is_valid_and_needs_keys_where_the_server_does(keys: bool) -> None:
    found = description(keys=keys)
    OpenAPIV31SpecValidator(found).validate()
    assert found["openapi"] == "3.1.0"
    secured = {
        (method.upper(), path)
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
        if operation.get("security") and "401" in operation["responses"]
    }
    assert secured == ({where for where, operation in OPERATIONS.items() if operation.secured} if keys else set())


def test_it_has_every_address(server: Server) -> None:
    app = create_app(server.service)
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = {(method, shown(route.path)) for route in routes for method in (route.methods or ())}
    assert {(method, path) for method, path in found if method != "HEAD"} == set(OPERATIONS)


def test_it_is_served_without_a_key(chat_folder: Path) -> None:
    with serving(chat_folder, keys=["secret"]) as server:
        found = httpx2.get(server.url + PATH)
        assert found.json() == {**description(keys=True), "servers": [{"url": "/"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [(CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": [{"role": "user", "content": "x"}]})],
)
def test_it_says_which_fields_are_accepted(kind: Any, body: dict[str, Any]) -> None:
    described = description(keys=False)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", **described}
    validator = jsonschema.Draft202012Validator(schema)
    accepted = [{name: value} for name in NEUTRAL for value in (*NEUTRAL[name], None)]
    accepted += [{name: value} for name in IGNORED for value in ("x", {}, None)]
    accepted += [{name: None} for name in kind.model_fields if name not in body]
    accepted += [
        {"stop": "x"},
        {"stop": ["x", "y"]},
        {"best_of": 1},
        {"seed": -1},
        {"top_p": 0},
        {"logit_bias": {"7": 1}},
    ]
    for change in accepted:
        kind.model_validate({**body, **change})
        validator.validate({**body, **change})
    refused: list[dict[str, Any]] = [
        {"nonsense": 1},
        {"nonsense": False},
        {"suffix": "x"},
        {"n": 0},
        {"n": "1"},
        {"stop": 1},
    ]
    refused += [{"temperature": -1}, {"stream": 1}, {next(iter(body)): None}]
    refused += [{"messages": [{"role": "user", "content": content}]} for content in (5, [], [{"type": "image_url"}])]
    for change in refused:
        assert not validator.is_valid({**body, **change})
        with pytest.raises(ValueError, match="validation error"):
            kind.model_validate({**body, **change})


CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_headers_conformance, checks.response_schema_conformance, checks.negative_data_rejection,
    checks.unsupported_method,
]  # fmt: skip


FEW = {"model": "llama", "max_tokens": 3, "n": 1, "stop": None, "logit_bias": None}
REACHING: Any = {
    "/v1/completions": FEW,
    "/v1/chat/completions": {**FEW, "max_completion_tokens": 3, "tools": None, "tool_choice": None},
}
"""Fields with which a request is likely to be answered."""
ROW = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
WAYS = [
    (method, path, way)
    for (method, path), operation in OPERATIONS.items()
    for way in (POSITIVE, NEGATIVE)
    if way is POSITIVE or operation.reads is not None
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "way"), WAYS, ids=lambda value: str(getattr(value, "value", value)))
def test_the_server_does_what_it_says(server: Server, method: str, path: str, way: schemathesis.GenerationMode) -> None:
    """Requests are made from the description, and against it. Half of them are changed so that they reach the model."""
    operation = schemathesis.openapi.from_url(server.url + PATH)[path][method]

    @hypothesis.settings(max_examples=CASES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=way), reaches=st.booleans(), stream=st.booleans())
    def ask(case: Any, reaches: bool, stream: bool) -> None:
        if reaches and case.path_parameters:
            case.path_parameters.update(name="llama", version="1")
        if reaches and way is POSITIVE and isinstance(case.body, dict):
            case.body = {**case.body, **REACHING.get(path, {"inputs": [ROW]})}
            for message in case.body.get("messages", ()):
                message["content"] = message.get("content") or "Hi"
            if path in REACHING:
                case.body |= {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

    ask()
