"""The ASGI application of an open build folder: routes, access control and error responses."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Collection
from functools import wraps
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mod_export.report.pages import render_page
from mod_export.serve import inference_protocol, openai_api
from mod_export.serve.metrics import CONTENT_TYPE, Metrics
from mod_export.serve.problems import ApiError, problem_of
from mod_export.serve.service import Service

HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
CLIENT_LEFT = 499
"""The status that nginx logs for a client that disconnected; it is never sent."""

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(service: Service, keys: Collection[str] = (), hosts: Collection[str] | None = None) -> Starlette:
    """Creates the application.

    Args:
        service: an open build folder, which must stay open while the application is used.
        keys: API keys, of which each request must send one. If empty, no key is needed.
        hosts: host names that the server answers to; None means any. Without API keys this keeps out other web pages
            in a user's browser: the Host check stops pages whose domain name resolves to this machine, and the Origin
            check stops all others.
    """
    secured, open_to_all = Guard(keys, hosts), Guard((), hosts)
    routes = [
        ("GET", "/v1/models", secured, openai_api.list_models),
        ("GET", "/v1/models/{name:path}", secured, openai_api.one_model),
        ("POST", "/v1/completions", secured, openai_api.completions),
        ("POST", "/v1/chat/completions", secured, openai_api.chat_completions),
        ("GET", "/v2", secured, inference_protocol.server_metadata),
        ("GET", "/v2/health/live", open_to_all, inference_protocol.live),
        ("GET", "/v2/health/ready", open_to_all, inference_protocol.ready),
        ("GET", "/metrics", secured, _metrics),
        ("GET", "/", open_to_all, _page),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            ("GET", model, secured, inference_protocol.model_metadata),
            ("GET", f"{model}/ready", secured, inference_protocol.model_ready),
            ("POST", f"{model}/infer", secured, inference_protocol.infer),
        ]
    app = Starlette(
        routes=[Route(path, guard(path, endpoint), methods=[method]) for method, path, guard, endpoint in routes],
        exception_handlers={HTTPException: _no_such_address},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.mailbox = openai_api.Mailbox()
    return app


class Guard:
    """Checks requests before they reach an endpoint, and turns errors into responses."""

    def __init__(self, keys: Collection[str], hosts: Collection[str] | None) -> None:
        self._keys = [key.encode() for key in keys]
        self._hosts = hosts

    def __call__(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Wraps the endpoint of a path."""

        @wraps(endpoint)
        async def guarded(request: Request) -> Response:
            metrics: Metrics = request.app.state.service.metrics
            try:
                self.check(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception as error:  # For any error, the client gets a response in the format of its API.
                problem = problem_of(error)
                metrics.refused(problem.code or str(problem.status))
                response = problem.response(_path(request))
            metrics.answered(path, response.status_code)
            return response

        return guarded

    def check(self, request: Request) -> None:
        if self._hosts is not None:
            self._check_hosts(request, self._hosts)
        if not self._keys:
            return
        scheme, _, key_text = request.headers.get("authorization", "").partition(" ")
        key_bytes = key_text.strip().encode("latin-1")  # The original bytes: Starlette decodes headers as latin-1.
        # Compares with every key, each in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(key_bytes, known_key) for known_key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")

    def _check_hosts(self, request: Request, hosts: Collection[str]) -> None:
        with_key = "give it API keys (--api-key-file, on Ray api_key_file)"
        host = request.headers.get("host", "")
        match = HOST.fullmatch(host)
        if match is None or match["name"].strip("[]").lower() not in hosts:
            raise ApiError(
                403,
                f"Host {host[:80]!r}: without an API key this server answers as "
                f"{', '.join(sorted(hosts))} only; {with_key} to be reached by other names",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError(
                403, f"Origin {origin[:80]!r}: without an API key this server answers no other web page; {with_key}"
            )


def _path(request: Request) -> str:
    """Path of the request, without the prefix at which the application is mounted."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "no such address", 405: f"{request.method}: not a method of this address"}
    message = f"{_path(request)[:80]}: {reasons.get(error.status_code, error.detail)}"
    response = ApiError(error.status_code, message).response(_path(request))
    response.headers.update(error.headers or {})
    service: Service = request.app.state.service
    service.metrics.answered("", error.status_code)
    return response


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _page(request: Request) -> Response:
    service: Service = request.app.state.service
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    return HTMLResponse(render_page(__package__, "page.html.j2", script=script, service=service))
