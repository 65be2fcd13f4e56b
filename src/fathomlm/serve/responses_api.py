"""POST /v1/responses: OpenAI's newer form of a chat, for text. A body becomes that of a chat, the reply an item of output.

Nothing is stored: a conversation comes whole with each request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fathomlm.engine.request import Request, Result, TokenEvent
from fathomlm.serve.bodies import (
    MOST_MESSAGES,
    MOST_PARTS,
    ChatBody,
    Count,
    FathomOptions,
    Name,
    Part,
    Temperature,
    TopP,
)
from fathomlm.serve.errors import refused
from fathomlm.serve.responses import Json, ResponseFormat, finish_reason
from fathomlm.serve.served_model import ServedModel

REFUSED = (
    "previous_response_id", "conversation", "background", "prompt", "tools", "include", "max_tool_calls", "top_logprobs",
    "reasoning",
)  # fmt: skip
"""What would change the reply and is not supported; absent, empty and false are fine."""


class InputText(Part):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Part):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(max_length=MOST_PARTS, fail_fast=True)]


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Part):
    format: TextFormat | None = None


class ResponsesBody(Part):
    """POST /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = Field(None, description="A system message in front.")
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    text: TextSettings | None = Field(None, description="`format`: text, json_object or json_schema.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="Only 'disabled' is supported.")
    fathom: FathomOptions | None = Field(None, description="Beyond OpenAI: depth.")
    previous_response_id: Any = Field(None, description="Refused.")
    conversation: Any = Field(None, description="Refused.")
    background: Any = Field(None, description="Refused.")
    prompt: Any = Field(None, description="Refused.")
    tools: Any = Field(None, description="Refused: use /v1/chat/completions.")
    include: Any = Field(None, description="Refused.")
    max_tool_calls: Any = Field(None, description="Refused.")
    top_logprobs: Any = Field(None, description="Refused.")
    reasoning: Any = Field(None, description="Refused.")

    def chat(self) -> ChatBody:
        for name in REFUSED:
            if getattr(self, name):
                hint = "use /v1/chat/completions" if name == "tools" else "send the whole conversation as text"
                raise refused(f"{name} is not supported: {hint}", name, "unsupported_parameter")
        if self.truncation == "auto":
            raise refused(
                "truncation must be 'disabled': nothing is left out of a conversation", "truncation", "invalid_value"
            )
        given = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [{"role": one.role, "content": _text(one.content)} for one in given]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = self.model_dump(include={"model", "temperature", "top_p", "stream", "fathom"}, exclude_none=True)
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        form = None if self.text is None else self.text.format
        if form is not None:
            if form.type == "json_schema" and form.schema_ is None:
                where = "text.format.schema"
                raise refused(f"{where} is required where the type is json_schema", where, "missing_required_parameter")
            schema = {} if form.schema_ is None else {"json_schema": {"schema": form.schema_}}
            fields["response_format"] = {"type": form.type, **schema}
        return ChatBody.model_validate(fields | {"messages": messages})


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponsesFormat(ResponseFormat):
    prefix, whole_object, chunk_object = "resp", "response", "response"

    def __init__(self, served: ServedModel, body: ChatBody, requests: Sequence[Request]) -> None:
        super().__init__(served, body, requests)
        self._body, self._item, self._number = body, f"msg_{self.id}", -1

    def whole(self, results: Sequence[Result]) -> Json:
        (result,) = results
        cut = finish_reason(result.finish) == "length"
        return self._response("incomplete" if cut else "completed", [self._message(result.text, cut)], results)

    def opening(self, index: int) -> list[Json]:
        begun = self._response("in_progress", [])
        item = self._message(None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def token(self, index: int, event: TokenEvent) -> list[Json]:
        self._sent[index] += len(event.text)
        return [self._delta(event.text)] if event.text else []

    def closing(self, index: int, result: Result) -> list[Json]:
        cut = finish_reason(result.finish) == "length"
        rest = result.text[self._sent[index] :]
        return [
            *([self._delta(rest)] if rest else []),
            self._event("response.output_text.done", **self._place, text=result.text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_part(result.text)),
            self._event("response.output_item.done", output_index=0, item=self._message(result.text, cut)),
        ]

    def counts(self, results: Sequence[Result]) -> list[Json]:
        whole = self.whole(results)
        return [self._event(f"response.{whole['status']}", response=whole)]

    @property
    def _place(self) -> Json:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _delta(self, text: str) -> Json:
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _message(self, text: str | None, cut: bool = False) -> Json:
        """None: it has just begun."""
        status = "in_progress" if text is None else "incomplete" if cut else "completed"
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Json], results: Sequence[Result] = ()) -> Json:
        body, usage = self._body, None
        if results:
            count = self.usage(results)
            usage = {
                "input_tokens": count["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": count["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": count["total_tokens"],
            }  # fmt: skip
        form = body.response_format
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if results else None, "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "max_output_tokens": body.max_completion_tokens, "model": self.served.name,
            "output": output, "parallel_tool_calls": True, "previous_response_id": None, "store": False,
            "temperature": self.requests[0].sampling.temperature, "top_p": self.requests[0].sampling.top_p,
            "text": {"format": {"type": "text" if form is None else form.type}}, "tool_choice": "none", "tools": [],
            "truncation": "disabled", "usage": usage, "metadata": {},
        }  # fmt: skip


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
