"""/v1/responses and /v1/embeddings through OpenAI's client: the reference decoder's text, and the model's hidden states."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch

from fathomlm.decode.full import generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.forward import deepest, embedding
from fathomlm.model.route import DepthControl
from model.route.small import model_of, routed
from serve.serving import NAME, Running

MESSAGES: list[Any] = [{"role": "system", "content": "be deep"}, {"role": "user", "content": "the fox?"}]
ASKED: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 8, "instructions": "be deep"}
PART = [{"type": "input_text", "text": "the "}, {"type": "input_text", "text": "fox?"}]


@pytest.mark.parametrize("input", ["the fox?", [{"role": "user", "content": PART}]], ids=["text", "messages"])
def test_a_response_is_the_chats_reply(server: Running, tiny_model: Any, input: Any) -> None:
    right = generate(tiny_model, [chat_prompt(tiny_model, MESSAGES)], max_new_tokens=8)[0]
    found = server.client().responses.create(input=input, **ASKED)
    assert found.output_text == right.text
    assert (found.status, found.object, found.model) == ("incomplete", "response", NAME)
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(right.prompt_tokens), 8)


def test_a_response_in_events(server: Running, tiny_model: Any) -> None:
    right = generate(tiny_model, [chat_prompt(tiny_model, MESSAGES)], max_new_tokens=8)[0]
    events = list(server.client().responses.create(input="the fox?", stream=True, **ASKED))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == right.text
    assert events[-1].response.output_text == right.text  # type: ignore[union-attr]
    raw = server.post("responses", input="the fox?", stream=True, **ASKED).text
    assert raw.startswith('event: response.created\ndata: {"type":"response.created"')


def test_a_response_that_ends_by_itself_follows_its_schema(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["sea", "lake"]}
    text: Any = {"format": {"type": "json_schema", "name": "where", "schema": schema}}
    found = server.client().responses.create(input="the fox?", text=text, **(ASKED | {"max_output_tokens": 20}))
    assert found.status == "completed"
    assert found.output_text in ('"sea"', '"lake"')


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"tools": [{"type": "function", "name": "a"}]}, "tools"),
        ("responses", {"background": True}, "background"),
        ("responses", {"truncation": "auto"}, "truncation"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ("responses", {"max_output_tokens": 5000}, "messages"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": "word " * 2000}, "input"),
        ("embeddings", {"input": [99999]}, "input"),
        ("embeddings", {"dimensions": 8}, "dimensions"),
        ("embeddings", {"depth": 5}, "depth"),
        ("embeddings", {"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_is_not_supported_is_named(server: Running, path: str, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.client().post(f"/{path}", body={"model": NAME, "input": "the fox?"} | wrong, cast_to=object)
    assert raised.value.param == param


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_mean_hidden_states_of_length_1(server: Running, tiny_model: Any, form: Any) -> None:
    texts = ["the quick brown fox", "water"]
    for depth in (None, 1, 4):
        extra = {} if depth is None else {"depth": depth}
        found = server.client().embeddings.create(model=NAME, input=texts, encoding_format=form, extra_body=extra)
        for text, one in zip(texts, found.data, strict=True):
            ids = torch.tensor([tiny_model.tokenizer.encode(text)])
            with torch.no_grad():
                states = tiny_model(ids, output_hidden_states=True).hidden_states
            hidden = states[-1] if depth in (None, 4) else tiny_model.decoder.norm(states[depth])
            wanted = torch.nn.functional.normalize(hidden[0].mean(0), dim=0)
            if form == "base64":  # what the client leaves as it came
                assert isinstance(one.embedding, str)
            else:
                assert one.embedding == pytest.approx(wanted.tolist(), abs=1e-5)
    plain = server.client().embeddings.create(model=NAME, input=texts)  # the client asks for base64, and reads it
    assert plain.data[0].embedding == pytest.approx(embedding(tiny_model, tiny_model.tokenizer.encode(texts[0])), abs=1e-5)
    assert plain.usage.prompt_tokens == sum(len(tiny_model.tokenizer.encode(text)) for text in texts)


def test_a_routed_model_embeds_by_recursions() -> None:
    model = model_of(routed())
    tokens = [1, 5, 7, 2]
    assert deepest(model) == model.plan.recursions
    found = [embedding(model, tokens, depth) for depth in (1, model.plan.recursions, None)]
    assert found[0] != found[1] == found[2]
    with torch.no_grad():
        hidden = model.decoder(torch.tensor([tokens]), control=DepthControl(max_depth=1))[0]
    assert found[0] == pytest.approx(torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist(), abs=1e-5)
