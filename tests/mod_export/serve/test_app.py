"""The application around both APIs: who may use it, how it describes itself, and its page in a browser."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from build_folders import file_entry, rewrite_manifest
from headless_chromium import DESK, Chromium
from serving import PATIENCE_S, Server, received, serving

from mod_export.engines import ENGINES
from mod_export.errors import BuildFolderError, TargetError, UsageError
from mod_export.runtime import generator as generator_module
from mod_export.serve import endpoint
from mod_export.serve.scheduler import Scheduler
from mod_export.serve.service import ServiceOptions, open_service
from mod_export.types import Engine, Unavailable

JSON = {"Content-Type": "application/json"}
ASKED = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
OPEN = ("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/")
SECURED = ("/v1/models", "/v1/models/writing", "/v2", "/v2/models/writing", "/metrics")


def value_of(server: Server, name: str) -> float:
    lines = server.service.metrics.text().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"mod_export_{name}"))


def test_a_key_is_asked_for(written: Path) -> None:
    keys = ["one", "two-\N{LATIN SMALL LETTER E WITH ACUTE}"]
    with serving(written, keys=keys) as server, httpx2.Client() as client:
        for path in OPEN:
            assert client.get(server.url + path).status_code == 200
        for authorization in (None, "Bearer three", "one", "Basic one", "Bearer one two"):
            headers = {} if authorization is None else {"Authorization": authorization}
            for path in SECURED:
                refused = client.get(server.url + path, headers=headers)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            answer = client.post(f"{server.url}/v1/completions", json=ASKED, headers=headers)
            assert answer.json()["error"] == {
                "message": "this server needs an API key: Authorization: Bearer KEY", "type": "authentication_error",
                "param": None, "code": "invalid_api_key"}  # fmt: skip
            infer = client.post(f"{server.url}/v2/models/writing/infer", json={}, headers=headers)
            assert infer.json() == {"error": "this server needs an API key: Authorization: Bearer KEY"}
        for key in keys:
            known = {"Authorization": f"bearer {key}".encode()}
            for path in SECURED:
                assert client.get(server.url + path, headers=known).status_code == 200  # type: ignore[arg-type]


def test_only_its_own_names_where_no_key_is_asked_for(written: Path) -> None:
    with serving(written, hosts=["localhost", "127.0.0.1"]) as server:
        for host in ("localhost", "127.0.0.1", f"localhost:{server.port}"):
            assert httpx2.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 200
        for path in ("/v1/models", "/", "/v2/health/ready", "/metrics"):
            refused = httpx2.get(server.url + path, headers={"Host": "evil.example"})
            assert refused.status_code == 403
            assert "'evil.example': without an API key this server answers as 127.0.0.1, localhost only" in refused.text
        for host in ("", "evil.example:99999", "[::1", "127.0.0.1:8000@x", "127.0.0.1.", "localhost evil"):
            assert httpx2.get(f"{server.url}/v1/models", headers={"Host": host}).status_code in (400, 403)


def test_addresses_and_methods_that_are_none(server: Server) -> None:
    has = "this server has GET /v1/models, GET /v1/models/{name}, POST /v1/completions, POST /v1/chat/completions"
    for path in ("/v1/engines", "/v3", "/v1/completions/", "/v1/completions/x", "/metrics/x", "/chat/completions"):
        answer = httpx2.get(server.url + path)
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": f"GET {path}: no such address; {has}", "type": "invalid_request_error",
            "param": None, "code": "unknown_url"}  # fmt: skip
    for path in ("/v1/embeddings", "/v1/responses", "/v1/audio/speech", "/v1/files/x", "/v1/messages"):
        answer = httpx2.post(server.url + path, json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "unsupported")
        assert error["message"] == f"POST {path}: not supported here; {has}"
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/writing", "GET, HEAD"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
    ):
        answer = httpx2.request(method, server.url + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"] == {
            "message": f"{method} {path}: not a method of this address; it has {allowed}",
            "type": "invalid_request_error", "param": None, "code": "unsupported"}  # fmt: skip
    message = httpx2.get(f"{server.url}/v2/nonsense").json()["error"]
    assert message.startswith("GET /v2/nonsense: no such address; this server has GET /v2, GET /v2/health/live, ")


def test_foreign_pages_are_kept_out_where_no_key_is_asked_for(written: Path) -> None:
    """A page can make the browser send requests. It cannot read the answers, but the engine would be busy."""
    with serving(written, hosts=["127.0.0.1"]) as server:
        for origin, status in (
            (server.url, 200),
            ("https://evil.example", 403),
            ("null", 403),
            ("http://127.0.0.1", 403),
        ):
            answer = httpx2.post(f"{server.url}/v1/completions", json=ASKED, headers={"Origin": origin})
            assert answer.status_code == status
        assert answer.json()["error"]["message"] == (
            "Origin 'http://127.0.0.1': this server answers only its own page and those that it was started for; allow "
            "another one with --allow-origin http://127.0.0.1 (on Ray allow_origins)"
        )


def test_a_body_that_is_too_large_or_does_not_come(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    large = b'{"prompt": "' + b"a" * (9 << 20)
    answer = httpx2.post(f"{server.url}/v1/completions", content=large, headers=JSON, timeout=PATIENCE_S)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith("the body of the request is larger than 1,048,576 bytes")
    monkeypatch.setattr(endpoint, "BODY_S", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        refusal = received(connection)
    assert refusal.startswith(b"HTTP/1.1 408")
    assert b"the body of the request did not come within 0.2 s" in refusal
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
    assert httpx2.get(f"{server.url}/v2/health/ready").status_code == 200


def test_a_bug_is_logged_and_not_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret")

    assert isinstance(server.service.writing, Scheduler)
    monkeypatch.setattr(server.service.writing.generator, "ids", broken)
    answer = httpx2.post(f"{server.url}/v1/completions", json=ASKED)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the server failed to answer this request; its log says why", "type": "server_error",
        "param": None, "code": "failed"}  # fmt: skip
    assert "a secret" in caplog.text


def test_metrics_count_what_happened(written: Path) -> None:
    with serving(written) as server:
        assert (value_of(server, "rows "), value_of(server, "busy_rows"), value_of(server, "queue_depth")) == (3, 0, 0)
        httpx2.post(f"{server.url}/v1/completions", json={**ASKED, "n": 2, "max_tokens": 10})
        httpx2.post(f"{server.url}/v1/completions", json={**ASKED, "nonsense": 1})
        text = httpx2.get(f"{server.url}/metrics")
        assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert value_of(server, 'tokens_total{kind="prompt"}') == 12
        assert value_of(server, 'tokens_total{kind="new"}') == 20
        assert value_of(server, "time_to_first_token_seconds_count") == 2
        assert value_of(server, "time_between_tokens_seconds_count") == 18
        assert value_of(server, "queue_seconds_count") == 2
        assert value_of(server, 'texts_total{finish="length"}') == 2
        assert value_of(server, 'refused_requests_total{reason="400"}') == 1
        assert value_of(server, 'http_requests_total{path="/v1/completions",status="200"}') == 1
        assert value_of(server, "read_tokens_total") == 30
        for site in (0, 2):
            share = value_of(server, f'site_selected_share{{site="{site}"}}')
            assert 0 < share <= 1
            assert share == value_of(server, f'site_tokens_total{{site="{site}"}}') / 30


def test_an_engine_that_keeps_failing_is_not_live(written: Path) -> None:
    with serving(written) as server:
        assert isinstance(server.service.writing, Scheduler)
        server.service.writing._failures["steps"] = 3
        for path in ("/v2/health/live", "/v2/health/ready", "/health", "/v2/models/writing/ready"):
            assert httpx2.get(server.url + path).status_code == 503
        server.service.writing._failures["steps"] = 0
        server.service.draining = True
        assert httpx2.get(f"{server.url}/v2/health/live").json() == {"live": True}
        for path in ("/v2/health/ready", "/health"):
            assert httpx2.get(server.url + path).json() == {"ready": False}


def test_folders_that_cannot_be_served(small: Path, written: Path) -> None:
    with pytest.raises(UsageError, match=r"rows: .* writes no text"), open_service(small, ServiceOptions(rows=2)):
        pass
    message = "nothing of it can be served\nwriting text: .*holds no engine.* for tensorrt.*\nwhole prompts: .*tensorrt"
    with pytest.raises(TargetError, match=message), open_service(written, ServiceOptions(target="tensorrt")):
        pass


@pytest.mark.parametrize(("roles", "reads", "writes"), [
    (("forward",), False, True), (("prefill",), True, False), (("decode",), True, False),
    (("forward", "decode"), False, False),
])  # fmt: skip
def test_engines_that_another_machine_has_to_run(
    written: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    roles: Sequence[str], reads: bool, writes: bool,
) -> None:  # fmt: skip
    """An engine itself knows the processors that it runs on, and says so when it is opened."""
    kind = type(ENGINES["ort-cpu"])
    load = kind.load

    def refusing(self: Any, root: Path, engine: Engine, *arguments: Any, **options: Any) -> Any:
        if engine.role in roles:
            raise TargetError(f"{engine.path}: compiled for another processor; build again here")
        return load(self, root, engine, *arguments, **options)

    monkeypatch.setattr(kind, "load", refusing)
    reason = f"{roles[0]}.*: compiled for another processor" if roles != ("forward",) else "b1s16.*: compiled for ano"
    if not reads and not writes:
        message = "nothing of it can be served\nwriting text: .*decode.*another processor.*\nwhole prompts: .*another"
        with pytest.raises(TargetError, match=message), open_service(written, ServiceOptions()):
            pass
        return
    with serving(written, name="writing") as server, httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert re.search(f"only a part of the folder is served: .*{reason}", caplog.text)
        assert client.get("/v2/health/ready").status_code == 200
        rows = {"inputs": [{"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}]}
        for path, body, works in (("/v1/completions", ASKED, writes), ("/v2/models/writing/infer", rows, reads)):
            answer = client.post(path, json=body)
            assert answer.status_code == (200 if works else 400), answer.text
            assert works or re.search(reason, answer.text)
        assert client.get("/v2/models/writing/ready").status_code == (200 if reads else 400)


@pytest.mark.parametrize(("role", "reads", "writes"), [("forward", False, True), ("decode", True, False)])
def test_engines_that_no_library_reads(
    written_copy: Path, caplog: pytest.LogCaptureFixture, role: str, reads: bool, writes: bool
) -> None:
    """The rest of the folder is served, also if the files are as they were built: another library may be installed."""

    def spoil(manifest: dict[str, Any]) -> None:
        for path in [engine["path"] for engine in manifest["engines"] if engine["role"] == role]:
            (written_copy / path).write_bytes(b"no graph")
            manifest["files"][path] = file_entry(written_copy / path)

    rewrite_manifest(written_copy, spoil)
    with serving(written_copy, name="writing") as server:
        assert isinstance(server.service.scoring, Unavailable) is not reads
        assert isinstance(server.service.writing, Unavailable) is not writes
        assert "only a part of the folder is served: " in caplog.text
        assert "ONNX Runtime refuses this graph" in caplog.text
        assert httpx2.get(f"{server.url}/health").status_code == 200


def test_no_memory_for_the_caches_is_said_at_once(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the server can ask for fewer rows."""
    monkeypatch.setattr(generator_module, "free_bytes", lambda: 1000)
    with pytest.raises(UsageError, match="MiB are free; ask for shorter"), open_service(written, ServiceOptions()):
        pass


@pytest.mark.parametrize("kind", [BuildFolderError, TargetError])
def test_what_is_wrong_with_the_folder_blames_no_request(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    problem = endpoint.problem_of(kind("engines/x.onnx has been changed since it was built"))
    assert (problem.status, problem.code) == (500, "failed")
    assert "engines" not in str(problem)
    assert "engines/x.onnx has been changed" in caplog.text


def test_names_of_statuses() -> None:
    assert endpoint.ApiError(429, "x").kind == "rate_limit_error"
    assert endpoint.ApiError(418, "x").kind == "invalid_request_error"
    assert endpoint.ApiError(503, "x").kind == "server_error"


@pytest.fixture
def page(server: Server, chromium: Chromium) -> Iterator[Chromium]:
    chromium.visit(f"{server.url}/", DESK, "light")
    yield chromium
    chromium.visit("about:blank", DESK, "light")


def waited(page: Chromium, expression: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := page.evaluate(expression)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_the_page_shows_what_happens_and_writes_text(page: Chromium, server: Server) -> None:
    assert waited(page, "document.getElementById('state').textContent === 'ready'")
    assert page.evaluate("document.getElementById('busy').textContent") == "0 of 3"
    expected = httpx2.post(f"{server.url}/v1/completions", json={**ASKED, "max_tokens": 30}).json()["choices"][0][
        "text"
    ]
    page.evaluate("document.getElementById('prompt').value = 'def f('; document.getElementById('tokens').value = 30")
    page.evaluate("document.getElementById('send').click()")
    assert waited(page, "document.getElementById('about').textContent").startswith("30 tokens in ")
    assert page.evaluate("document.getElementById('text').textContent") == expected
    assert waited(page, "document.getElementById('sites').textContent.includes('%')")
    assert page.complaints() == []
    assert all(url.startswith(server.url) for url in page.requests())


def test_the_page_of_a_model_that_writes_no_text_says_why(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "writing", Unavailable("its router looks ahead"))
    text = httpx2.get(f"{server.url}/").text
    assert "This model writes no text: its router looks ahead" in text
    assert 'id="form"' not in text


def test_the_page_says_what_is_wrong(page: Chromium) -> None:
    page.evaluate("document.getElementById('prompt').value = ''; document.getElementById('tokens').value = 5")
    page.evaluate("document.getElementById('send').click()")
    assert (
        waited(page, "document.getElementById('about').textContent") == "prompt 0 is empty; expected at least one token"
    )


def test_the_page_asks_for_a_key(written: Path, chromium: Chromium) -> None:
    with serving(written, keys=["secret"]) as server:
        chromium.visit(f"{server.url}/", DESK, "dark")
        assert waited(chromium, "document.getElementById('state').textContent === 'needs an API key'")
        assert not chromium.evaluate("document.getElementById('asks').hidden")
        chromium.evaluate("document.getElementById('key').value = 'secret'")
        assert waited(chromium, "document.getElementById('state').textContent === 'ready'")
        chromium.visit("about:blank", DESK, "light")
