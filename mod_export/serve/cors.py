"""Web pages of other origins that may use the server (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).

Starlette's middleware knows the protocol. It is an outer layer of the application, and endpoints turn every error
into a response, so refusals and streams have its headers too. Only the answer to a request that never reaches the
application, such as a head that is no HTTP, has none. Two answers of the middleware are replaced here: an accepted
preflight request is answered with 204, because the answer has no body, and the refusal of a preflight request names the
option that would allow it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from mod_export.errors import UsageError
from mod_export.serve.endpoint import foreign_page

ANY, OPAQUE = "*", "null"
"""`*` stands for every origin; browsers send `null` for pages without one, such as local files and sandboxed frames."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
IMPLIED_PORTS = ("http://", ":80"), ("https://", ":443")
METHODS = ("GET", "HEAD", "POST")
SHOWN = ("Allow", "Inference-Header-Content-Length", "Retry-After", "WWW-Authenticate", "X-Request-Id")
"""Headers of answers that pages may read, besides those that they always may."""
MAX_AGE_S = 7200
"""How long a browser may keep the answer to a preflight request; Chrome keeps none for longer."""


def check_origins(origins: Collection[str], option: str, *, public: bool) -> None:
    """Refuses origins that no browser would send, and those that stand for every page if no key is asked for.

    Args:
        origins: what the user allows.
        option: how the user spells the option.
        public: whether a request needs an API key, or the server answers everyone anyway.

    Raises:
        UsageError: an origin is refused.
    """
    for origin in origins:
        implied = any(origin.startswith(scheme) and origin.endswith(port) for scheme, port in IMPLIED_PORTS)
        if origin not in (ANY, OPAQUE) and (implied or not ORIGIN.fullmatch(origin)):
            raise UsageError(
                f"{option} {origin[:80]}: expected an origin as browsers send it, such as https://chat.example or "
                "http://localhost:3000: in lower case, without a path, and without the port that its scheme implies"
            )
        # Any page can open a sandboxed frame, whose origin is null.
        if origin in (ANY, OPAQUE) and not public:
            raise UsageError(
                f"{option} {origin}: every web page that a user of this machine opens could use the server; name the "
                "pages, or ask for API keys"
            )


class Cors(CORSMiddleware):
    """Lets the pages of some origins use an application. Their requests may have any headers."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=sorted(origins),
            allow_methods=METHODS,
            allow_headers=(ANY,),
            expose_headers=SHOWN,
            max_age=MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answers a preflight request. A method that no endpoint has is left to the browser, which compares it with the
        allowed methods.
        """
        origin = request_headers["origin"]
        if not self.is_allowed_origin(origin):
            refused = foreign_page(origin).response("")
            refused.headers["Vary"] = "Origin"
            return refused
        headers = super().preflight_response(request_headers).headers
        answer = Response(status_code=204)
        for name, value in headers.items():
            if name not in ("content-length", "content-type"):
                answer.headers[name] = value
        # Chrome sends this for a page from the internet that wants to reach this machine or its network.
        if "access-control-request-private-network" in request_headers:
            answer.headers["Access-Control-Allow-Private-Network"] = "true"
        return answer
