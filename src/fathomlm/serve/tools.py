"""Functions that a model may call: how they are described to it, the grammar of its calls, and what it called.

A call is written as Hermes, Qwen and SmolLM write it:

    <tool_call>
    {"name": "depth_of", "arguments": {"place": "Baikal"}}
    </tool_call>

A chat template that has this format describes the functions itself. For others a system message does, calls are part of the
assistant's text, and results come as messages of the user.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
MOST_CALLS = 8
"""Calls in one reply, where it must have one."""
DECODER = json.JSONDecoder()

Json = dict[str, Any]


def knows_tools(template: str) -> bool:
    """Whether a chat template describes functions, in the format that is read here."""
    return "tools" in template and BEGIN in template


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """The functions, for a model whose chat template does not tell it of them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = f'{BEGIN}\n{{"name": NAME, "arguments": ARGUMENTS}}\n{END}'
    return (
        f"You may call functions to answer the user. These are their signatures:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and its arguments as JSON:\n{call}"
    )


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """A conversation for a template that knows of no functions."""
    found: list[Json] = []
    for message in messages:
        calls, text = message.get("tool_calls"), message["content"]
        if calls:
            written = "\n".join(f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls)
            found.append({"role": "assistant", "content": f"{text}\n{written}" if text else written})
        elif message["role"] == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            found.append({"role": message["role"], "content": text})
    if not tools:
        return found
    first = [found.pop(0)["content"]] if found and found[0]["role"] == "system" else []
    return [{"role": "system", "content": "\n\n".join([*first, described(tools)])}, *found]


def call_grammar(tools: Sequence[Mapping[str, Any]], *, must: bool, most: int = MOST_CALLS) -> str:
    """Text with calls in it, or where the model `must` call, one to `most` calls and nothing else. Lark, as llguidance has
    it. A schema is a grammar of its own, so that its references stay within it."""
    from fathomlm.engine.grammar import SPACING

    functions = [tool["function"] for tool in tools]
    calls = " | ".join(f"f{number}" for number in range(len(functions)))
    lines = [f'call: "\\n" ({calls}) {json.dumps(chr(10) + END)}']
    for number, function in enumerate(functions):
        front = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        schema = (function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}) | {
            "x-guidance": SPACING
        }
        lines.append(f'f{number}: {front} args{number} "}}"\nargs{number}: %json {json.dumps(schema)}')
    if must:
        more = f' ("\\n{BEGIN}" call){{0,{most - 1}}}' if most > 1 else ""
        lines.append(f'start: "{BEGIN}" call{more}')
    else:
        again = "*" if most > 1 else "?"
        lines.append(f'start: (begin call){again} TEXT\nTEXT: /(.|\\n)*/\nbegin[lazy]: TEXT "{BEGIN}"')
    return "\n".join(lines)


def read_calls(text: str) -> tuple[str, list[Json]]:
    """A reply's text, and its calls as OpenAI has them. A call that was cut off is none, and behind
    others no text either."""
    parts, calls = [], []
    rest = text
    while BEGIN in rest:
        front, _, behind = rest.partition(BEGIN)
        try:
            found, end = DECODER.raw_decode(behind.lstrip())
            name, arguments = found["name"], json.dumps(found["arguments"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            break
        after = behind.lstrip()[end:].lstrip()
        if not after.startswith(END):
            break
        parts.append(front)
        calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": arguments}}
        )
        rest = after.removeprefix(END)
    parts.append(rest.partition(BEGIN)[0])
    return "".join(parts).strip() if calls else text, calls


def shown(text: str) -> str:
    """As much of a reply's beginning as is certainly text: up to a call, or what may become the beginning of one."""
    at = text.find(BEGIN)
    if at >= 0:
        return text[:at]
    held = next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)
    return text[: len(text) - held]
