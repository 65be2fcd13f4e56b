"""The official client, unchanged: what it gets is what the reference decoder says, and errors are of its own types."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from fathomlm.decode.full import generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.serve.options import ServeOptions
from serve.serving import NAME, Running, running

PROMPT = "the quick brown"
MESSAGES: list[Any] = [{"role": "system", "content": "be deep"}, {"role": "user", "content": "the fox?"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}


def reference(model: Any, prompt: Any = PROMPT, **options: Any) -> Any:
    return generate(model, [prompt], **({"max_new_tokens": 12} | options))[0]


def test_models(server: Running) -> None:
    client = server.client()
    (only,) = client.models.list().data
    assert (only.id, only.object) == (NAME, "model")
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_the_reference_text(server: Running, tiny_model: Any) -> None:
    right = reference(tiny_model)
    found = server.client().completions.create(prompt=PROMPT, **GREEDY)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (right.text, "length", 0)
    assert found.object == "text_completion"
    assert found.usage is not None
    counts = (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens)
    assert counts == (len(right.prompt_tokens), 12, len(right.prompt_tokens) + 12)


def test_a_stream_is_the_same_text(server: Running, tiny_model: Any) -> None:
    right = reference(tiny_model)
    chunks = list(server.client().completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == right.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5


def test_a_chat_uses_the_models_own_format(server: Running, tiny_model: Any) -> None:
    right = reference(tiny_model, chat_prompt(tiny_model, MESSAGES))
    found = server.client().chat.completions.create(messages=MESSAGES, **GREEDY)
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", right.text)
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox?"}]
    split: list[Any] = [{"role": "developer", "content": "be deep"}, {"role": "user", "content": parts}]
    same = server.client().chat.completions.create(messages=split, **GREEDY)
    assert same.choices[0].message.content == right.text


def test_a_chat_stream(server: Running, tiny_model: Any) -> None:
    right = reference(tiny_model, chat_prompt(tiny_model, MESSAGES))
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(server.client().chat.completions.create(messages=MESSAGES, **GREEDY, **asked))
    *said, last = chunks
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == right.text
    assert said[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in said)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == len(right.prompt_tokens)


def test_without_max_tokens_a_chat_goes_on_and_a_completion_stops_at_16(server: Running) -> None:
    chat = server.client().chat.completions.create(model=NAME, messages=MESSAGES, seed=3)
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 16
    assert chat.usage.total_tokens <= 96
    plain = server.client().completions.create(model=NAME, prompt=PROMPT, temperature=0)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(server: Running, tiny_model: Any, stream: bool) -> None:
    free = reference(tiny_model).text
    stop = free[4:6]
    at = free.index(stop)
    found: Any = server.client().completions.create(prompt=PROMPT, stop=[stop, "\0never"], stream=stream, **GREEDY)
    chunks = list(found) if stream else [found]
    assert "".join(chunk.choices[0].text for chunk in chunks) == free[:at]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_that_only_seemed_to_begin_a_stop_string_is_not_lost(server: Running, tiny_model: Any) -> None:
    free = reference(tiny_model).text
    stop = free[-1] + "\0"
    chunks = list(server.client().completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == free


def test_the_models_end_token_ends_the_text(server: Running, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end = reference(tiny_model).tokens[5]
    monkeypatch.setattr(tiny_model.config, "eos_token_id", end)
    right = reference(tiny_model)
    with running(tiny_model) as other:
        found = other.client().chat.completions.create(messages=MESSAGES, logprobs=True, **(GREEDY | {"max_tokens": 30}))
        plain = other.client().completions.create(prompt=PROMPT, logprobs=0, **GREEDY)
    assert found.choices[0].finish_reason in ("stop", "length")
    assert plain.choices[0].finish_reason == "stop"
    assert plain.choices[0].text == right.text
    assert plain.usage is not None
    assert plain.choices[0].logprobs is not None
    assert plain.usage.completion_tokens == len(right.tokens)
    assert len(plain.choices[0].logprobs.tokens or ()) == len(right.tokens) - 1


def test_seeds_repeat_and_choices_differ(server: Running) -> None:
    client = server.client()

    def texts(seed: int, n: int = 3) -> list[str]:
        found = client.completions.create(model=NAME, prompt=PROMPT, n=n, seed=seed, temperature=1.2, max_tokens=12)
        assert [choice.index for choice in found.choices] == list(range(n))
        return [choice.text for choice in found.choices]

    first = texts(7)
    assert first == texts(7)
    assert len(set(first)) == 3
    assert texts(7, n=1) == first[:1]
    assert texts(-7) == texts(-7) != first


def test_several_prompts_and_choices_stream_without_mixing(server: Running, tiny_model: Any) -> None:
    prompts = ["the water", "a fathom is", "dog"]
    chunks = list(server.client().completions.create(prompt=prompts, n=2, stream=True, **GREEDY))
    texts = [""] * 6
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [reference(tiny_model, prompt).text for prompt in prompts for _ in range(2)]


def test_token_ids_are_a_prompt_too(server: Running, tiny_model: Any) -> None:
    right = reference(tiny_model)
    found = server.client().completions.create(prompt=list(right.prompt_tokens), **GREEDY)
    assert found.choices[0].text == right.text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(server: Running, tiny_model: Any, stream: bool) -> None:
    right = server.engine.model.tokenizer.decode
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "stream": stream}
    found: Any = server.client().chat.completions.create(messages=MESSAGES, **GREEDY, **asked)
    chunks = list(found) if stream else [found]
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    tokens = reference(tiny_model, chat_prompt(tiny_model, MESSAGES)).tokens
    assert [entry.token for entry in entries] == [right([token]) for token in tokens]
    text = reference(tiny_model, chat_prompt(tiny_model, MESSAGES)).text
    assert bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace").startswith(text[:5])
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0] <= 0  # greedy


def test_logprobs_of_a_completion(server: Running) -> None:
    found = server.client().completions.create(prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    assert all(
        max(top.values()) == pytest.approx(own) for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )
    assert found.text_offset == [sum(map(len, found.tokens[:at])) for at in range(12)]
    none = server.client().completions.create(prompt=PROMPT, logprobs=0, **GREEDY).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs is None
    assert none.token_logprobs == found.token_logprobs


def test_penalties_change_the_text(server: Running) -> None:
    client = server.client()
    plain, penalised = (
        client.completions.create(prompt=PROMPT, model=NAME, temperature=0, max_tokens=30, frequency_penalty=f)
        .choices[0]
        .text
        for f in (0, 2)
    )
    assert plain != penalised
    assert penalised.count(plain[0]) < plain.count(plain[0])


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
HALF = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a", "arguments": "{"}}]}
UNKNOWN = {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"temperature": 3}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 1000}, "n"),
    ("completions", {"max_tokens": 5000}, "prompt"),
    ("completions", {"prompt": "word " * 2000}, "prompt"),
    ("completions", {"prompt": [99999]}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": {"a": 1}}, "prompt"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"logprobs": 6}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"stop": [""]}, "stop"),
    ("completions", {"stop": ["x"] * 17}, "stop"),
    ("completions", {"stop": "x" * 257}, "stop"),
    ("completions", {"logit_bias": {"99999": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias.5"),
    ("completions", {"logit_bias": {"five": 1}}, "logit_bias.five"),
    ("completions", {"logit_bias": [5]}, "logit_bias"),
    ("completions", {"presence_penalty": 2.5}, "presence_penalty"),
    ("completions", {"seed": 2**70}, "seed"),
    ("completions", {"fathom": {"max_depth": 0}}, "fathom.max_depth"),
    ("completions", {"fathom": {"threshold": 2}}, "fathom.threshold"),
    ("completions", {"fathom": {"mode": "full"}}, "fathom.mode"),
    ("completions", {"fathom": {"max_depth": 1}}, "fathom.max_depth"),  # it has no router
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("chat/completions", {"tools": [{"type": "x", "function": {"name": "a"}}]}, "tools[0].type"),
    ("chat/completions", {"functions": [{}]}, "functions"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat/completions", {"response_format": UNKNOWN}, "response_format"),
    ("chat/completions", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "owner", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ("chat/completions", {"messages": [HALF]}, "messages[0].tool_calls[0].function.arguments"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "wrong", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_mistakes_are_bad_requests_that_say_where(server: Running, path: str, wrong: dict[str, Any], param: str) -> None:
    right: dict[str, Any] = {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as raised:
        server.client().post(f"/{path}", body={"model": NAME} | right | wrong, cast_to=object)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert raised.value.code
    assert raised.value.body["message"]  # type: ignore[index]


def test_a_context_that_is_too_long_has_openais_code(server: Running) -> None:
    for extra in ({"max_tokens": 5000}, {"prompt": "word " * 2000}):
        with pytest.raises(openai.BadRequestError) as raised:
            server.client().completions.create(**({"model": NAME, "prompt": PROMPT} | extra))  # type: ignore[call-overload]
        assert raised.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        server.client().completions.create(model="gpt-4", prompt=PROMPT)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_unknown_fields_are_ignored(server: Running, tiny_model: Any) -> None:
    found = server.client().completions.create(prompt=PROMPT, user="me", extra_body={"metadata": {"a": 1}}, **GREEDY)
    assert found.choices[0].text == reference(tiny_model).text


def test_keys(tiny_model: Any, one_thread: None) -> None:
    with running(tiny_model, ServeOptions(api_keys=("first", "second"))) as guarded:
        for key in ("first", "second"):
            assert guarded.client(api_key=key).models.list().data
        for key in ("firs", "firstt", "third", "Second"):
            with pytest.raises(openai.AuthenticationError) as raised:
                guarded.client(api_key=key).completions.create(prompt=PROMPT, **GREEDY)
            assert raised.value.code == "invalid_api_key"
        assert guarded.http.get("/v1/models").status_code == guarded.http.get("/metrics").status_code == 401
        assert guarded.http.get("/health").status_code == guarded.http.get("/ready").status_code == 200
