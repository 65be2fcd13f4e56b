"""Running the app: its socket, and a graceful shutdown.

The first SIGTERM or Ctrl-C turns /ready to 503 and rejects new requests, while running ones continue; the port stays open
meanwhile, so that a load balancer can see it. When all have ended, or their time is up, the server goes. A second signal
does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from fathomlm.interrupts import on_signals
from fathomlm.serve.connections import ACCEPTED, Connections
from fathomlm.serve.logs import log_event
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.service import Service

CLOSING = 5
"""Seconds that connections get to take what has been written for them, at most."""
WAITING = 1024
"""Connections that the kernel holds until they are accepted."""
CUT_OFF = 0.5
"""Seconds to send final errors to aborted requests, and for the engine to stop them."""


class Server(uvicorn.Server):
    """uvicorn, with our way of ending. Its parts are named, so that it is the same server whatever else is installed."""

    def __init__(self, app: FastAPI, service: Service, options: ServeOptions) -> None:
        self.connections = Connections(options)
        protocol: Any = self.connections.protocol  # uvicorn calls it and asks no more of it
        super().__init__(
            uvicorn.Config(
                app, lifespan="on", log_config=None, access_log=False, server_header=False, ws="none",
                timeout_graceful_shutdown=CLOSING, loop="asyncio", http=protocol,
                backlog=ACCEPTED,
            )
        )  # fmt: skip
        self._service, self._options = service, options
        self._ending: asyncio.Task[None] | None = None
        service.on_failure = self._give_up

    def run_at(self, sock: socket.socket) -> None:
        """Until a signal ends it. An error of loading is raised here."""
        self.run(sockets=[sock])
        if self._service.failure is not None:
            raise self._service.failure

    def end(self) -> None:
        """In the server's event loop: finish running requests, then exit. A second call exits at once."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._finish())
        else:
            self._service.abandoned = self.should_exit = self.force_exit = True
            log_event("cut off", logging.WARNING)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING)  # asyncio takes one number for this and for how many it accepts at a time

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn leaves the application out when it is in a hurry, which then complains; ours is in a hurry too."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def _finish(self) -> None:
        """Whatever was not taken, or not ended, when the time is up has `CUT_OFF` seconds to end, and is left behind."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._options.drain_timeout
        log_event("draining", timeout=self._options.drain_timeout)
        whole = await self._service.drain(self._options.drain_timeout, CUT_OFF)
        log_event("drained", complete=whole)
        left = min(max(ends - loop.time(), CUT_OFF), CLOSING)
        self.config.timeout_graceful_shutdown = left  # type: ignore[assignment]  # it takes fractions as well
        self.should_exit = True

    def _give_up(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn raises a signal again when it is done; for us a drained server has ended well."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._ending is not None:  # a second signal: what is aborted now was asked for
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            loop.call_soon_threadsafe(self.end)

        with on_signals(on_signal):
            yield
