"""LangChain and LiteLLM against a tiny server, as their users write it. They are the extra `clients`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fathomlm.decode.full import generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.forward import embedding
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from serve.serving import NAME, Running, running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MESSAGES: list[Any] = [{"role": "system", "content": "be deep"}, {"role": "user", "content": "the fox?"}]
TALK: list[Any] = [("system", "be deep"), ("user", "the fox?")]
SCHEMA: dict[str, Any] = {
    "title": "sound", "description": "takes a sounding", "type": "object", "properties": {"deep": {"type": "boolean"}},
    "required": ["deep"], "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "sound", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tiny_model: Any, one_thread: None) -> Iterator[Running]:
    """The tiny model with room for descriptions of functions."""
    architecture = replace(tiny_model.architecture, context=4096)
    ids = {name: getattr(tiny_model.config, name) for name in ("bos_token_id", "eos_token_id")}
    model = FathomForCausalLM(FathomConfig.of(architecture, tiny_model.plan, dtype=torch.float32, **ids)).eval()
    model.load_state_dict(tiny_model.state_dict())
    model.tokenizer = tiny_model.tokenizer
    with running(model, max_length=2048, page_size=16) as found:
        yield found


@pytest.fixture(scope="module")
def right(tiny_model: Any) -> str:
    text: str = generate(tiny_model, [chat_prompt(tiny_model, MESSAGES)], max_new_tokens=12)[0].text
    return text


def test_langchain(server: Running, tiny_model: Any, right: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "any", "model": NAME, "max_retries": 0}
    chat = langchain.ChatOpenAI(temperature=0, max_tokens=12, **options)
    reply = chat.invoke(TALK)
    assert reply.content == right
    assert reply.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.content for chunk in chat.stream(TALK)) == right
    assert [one.content for one in chat.batch([TALK, TALK])] == [right, right]

    roomy = langchain.ChatOpenAI(temperature=0, max_tokens=120, **options)
    for method in ("json_schema", "function_calling"):
        found = roomy.with_structured_output(SCHEMA, method=method).invoke(TALK)
        assert isinstance(found["deep"], bool), method
    bound = roomy.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke(TALK)
    (call,) = called.tool_calls
    assert (call["name"], list(call["args"])) == ("sound", ["deep"])
    from langchain_core.messages import HumanMessage, ToolMessage

    talk = [HumanMessage("the fox?"), called, ToolMessage("six fathoms", tool_call_id=call["id"])]
    assert roomy.bind_tools([TOOL]).invoke(talk).content

    plain = langchain.OpenAI(temperature=0, max_tokens=12, **options)
    assert plain.invoke("the quick brown") == generate(tiny_model, ["the quick brown"], max_new_tokens=12)[0].text
    vectors = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **options).embed_documents(["the fox", "water"])
    assert vectors[0] == pytest.approx(embedding(tiny_model, tiny_model.tokenizer.encode("the fox")), abs=1e-5)


def test_litellm(server: Running, tiny_model: Any, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1", "api_key": "any", "num_retries": 0}
    asked: dict[str, Any] = options | {"messages": MESSAGES, "temperature": 0}
    reply = litellm.completion(max_tokens=12, **asked)
    assert reply.choices[0].message.content == right
    assert reply.usage.completion_tokens == 12
    parts = litellm.completion(max_tokens=12, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == right
    for stream in (False, True):
        extra: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
        found = litellm.completion(max_tokens=120, **asked, **extra)
        if stream:
            found = litellm.stream_chunk_builder(list(found))
        (call,) = found.choices[0].message.tool_calls
        assert call.function.name == "sound"
        assert found.choices[0].finish_reason == "tool_calls"
    vectors = litellm.embedding(input=["the fox"], encoding_format="float", **options)
    wanted = embedding(tiny_model, tiny_model.tokenizer.encode("the fox"))
    assert vectors.data[0]["embedding"] == pytest.approx(wanted, abs=1e-5)
