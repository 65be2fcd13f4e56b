"""What clients may send. Fields that OpenAI has and we do not know are ignored, as there; wrong types are refused.

Fields that would change the answer and that nothing here can honour are listed, so that they can be refused by name.

Every list, string and integer has a bound, and a list is left at its first mistake: pydantic would otherwise describe each
of a hundred thousand mistakes in a body, which takes seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fathomlm.engine.request import MAX_LOGPROBS

MOST_COMPLETION_LOGPROBS = 5
MOST_INT = 2**31 - 1
"""Of counts and token ids."""
MOST_NAME = 1024
"""Characters of a name: the model, a way of decoding, a modality."""
MOST_MESSAGES = 4096
MOST_PARTS = 1024
"""Content parts of one message."""
MOST_PROMPTS = 4096
"""Prompts of one request; the server's `max_choices` is less by default."""
MOST_TOKENS = 1 << 20
"""Token ids of one prompt; the model's context is less."""
MOST_STOPS = 1024
"""Stop strings; the server's `max_stops` is less by default."""

Count = Annotated[int, Field(ge=1, le=MOST_INT)]
Name = Annotated[str, Field(max_length=MOST_NAME)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, le=MOST_INT)]], Field(max_length=MOST_TOKENS, fail_fast=True)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class FathomOptions(_Part):
    """How deep tokens may go, and whether to say how deep they went."""

    model_config = ConfigDict(strict=True, extra="forbid")

    decode: Name | None = Field(
        None, description="`full` is every layer for every token; else as the server decodes, which its status names."
    )
    max_depth: Count | None = Field(None, description="No token runs more recursions; models with a router only.")
    threshold: float | None = Field(
        None, ge=0, le=1, description="Leave where the exit is surer than this; servers with an exit only."
    )
    depths: bool | None = Field(None, description="Report the depth of each token, and how sure its exit was.")


class StreamOptions(_Part):
    include_usage: bool | None = Field(None, description="One more chunk at the end, with the token counts.")


class Asked(_Part):
    """What both kinds of completion have in common."""

    model: Name | None = Field(None, description="As /v1/models names it; there is one.")
    n: Count | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_INT, description="Beyond OpenAI: sample among so many; 0 and -1 are all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Beyond OpenAI.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Beyond OpenAI; 1 is off.")
    ignore_eos: bool | None = Field(None, description="Beyond OpenAI: go on past the end token, for measurements.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Any] | None = Field(None, description="Refused.")
    fathom: FathomOptions | None = Field(None, description="Beyond OpenAI: depth.")


class CompletionAsked(Asked):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    ) = Field(description="Texts or token ids.")
    logprobs: int | None = Field(None, ge=0, le=MOST_COMPLETION_LOGPROBS)
    echo: bool | None = Field(None, description="Refused.")
    best_of: Count | None = Field(None, description="Refused above 1.")
    suffix: str | None = Field(None, description="Refused.")


class TextPart(_Part):
    type: Literal["text"]
    text: str


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = Field(None, description="Refused.")
    functions: list[Any] | None = Field(None, description="Refused.")
    tool_choice: Any = Field(None, description="Refused, but for 'none' and 'auto'.")
    function_call: Any = Field(None, description="Refused, but for 'none' and 'auto'.")
    response_format: dict[str, Any] | None = Field(None, description="Refused, but for plain text.")
    modalities: Annotated[list[Name], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Refused, but for text."
    )
    audio: Any = Field(None, description="Refused.")
