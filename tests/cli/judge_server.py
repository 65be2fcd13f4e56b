"""An OpenAI-compatible server that says what a test tells it to, in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = "Relevance: 5\nInformativeness: 4\nFluency: 3\nCoherence: 2"


@dataclass(frozen=True, slots=True)
class Said:
    """One response."""

    text: str | None = None
    """What the model says; None sends `raw`."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    finish: str = "stop"
    wait: threading.Event | None = None
    """The response waits for this."""

    def data(self) -> bytes:
        if self.text is None:
            return self.raw
        message = {"role": "assistant", "content": self.text}
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]}).encode()


@dataclass(slots=True)
class Judge:
    """A running server, and what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


@contextmanager
def judge(answer: Callable[[str, int], Said]) -> Iterator[Judge]:
    """`answer` gets a prompt and how often that prompt came before."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            with lock:
                before = found.prompts.count(prompt)
                found.bodies.append(body)
                found.headers.append({"path": self.path, **{name.title(): value for name, value in self.headers.items()}})
            said = answer(prompt, before)
            if said.wait is not None:
                said.wait.wait(600)
            data = said.data()
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Judge(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
