"""How a server is set up: who may ask, and how much."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fathomlm.errors import OptionError

HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything but the engine's own sizes (`EngineOptions`)."""

    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; none leaves it open to whoever reaches the port."""
    host: str = "127.0.0.1"
    """Where the server listens, which is one of the names that it answers to."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may call the server by, beside addresses in numbers and localhost: `api.example.org`,
    `*.example.org` or `*` for any. None: what `fathomlm.serve.hosts` finds safe for `host`."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser; none by default."""
    max_body: int = 1 << 20
    """Bytes of a request's body."""
    max_choices: int = 32
    """Texts that one HTTP request may ask for: prompts times n."""
    max_stops: int = 16
    max_stop_length: int = 256
    """Characters of one stop string."""
    max_tokens: int | None = None
    """New tokens of one text; by default only the context limits it."""
    timeout: float = 600.0
    """Seconds that a request may take, waiting in the queue and sending included."""
    header_timeout: float = 10.0
    """Seconds in which a request's headers have to arrive, from the beginning of the connection or of the request."""
    body_timeout: float = 30.0
    """Seconds in which a request's body has to arrive."""
    drain_timeout: float = 30.0
    """Seconds that running texts get to end once the server was told to stop."""
    max_connections: int = 1024
    """Connections at a time; fewer where the process may open fewer files."""
    max_connections_per_client: int = 256
    """Connections of one address at a time."""
    log_prompts: bool = False
    """Whether logs hold prompts and texts. They hold neither by default: they are the users' own."""

    def __post_init__(self) -> None:
        for name in (
            "max_body", "max_choices", "max_stops", "max_stop_length", "max_tokens", "max_connections",
            "max_connections_per_client",
        ):  # fmt: skip
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name == "max_tokens"):
                raise OptionError(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("timeout", "header_timeout", "body_timeout", "drain_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
                raise OptionError(f"{name} must be a number of seconds > 0, got {value!r}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise OptionError("an API key must be printable ASCII text without spaces, and not empty")
        for name in self.allowed_hosts:
            if name != "*" and not HOST.fullmatch(name):  # addresses in numbers are allowed anyway
                raise OptionError(f"an allowed host is a name without a port, such as api.example.org, got '{name}'")
        for origin in self.cors:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise OptionError(f"a CORS origin is a scheme and a host, such as http://localhost:3000, got '{origin}'")
