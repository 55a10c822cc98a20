"""Prometheus metrics of a server. Each server has its own registry, so one process can hold several servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mod_export.runtime.rows import RowText
from mod_export.serve.scheduler import TextObserver

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Gauge = tuple[str, str, Callable[[], float]]
"""Name, explanation and value, which is computed at each scrape."""


class Metrics(TextObserver, Collector):
    """Observes a scheduler, and counts HTTP responses and refused requests."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: Sequence[Gauge] = ()
        self._read: dict[str, int] = {}
        self._selected: dict[str, int] = {}
        self._registry.register(self)
        self._queued = self._histogram("queue_seconds", "From a request to the row of its text", SECONDS)
        self._first = self._histogram("time_to_first_token_seconds", "From a request to the first token", SECONDS)
        self._between = self._histogram("time_between_tokens_seconds", "Between tokens of a text", SHORT_SECONDS)
        self._tokens = self._counter("tokens", "Tokens that were read as prompts, and written", "kind")
        self._cached = self._counter("cached_tokens", "Tokens of prompts that were taken from the prefix cache")
        self._ended = self._counter("texts", "Texts that are over, by how they ended", "finish")
        self._refused = self._counter("refused_requests", "Requests that got no text, by reason", "reason")
        self._requests = self._counter("http_requests", "Answered requests", "path", "status")
        self._reloads = self._counter("reloads", "New versions of the build folder, by what became of them", "result")
        self._restarts = self._counter("engine_restarts", "Processes of engines that were replaced after a crash")
        self._at_site = self._counter("site_tokens", "Tokens that were selected at a routing site", "site")
        self._all_read = self._counter("read_tokens", "Tokens that the model has read, whose share is selected")

    def show(self, gauges: Sequence[Gauge]) -> None:
        """Shows these gauges in place of the earlier ones."""
        self._gauges = gauges

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Computes the gauges; the registry calls this at each scrape."""
        for name, explained, value in self._gauges:
            yield GaugeMetricFamily(name, explained, value())
        share = GaugeMetricFamily(
            "mod_export_site_selected_share", "Share of the read tokens that a routing site ran", labels=["site"]
        )
        for site, read in list(self._read.items()):
            if read:
                share.add_metric([site], self._selected[site] / read)
        yield share

    def answered(self, path: str, status: int) -> None:
        """Counts a response. `path` is that of the route, or empty if no route matched."""
        self._requests.labels(path, str(status)).inc()

    def refused(self, reason: str) -> None:
        """Counts a request that got no text."""
        self._refused.labels(reason).inc()

    def reloaded(self, result: str) -> None:
        """Counts a new version of the folder: "taken", or "failed" if the one before stays."""
        self._reloads.labels(result).inc()

    def restarted(self, count: int) -> None:
        """Counts the processes that ended before this one and were replaced."""
        self._restarts.inc(count)

    # The following methods run on the scheduler's thread.

    def began(self, text: RowText, waited_s: float) -> None:
        self._queued.observe(waited_s)
        self._tokens.labels("prompt").inc(len(text.completion.prompt_ids))

    def wrote(self, text: RowText, since_s: float | None) -> None:
        self._tokens.labels("new").inc()
        if since_s is not None:
            self._between.observe(since_s)
        elif text.completion.first_token_s is not None:
            self._first.observe(text.completion.first_token_s)

    def ended(self, text: RowText) -> None:
        done = text.completion
        self._ended.labels(done.finish).inc()
        self._all_read.inc(done.read)
        self._cached.inc(done.cached)
        for site, count in done.ran.items():
            self._at_site.labels(str(site)).inc(count)
            # In this order: a scrape on another thread looks up the selected tokens of every site in `_read`.
            self._selected[str(site)] = self._selected.get(str(site), 0) + count
            self._read[str(site)] = self._read.get(str(site), 0) + done.read

    def failed(self, error: Exception, texts: Sequence[RowText]) -> None:
        self._ended.labels("failed").inc(len(texts))

    def _counter(self, name: str, explained: str, *labels: str) -> Counter:
        return Counter(f"mod_export_{name}", explained, labels, registry=self._registry)

    def _histogram(self, name: str, explained: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mod_export_{name}", explained, buckets=buckets, registry=self._registry)
