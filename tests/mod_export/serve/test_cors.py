"""Web pages of other origins: what browsers ask before a request, and the headers with which they show its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_line import invoke, refused
from serving import PATIENCE_S, Server, serving

from mod_export.errors import UsageError
from mod_export.serve.cors import check_origins

PAGE, OTHER = "https://chat.example", "http://localhost:3000"
ASKED = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
SHOWN = "Access-Control-Allow-Origin"


def preflight(server: Server, origin: str, path: str = "/v1/chat/completions", **more: str) -> httpx2.Response:
    headers = {"Origin": origin, **ASKING, **more}
    return httpx2.request("OPTIONS", server.url + path, headers=headers, timeout=PATIENCE_S)


def vary(answer: httpx2.Response) -> list[str]:
    return answer.headers.get("vary", "").split(", ")


@pytest.mark.parametrize("keys", [[], ["secret"]], ids=["no key", "a key"])
def test_a_preflight_request_of_a_page_that_is_allowed(written: Path, keys: list[str]) -> None:
    """It never has the key."""
    with serving(written, keys=keys, hosts=None if keys else ["127.0.0.1"], origins=[PAGE, OTHER]) as server:
        for origin in (PAGE, OTHER):
            answer = preflight(server, origin)
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers[SHOWN] == origin
            assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
            assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            assert answer.headers["access-control-max-age"] == "7200"
            assert "Origin" in vary(answer)
            assert not {"content-length", "access-control-allow-private-network"} & set(answer.headers)
        asked = preflight(server, PAGE, **{"Access-Control-Request-Private-Network": "true"})
        assert (asked.status_code, asked.headers["access-control-allow-private-network"]) == (204, "true")


def test_other_pages_are_told_the_option(server: Server) -> None:
    answer = preflight(server, PAGE)
    assert (answer.status_code, SHOWN in answer.headers) == (403, False)
    assert answer.json()["error"]["message"] == (
        f"Origin '{PAGE}': this server answers only its own page and those that it was started for; allow another one "
        f"with --allow-origin {PAGE} (on Ray allow_origins)"
    )
    assert "Origin" in vary(answer)


def test_answers_errors_and_streams_are_shown_to_the_page(written: Path) -> None:
    with serving(written, hosts=["127.0.0.1"], origins=[PAGE]) as server:

        def ask(origin: str, path: str = "/v1/completions", **change: Any) -> httpx2.Response:
            body = json.dumps({**ASKED, **change})
            return httpx2.post(server.url + path, content=body, headers={"Origin": origin}, timeout=PATIENCE_S)

        for status, answer in (
            (200, ask(PAGE)),
            (200, ask(PAGE, stream=True)),
            (400, ask(PAGE, nonsense=1)),
            (404, ask(PAGE, model="other")),
            (404, ask(PAGE, "/v1/embeddings")),
            (405, ask(PAGE, "/v1/models")),
            (400, ask(PAGE, "/v2/models/writing/infer")),
        ):
            assert (answer.status_code, answer.headers[SHOWN]) == (status, PAGE), answer.text
            assert "Origin" in vary(answer)
            assert "Retry-After" in answer.headers["access-control-expose-headers"]
        refused = ask(OTHER)
        assert (refused.status_code, SHOWN in refused.headers) == (403, False)
        assert ask(server.url).status_code == 200
        # A cache must not give the answer of a program to a page.
        assert "Origin" in vary(httpx2.get(f"{server.url}/v1/models"))


def test_with_keys_every_page_may_be_allowed(written: Path) -> None:
    with serving(written, keys=["secret"], origins=["*"]) as server:
        assert preflight(server, PAGE).headers[SHOWN] == "*"
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            answer = httpx2.get(f"{server.url}/v1/models", headers={"Origin": PAGE, **headers})
            assert (answer.status_code, answer.headers[SHOWN]) == (status, "*")


@pytest.mark.parametrize(
    "origin",
    ["chat.example", "https://chat.example/", "https://Chat.example", "https://a.example https://b.example", "",
     "https://*.example", "http://a.example:80", "https://a.example:443", "https://a.example:x", "https://"],
)  # fmt: skip
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_origins([origin], "--allow-origin", public=True)
    assert str(caught.value) == (
        f"--allow-origin {origin}: expected an origin as browsers send it, such as https://chat.example or "
        "http://localhost:3000: in lower case, without a path, and without the port that its scheme implies"
    )


def test_origins_that_stand_for_every_page_need_a_key(written: Path) -> None:
    forms = [PAGE, OTHER, "chrome-extension://abcdef", "tauri://localhost", "http://[::1]:8080", "https://a.example:80"]
    check_origins(forms, "--allow-origin", public=False)
    check_origins(["*", "null"], "--allow-origin", public=True)
    for origin in ("*", "null"):
        message = (
            rf"--allow-origin {'[*]' if origin == '*' else origin}: every web page that a user of this machine opens "
            "could use the server; name the pages, or ask for API keys"
        )
        refused(invoke("serve", written, "--port", 0, "--allow-origin", origin), message)
