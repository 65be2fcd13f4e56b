"""What OpenAI's and vLLM's clients send beside prompts: biases, echoes, tokens, and defaults of the model itself."""

from __future__ import annotations

import asyncio
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.full import generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.engine import Engine
from fathomlm.engine.forward import prompt_logprobs
from fathomlm.errors import CheckpointError, EngineStopped
from fathomlm.model.route import DepthControl
from fathomlm.serve.served_model import serve_model
from model.route.small import model_of, routed
from serve.serving import NAME, SMALL, Running, events, running

PROMPT = "the quick brown"
MESSAGES: list[Any] = [{"role": "user", "content": "the fox?"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}


def test_a_bias_demands_and_forbids_tokens(server: Running, tiny_model: Any) -> None:
    client = server.client()
    wanted = tiny_model.tokenizer.encode("f")[0]
    assert client.completions.create(prompt=PROMPT, logit_bias={str(wanted): 100}, **GREEDY).choices[0].text == "f" * 8
    first = generate(tiny_model, [PROMPT], max_new_tokens=8)[0].tokens[0]
    other = client.chat.completions.create(messages=MESSAGES, logit_bias={str(wanted): 100}, **GREEDY)
    assert other.choices[0].message.content == "f" * 8
    without = client.completions.create(prompt=PROMPT, logit_bias={str(first): -100}, logprobs=0, **GREEDY)
    assert server.engine.model.tokenizer.decode([first]) != without.choices[0].logprobs.tokens[0]  # type: ignore[union-attr, index]
    assert server.engine.runner.sampler.biased is False


# echo


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_in_front(server: Running, tiny_model: Any, stream: bool) -> None:
    right = generate(tiny_model, [PROMPT], max_new_tokens=8)[0]
    for prompt in (PROMPT, list(right.prompt_tokens)):
        found: Any = server.client().completions.create(prompt=prompt, echo=True, stream=stream, **GREEDY)
        chunks = list(found) if stream else [found]
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + right.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompts_log_probabilities(server: Running, tiny_model: Any, stream: bool) -> None:
    """The slow twin is one forward pass of the model over prompt and completion."""
    right = generate(tiny_model, [PROMPT], max_new_tokens=8)[0]
    ids = torch.tensor([[*right.prompt_tokens, *right.tokens]])
    with torch.no_grad():
        rows = tiny_model(ids).logits[0, :-1].log_softmax(-1)
    wanted = rows.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    found: Any = server.client().completions.create(prompt=PROMPT, echo=True, logprobs=2, n=2, stream=stream, **GREEDY)
    chunks = [choice for chunk in (list(found) if stream else [found]) for choice in chunk.choices]
    for index in range(2):
        parts = [choice.logprobs for choice in chunks if choice.index == index and choice.logprobs]
        values = [value for part in parts for value in part.token_logprobs]
        assert values[0] is None
        assert values[1:] == pytest.approx(wanted, abs=1e-4)
        tops = [top for part in parts for top in part.top_logprobs]
        assert tops[0] is None
        assert [max(top.values()) for top in tops[1:]] == pytest.approx(rows.amax(-1).tolist(), abs=1e-4)
        tokens = [token for part in parts for token in part.tokens]
        assert tokens == [tiny_model.tokenizer.decode([token]) for token in ids[0].tolist()]
        offsets = [at for part in parts for at in part.text_offset]
        assert offsets == [sum(map(len, tokens[:at])) for at in range(len(tokens))]


def test_prompt_log_probabilities_of_a_routed_model_follow_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathomlm.engine.forward.CHUNK", 3)
    model = model_of(routed())
    tokens = [token % model.architecture.vocab for token in (5, 9, 33, 7, 81, 2, 64, 13)]
    for depth in (None, 1):
        with torch.no_grad():
            hidden = model.decoder(torch.tensor([tokens]), control=None if depth is None else DepthControl(max_depth=depth))
            rows = model.decoder.logits(hidden)[0, :-1].log_softmax(-1)
        found = prompt_logprobs(model, tokens, 1, max_depth=depth)
        assert found[0] is None
        assert [one.logprob for one in found[1:] if one] == pytest.approx(
            [rows[at, token].item() for at, token in enumerate(tokens[1:])], abs=1e-4
        )
        assert [one.top[0][0] for one in found[1:] if one] == rows.argmax(-1).tolist()


def test_work_between_two_steps_fails_alone_and_not_after_the_end(tiny_model: Any) -> None:
    async def ask() -> None:
        engine = AsyncEngine(Engine(tiny_model, **SMALL))
        assert await engine.call(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        assert engine.healthy
        await engine.close()
        with pytest.raises(EngineStopped):
            await engine.call(lambda: 7)

    asyncio.run(ask())


# /tokenize and /detokenize


def test_tokens_and_back(server: Running, tiny_model: Any) -> None:
    tokenizer = tiny_model.tokenizer
    found = server.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    tokens = tokenizer.encode(PROMPT)
    strings = [tokenizer.decode([token]) for token in tokens]
    assert found == {"count": len(tokens), "max_model_len": 96, "tokens": tokens, "token_strs": strings}
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}
    special = [tokenizer.bos_token_id, *tokens]
    assert server.http.post("/detokenize", json={"tokens": special}).json()["prompt"] == "<|endoftext|>" + PROMPT
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_tokens_of_a_conversation(server: Running, tiny_model: Any) -> None:
    found = server.http.post("/tokenize", json={"model": NAME, "messages": MESSAGES}).json()
    assert found["tokens"] == chat_prompt(tiny_model, MESSAGES)
    ended = server.http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert found["tokens"][: len(ended)] == ended
    assert len(ended) < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("detokenize", {"tokens": [99999]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_said(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    response = server.http.post(f"/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert server.http.post(f"/{path}", json={"model": "gpt-4", "prompt": "a", "tokens": [1]}).status_code == 404


# generation_config


def test_a_models_own_sampling_is_the_default_of_requests(tiny_model: Any, one_thread: None) -> None:
    model = deepcopy(tiny_model)
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.7)
    greedy = generate(tiny_model, [PROMPT], max_new_tokens=8)[0].text
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1}
    with running(model) as own:
        assert own.http.get("/v1/fathom/status").json()["sampling"] == {"temperature": 0.7, "top_k": 1}
        assert own.post("completions", **body).json()["choices"][0]["text"] == greedy
        assert own.post("completions", **body, top_k=0).json()["choices"][0]["text"] != greedy
    with running(tiny_model) as plain:
        assert plain.http.get("/v1/fathom/status").json()["sampling"] == {}
        assert plain.post("completions", **body).json()["choices"][0]["text"] != greedy
    model.generation_config.update(top_p=7.0)
    with pytest.raises(CheckpointError, match=r"generation_config\.json of .*: top_p must be > 0 and <= 1, got 7\.0"):
        serve_model(Engine(model, **SMALL), name=NAME)


def test_a_checkpoints_sampling_is_read_and_saved(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "generation_config.json"
    plain = json.loads(file.read_text(encoding="utf-8"))
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    file.write_text(json.dumps(plain | said | {"do_sample": True}), encoding="utf-8")
    load(tmp_path / "plain").save_pretrained(tmp_path / "again")
    config = load(tmp_path / "again").generation_config
    assert {name: getattr(config, name) for name in said} == said
    file.write_text(json.dumps(plain | said), encoding="utf-8")  # greedy
    assert load(tmp_path / "plain").generation_config.temperature is None
    file.write_text(json.dumps(plain | {"do_sample": True, "top_p": "most"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"top_p must be a number"):
        load(tmp_path / "plain")


# /docs


def test_the_page_of_endpoints_names_them_all_and_loads_nothing_from_elsewhere(server: Running) -> None:
    response = server.http.get("/docs")
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = response.text
    for path, methods in server.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    for field in ("logit_bias", "stream_options.include_usage", "fathom.max_depth", "messages"):
        assert f"<code>{field}</code>" in page
    assert not re.search(r"https?://|<script", page)
    for link in re.findall(r'href="([^"]+)"', page):
        assert server.http.get(f"/{link}").status_code == 200


def test_a_stream_with_an_echo_begins_with_it(server: Running) -> None:
    response = server.post("completions", prompt=PROMPT, echo=True, stream=True, max_tokens=1, temperature=0)
    assert events(response)[0]["choices"][0]["text"] == PROMPT
