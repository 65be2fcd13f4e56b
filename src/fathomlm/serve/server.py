"""Running the app: here, with its socket and a graceful shutdown, or as several copies behind one address, on Ray Serve.

The first SIGTERM or Ctrl-C turns /ready to 503 and rejects new requests, while running ones continue; the port stays open
meanwhile, so that a load balancer can see it. When all have ended, or their time is up, the server goes. A second signal
does not wait.

Each replica is the same ASGI application over an engine of its own. Ray's proxies listen at the address and hand each
request to a replica that has little to do. Ray starts replicas on whatever machines its cluster has, and replaces one whose
engine has failed permanently. Nothing of Ray is imported before a function here is called.

What a replica needs, API keys included, travels to it pickled over Ray's own connections: on no command line, in no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from fathomlm.errors import FathomError, OptionError
from fathomlm.interrupts import on_signals
from fathomlm.serve.connections import ACCEPTED, Connections
from fathomlm.serve.logs import log_event
from fathomlm.serve.options import ReplicaOptions, ServeOptions
from fathomlm.serve.service import Service

if TYPE_CHECKING:
    from fathomlm.serve.served_model import ServedModel

CLOSING = 5
"""Seconds that connections get to take what has been written for them, at most."""
WAITING = 1024
"""Connections that the kernel holds until they are accepted."""
APPLICATION = "fathomlm"
TRIES = 1
"""Of each replica whose model does not load: what is wrong with it is wrong the next time too."""
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


class Replica:
    """What Ray asks of a replica beside HTTP; it is put around the application."""

    app: FastAPI

    async def check_health(self) -> None:
        """Ray puts a new replica in the place of one that raises here."""
        phase = self.app.state.service.phase
        if phase == "failed":
            raise RuntimeError("the engine has failed permanently")


def run_replicas(
    load: Callable[[], ServedModel], options: ServeOptions, replicas: ReplicaOptions, host: str, port: int,
    ready: Callable[[], object],
) -> None:  # fmt: skip
    """Serve until SIGTERM or Ctrl-C, then let running requests finish. `load` is called in each replica and must pickle."""
    import ray
    from ray import serve

    local = replicas.address is None
    if local:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a server tells nobody that it runs
        cpus = max(os.cpu_count() or 1, replicas.most * replicas.cpus)  # a count for placing replicas, no limit
        ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
        _check_gpus(ray.cluster_resources().get("GPU", 0), replicas)
    else:
        try:
            ray.init(address=replicas.address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError) as error:
            what = "its address may be wrong, or its token missing (RAY_AUTH_MODE=token)"
            raise OptionError(f"cannot join the Ray cluster at {replicas.address}: {what}: {error}") from error
    with _stop_event() as stop:  # Ray has signal handlers of its own, which these replace
        try:
            serve.start(proxy_location="HeadOnly" if local else "EveryNode", http_options={"host": host, "port": port})
            try:
                serve.run(_application(load, options, replicas), name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                raise FathomError(f"no replica could be started: {_cause() or error}") from error
            ready()
            stop.wait()
        finally:
            serve.delete(APPLICATION)  # waits for replicas to end, and they for their requests
            if local:
                serve.shutdown()
            ray.shutdown()


@contextlib.contextmanager
def _stop_event() -> Generator[threading.Event, None, None]:
    """Set by the first signal. The second does not wait: the processes that Ray started here end with this one."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    with on_signals(on_signal):
        yield stop


def _application(load: Callable[[], ServedModel], options: ServeOptions, replicas: ReplicaOptions) -> Any:
    from ray import serve

    def build() -> FastAPI:
        from fathomlm.engine.heap import settle_heap
        from fathomlm.serve.app import create_app
        from fathomlm.serve.logs import configure_logging

        name = serve.get_replica_context().replica_tag
        configure_logging(replica=name)
        served = load()  # here and not in the background, so that what it raises is what Ray reports
        settle_heap()
        service = Service(lambda: served, replica=name)
        app = create_app(service, options)
        app.state.service = service
        return app

    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name="replica",
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        max_ongoing_requests=replicas.max_ongoing,
        max_queued_requests=replicas.max_ongoing,
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=TRIES,
        logging_config={"enable_access_log": False},
        **_scaling(replicas),
    )
    return deployment.bind()


def _scaling(replicas: ReplicaOptions) -> dict[str, Any]:
    if replicas.max_replicas is None:
        return {"num_replicas": replicas.replicas}
    bounds = {"min_replicas": replicas.replicas, "max_replicas": replicas.max_replicas}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": replicas.ongoing}}


def _check_gpus(found: float, replicas: ReplicaOptions) -> None:
    """A replica that has no GPU to come to would be waited for without end."""
    wanted = replicas.most * replicas.gpus
    if wanted > found:
        raise OptionError(
            f"{replicas.most} replicas require {wanted} GPUs and this machine has {found:g}; give fewer --replicas"
        )


def _cause() -> str | None:
    """What the last replica that could not be started raised, of all that Ray says about it."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [one.message for one in application.deployments.values()] if application else []
    lines = [line.strip() for message in messages for line in message.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return re.sub(r"^fathomlm\.errors\.\w+: ", "", raised[-1]) if raised else None
