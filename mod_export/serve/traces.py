"""OpenTelemetry traces: a span for each request, and below it a span for each text, which shows where its time went.

    POST /v1/completions        the request (kind SERVER), part of the client's trace if it sends `traceparent`
      text                      from the request to the last token
        queue                   until a row is free
        prompt                  until the first token is written
        write                   until the last one

Without an SDK the calls do nothing, so an application that runs this one, such as Ray Serve, may bring its own.
`mod-export serve --traces` sets up the SDK (extra `traces`), which the variables OTEL_* configure.

Source: https://opentelemetry.io/docs/specs/semconv, HTTP spans and the attributes `gen_ai.*`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import Scope

from mod_export import __version__
from mod_export.runtime.rows import RowText
from mod_export.serve.scheduler import TextObserver

SERVICE = "mod-export"
"""Name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another."""
FIRST_SERVER_ERROR = 500
_TRACER = trace.get_tracer("mod_export", __version__)


@contextlib.contextmanager
def request_span(scope: Scope) -> Iterator[Span]:
    """Makes the span of an HTTP request the current one. The query is no part of it: it may hold secrets."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    attributes = {
        "http.request.method": scope["method"],
        "url.path": scope["path"][:200],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    method, parent = scope["method"], propagate.extract(headers)
    with _TRACER.start_as_current_span(method, parent, SpanKind.SERVER, attributes) as span:
        yield span


def name_request(method: str, route: str) -> None:
    """Names the current request after the route that answers it, because there are fewer routes than paths."""
    span = trace.get_current_span()
    span.update_name(f"{method} {route}")
    span.set_attribute("http.route", route)


def answered(span: Span, status: int, request_id: str) -> None:
    """Adds to the span of a request how it was answered."""
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("http.response.header.x-request-id", [request_id])
    if status >= FIRST_SERVER_ERROR:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


def trace_of_request() -> str | None:
    """Returns the id of the current trace, as 32 hexadecimal digits; None if nothing is traced."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


@dataclass(slots=True)
class _Times:
    """When a text reached each of these points, from `time.perf_counter`; None if it has not reached the point."""

    request: Span
    begun: float | None = None
    first_token: float | None = None


class TextTraces(TextObserver):
    """Makes the spans of texts whose request is traced."""

    def __init__(self) -> None:
        self._texts: dict[RowText, _Times] = {}

    def submitted(self, text: RowText) -> None:
        request = trace.get_current_span()
        if request.is_recording():
            self._texts[text] = _Times(request)

    def began(self, text: RowText, waited_s: float) -> None:
        if (times := self._texts.get(text)) is not None:
            times.begun = time.perf_counter()

    def wrote(self, text: RowText, since_s: float | None) -> None:
        if since_s is None and (times := self._texts.get(text)) is not None:
            times.first_token = time.perf_counter()

    def ended(self, text: RowText) -> None:
        self._made(text, None)

    def failed(self, error: Exception, texts: Sequence[RowText]) -> None:
        for text in texts:
            self._made(text, error)

    def _made(self, text: RowText, error: Exception | None) -> None:
        times = self._texts.pop(text, None)
        if times is None:
            return
        done, end, end_ns = text.completion, time.perf_counter(), time.time_ns()
        known = [bound for bound in (text.since, times.begun, times.first_token) if bound is not None]
        # The clock is read once for all bounds, because it may be set in between.
        bounds = [end_ns - int((end - bound) * 1e9) for bound in known] + [end_ns]
        span = _TRACER.start_span("text", trace.set_span_in_context(times.request), start_time=bounds[0])
        span.set_attribute("gen_ai.usage.input_tokens", len(done.prompt_ids))
        span.set_attribute("gen_ai.usage.output_tokens", len(done.ids))
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", done.cached)
        span.set_attribute("gen_ai.response.finish_reasons", ["failed" if error else done.finish])
        if done.first_token_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", done.first_token_s)
        for site, count in done.ran.items():
            span.set_attribute(f"mod_export.site_tokens.{site}", count)
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        inside = trace.set_span_in_context(span)
        # A text that ended in the queue has no prompt span, and one that ended at its prompt no write span.
        for name, since, until in zip(("queue", "prompt", "write"), bounds, bounds[1:], strict=False):
            _TRACER.start_span(name, inside, start_time=since).end(until)
        span.end(end_ns)


@contextlib.contextmanager
def sending_traces() -> Iterator[None]:
    """Sends the spans of this process by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT says (port 4318 of this
    machine by default), in batches on a thread of its own. Spans that cannot be sent are dropped, which is logged.

    Raises:
        ImportError: the extra `traces` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = Resource.create({"service.name": SERVICE, "service.version": __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
