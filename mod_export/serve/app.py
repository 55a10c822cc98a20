"""The ASGI application of an open build folder: its routes, and its page."""

from __future__ import annotations

from collections.abc import Collection
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mod_export.report.pages import render_page
from mod_export.serve import inference_protocol, openai_api
from mod_export.serve.endpoint import ApiError, Guard, path_of, service_of
from mod_export.serve.metrics import CONTENT_TYPE
from mod_export.serve.service import Service


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


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "no such address", 405: f"{request.method}: not a method of this address"}
    message = f"{path_of(request)[:80]}: {reasons.get(error.status_code, error.detail)}"
    response = ApiError(error.status_code, message).response(path_of(request))
    response.headers.update(error.headers or {})
    service_of(request).metrics.answered("", error.status_code)
    return response


async def _metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _page(request: Request) -> Response:
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    return HTMLResponse(render_page(__package__, "page.html.j2", script=script, service=service_of(request)))
