"""Replies that follow a schema, and functions that a model calls: as OpenAI's client asks for them and reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.grammar import Grammars
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.serve.tools import BEGIN, END, call_grammar, plain_messages, read_calls, shown
from serve.serving import NAME, Running, running

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": False,
}  # fmt: skip
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "depth", "schema": SCHEMA, "strict": True}}
PLACE: dict[str, Any] = {
    "type": "object", "properties": {"at": {"$ref": "#/$defs/at"}}, "required": ["at"], "additionalProperties": False,
    "$defs": {"at": {"enum": ["sea", "lake"]}},
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "sound", "description": "takes a sounding", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "go", "parameters": PLACE},
    },
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES: list[Any] = [{"role": "system", "content": "be deep"}, {"role": "user", "content": "the fox?"}]
ASKED: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 120, "messages": MESSAGES}
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools> as <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.deep }}){% endfor %}; {% endfor %}assistant: "
)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> FathomForCausalLM:
    """The tiny model with room for descriptions of functions."""
    architecture = replace(tiny_model.architecture, context=4096)
    ids = {name: getattr(tiny_model.config, name) for name in ("bos_token_id", "eos_token_id")}
    made = FathomForCausalLM(FathomConfig.of(architecture, tiny_model.plan, dtype=torch.float32, **ids))
    made.load_state_dict(tiny_model.state_dict())
    made.tokenizer = tiny_model.tokenizer
    return made.eval()


@pytest.fixture(scope="module")
def server(model: FathomForCausalLM, one_thread: None) -> Iterator[Running]:
    with running(model, max_length=2048, page_size=16, prefill_chunk=512) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_follows_its_schema(server: Running, stream: bool) -> None:
    found: Any = server.client().chat.completions.create(response_format=FORMAT, stream=stream, **ASKED)
    if stream:
        chunks = list(found)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        text = found.choices[0].message.content
    assert isinstance(json.loads(text)["deep"], bool)


def test_any_object_and_choices_and_a_limit(server: Running) -> None:
    client = server.client()
    many = client.chat.completions.create(response_format=FORMAT, **(ASKED | {"temperature": 1.5}), n=3, seed=1)
    assert all(isinstance(json.loads(choice.message.content or "")["deep"], bool) for choice in many.choices)
    short = client.chat.completions.create(response_format=FORMAT, **(ASKED | {"max_tokens": 5}))
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ('{"deep', "length")
    free = client.chat.completions.create(response_format={"type": "json_object"}, **ASKED)
    assert (free.choices[0].message.content or "").startswith("{")
    plain = client.chat.completions.create(response_format={"type": "text"}, **ASKED)
    assert plain.choices[0].message.content == client.chat.completions.create(**ASKED).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}], ids=["required", "named"])
def test_a_function_is_called(server: Running, choice: Any, stream: bool) -> None:
    extra: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
    found: Any = server.client().chat.completions.create(**ASKED, **extra)
    if stream:
        chunks = list(found)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
    else:
        message, reason = found.choices[0].message, found.choices[0].finish_reason
        calls = message.tool_calls
        assert message.content is None
    assert reason == "tool_calls"
    (call,) = calls
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "go"
    if call.function.name == "go":
        assert arguments["at"] in ("sea", "lake")


def test_tools_that_may_be_left_alone(server: Running) -> None:
    """A random model calls nothing by itself; its text comes as it is, streamed or not."""
    client = server.client()
    asked = ASKED | {"max_tokens": 24}
    whole = client.chat.completions.create(**asked, tools=TOOLS).choices[0]
    assert whole.message.tool_calls is None
    parts = client.chat.completions.create(**asked, tools=TOOLS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole.message.content
    without = client.chat.completions.create(**asked).choices[0].message.content
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0].message
    assert (none.content, none.tool_calls) == (without, None)


def test_a_conversation_with_calls_goes_on(server: Running, model: FathomForCausalLM) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "sound", "arguments": '{"deep": true}'}}
    talk: list[Any] = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "six fathoms"},
    ]  # fmt: skip
    written = [
        *MESSAGES,
        {"role": "assistant", "content": f'{BEGIN}\n{{"name": "sound", "arguments": {{"deep": true}}}}\n{END}'},
        {"role": "user", "content": "<tool_response>\nsix fathoms\n</tool_response>"},
    ]
    tokens = server.http.post("/tokenize", json={"messages": talk}).json()["tokens"]
    assert tokens == chat_prompt(model, written)
    assert server.client().chat.completions.create(**(ASKED | {"messages": talk}), tools=TOOLS).choices[0].message.content


def test_a_template_that_has_the_format_describes_functions_itself(
    server: Running, model: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", TOOL_TEMPLATE)
    call = {"id": "c", "type": "function", "function": {"name": "sound", "arguments": '{"deep": true}'}}
    talk: list[Any] = [MESSAGES[1], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "six"}]
    rendered = "user: the fox?; assistant: sound(True); tool: six; assistant: "
    tokens = server.http.post("/tokenize", json={"messages": talk}).json()["tokens"]
    assert model.tokenizer.decode(tokens) == rendered
    found = server.client().chat.completions.create(**(ASKED | {"messages": talk, "max_tokens": 1}), tools=TOOLS)
    described = "<tools>sound go stop </tools> as <tool_call>" + rendered
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(model.tokenizer.encode(described))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "swim"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": FORMAT}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "wat"}}}]}, "tools"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_is_said(server: Running, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.client().post("/chat/completions", body=ASKED | wrong, cast_to=object)
    assert raised.value.param == param


def test_without_the_package_a_request_says_what_to_install(
    model: FathomForCausalLM, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with running(model, max_length=2048) as bare:
        for extra in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS}):
            response = bare.post("chat/completions", **ASKED, **extra)
            assert response.status_code == 400
            assert response.json()["error"]["message"].endswith(
                "requires llguidance: pip install -c constraints.txt -e '.[grammar]'"
            )
        assert bare.post("chat/completions", **ASKED, tools=TOOLS, tool_choice="none").status_code == 200


# The grammar of calls.


def follows(model: FathomForCausalLM, grammar: str, text: str) -> bool:
    """Whether a text may be written, and may end there."""
    matcher = Grammars(model).lark(grammar).begin()
    try:
        for token in model.tokenizer.encode(text):
            if not matcher.allowed()[token]:
                return False
            matcher.advance(token)
        return bool(matcher.allowed()[model.config.eos_token_id])
    except OptionError:
        return False


def call_of(name: str, arguments: str) -> str:
    return f'{BEGIN}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'


def test_calls_stand_in_text_or_alone(model: FathomForCausalLM) -> None:
    right, other = call_of("go", '{"at": "sea"}'), call_of("stop", "{}")
    wrong = [call_of("go", '{"at": "moon"}'), call_of("swim", "{}"), f"{BEGIN}\nhello", right.removesuffix(END)]
    free, must, once = (call_grammar(TOOLS, must=must, most=most) for must, most in ((False, 8), (True, 8), (True, 1)))
    for text in ("", "a < b <tool> </tool_call>", right, f"so: {right}", f"{right}\n{other}", f"{right} and {other}."):
        assert follows(model, free, text), text
    for text in (right, other, f"{right}\n{other}"):
        assert follows(model, must, text), text
    for text in ("", "so", f"so: {right}", f"{right} and {other}", "\n".join([right] * 9), *wrong):
        assert not follows(model, must, text), text
    assert follows(model, once, right)
    assert not follows(model, once, f"{right}\n{other}")
    for text in wrong:
        assert not follows(model, free, text), text


def test_calls_are_read_and_half_a_call_is_text() -> None:
    right, tricky = call_of("go", '{"at": "sea"}'), call_of("say", json.dumps({"text": f"é {END} {BEGIN}"}))
    text, calls = read_calls(f"so: {right}\n{tricky}")
    assert text == "so:"
    assert [call["function"]["name"] for call in calls] == ["go", "say"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"text": f"é {END} {BEGIN}"}
    assert len({call["id"] for call in calls}) == 2
    text, calls = read_calls(f"{right}\n{right[:-3]}")
    assert (text, len(calls)) == ("", 1), "the second was cut off"
    for other in ("plain", right[:-3], f"{BEGIN} none", f"{BEGIN}[1]{END}", f'{BEGIN}{{"name": "a"}}{END}'):
        assert read_calls(other) == (other, [])
    for size in range(len(right) + 4):
        assert shown(f"so: {right}"[:size]) == "so: "[:size]
    assert shown("a <tool") == "a "
    assert shown("a <toy") == "a <toy"


def test_functions_join_the_system_message() -> None:
    both = plain_messages(MESSAGES, TOOLS)
    assert [message["role"] for message in both] == ["system", "user"]
    assert both[0]["content"].startswith("be deep\n\n")
    assert '"name": "sound"' in both[0]["content"]
    assert [message["role"] for message in plain_messages(MESSAGES[1:], TOOLS)] == ["system", "user"]
    assert plain_messages(MESSAGES, []) == MESSAGES
