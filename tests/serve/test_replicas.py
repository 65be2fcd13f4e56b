"""Replicas on Ray Serve: what is checked before anything starts, and two of them behind one address."""

from __future__ import annotations

import importlib.util
import json
import pickle
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fathomlm.cli import serve
from fathomlm.cli.main import main
from fathomlm.decode.full import generate
from fathomlm.errors import OptionError
from fathomlm.serve.app import create_app
from fathomlm.serve.served_model import serve_model
from fathomlm.serve.server import ReplicaOptions, _check_gpus, _scaling
from fathomlm.serve.service import Service
from serve.serving import until
from serve.test_command import parse, started

HAS_RAY = importlib.util.find_spec("ray") is not None


def exits_of(args: Any) -> Any:
    return args.exiting.settle(args.model)


def read(*words: str) -> ReplicaOptions | None:
    args = parse(*words)
    return args.ray.of_engine(args.engine_options, args.device, args.threads)


def with_ray(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None if name == "ray" else found(name))


def test_one_process_needs_no_ray() -> None:
    assert read() is None
    assert read("--replicas", "1") is None


@pytest.mark.parametrize("words", [["--replicas", "2"], ["--max-replicas", "2"], ["--ray-address", "auto"]], ids=" ".join)
def test_replicas_without_ray_say_what_to_do(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{words[0]} requires --ray" in line
    assert "load balancer" in line


def test_ray_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, False)
    with pytest.raises(OptionError, match=r"\[serve,ray\]"):
        read("--ray", "--replicas", "2")


def test_what_a_replica_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, True)
    small, large = (
        read("--ray", "--threads", "3"),
        read("--ray", "--replicas", "2", "--max-replicas", "5", "--device", "cuda"),
    )
    assert small is not None
    assert large is not None
    assert (small.replicas, small.most, small.cpus, small.gpus, small.address) == (1, 1, 3, 0, None)
    assert (large.replicas, large.most, large.gpus, large.ongoing) == (2, 5, 1, 32)
    assert large.max_ongoing > 256 + 64  # the engine's own queue is full before Ray's, so that 429 is ours
    assert _scaling(small) == {"num_replicas": 1}
    assert _scaling(large) == {
        "autoscaling_config": {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 32}
    }  # fmt: skip
    with pytest.raises(OptionError, match="5 GPUs and this machine has 2"):
        _check_gpus(2.0, large)


@pytest.mark.parametrize(
    "words",
    [["--replicas", "0"], ["--replicas", "3", "--max-replicas", "2"], ["--device", "cuda:1"]],
    ids=" ".join,
)  # fmt: skip
def test_replicas_that_cannot_be(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, True)
    with pytest.raises(OptionError):
        read("--ray", *words)


def test_ray_is_imported_only_when_asked_for() -> None:
    assert "ray" not in sys.modules  # with everything of the server's imported above


def test_what_travels_to_a_replica_can(tiny_model_dir: Path) -> None:
    args = parse(str(tiny_model_dir), "--exit-layer", "2", "--api-key", "key")
    load = partial(serve.load_served, args, args.engine_options, exits_of(args))
    again = pickle.loads(pickle.dumps((load, args.server_options)))
    assert (again[0].args[0].model, again[1].api_keys) == (str(tiny_model_dir), ("key",))


def test_a_replica_says_which_it_is(tiny_model: Any, one_thread: None) -> None:
    from starlette.testclient import TestClient

    from fathomlm.engine.engine import Engine

    found = serve_model(Engine(tiny_model, batch_size=2, max_length=64), name="tiny")
    with TestClient(
        create_app(Service(lambda: found, replica="b7")), base_url="http://localhost"
    ) as client:  # it starts with its model
        status = client.get("/v1/fathom/status", headers={"x-request-id": "theirs"})
        assert (status.json()["status"], status.json()["replica"]) == ("ready", "b7")
        assert "x-request-id" not in status.headers  # the proxy puts its own there
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert all('replica="b7"' in line for line in lines)
    assert 'fathomlm_http_requests_total{path="/v1/fathom/status",replica="b7",status="200"} 1.0' in lines


def test_a_replica_that_cannot_load_does_not_start(one_thread: None) -> None:
    from starlette.testclient import TestClient

    def load() -> Any:
        raise OptionError("no such model")

    with pytest.raises(OptionError, match="no such model"), TestClient(create_app(Service(load, replica="b7"))):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install -e '.[ray]'")
def test_two_replicas_behind_one_address(tiny_model: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The same texts from both, by the same API with the same keys; one that hangs up frees its pages; a stream ends well
    when the server is told to stop."""
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    words = ("--ray", "--replicas", "2", "--batch-size", "2", "--api-key-file", str(keys), "--port", str(free_port()))
    right = generate(tiny_model, ["the fox"], max_new_tokens=200, ignore_eos=True)[0].text
    body: dict[str, Any] = {"prompt": "the fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with started(str(tiny_model_dir), *words) as (process, url):
        headers = {"authorization": "Bearer secret-key"}
        with httpx.Client(base_url=url, headers=headers, timeout=600) as http:
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert "secret-key" not in commands()
            with ThreadPoolExecutor(8) as pool:
                told = list(pool.map(lambda _: http.post("/v1/completions", json=body), range(8)))
            assert {one.json()["choices"][0]["text"] for one in told} == {right}
            assert len(told[0].headers.get_list("x-request-id")) == 1
            made = tokens_made(http)
            assert len(made) == 2
            assert sum(made.values()) == 8 * 200
            assert min(made.values()) > 0

            with pytest.raises(openai.BadRequestError) as raised:
                openai.OpenAI(base_url=f"{url}/v1", api_key="secret-key").completions.create(
                    model="tiny", prompt="x", max_tokens=10**6
                )
            assert raised.value.code == "context_length_exceeded"

            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
            until(lambda: in_flight(http) == 0)
            assert sum(tokens_made(http).values()) < 9 * 200

            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                lines = (line for line in response.iter_lines() if line)
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [first, *lines]
        assert rest[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == right
        assert process.wait(600) == 0


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def commands() -> str:
    """Every command line of this machine."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def statuses(http: httpx.Client) -> dict[str, Any]:
    """Of each replica; whichever answers is asked until both have."""
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    while len(found) < 2 or min(seen.values()) < 2:
        status = http.get("/v1/fathom/status").json()
        found[status["replica"]] = status
        seen[status["replica"]] += 1
        assert sum(seen.values()) < 500
    return found


def tokens_made(http: httpx.Client) -> dict[str, int]:
    return {name: status["totals"]["tokens"] for name, status in statuses(http).items()}


def in_flight(http: httpx.Client) -> int:
    return sum(status["in_flight"] for status in statuses(http).values())
