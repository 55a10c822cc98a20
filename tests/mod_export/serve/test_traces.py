"""OpenTelemetry traces, as a collector receives them: OTLP over HTTP from the command in its own process."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serving import PATIENCE_S, Server, command

from mod_export import __version__

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TEXT = {"prompt": "def f(", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


class Collector:
    """Receives what exporters send, as the OpenTelemetry Collector does."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        return plain(self.requests[0].resource_spans[0].resource.attributes)


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as Python's values."""

    def value(item: Any) -> Any:
        kind = item.WhichOneof("value")
        found = getattr(item, kind)
        return [value(inner) for inner in found.values] if kind == "array_value" else found

    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    with found.running():
        yield found


def traced(folder: Path, ask: Callable[[str], None], *options: str, code: str = "") -> str:
    """Serves a folder with traces until `ask` returns; returns the log. When the server ends, it sends what is left."""
    with command(folder, "--traces", "--log-format", "json", "-v", *options, code=code) as (process, url):
        ask(url)
        process.terminate()
        assert process.stderr is not None
        output = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, output
    return output


def test_the_spans_of_a_text(written: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")

    def ask(url: str) -> None:
        headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "X-Request-Id": "mine"}
        answer = httpx2.post(f"{url}/v1/completions?key=secret", json=TEXT, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200

    log = traced(written, ask)
    assert (collector.resource["service.name"], collector.resource["service.version"]) == ("chat", __version__)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/completions", "text", "queue", "prompt", "write"}
    request, text = spans["POST /v1/completions"], spans["text"]
    # It is part of the client's trace.
    assert {span.trace_id.hex() for span in spans.values()} == {CLIENT_TRACE}
    assert (request.parent_span_id.hex(), request.kind) == (CLIENT_SPAN, Span.SPAN_KIND_SERVER)
    found = plain(request.attributes)
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "client.address": "127.0.0.1",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ["mine"],
    }
    assert text.parent_span_id == request.span_id
    found = plain(text.attributes)
    sites = {name: found.pop(name) for name in list(found) if name.startswith("mod_export.site_tokens.")}
    assert sites
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < PATIENCE_S
    assert found == {
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    # Its parts follow each other without a gap, and fill it.
    parts = [spans[name] for name in ("queue", "prompt", "write")]
    assert all(part.parent_span_id == text.span_id for part in parts)
    bounds = [parts[0].start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert bounds == sorted(bounds)
    assert [part.start_time_unix_nano for part in parts] == bounds[:-1]
    assert (bounds[0], bounds[-1]) == (text.start_time_unix_nano, text.end_time_unix_nano)
    assert request.start_time_unix_nano <= text.start_time_unix_nano < text.end_time_unix_nano
    assert "secret" not in str(collector.requests)
    # The log has the trace's name.
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert next(line for line in lines if line.get("request_id") == "mine")["trace_id"] == CLIENT_TRACE


def test_requests_of_other_kinds(written: Path, collector: Collector, tmp_path: Path) -> None:
    """Several texts, a stream, a refusal, an address that does not exist, whole rows and a text whose engine fails."""
    without_memory = tmp_path / "no memory"
    code = f"""
import pathlib
from mod_export.errors import EngineError
from mod_export.runtime.decoder import Decoder
from mod_export.serve.service import Scoring
def fail(*_): raise RuntimeError('broken')
Scoring.admitted = fail
step = Decoder.step
def step_with_memory(*arguments):
    if pathlib.Path({str(without_memory)!r}).exists(): raise EngineError('no memory')
    return step(*arguments)
Decoder.step = step_with_memory
"""

    def ask(url: str) -> None:
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert client.post("/v1/completions", json={**TEXT, "n": 2}).status_code == 200
            assert client.post("/v1/completions", json={**TEXT, "stream": True}).status_code == 200
            assert client.post("/v1/completions", json={**TEXT, "n": 0}).status_code == 400
            assert client.get("/nowhere").status_code == 404
            name = client.get("/v1/models").json()["data"][0]["id"]
            ids = {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [1, 2, 3, 4]}
            assert client.post(f"/v2/models/{name}/infer", json={"inputs": [ids]}).status_code == 500
            without_memory.touch()
            assert client.post("/v1/completions", json=TEXT).status_code == 500

    traced(written, ask, code=code)
    spans = collector.spans
    requests = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert sorted((span.name, plain(span.attributes)["http.response.status_code"]) for span in requests) == [
        ("GET", 404),  # No route, and so no name: paths would be too many.
        ("GET /v1/models", 200),
        ("POST /v1/completions", 200),
        ("POST /v1/completions", 200),
        ("POST /v1/completions", 400),
        ("POST /v1/completions", 500),
        ("POST /v2/models/{name}/infer", 500),
    ]
    texts = {span.span_id: [text for text in spans if text.parent_span_id == span.span_id] for span in requests}
    assert sorted(len(found) for found in texts.values()) == [0, 0, 0, 0, 1, 1, 2]
    failed = [span for span in requests if span.status.code == Status.STATUS_CODE_ERROR]
    assert sorted((span.name, plain(span.attributes)["error.type"]) for span in failed) == [
        ("POST /v1/completions", "500"),
        ("POST /v2/models/{name}/infer", "500"),
    ]
    (text,) = (span for span in spans if span.name == "text" and span.status.code == Status.STATUS_CODE_ERROR)
    assert text.status.message == "no memory"
    assert plain(text.attributes)["gen_ai.response.finish_reasons"] == ["failed"]
    assert [event.name for event in text.events] == ["exception"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "mod-export"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=search,region=eu"}, "search"),
    ],
)
def test_the_name_of_the_service(
    written: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    traced(written, lambda url: httpx2.get(f"{url}/v1/models").raise_for_status())
    assert (collector.resource["service.name"], collector.resource["service.version"]) == (name, __version__)


@pytest.mark.slow
def test_a_sampler_of_the_environment(written: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    traced(written, lambda url: httpx2.post(f"{url}/v1/completions", json=TEXT).raise_for_status())
    assert collector.requests == []


@pytest.mark.slow
def test_a_collector_that_is_away_stops_nothing(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    ended = 0.0

    def ask(url: str) -> None:
        nonlocal ended
        assert httpx2.post(f"{url}/v1/completions", json=TEXT, timeout=PATIENCE_S).status_code == 200
        ended = time.monotonic()

    log = traced(written, ask)
    assert time.monotonic() - ended < PATIENCE_S / 2
    assert "Traceback" not in log


def test_without_the_option_nothing_is_traced(server: Server) -> None:
    """Nor is anything kept of texts."""
    assert httpx2.post(f"{server.url}/v1/completions", json=TEXT, timeout=PATIENCE_S).status_code == 200
    (traces,) = (observer for observer in server.writing._observers if hasattr(observer, "_texts"))
    assert not traces._texts
