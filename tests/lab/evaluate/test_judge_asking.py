"""Questions to a server that fails in every way that servers do, and answers that are kept."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli.judge_server import GOOD, Said, judge
from fathomlm.errors import DataError, OptionError, OutputError
from fathomlm.lab.evaluate.judge_client import Endpoint, EndpointError, JudgeError, Reply
from fathomlm.lab.evaluate.judge_questions import IN_A_ROW, AnswerFile, Answers, JudgeQuestion, ask_all, key_of

QUICK: dict[str, Any] = {"model": "m", "timeout": 5.0}
SOON = {"retry-after-ms": "1"}
"""What a server says that wants to be asked again at once."""


def asked_of(*prompts: str) -> list[JudgeQuestion]:
    return [JudgeQuestion(kind="likert", row=n, systems=(0,), prompt=prompt) for n, prompt in enumerate(prompts)]


def ask(path: Path, endpoint: Endpoint, *prompts: str, **options: Any) -> Answers:
    with AnswerFile(path) as answers:
        return ask_all(asked_of(*prompts), endpoint, answers, **options)


def one(endpoint: Endpoint, prompt: str = "q") -> Reply:
    async def ask_one() -> Reply:
        async with endpoint.client() as client:
            return await endpoint.ask(client, prompt)

    return asyncio.run(ask_one())


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "of-somebody-else")
    with judge(lambda prompt, before: Said(GOOD, finish="length")) as server:
        endpoint = Endpoint(base_url=server.url, key="k3y", body={"max_tokens": None, "seed": 3}, **QUICK)
        assert one(endpoint, "é {x}") == Reply(GOOD, "length")
        one(Endpoint(base_url=f"{server.url}/?version=2", **QUICK))
    body, bare = server.bodies
    assert body == {"model": "m", "messages": [{"role": "user", "content": "é {x}"}], "temperature": 0, "seed": 3}
    assert bare["max_tokens"] == 128
    assert (server.headers[0]["Authorization"], server.headers[0]["path"]) == ("Bearer k3y", "/v1/chat/completions")
    assert "Authorization" not in server.headers[1]
    assert server.headers[1]["path"] == "/v1/chat/completions?version=2"
    assert "k3y" not in repr(endpoint)
    assert "of-somebody-else" not in str(server.headers), "only what the command names is sent"


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with judge(
        lambda prompt, before: Said(GOOD) if before == 2 else Said(status=status, raw=b"busy", headers=SOON)
    ) as server:
        assert one(Endpoint(base_url=server.url, **QUICK)).text == GOOD
        assert len(server.bodies) == 3
    with judge(
        lambda prompt, before: Said(status=status, raw=b'{"error": {"message": "too  busy"}}', headers=SOON)
    ) as server:
        with pytest.raises(JudgeError, match=rf"answered {status}: too busy \(3 tries\)"):
            one(Endpoint(base_url=server.url, retries=2, **QUICK))
        assert len(server.bodies) == 3


def test_a_server_says_how_long_to_wait() -> None:
    with judge(lambda prompt, before: Said(GOOD) if before else Said(status=429, headers={"Retry-After": "1"})) as server:
        begun = time.monotonic()
        one(Endpoint(base_url=server.url, **QUICK))
    assert time.monotonic() - begun >= 1.0


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (Said(status=401, raw=b'{"error": {"message": "bad key k3y"}}'), EndpointError, r"answered 401: bad key \*\*\*$"),
        (Said(status=404, raw=b"nothing here"), EndpointError, "answered 404: nothing here"),
        (Said(status=307, headers={"Location": "http://127.0.0.1:1/v1"}), EndpointError, "answered 307"),
        (Said(status=400, raw=b"too long"), JudgeError, "answered 400: too long"),
        (Said(raw=b"<html>hello</html>"), JudgeError, "not a chat completion: <html>hello"),
        (Said(raw=b'{"choices": []}'), JudgeError, "not a chat completion"),
        (Said(raw=b'{"choices": [{"message": {"content": 3}}]}'), JudgeError, "its content is not a string"),
    ],
)
def test_what_will_not_pass_is_asked_once(said: Said, error: type[Exception], message: str) -> None:
    with judge(lambda prompt, before: said) as server:
        with pytest.raises(error, match=message) as found:
            one(Endpoint(base_url=server.url, key="k3y", **QUICK))
        assert (type(found.value), len(server.bodies)) == (error, 1)


def test_an_answer_without_words_is_an_answer() -> None:
    with judge(lambda prompt, before: Said(raw=b'{"choices": [{"message": {"content": null}}]}')) as server:
        assert one(Endpoint(base_url=server.url, **QUICK)) == Reply("", None)


def test_time_is_limited_before_and_within_an_answer() -> None:
    never = threading.Event()
    with judge(lambda prompt, before: Said(GOOD, wait=never)) as server:
        with pytest.raises(JudgeError, match=r"no answer within 0.1 s \(2 tries\)"):
            one(Endpoint(base_url=server.url, model="m", timeout=0.1, retries=1))
        never.set()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_drip, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(JudgeError, match=r"no answer within 0.3 s"):
            one(Endpoint(base_url=url, model="m", timeout=0.3, retries=0))


def _drip(listening: socket.socket) -> None:
    """A byte now and then, so that no single wait is long."""
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        try:
            while True:  # until the other side hangs up
                connection.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            pass


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(JudgeError, match=r"cannot reach .* \(2 tries\)"):
        one(Endpoint(base_url=url, retries=1, **QUICK))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "localhost:8000"}, "must begin with http://"),
        ({"base_url": "file:///etc/passwd"}, "must begin with http://"),
        ({"base_url": "http://host:port"}, "is not a URL"),
        ({"base_url": "http://me:secret@host"}, "must not hold a key"),
        ({"key": "two words"}, "holds no key"),
        ({"key": "line\n"}, "holds no key"),
        ({"timeout": 0}, "timeout must be > 0"),
        ({"retries": -1}, "retries must be >= 0"),
    ],
)
def test_endpoints_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as found:
        Endpoint(**({"base_url": "http://host", "model": "m"} | given))
    assert "words" not in str(found.value)
    assert "secret" not in str(found.value)


def test_only_what_is_missing_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    broken = {"b"}
    with judge(lambda prompt, before: Said(status=400) if prompt in broken else Said(f"{prompt}!")) as server:
        endpoint = Endpoint(base_url=server.url, **QUICK)
        first = ask(path, endpoint, "a", "b", "a", "c")
        assert Counter(server.prompts) == Counter("abc"), "the same words are asked once"
        assert {q.row: reply.text for q, reply in first.replies.items()} == {0: "a!", 2: "a!", 3: "c!"}
        assert [q.row for q in first.failed] == [1]
        assert first.kept == 0
        broken.clear()
        told: list[tuple[int, int]] = []
        second = ask(path, endpoint, "a", "b", "c", on_done=lambda *now: told.append(now))
        assert server.prompts[3:] == ["b"]
        assert (len(second.replies), second.failed, second.kept, told) == (3, {}, 2, [(1, 1)])
        third = ask(path, endpoint, "a", "b", again=lambda question, reply: reply.text == "a!")
        assert (server.prompts[4:], third.kept) == (["a"], 1)
        ask(path, Endpoint(base_url=server.url, **QUICK | {"model": "other"}), "a")
        ask(path, Endpoint(base_url=server.url, max_tokens=9, **QUICK), "a")
        assert len(server.prompts) == 7, "another judge, or other settings, is another question"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0].keys() == {"key", "model", "kind", "row", "systems", "text", "finish"}


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with judge(lambda prompt, before: Said(f"{prompt}{before}")) as server:
        endpoint = Endpoint(base_url=server.url, **QUICK)
        ask(path, endpoint, "a", "b", concurrency=1)
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        found = ask(path, endpoint, "a", "b")
        assert (server.prompts[2:], found.kept) == (["b"], 1)
    assert path.read_text().count("\n") == 2
    with AnswerFile(path) as again:
        assert again.found[key_of(endpoint, "b")].text == "b1"


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"source": "s"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl line 1 is not a judge's answer"), AnswerFile(path):
        pass
    assert path.read_text() == '{"source": "s"}\n'
    with pytest.raises(OutputError, match="cannot write"), AnswerFile(path / "below"):
        pass


def test_it_asks_several_at_a_time_and_no_more(tmp_path: Path) -> None:
    """Nobody is answered before three have asked: fewer at a time would wait for ever, and a fourth would be counted."""
    lock, together, here, most = threading.Lock(), threading.Barrier(3), 0, 0

    def answer(prompt: str, before: int) -> Said:
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        together.wait(600)
        with lock:
            here -= 1
        return Said(GOOD)

    with judge(answer) as server:
        ask(
            tmp_path / "a.jsonl",
            Endpoint(base_url=server.url, **QUICK | {"timeout": 600.0}),
            *map(str, range(12)),
            concurrency=3,
        )
    assert most == 3


def test_it_gives_up_where_nobody_gets_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with judge(lambda prompt, before: Said(status=400, raw=b"no template")) as server:
        with pytest.raises(JudgeError, match=f"{IN_A_ROW} questions in a row got no answer.*no template"):
            ask(path, Endpoint(base_url=server.url, **QUICK), *map(str, range(40)), concurrency=2)
        assert IN_A_ROW <= len(server.bodies) < 30
    with judge(lambda prompt, before: Said(GOOD) if int(prompt) % 4 == 0 else Said(status=400)) as server:
        found = ask(path, Endpoint(base_url=server.url, **QUICK), *map(str, range(40)), concurrency=2)
    assert (len(found.replies), len(found.failed)) == (10, 30)
    with judge(lambda prompt, before: Said(GOOD) if prompt == "0" else Said(status=401)) as server:
        with pytest.raises(EndpointError, match="answered 401"):
            ask(path, Endpoint(base_url=server.url, **QUICK), *map(str, range(40)), concurrency=1)
        assert len(server.bodies) < 30
    with AnswerFile(path) as kept:
        assert len(kept.found) == 11
