"""Names of requests, in answers and in the log, and the log as lines for people and for programs."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from serving import PATIENCE_S, Server, command

from mod_export.serve.request_log import HEADER, LOG
from mod_export.serve.service import Scoring

MADE = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, LOG.name)
    return caplog


def test_an_answer_has_the_name_of_its_request(server: Server) -> None:
    """Also a refused one, one for another address, and a stream."""
    body = {"prompt": "x", "max_tokens": 2}
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S, headers={HEADER: "client-7"}) as client:
        answers = [
            client.get("/v1/models"),
            client.get("/nowhere"),
            client.post("/v1/completions", json={}),
            client.post("/v1/completions", json=body),
            client.post("/v1/completions", json={**body, "stream": True}),
            client.options("/v1/models", headers=preflight),
        ]
    assert [answer.status_code for answer in answers] == [200, 404, 400, 200, 200, 403]
    assert {answer.headers[HEADER] for answer in answers} == {"client-7"}


@pytest.mark.parametrize("given", [None, "", "two words", "ä", "x" * 129])
def test_other_names_are_replaced(server: Server, given: str | None) -> None:
    headers = {} if given is None else {HEADER: given.encode()}
    found = [httpx2.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).headers[HEADER] for _ in "ab"]
    assert all(MADE.fullmatch(name) for name in found)
    assert found[0] != found[1]


def test_openais_client_shows_the_name(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model=server.service.name, prompt="x", max_tokens=1)
    assert MADE.fullmatch(answer._request_id or "")


def test_the_log_of_a_request(server: Server, logged: pytest.LogCaptureFixture) -> None:
    answer = httpx2.get(f"{server.url}/v1/models?key=secret", timeout=PATIENCE_S)
    httpx2.get(f"{server.url}/no%0Awhere", timeout=PATIENCE_S)
    records = [record for record in logged.records if record.name == LOG.name]
    assert len(records) == 2
    fields: dict[str, Any] = records[0].mod_export  # type: ignore[attr-defined]  # What JSON lines have more.
    assert {**fields, "seconds": 0} == {
        "method": "GET", "path": "/v1/models", "status": 200, "seconds": 0, "client": "127.0.0.1",
    }  # fmt: skip
    assert 0 < fields["seconds"] < PATIENCE_S
    assert answer.status_code == 200
    # No query, and no line that a client could end.
    assert re.fullmatch(r"127.0.0.1 GET /v1/models 200 \d+\.\d{3} s", records[0].getMessage())
    assert re.fullmatch(r"127.0.0.1 GET /no\\nwhere 404 \d+\.\d{3} s", records[1].getMessage())


@pytest.mark.fast("json")
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_of_a_command(written: Path, form: str) -> None:
    """An error has the name of the request in which it happened."""
    fail = "from mod_export.serve import inference_protocol as p\ndef fail(*_): raise RuntimeError('broken')\n"
    fail += "from mod_export.serve.service import Scoring\nScoring.admitted = fail\n"
    assert hasattr(Scoring, "admitted")
    with command(written, "-v", "--log-format", form, code=fail) as (process, url):
        httpx2.get(f"{url}/v1/models", headers={HEADER: "first"}, timeout=PATIENCE_S)
        name = httpx2.get(f"{url}/v2", timeout=PATIENCE_S).json()["name"]
        models = httpx2.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert name
        bucket = httpx2.get(f"{url}/v2/models/{models[0]['id']}", timeout=PATIENCE_S).json()["inputs"][0]
        ids = {"name": bucket["name"], "shape": [1, 4], "datatype": bucket["datatype"], "data": [1, 2, 3, 4]}
        broken = httpx2.post(
            f"{url}/v2/models/{models[0]['id']}/infer",
            json={"inputs": [ids]},
            headers={HEADER: "broken-one"},
            timeout=PATIENCE_S,
        )
        assert broken.status_code == 500, broken.text
        process.terminate()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    if form == "text":
        assert any(re.fullmatch(r"info: 127.0.0.1 GET /v1/models 200 \d+\.\d{3} s \[first\]", line) for line in lines)
        assert "error: a request failed: broken" in lines
        assert any(line.startswith("RuntimeError: broken [broken-one]") for line in lines)
        return
    records = [json.loads(line) for line in lines if line.startswith("{")]
    first = next(record for record in records if record.get("request_id") == "first")
    assert first.keys() == {
        "time", "level", "logger", "message", "request_id", "method", "path", "status", "seconds", "client",
    }  # fmt: skip
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    error, answered = (record for record in records if record.get("request_id") == "broken-one")
    assert (error["level"], error["message"]) == ("error", "a request failed: broken")
    assert error["exception"].endswith("RuntimeError: broken")
    assert (answered["status"], answered["path"]) == (500, f"/v2/models/{models[0]['id']}/infer")


def test_without_v_only_errors_are_logged(written: Path) -> None:
    with command(written, "--log-format", "json") as (process, url):
        assert httpx2.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 200
        process.terminate()
        assert process.stderr is not None
        assert [line for line in process.stderr.read().splitlines() if line.startswith("{")] == []
