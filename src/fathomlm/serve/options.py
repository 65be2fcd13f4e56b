"""How a server is set up: access, limits, replicas, and where it listens. Without torch: a port in use is to be known before
that is imported."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from fathomlm.errors import OptionError, require
from fathomlm.options import check, option

HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Access and limits: everything but the engine's own sizes (`EngineOptions`)."""

    host: str = option("127.0.0.1", metavar="HOST", help="address to listen on; the default is this machine only")
    port: int = option(8000, ge=0, le=65535, help="port to listen on; 0 takes any free one")
    api_keys: tuple[str, ...] = option(
        (), flag="--api-key", metavar="KEY",
        help="require this API key; repeatable; other users of this machine may see it in the process list",
    )  # fmt: skip
    """None: no authentication."""
    allowed_hosts: tuple[str, ...] = option(
        (), metavar="NAMES", comma=True,
        help="host names that clients may use, separated by commas: api.example.org, *.example.org or * for any; numeric "
        "addresses are always allowed", default_text="localhost and --host",
    )  # fmt: skip
    """None: what `fathomlm.serve.middleware` finds safe for `host`."""
    cors: tuple[str, ...] = option((), metavar="ORIGIN", help="allow browser pages from ORIGIN; repeatable")
    max_tokens: int | None = option(None, ge=1, help="max new tokens per completion", default_text="the context's rest")
    max_choices: int = option(32, ge=1, help="max completions per request: prompts times n")
    max_stops: int = option(16, ge=1)
    max_stop_length: int = option(256, ge=1)
    """Characters of one stop string."""
    max_body: int = option(1 << 20, ge=1, size=1, help="max size of a request's body")
    max_connections: int = option(1024, ge=1, help="max open connections")
    """Fewer where the process may open fewer files."""
    max_connections_per_client: int = option(
        256, ge=1, help="max open connections per client address; behind a proxy set it to --max-connections"
    )
    header_timeout: float = option(10.0, gt=0, metavar="S", help="seconds for a request's headers to arrive")
    body_timeout: float = option(30.0, gt=0, metavar="S", help="seconds for a request's body to arrive")
    timeout: float = option(600.0, gt=0, metavar="S", help="seconds per request, waiting in the queue included")
    drain_timeout: float = option(30.0, gt=0, metavar="S", help="seconds for running requests to end at shutdown")
    generation_config: bool = option(
        True, help="take the sampling defaults of requests from the model's generation_config.json"
    )
    log_prompts: bool = option(False, help="log prompts and completions; by default neither is, they are the users' own")

    def __post_init__(self) -> None:
        check(self)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise OptionError("an API key must be printable ASCII text without spaces, and not empty")
        for name in self.allowed_hosts:
            if name != "*" and not HOST.fullmatch(name):  # numeric addresses are allowed anyway
                raise OptionError(f"an allowed host is a name without a port, such as api.example.org, got '{name}'")
        for origin in self.cors:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise OptionError(f"a CORS origin is a scheme and a host, such as http://localhost:3000, got '{origin}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are, where, and what each may use."""

    replicas: int = option(1, ge=1, help="copies of the model, each with its own engine")
    """The fewest, where `max_replicas` is more."""
    max_replicas: int | None = option(None, ge=1, help="scale up to N replicas under load", default_text="--replicas")
    address: str | None = option(
        None, flag="--ray-address", metavar="ADDRESS", default_text="start Ray here",
        help="join a running Ray cluster at host:port, or auto on one of its machines",
    )  # fmt: skip
    cpus: int = option(1, ge=1)
    gpus: int = option(0, ge=0)
    ongoing: int = option(16, ge=1)
    """Requests of a replica at a time, above which Ray starts another one."""
    max_ongoing: int = option(300, ge=1)
    """Requests that a replica is given at all. Its own queue is shorter, so that a full one answers 429."""

    def __post_init__(self) -> None:
        check(self)
        most = self.max_replicas
        require(most is None or most >= self.replicas, "max_replicas", f">= replicas, which is {self.replicas}", most)

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas


def bind(host: str, port: int) -> socket.socket:
    """A socket of its own, so that a port that is taken is known before the model is loaded. Port 0 is any free one."""
    if not 0 <= port <= 65535:
        raise OptionError(f"a port is a number from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"cannot listen at {host}: {error.strerror}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise OptionError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port") from error
    return found


def address_of(sock: socket.socket) -> str:
    """http://host:port"""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
