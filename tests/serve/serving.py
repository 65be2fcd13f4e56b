"""A real server over a tiny engine, in a thread of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from openai import OpenAI

from fathomlm.engine.engine import Engine
from fathomlm.engine.options import RestartPolicy
from fathomlm.serve.app import create_app
from fathomlm.serve.options import ServeOptions, address_of, bind
from fathomlm.serve.served_model import serve_model
from fathomlm.serve.server import Server
from fathomlm.serve.service import Catalog, Service

SMALL: dict[str, Any] = {"batch_size": 4, "page_size": 4, "max_length": 96, "max_logprobs": 20}
NAME = "tiny"


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    engine: Engine
    service: Service
    server: Server
    thread: threading.Thread
    http: httpx.Client

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "any", "max_retries": 0} | options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)

    def free(self) -> bool:
        """Whether nothing runs and no page is held but by the prefix cache."""
        counters = self.service.served.engine.status().counters if self.service.served else None
        assert counters is not None
        idle = (counters.queued, counters.prefilling, counters.running) == (0, 0, 0)
        return idle and counters.pages_used == counters.pages_cached


@contextmanager
def running(
    model: Any, options: ServeOptions | None = None, *, exiting: Any = None, max_depth: int | None = None,
    headers: dict[str, str] | None = None, name: str = NAME, restarts: RestartPolicy | None = None,
    catalog: Catalog | None = None, **engine_options: Any,
) -> Iterator[Running]:  # fmt: skip
    engine = Engine(model, exiting=exiting, **(SMALL | engine_options))
    load = partial(serve_model, engine, name=name, exiting=exiting, max_depth=max_depth, restarts=restarts)
    with serving(Service(load, catalog=catalog), options, headers) as (url, rest):
        yield Running(url, engine, *rest)


@contextmanager
def serving(
    service: Service, options: ServeOptions | None = None, headers: dict[str, str] | None = None
) -> Iterator[tuple[str, Any]]:
    """The address of a server that has loaded its model, and its service, server, thread and a client."""
    chosen = options or ServeOptions()
    server = Server(create_app(service, chosen), service, chosen)
    sock = bind("127.0.0.1", 0)
    url = address_of(sock)
    thread = threading.Thread(target=server.run_at, args=(sock,))
    thread.start()
    try:
        until(lambda: service.served is not None and server.started)
        with httpx.Client(base_url=url, timeout=600, headers=headers) as http:
            yield url, (service, server, thread, http)
    finally:
        server.should_exit = True
        thread.join(600)
        assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 600.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it never came to hold"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream of server-sent events, and last the word that ends it."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
