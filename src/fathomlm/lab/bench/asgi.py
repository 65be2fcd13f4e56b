"""The server's application around an engine, asked for streamed completions in the same process: what `bench host` measures
of a server. Sockets and HTTP's own bytes are left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fathomlm.engine.engine import Engine

Complete = Callable[[int], Awaitable[None]]
"""Stream one completion of so many tokens, to its end."""
PATH = "/v1/completions"
SCOPE: dict[str, Any] = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": PATH,
    "raw_path": PATH.encode(), "query_string": b"", "root_path": "",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
}  # fmt: skip


@asynccontextmanager
async def streaming_client(engine: Engine) -> AsyncIterator[Complete]:
    """The engine belongs to the server from then on."""
    from fathomlm.serve.app import create_app
    from fathomlm.serve.served_model import serve_model
    from fathomlm.serve.service import Service

    service = Service(lambda: serve_model(engine, name="null"))
    app = create_app(service)
    service.start()
    await service.loaded()

    async def complete(new: int) -> None:
        fields = {"model": "null", "prompt": [0], "max_tokens": new, "stream": True, "ignore_eos": True}
        body = {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}
        asked, status = iter([body]), 0

        async def receive() -> dict[str, Any]:
            if (message := next(asked, None)) is not None:
                return message
            await asyncio.get_running_loop().create_future()  # the client stays
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await app({**SCOPE}, receive, send)
        assert status == 200, f"the server answered {status}"

    try:
        yield complete
    finally:
        await service.close()
