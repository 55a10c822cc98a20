"""The ASGI application of an open build folder: its routes, and its page."""

from __future__ import annotations

import re
from collections.abc import Collection
from http import HTTPStatus
from importlib.resources import files

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mod_export.report.pages import render_page
from mod_export.serve import inference_protocol, openai_api, openapi
from mod_export.serve.cors import Cors
from mod_export.serve.endpoint import ApiError, Guard, path_of, service_of
from mod_export.serve.metrics import CONTENT_TYPE
from mod_export.serve.request_log import RequestLog
from mod_export.serve.service import Service

NOT_HERE = tuple(
    f"/v1/{name}"
    for name in (
        "assistants", "audio", "batches", "classify", "containers", "conversations", "embeddings", "evals", "files",
        "fine_tuning", "images", "messages", "moderations", "realtime", "rerank", "responses", "score", "threads",
        "uploads", "vector_stores", "videos",
    )
)  # fmt: skip
"""Addresses of OpenAI's API, and of servers like this one, that no model here could answer."""


class _ModelName(PathConvertor):
    """A name of a model, which may have slashes. What follows it in some addresses is no part of it."""

    regex = ".+(?<!/infer)(?<!/ready)"


register_url_convertor("model", _ModelName())


def create_app(
    service: Service,
    keys: Collection[str] = (),
    hosts: Collection[str] | None = None,
    origins: Collection[str] = frozenset(),
) -> Starlette:
    """Creates the application.

    Args:
        service: an open build folder, which must stay open while the application is used.
        keys: API keys, of which each request must send one. If empty, no key is needed.
        hosts: host names that the server answers to; None means any. Without API keys this keeps out other web pages
            in a user's browser: the Host check stops pages whose domain name resolves to this machine, and the Origin
            check stops all others.
        origins: web pages of other origins that may use the server; see `check_origins`.
    """
    secured, open_to_all = Guard(keys, hosts, origins), Guard((), hosts, origins)
    routes = [
        ("GET", "/v1/models", secured, openai_api.list_models),
        ("GET", "/v1/models/{name:path}", secured, openai_api.one_model),
        ("POST", "/v1/completions", secured, openai_api.completions),
        ("POST", "/v1/chat/completions", secured, openai_api.chat_completions),
        ("GET", "/v2", secured, inference_protocol.server_metadata),
        *(("GET", path, open_to_all, inference_protocol.live) for path in inference_protocol.LIVE),
        *(("GET", path, open_to_all, inference_protocol.ready) for path in inference_protocol.READY),
        ("GET", "/metrics", secured, _metrics),
        ("GET", "/", open_to_all, _page),
        ("GET", openapi.PATH, open_to_all, openapi.route(keys=bool(keys))),
    ]
    # Versions come first: a name may have slashes, so the other addresses match them too.
    for model in ("/v2/models/{name:model}/versions/{version}", "/v2/models/{name:model}"):
        routes += [
            ("GET", model, secured, inference_protocol.model_metadata),
            ("GET", f"{model}/ready", secured, inference_protocol.model_ready),
            ("POST", f"{model}/infer", secured, inference_protocol.infer),
        ]
    app = Starlette(
        routes=[
            Route(path, guard(shown(path), endpoint), methods=[method]) for method, path, guard, endpoint in routes
        ],
        exception_handlers={HTTPException: _no_such_address},
        middleware=[Middleware(RequestLog), Middleware(Cors, origins=origins)],
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.mailbox = openai_api.Mailbox()
    return app


def shown(path: str) -> str:
    """Returns the path of a route as people read it: with `{name}` for `{name:path}`."""
    return re.sub(r":\w+}", "}", path)


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = path_of(request)
    requested = f"{request.method[:20]} {path[:80]}"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette keeps the methods in a set, whose order differs from process to process.
        headers["Allow"] = allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        problem = ApiError(405, f"{requested}: not a method of this address; it has {allowed}", code="unsupported")
    elif path.startswith(NOT_HERE):
        problem = ApiError(
            404, f"{requested}: not supported here; this server has {_addresses(request)}", code="unsupported"
        )
    else:
        problem = ApiError(
            404, f"{requested}: no such address; this server has {_addresses(request)}", code="unknown_url"
        )
    response = problem.response(path)
    response.headers.update(headers)
    service_of(request).metrics.answered("", error.status_code)
    return response


def _addresses(request: Request) -> str:
    """The addresses of the API that the client seems to mean."""
    prefix = "/v2" if path_of(request).startswith("/v2") else "/v1"
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.path.startswith(prefix)]
    return ", ".join(f"{min(route.methods or ('GET',))} {shown(route.path)}" for route in routes)


async def _metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _page(request: Request) -> Response:
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    return HTMLResponse(render_page(__package__, "page.html.j2", script=script, service=service_of(request)))
