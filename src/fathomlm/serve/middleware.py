"""What every request passes on its way in: a line in the log, its host name, the key, the size of its body.

A page on the web may point its own name at 127.0.0.1 once it is loaded (DNS rebinding); the browser then lets its scripts
read a server on this machine as if it were their own. Such a request carries the page's name in `Host`, so names that are
not the server's own are refused. A numeric address cannot be rebound, and is always allowed.

Plain ASGI, so that a stream goes through untouched and a client that disconnects is noticed at once.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fathomlm.serve.errors import ApiError
from fathomlm.serve.logs import LogEntry, log_event
from fathomlm.serve.metrics import Metrics
from fathomlm.serve.options import ServeOptions

OPEN = ("/", "/health", "/ready", "/openapi.json", "/docs")
"""Paths that need no key: probes, and what a browser must load before it can send one."""
ENTRY = "fathomlm.entry"
ID_LENGTH = 64
"""Characters of a request's id that came from outside."""
GONE = 499
"""In logs and metrics: the client disconnected before it had its response."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
QUIET = ("/health", "/ready", "/metrics", "/v1/fathom/status")
"""Asked for every few seconds, by probes and by the page: not worth a line in the log."""
SHOWN = 100
"""Characters of a wrong name that are repeated."""


class RequestLog:
    """A line for each request when it is over, an id for it, and headers that every answer has. Behind a proxy that gives
    out ids (`numbered`) the id is the proxy's, which also puts it on the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str], numbered: bool = False) -> None:
        self._app, self._metrics, self._paths, self._numbered = app, metrics, paths, numbered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        entry = scope[ENTRY] = LogEntry()
        id = self._id(scope)
        status = GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if not self._numbered:
                    headers["x-request-id"] = id
                headers["x-content-type-options"] = "nosniff"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"]
            self._metrics.answered(path if path in self._paths else "other", status)
            client = scope.get("client")
            fields = {
                "id": id, "method": scope["method"], "path": path, "status": status,
                "seconds": round(time.perf_counter() - begun, 4), "client": client[0] if client else None,
            }  # fmt: skip
            quiet = path in QUIET and status == 200
            log_event("request", logging.DEBUG if quiet else logging.INFO, **fields, **entry.record())

    def _id(self, scope: Scope) -> str:
        given = Headers(scope=scope).get("x-request-id") if self._numbered else None
        return given[:ID_LENGTH] if given else f"req-{secrets.token_hex(12)}"


class ApiKeys:
    """Bearer keys, each compared in a time that does not depend on how much of it is right."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str] = frozenset()) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._open = open_paths | set(OPEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open or self._fits(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        error = ApiError(401, message, code="invalid_api_key", kind="authentication_error")
        await error.response()(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        found = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)


class BodyLimit:
    """Reads a body before anything else does, so that one that is too long, or never ends, costs little."""

    def __init__(self, app: ASGIApp, most: int, timeout: float) -> None:
        self._app, self._most, self._timeout = app, most, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read(scope, receive)
        except TimeoutError:
            body = ApiError(408, f"the body did not arrive within {self._timeout:g} seconds", code="timeout")
        if body is None:
            return
        if isinstance(body, ApiError):
            response = body.response()
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        first = True

        async def again() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The body, why not, or None of a client that disconnected."""
        error = ApiError(413, f"the body is more than this server's limit of {self._most} bytes", code="body_too_large")
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._most:
            return error
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                return error
            more = message.get("more_body", False)
        return b"".join(parts)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def host_name(header: str) -> str:
    """The name in a `Host` header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def allowed_hosts(options: ServeOptions) -> frozenset[str]:
    """Names beside addresses in numbers; `*` is any. What `--allowed-hosts` says is all; by default loopback names, the
    name or address that the server listens at and, where others can reach it, this machine's own. A server that others can
    reach and that asks for a key answers to any name: a page does not have the key."""
    if options.allowed_hosts:
        return frozenset(name.lower() for name in (*options.allowed_hosts, options.host, "localhost"))
    if is_loopback(options.host):
        return frozenset({"localhost", options.host.lower()})
    if options.api_keys:
        return frozenset({"*"})
    return frozenset({"localhost", options.host.lower(), socket.gethostname().lower()})


class AllowedHosts:
    """Refuses requests for other names with 403."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app, self._names = app, allowed
        self._under = tuple(name[1:] for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(scope) if scope["type"] == "http" else None
        if wrong is None:
            await self._app(scope, receive, send)
            return
        message = f"this server does not answer to the name '{wrong[:SHOWN]}'; start it with --allowed-hosts to allow names"
        error = ApiError(403, message, code="host_not_allowed", kind="permission_error")
        await error.response()(scope, receive, send)

    def _wrong(self, scope: Scope) -> str | None:
        """The first name that is not ours. Browsers always send one; HTTP/1.0 has none."""
        if "*" in self._names:
            return None
        found = [host_name(value.decode("latin-1")) for key, value in scope["headers"] if key == b"host"]
        return next((name for name in found if not self._fits(name)), None)

    def _fits(self, name: str) -> bool:
        return name in self._names or is_address(name) or name.endswith(self._under)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
