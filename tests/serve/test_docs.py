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
from fathomlm.cli.main import build_parser
from fathomlm.packaged import default_model, models_directory
from model.route.small import LLAMA, model_of, routed
from serve.serving import Running, events, running

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CLIENTS = [code for kind, code in BLOCKS if kind == "python" and "client." in code]
SHELL = [line.partition("  #")[0].strip() for kind, code in BLOCKS if not kind for line in code.splitlines()]
ADDRESS = "http://127.0.0.1:8000"
BUNDLED, CHAT = "fathom-mor-23m", "smollm2-135m"


@pytest.fixture(scope="module")
def servers(tiny_model: Any, tiny_tokenizer: Any, one_thread: None) -> Iterator[dict[str, Running]]:
    """By the name that the page has for them: a routed model without a chat template, and a chat model."""
    bundled = model_of(routed(), architecture=replace(LLAMA, vocab=len(tiny_tokenizer), context=256))
    bundled.tokenizer = deepcopy(tiny_tokenizer)
    bundled.tokenizer.chat_template = None
    wide: dict[str, Any] = {"max_length": 192}
    with running(bundled, name=BUNDLED, **wide) as routed_one, running(tiny_model, name=CHAT, **wide) as chat:
        yield {BUNDLED: routed_one, CHAT: chat}


def test_the_page_has_the_default_model_and_what_it_says_of_it() -> None:
    assert default_model() == BUNDLED
    directory = models_directory()
    assert directory is not None
    assert plan_of(BUNDLED, None).routing is not None
    assert "chat_template" not in (directory / BUNDLED / "tokenizer_config.json").read_text(encoding="utf-8")
    assert re.search(rf"^fathomlm serve  .*# {BUNDLED}", PAGE, re.MULTILINE)


@pytest.mark.parametrize("number", range(len(CLIENTS)))
def test_the_python_examples_run(servers: dict[str, Running], number: int) -> None:
    code = CLIENTS[number]
    named = re.findall(r'model="([^"]+)"', code)
    assert len(named) == 1
    start = CLIENTS[0][: CLIENTS[0].index("reply =")]  # later ones go on with the first one's client
    code = (code if "OpenAI(" in code else start + code).replace(ADDRESS, servers[named[0]].url)
    assert servers[named[0]].url in code
    told = io.StringIO()
    with redirect_stdout(told):
        exec(compile(code, f"docs/serve.md example {number}", "exec"), {})
    assert told.getvalue().endswith("\n")


def test_the_curl_examples_run(servers: dict[str, Running]) -> None:
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
                url = word.replace(ADDRESS, servers[BUNDLED].url)
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
