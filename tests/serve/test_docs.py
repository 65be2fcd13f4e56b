"""The examples of docs/serve.md, run as they stand against a server like the one that each of them names."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fathomlm.checkpoints.resolve import plan_of
from fathomlm.cli import serve
from fathomlm.cli.main import build_parser, read_command
from fathomlm.engine.engine import Engine
from fathomlm.packaged import default_model, models_directory
from fathomlm.serve.served_model import serve_model
from fathomlm.serve.service import Catalog, Offer, Service
from model.route.small import LLAMA, model_of, routed
from serve.serving import SMALL, Running, events, running, serving

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CLIENTS = [code for kind, code in BLOCKS if kind == "python" and "client." in code]
SHELL = [line.partition("  #")[0].strip() for kind, code in BLOCKS if not kind for line in code.splitlines()]
ADDRESS = "http://127.0.0.1:8000"
BUNDLED, CHAT = "fathom-mor-23m", "smollm2-135m"


@pytest.fixture(scope="module")
def default_server(tiny_model: Any, tiny_tokenizer: Any, one_thread: None) -> Iterator[Running]:
    """Like `fathomlm serve`: a routed model without a chat template, and a chat model that is loaded on demand."""
    bundled = model_of(routed(), architecture=replace(LLAMA, vocab=len(tiny_tokenizer), context=256))
    bundled.tokenizer = deepcopy(tiny_tokenizer)
    bundled.tokenizer.chat_template = None
    chat = Offer(load=lambda: serve_model(Engine(tiny_model, **SMALL | {"max_length": 192}), name=CHAT))
    with running(bundled, name=BUNDLED, catalog=Catalog({CHAT: chat}), max_length=192) as found:
        yield found


def test_the_page_has_the_default_model_and_what_it_says_of_it() -> None:
    assert default_model() == BUNDLED
    directory = models_directory()
    assert directory is not None
    assert plan_of(BUNDLED, None).routing is not None
    assert "chat_template" not in (directory / BUNDLED / "tokenizer_config.json").read_text(encoding="utf-8")
    assert re.search(rf"^fathomlm serve  .*# {BUNDLED}", PAGE, re.MULTILINE)


def run_example(number: int, url: str) -> str:
    """What it prints."""
    code = CLIENTS[number]
    start = CLIENTS[0][: CLIENTS[0].index("reply =")]  # later ones go on with the first one's client
    code = (code if "OpenAI(" in code else start + code).replace(ADDRESS, url)
    assert url in code
    told = io.StringIO()
    with redirect_stdout(told):
        exec(compile(code, f"docs/serve.md example {number}", "exec"), {})
    return told.getvalue()


@pytest.mark.parametrize("number", range(len(CLIENTS)))
def test_the_python_examples_run(default_server: Running, number: int) -> None:
    assert run_example(number, default_server.url).endswith("\n")


def test_the_first_example_runs_with_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newcomer meets it: `fathomlm serve`, no network, the example as it stands."""
    monkeypatch.setattr("fathomlm.checkpoints.fetch.fetch", lambda name: pytest.fail("it needs the network"))
    args = read_command(["serve", "--threads", "1"])[1]
    service = Service(lambda: serve.load_served(args, args.engine_options, None))
    with serving(service) as (url, _):
        text = run_example(0, url)
    assert len(text.split()) > 10
    assert service.served is not None
    assert service.served.name == BUNDLED


def test_the_curl_examples_run(default_server: Running) -> None:
    found = [code for kind, code in BLOCKS if not kind and code.startswith("curl ")]
    assert found
    for code in found:
        words = iter(shlex.split(code.replace("\\\n", " "))[1:])
        url, headers, body = "", {}, None
        for word in words:
            if word == "-H":
                name, _, value = next(words).partition(": ")
                headers[name] = value
            elif word == "-d":
                body = next(words)
            else:
                url = word.replace(ADDRESS, default_server.url)
        response = httpx.post(url, headers=headers, content=body, timeout=60)
        assert response.status_code == 200
        assert events(response)[-1] == "[DONE]"


def test_every_command_on_the_page_can_be_parsed() -> None:
    commands = [shlex.split(line) for line in SHELL if line.startswith("fathomlm ")]
    assert len(commands) >= 5
    for _, *words in commands:
        build_parser().parse_args(words)


def test_every_option_that_the_page_names_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    table = PAGE[PAGE.index("## Limits") : PAGE.index("## Shutdown")]
    named = set(re.findall(r"`(--[a-z][a-z-]+)", table))
    assert named <= known
    assert {"--max-connections", "--header-timeout", "--drain-timeout"} <= named


def test_the_application_from_python_starts(tiny_model: Any) -> None:
    """The last example: an ASGI application over a model of one's own."""
    code = next(code for kind, code in BLOCKS if kind == "python" and "create_app" in code)
    found: dict[str, Any] = {"model": tiny_model}
    exec(compile(code, "docs/serve.md from Python", "exec"), found)

    async def ask() -> httpx.Response:
        app = found["app"]
        async with app.router.lifespan_context(app):
            await found["service"].loaded()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                return await client.post("/v1/completions", json={"prompt": "the fox", "max_tokens": 2})

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["model"]) == (200, "mine")
