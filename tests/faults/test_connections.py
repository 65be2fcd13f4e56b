"""Clients that connect and do not ask, ask and do not listen, or close their side and wait. Deadlines are tiny where a test
waits for them and an hour where they must not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fathomlm.serve.connections import Phase, client_key
from fathomlm.serve.options import ServeOptions
from serve.serving import Running, running, until

pytestmark = pytest.mark.usefixtures("one_thread")

NEVER = 3600.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"


@contextmanager
def dialled(found: Running, sent: bytes = b"") -> Iterator[socket.socket]:
    host, port = found.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        if sent:
            raw.sendall(sent)
        yield raw


def answer(raw: socket.socket) -> tuple[int, dict[str, Any]]:
    """All that comes until the server closes: its status, and the error in it."""
    told = b""
    while part := raw.recv(65536):
        told += part
    return parse(told)


def parse(told: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = told.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "], ids=["nothing", "half a header"])
def test_headers_have_a_deadline(tiny_model: Any, sent: bytes) -> None:
    with running(tiny_model, ServeOptions(header_timeout=0.1, body_timeout=NEVER)) as strict, dialled(strict, sent) as raw:
        status, body = answer(raw)
        assert (status, body["error"]["code"]) == (408, "timeout")


def test_bytes_that_trickle_in_do_not_move_the_deadline(tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(header_timeout=0.3)) as strict, dialled(strict, b"GET / HTTP/1.1\r\n") as raw:
        raw.settimeout(0.01)
        told = b""
        with suppress(ConnectionError):
            while True:
                raw.sendall(b"x")
                try:
                    part = raw.recv(4096)
                except TimeoutError:
                    continue
                told += part
                if not part:
                    break
        assert not told or parse(told)[0] == 408


def test_a_second_request_has_a_deadline_for_its_headers_too(tiny_model: Any) -> None:
    first = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with running(tiny_model, ServeOptions(header_timeout=3.0)) as strict, dialled(strict, first) as raw:
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /hea")
        assert answer(raw)[0] == 408


def test_a_body_has_a_deadline_even_where_it_was_refused_unread(tiny_model: Any) -> None:
    """A 401 is sent without reading the body; what comes after it must not keep the connection for ever."""
    options = ServeOptions(api_keys=("key",), body_timeout=0.1)
    with running(tiny_model, options) as strict, dialled(strict, HEAD + b"\r\n{") as raw:
        raw.settimeout(0.05)
        told = b""
        while True:
            try:
                raw.sendall(b" ")
                part = raw.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not part:
                break
            told += part
        assert told.startswith(b"HTTP/1.1 401 ")
        assert told.count(b"HTTP/1.1") == 1
        until(lambda: not len(strict.server.connections))


def test_half_open_connections_make_room_for_those_that_ask(tiny_model: Any) -> None:
    """None of the deadlines comes: only eviction can let the others in."""
    options = ServeOptions(
        header_timeout=NEVER, body_timeout=NEVER, max_connections=8, max_connections_per_client=8
    )  # fmt: skip
    with running(tiny_model, options) as small, ExitStack() as stack:
        for number in range(40):
            stack.enter_context(dialled(small, b"" if number % 2 else HEAD))
            if number % 8 == 7:
                assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        assert len(small.server.connections) <= 8
        response = httpx.post(f"{small.url}/v1/completions", json={"prompt": "the fox", "max_tokens": 2}, timeout=60)
        assert response.status_code == 200


def test_the_oldest_goes_first_and_is_told(tiny_model: Any) -> None:
    options = ServeOptions(header_timeout=NEVER, max_connections=2, max_connections_per_client=2)
    with running(tiny_model, options) as small, ExitStack() as stack:
        first = stack.enter_context(dialled(small, b"GET /he"))
        until(lambda: len(small.server.connections) == 1)
        second = stack.enter_context(dialled(small, b"GET /he"))
        until(lambda: len(small.server.connections) == 2)
        third = stack.enter_context(dialled(small, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"))
        status, body = answer(first)
        assert (status, body["error"]["code"]) == (408, "too_many_connections")
        assert answer(third) == (200, {"status": "ok"})
        second.sendall(b"alth HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        assert answer(second) == (200, {"status": "ok"})


def test_a_body_under_way_goes_after_those_that_sent_nothing(tiny_model: Any) -> None:
    options = ServeOptions(header_timeout=NEVER, body_timeout=NEVER, max_connections=2, max_connections_per_client=2)
    with running(tiny_model, options) as small, ExitStack() as stack:
        body = json.dumps({"prompt": "the fox", "max_tokens": 2}).encode().ljust(1000)
        writing = stack.enter_context(dialled(small, HEAD + b"connection: close\r\n\r\n" + body[:500]))
        until(lambda: [one.phase for one in small.server.connections.waiting] == [Phase.BODY])
        idle = stack.enter_context(dialled(small))
        until(lambda: len(small.server.connections) == 2)
        assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        assert answer(idle)[0] == 408
        writing.sendall(body[500:])
        assert answer(writing)[0] == 200


@pytest.fixture
def held(tiny_model: Any) -> Iterator[Any]:
    """A server whose engine does not step until it is let."""

    @contextmanager
    def start(options: ServeOptions) -> Iterator[tuple[Running, threading.Event]]:
        with running(tiny_model, options) as found:
            step, go_on = found.engine.step, threading.Event()

            def waiting() -> None:
                assert go_on.wait(120)
                step()

            found.engine.step = waiting  # type: ignore[method-assign]
            try:
                yield found, go_on
            finally:
                go_on.set()

    return start


ASKED = {"prompt": "the fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def request(path: str = "/v1/completions", version: str = "1.1", **body: Any) -> bytes:
    content = json.dumps(ASKED | body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize(("client", "total"), [(8, 2), (2, 8)], ids=["total", "client"])
def test_where_everybody_is_being_answered_a_new_one_gets_503(held: Any, client: int, total: int) -> None:
    options = ServeOptions(max_connections=total, max_connections_per_client=client)
    with held(options) as (full, go_on), ExitStack() as stack:
        asking = [stack.enter_context(dialled(full, request())) for _ in range(2)]
        until(lambda: len(full.server.connections) == 2 and not full.server.connections.waiting)
        response = httpx.get(f"{full.url}/health", timeout=60)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.headers["connection"] == "close"
        assert response.json()["error"]["code"] == "too_many_connections"
        go_on.set()
        for raw in asking:
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert httpx.get(f"{full.url}/health", timeout=60).status_code == 200


def test_places_come_back(tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(max_connections=2, max_connections_per_client=1)) as small:
        for _ in range(20):
            assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        small.http.close()
        until(lambda: len(small.server.connections) == 0)
        assert not small.server.connections.waiting
        assert not small.server.connections.refused


def test_who_is_one_client() -> None:
    assert client_key("10.0.0.1") == client_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff:1") != client_key("2001:db8:0:1::1")
    assert client_key("fe80::1%eth0") == "fe80::/64"
    assert client_key(None) == ""


def test_a_header_without_end_is_refused_in_words(tiny_model: Any) -> None:
    with running(tiny_model) as found, dialled(found, b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000) as raw:
        told = raw.recv(4096)
        assert told.startswith(b"HTTP/1.1 400 ")
        assert set(parse(told)[1]["error"]) == {"message", "type", "param", "code"}


# Clients that close their side.


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_closes_its_side_gets_its_answer(held: Any, version: str) -> None:
    with held(ServeOptions()) as (found, go_on), dialled(found, request(version=version)) as raw:
        raw.shutdown(socket.SHUT_WR)
        until(lambda: found.service.served.engine.status().in_flight == 1)
        if version == "1.1":
            assert raw.recv(4096).startswith(b"HTTP/1.1 100 ")  # is it still there?
        go_on.set()
        told = b""
        while part := raw.recv(65536):
            told += part
        status, body = parse(told[told.rindex(b"HTTP/1.1 ") :])
        assert (status, body["usage"]["completion_tokens"]) == (200, 4)


def test_a_client_that_closes_its_side_gets_a_quick_answer_alone(tiny_model: Any) -> None:
    with running(tiny_model) as found:
        for path, status in ((b"/health", 200), (b"/nothing", 404)):
            with dialled(found, b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path) as raw:
                raw.shutdown(socket.SHUT_WR)
                told = b""
                while part := raw.recv(65536):
                    told += part
                assert parse(told[told.rindex(b"HTTP/1.1 ") :])[0] == status


def test_a_client_that_closes_its_side_gets_its_stream(held: Any) -> None:
    with held(ServeOptions()) as (found, go_on), dialled(found, request(stream=True)) as raw:
        raw.shutdown(socket.SHUT_WR)
        told = b""
        while b":\n\n" not in told:
            told += raw.recv(65536)
        go_on.set()
        while part := raw.recv(65536):
            told += part
        assert b"data: [DONE]" in told
        assert told.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_its_first_token_is_noticed(held: Any, stream: bool) -> None:
    """Closing altogether looks the same at first. The engine stands still meanwhile, so no token can tell."""
    with held(ServeOptions()) as (found, go_on):
        with dialled(found, request(stream=stream)):
            until(lambda: found.server.server_state.tasks and not found.server.connections.waiting)
            until(lambda: found.service.served.engine._inbox or found.service.served.engine._streams)
        until(lambda: not found.server.server_state.tasks, 60)
        assert len(found.server.connections) == 0
        go_on.set()
        until(found.free)
        assert found.engine.totals.tokens < 4


def test_a_client_that_does_not_read_is_cut_off(tiny_model: Any) -> None:
    """The answer is larger than what the machine holds for a client; the request's time ends the connection."""
    with running(tiny_model, ServeOptions(timeout=1.0)) as found:
        host, port = found.url.removeprefix("http://").split(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with raw:
            raw.settimeout(60)
            raw.connect((host, int(port)))
            ask = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            raw.sendall(ask * 800)
            until(lambda: len(found.server.connections) == 1)
            until(lambda: len(found.server.connections) == 0, 60)


def test_more_connections_than_files_do_not_silence_the_server(tiny_model_dir: Path, start_python: Any) -> None:
    """The command, where it may open 450 files. No deadline comes, so that only eviction lets anybody in."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (450, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "from fathomlm.cli.main import main\n"
        f"words = [{str(tiny_model_dir)!r}, '--port', '0', '--threads', '1', '--header-timeout', '3600']\n"
        "sys.exit(main(['serve', *words, '--max-connections-per-client', '1024']))\n"
    )
    process = start_python(script)
    url = next(line for line in process.stderr if " ready at " in line).split(" ready at ")[1].split()[0]
    told: list[str] = []
    threading.Thread(target=lambda: told.extend(process.stderr), daemon=True).start()
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(700):
            raw = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            raw.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=120).status_code == 200
    assert not told  # asyncio says so when it is out of files
