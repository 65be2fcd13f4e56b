"""Connections before they are requests: how many there may be, and how long each may take over its head and body.

uvicorn has no deadline for a request's head and no cap on connections, so that whoever opens a thousand and sends nothing
keeps everybody else out, before any key is asked for. Here each connection is in one phase at a time, and most phases end
by themselves:

    HEAD       the request line and headers are awaited     --header-timeout, then 408
    BODY       the body is awaited                          --body-timeout, then 408, which a guard of the app sends first
    RESPONSE   the answer is being made and sent            --timeout, kept by the handler
    IDLE       the next request may come                    KEEP_ALIVE, then closed
    CLOSING    the last bytes are being sent                LAST_BYTES, then cut

A deadline counts from the beginning of its phase: bytes that trickle in do not move it. Where all places are taken, the
connection that has waited longest in HEAD or IDLE, or else in BODY, makes room for a new one; where all have requests that
are being answered, the new one gets 503.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from fathomlm.serve.errors import ApiError, refused, to_json
from fathomlm.serve.options import ServeOptions

APP_FIRST = 1.0
"""Seconds by which the app's own guard of a body is ahead, so that the 408 is in its log and metrics."""
KEEP_ALIVE = 5.0
"""Seconds that a connection may be idle between two requests."""
LAST_BYTES = 5.0
"""Seconds that a connection which is being closed has for what was written to it."""
REFUSING = 64
"""Connections beyond the cap that may wait for their 503; more are cut without one."""
PATIENCE = 1.0
"""Seconds in which a connection that will get 503 has to send something: an answer to nothing is often not read."""
PROBES = (0.05, 0.05)
"""Seconds until a client that has closed its side is written to, and until that has shown whether it is still there."""
PROBE = 1.0
"""Seconds between two such writes from then on."""
ACCEPTED = 32
"""Connections that are accepted at a time. asyncio accepts some batches before the first of them is seen here: small ones
leave file descriptors, without which it would accept nobody for a second."""
SPARE_FILES = 8 * ACCEPTED
"""File descriptors of the process that are not for connections, or are for those that were accepted and not seen yet."""
HALF_CLOSED = "fathomlm.half_closed"
"""In a request's scope: an event that is set when the client has closed its side of the connection."""


class Phase(Enum):
    HEAD = "head"
    BODY = "body"
    RESPONSE = "response"
    IDLE = "idle"
    CLOSING = "closing"


class Connections:
    """All connections of a server, and which one is closed when there are too many."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = options.max_connections
        if files != resource.RLIM_INFINITY:  # with no file descriptor left, no error could be sent
            self.most = max(min(self.most, files - REFUSING - SPARE_FILES), 1)
        self.waiting: dict[Connection, None] = {}
        """Those that the server waits for, the one that waits longest first."""
        self.refused: set[Connection] = set()
        self._clients: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._clients.total()

    def protocol(self, *arguments: Any, **options: Any) -> Connection:
        """What uvicorn makes a connection with."""
        return Connection(self, *arguments, **options)

    def admit(self, new: Connection) -> bool:
        """Whether there is room for it, after another one may have been closed."""
        client = new.client_key
        if self._clients[client] >= self.options.max_connections_per_client and not self._make_room(client):
            return False
        if len(self) >= self.most and not self._make_room(None):
            return False
        self._clients[client] += 1
        new.counted = True
        return True

    def remove(self, gone: Connection) -> None:
        """Its place is free, although its last bytes may still be on their way."""
        self.waiting.pop(gone, None)
        if not gone.counted:
            return
        gone.counted = False
        self._clients[gone.client_key] -= 1
        if not self._clients[gone.client_key]:
            del self._clients[gone.client_key]

    def _make_room(self, client: str | None) -> bool:
        found = [one for one in self.waiting if client is None or one.client_key == client]
        if not found:
            return False
        next((one for one in found if one.phase is not Phase.BODY), found[0]).evict()
        return True


def client_key(address: str | None) -> str:
    """What counts as one client: an IPv4 address, or the 64 bits of an IPv6 address that name a network."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or ""
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class Connection(H11Protocol):
    """uvicorn's, with phases, deadlines, and an answer for clients that close their side first."""

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.phase = Phase.HEAD
        self.client_key = ""
        self.counted = False
        """Whether it takes one of the places."""
        self._all, self._options = connections, connections.options
        self._admitted = False
        self._of: object = self  # what the phase is about: nothing yet, then a request
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed = asyncio.Event()

    # What asyncio and uvicorn call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = get_remote_addr(transport)
        self.client_key = client_key(peer[0] if peer else None)
        self._admitted = self._all.admit(self)
        if self._admitted:
            super().connection_made(transport)
            self._enter(Phase.HEAD, None)
            return
        self.transport = transport
        if len(self._all.refused) >= REFUSING:
            transport.abort()
            return
        self._all.refused.add(self)
        self._timer = self.loop.call_later(PATIENCE, self._refuse)

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            self._refuse()
            return
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # its task has not begun yet
            self.cycle.scope[HALF_CLOSED] = self._half_closed  # type: ignore[literal-required]

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that closes its side after it has asked still waits for the answer, or has gone; which of them is known
        once something is written to it."""
        self._half_closed.set()
        if not self._admitted or self.phase is not Phase.RESPONSE:
            return False
        self._probe_timer = self.loop.call_later(PROBES[0], self._probe, *PROBES[1:])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        if not self._admitted:
            self._all.refused.discard(self)
            return
        self._all.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._options.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def shutdown(self) -> None:
        if self.phase is Phase.BODY:  # it would get 503
            self.transport.close()
        if not self.transport.is_closing():
            super().shutdown()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._answer(refused(msg.rstrip(".").lower(), None, "invalid_http"))

    # Phases.

    def _watch(self) -> None:
        """Find the phase from where uvicorn and h11 stand."""
        cycle, theirs = self.cycle, self.conn.their_state
        if self.transport.is_closing():
            self._enter(Phase.CLOSING, None)
        elif theirs is h11.SEND_BODY:
            self._enter(Phase.BODY, cycle)
        elif cycle is not None and not cycle.response_complete:
            self._enter(Phase.RESPONSE, cycle)
        elif cycle is None or self.conn.trailing_data[0]:
            self._enter(Phase.HEAD, cycle)
        else:
            self._enter(Phase.IDLE, cycle)

    def _enter(self, phase: Phase, of: object) -> None:
        if (phase, of) == (self.phase, self._of):
            return
        self.phase, self._of = phase, of
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._all.waiting.pop(self, None)
        if phase in (Phase.HEAD, Phase.IDLE, Phase.BODY):
            if self._half_closed.is_set():  # nothing more can come
                self.transport.close()
                self._enter(Phase.CLOSING, None)
                return
            self._all.waiting[self] = None
        ends: dict[Phase, tuple[float, Callable[[], object]]] = {
            Phase.HEAD: (self._options.header_timeout, self._late),
            Phase.BODY: (self._options.body_timeout + APP_FIRST, self._late),
            Phase.IDLE: (KEEP_ALIVE, self.transport.close),
            Phase.CLOSING: (LAST_BYTES, self.transport.abort),
        }
        if phase in ends:
            self._timer = self.loop.call_later(*ends[phase])

    def _late(self) -> None:
        what = "headers" if self.phase is Phase.HEAD else "body"
        seconds = self._options.header_timeout if self.phase is Phase.HEAD else self._options.body_timeout
        self._answer(ApiError(408, f"the request's {what} did not arrive within {seconds:g} seconds", code="timeout"))

    def evict(self) -> None:
        """Make room for another connection."""
        if self.phase is Phase.IDLE:
            self.transport.close()
            self._watch()
        else:
            message = "the server has too many connections, and this one had not sent its request yet"
            self._answer(ApiError(408, message, code="too_many_connections"))
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self._all.remove(self)

    def _refuse(self) -> None:
        message = "the server has too many connections; come again later"
        self._answer(ApiError(503, message, code="too_many_connections"))

    def _answer(self, error: ApiError) -> None:
        """Send the error, unless another response has begun, and close."""
        cycle = self.cycle
        between = cycle is None or (cycle.response_complete and self.phase in (Phase.HEAD, Phase.IDLE))
        if not self.transport.is_closing() and (between or not cycle.response_started):
            self.transport.write(_written(error))
        self.transport.close()
        if self._admitted:
            self._watch()

    # Clients that closed their side.

    def _probe(self, *later: float) -> None:
        """Write what changes nothing. The machine of a client that has gone answers that it knows of no connection, and
        the next write fails; a client that waits skips it. Streams of events do the same themselves."""
        cycle = self.cycle
        if self.transport.is_closing() or self.phase is not Phase.RESPONSE:
            return
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event) or b"")
        wait, *rest = later or (PROBE,)
        self._probe_timer = self.loop.call_later(wait, self._probe, *rest)


def _written(error: ApiError) -> bytes:
    response = error.response()
    response.headers["connection"] = "close"
    head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
    reason = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}[error.status]
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (error.status, reason, head, to_json(error.record()))
