"""Turns errors into HTTP responses: a status, and a body in the format of the API that the client uses."""

from __future__ import annotations

import logging
from http import HTTPStatus

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from mod_export.errors import TooLongError, UsageError
from mod_export.serve.jobs import ClosingError, QueueFullError, WaitedTooLongError

LOG = logging.getLogger("mod_export.serve")
RETRY_S = 1
"""Retry-After for clients if the server has no free row or is shutting down: another replica may have a free row."""


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: HTTP status.
        kind: `type` of OpenAI's error object.
        param: name of the invalid field.
        code: machine-readable reason.
        retry_after_s: seconds until the client should try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def kind(self) -> str:
        named = {401: "authentication_error", 429: "rate_limit_error"}
        return named.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def openai(self) -> dict[str, dict[str, str | None]]:
        """Returns the body in the format of OpenAI's API."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """Returns the response, in the format of the Open Inference Protocol under /v2 and of OpenAI elsewhere."""
        body = {"error": str(self)} if path.startswith("/v2") else self.openai()
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body, self.status, headers)


def problem_of(error: Exception) -> ApiError:
    """Returns the error to send to a client. Internal errors are logged, and the client does not see their text."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case WaitedTooLongError():
            return ApiError(503, str(error), code="waited_too_long", retry_after_s=RETRY_S)
        case ClosingError():
            return ApiError(503, str(error), code="shutting_down", retry_after_s=RETRY_S)
        case TooLongError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case UsageError():
            return ApiError(400, str(error))
        case ValidationError():
            return _invalid(error)
    LOG.error("a request failed: %s", error, exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why", code="failed")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param)
