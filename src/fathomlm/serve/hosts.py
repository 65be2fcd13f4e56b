"""Which names a server answers to.

A page on the web may point its own name at 127.0.0.1 once it is loaded (DNS rebinding); the browser then lets its scripts
read a server on this machine as if it were their own. Such a request carries the page's name in `Host`, so names that are
not the server's own are refused. An address in numbers cannot be rebound, and is always taken.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from fathomlm.serve.errors import ApiError
from fathomlm.serve.options import ServeOptions

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANYWHERE = ("0.0.0.0", "::", "")
SHOWN = 100
"""Characters of a wrong name that are said again."""


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


class Hosts:
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
