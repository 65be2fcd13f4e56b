"""An encoder-decoder model over HTTP: the prompt is what its encoder reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from engine.encoders import encoder_model
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan
from serve.serving import NAME, Running, running

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def server(tiny_tokenizer: Any) -> Iterator[Running]:
    model = encoder_model(DepthPlan.vanilla(2), vocab=len(tiny_tokenizer))
    model.tokenizer = copy.copy(tiny_tokenizer)
    model.tokenizer.chat_template = None
    drafts = Exiting(mode="speculative", exit_layers=(1,), threshold=0.0)
    with running(model, exiting=drafts, max_length=24, max_source=12) as found:
        yield found


def test_completions_are_those_of_the_reference(server: Running) -> None:
    prompts = ["the fox", "a dog and a fox"]
    wanted = generate(server.engine.model, prompts, max_new_tokens=9)
    asked = {"model": NAME, "prompt": prompts, "max_tokens": 9, "temperature": 0}
    answer = server.post("completions", **asked).json()
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in wanted]
    assert answer["usage"]["prompt_tokens"] == sum(len(one.prompt_tokens) for one in wanted)
    assert server.http.get("/v1/fathom/status").json()["max_source"] == 12


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "completions",
            {"prompt": [5] * 13},
            "this model's encoder reads at most 12 tokens, but the prompt has at least 13",
        ),
        (
            "completions",
            {"prompt": [5], "max_tokens": 24},
            "this model's decoder writes at most 23 tokens, got max_tokens=24",
        ),
        ("completions", {"prompt": [5], "echo": True, "logprobs": 1}, "log probabilities of a prompt takes decoder-only"),
        ("embeddings", {"input": "a fox"}, "an embedding takes decoder-only models"),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "has no chat template"),
    ],
)
def test_what_an_encoder_decoder_cannot_do(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    response = server.post(path, model=NAME, **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
