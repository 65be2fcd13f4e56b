"""What goes wrong, in OpenAI's shape, so that its clients raise what their users expect.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fathomlm.errors import EngineStopped, FathomError, QueueFull, RequestTooLarge

RETRY_SECONDS = 1
INTERNAL = "internal server error; see the server's log"


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    def record(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """`Retry-After` for clients that may retry soon."""
        headers = {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.record(), self.status, headers)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Kept: `json.dumps` makes one for each call, which takes as long as a chunk."""


def to_json(record: object) -> bytes:
    """UTF-8. Half a surrogate pair, which no UTF-8 has, comes out as the escape that JSON has for it."""
    return _ENCODER.encode(record).encode("utf-8", "backslashreplace")


def json_response(record: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(record), status, dict(headers or {}), media_type="application/json")


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """What the user can mend."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: FathomError, param: str | None = None) -> ApiError:
    """One of our own errors, as a client should see it."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="rate_limit_exceeded", kind="rate_limit_error")
    if isinstance(error, RequestTooLarge):
        return refused(str(error), param, "context_length_exceeded")
    if isinstance(error, EngineStopped):
        return ApiError(503, "the server accepts no new requests at the moment", code="unavailable")
    return refused(str(error), param, "invalid_value")


def install(app: FastAPI) -> None:
    """Every error of the app in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def ours(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        what = f"{request.method} {request.url.path}: " if code else ""
        response = ApiError(error.status_code, f"{what}{error.detail}", code=code).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return ApiError(500, INTERNAL, code="internal_error").response()


def validation_error(errors: Sequence[Any], body: object) -> ApiError:
    """One mistake, where it lies deepest (the other alternatives of a field never got that far), with all that would do. A
    list that is too long is one whose items were right as far as it was read."""
    errors = [error for error in errors if error["type"] == "too_long"] or errors
    paths = [_path(error, body) for error in errors]
    first = max(paths, key=lambda path: 0 if path is None else 1 + path.count(".") + path.count("["))
    there = [error for error, path in zip(errors, paths, strict=True) if path == first]
    message = " or ".join(dict.fromkeys(map(_message, there)))
    missing = there[0]["type"] == "missing"
    code = "missing_required_parameter" if missing else "invalid_json" if first is None else "invalid_value"
    return refused(f"{first}: {message}" if first else message, first, code)


def _message(error: Mapping[str, Any]) -> str:
    if not error["loc"]:
        return "the body must be a JSON object, sent with the content type application/json"
    return str(error["msg"]).removeprefix("Value error, ")


def _path(error: Mapping[str, Any], body: object) -> str | None:
    """messages[0].content: where in the body the mistake is, without the names of alternatives that pydantic mixes in."""
    path, at = "", body
    for part in error["loc"]:
        if isinstance(at, dict) and (part in at or error["type"] == "missing"):
            path, at = f"{path}.{part}" if path else str(part), at.get(part)
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            path, at = f"{path}[{part}]", at[part]
    return path or None
