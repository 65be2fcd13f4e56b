"""Request bodies: their fields.

Fields that OpenAI has and we do not know are ignored, as there; wrong types are refused. Fields that would change the result
and that nothing here can honour are listed, so that they can be refused by name. Every list, string and integer has a bound,
and a list is left at its first mistake: pydantic would otherwise describe each of a hundred thousand mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Request as EngineRequest
from fathomlm.options import bounds
from fathomlm.serve.errors import refused

MOST_COMPLETION_LOGPROBS = 5
MOST_INT = 2**31 - 1
"""Of counts and token ids."""
MOST_NAME = 1024
"""Characters of a name: the model, a way of decoding, a modality."""
MOST_MESSAGES = 4096
MOST_PARTS = 1024
"""Content parts of one message."""
MOST_TOOLS = 128
"""Functions of one request, and calls of one message."""
MOST_PROMPTS = 4096
"""Prompts of one request; the server's `max_choices` is less by default."""
MOST_TOKENS = 1 << 20
"""Token ids of one prompt; the model's context is less."""
MOST_EXITS = 64
MOST_STOPS = 1024
"""Stop strings; the server's `max_stops` is less by default."""

Count = Annotated[int, Field(ge=1, le=MOST_INT)]
Temperature = Annotated[float, Field(**bounds(Sampling, "temperature"), le=2)]
"""At most 2, as OpenAI has it."""
Alternatives = Annotated[int, Field(**bounds(EngineRequest, "logprobs"))]
Penalty = Annotated[float, Field(**bounds(EngineRequest, "presence_penalty"))]
TopP = Annotated[float, Field(**bounds(Sampling, "top_p"))]
MinP = Annotated[float, Field(**bounds(Sampling, "min_p"))]
RepetitionPenalty = Annotated[float, Field(**bounds(Sampling, "repetition_penalty"))]
Name = Annotated[str, Field(max_length=MOST_NAME)]
Confidence = Annotated[float, Field(**bounds(Exiting, "threshold"))]
Thresholds = Annotated[list[Confidence], Field(min_length=1, max_length=MOST_EXITS, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""As the key of an object."""
Tokens = Annotated[list[Annotated[int, Field(ge=0, le=MOST_INT)]], Field(max_length=MOST_TOKENS, fail_fast=True)]


Prompts = (
    str
    | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(max_length=MOST_PROMPTS, fail_fast=True)]
)


def as_prompts(given: Any) -> list[Any]:
    """One string or one list of token ids is one prompt."""
    single = isinstance(given, str) or (given and isinstance(given[0], int))
    return [given] if single else list(given)


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class FathomOptions(Part):
    """Depth of tokens, and whether to report it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    decode: Name | None = Field(
        None, description="`full` runs every layer for every token; otherwise the server's own mode, see its status."
    )
    max_depth: Count | None = Field(None, description="Max recursions per token; requires a model with a router.")
    threshold: Confidence | Thresholds | None = Field(
        None,
        description="Exit where the confidence exceeds this, or a list with one for each exit; requires a server with early "
        "exit.",
    )
    depths: bool | None = Field(None, description="Report the depth of each token, and the confidence of its exit.")


class StreamOptions(Part):
    include_usage: bool | None = Field(None, description="One more chunk at the end, with the usage.")


class LoadBody(Part):
    """POST /v1/fathom/load."""

    model: Name


class RequestBody(Part):
    """What both kinds of completion have in common."""

    model: Name | None = Field(None, description="A name in /v1/models; the server's own model where it is left out.")
    n: Count | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = Field(None, ge=-1, le=MOST_INT, description="Beyond OpenAI: sample among so many; 0 and -1 are all.")
    min_p: MinP | None = Field(None, description="Beyond OpenAI.")
    repetition_penalty: RepetitionPenalty | None = Field(None, description="Beyond OpenAI; 1 is off.")
    ignore_eos: bool | None = Field(None, description="Beyond OpenAI: go on past the end token, for measurements.")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="By token id: added to the logit before a token is chosen."
    )
    fathom: FathomOptions | None = Field(None, description="Beyond OpenAI: depth.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def length(self) -> tuple[str, int | None]:
        """The field that limits the completion, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """The prompts: strings, lists of token ids, or one conversation."""
        raise NotImplementedError


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="Text or token ids.")
    logprobs: int | None = Field(None, ge=0, le=MOST_COMPLETION_LOGPROBS)
    echo: bool | None = Field(None, description="Put the prompt in front of the completion.")
    best_of: Count | None = Field(None, description="Refused above 1.")
    suffix: str | None = Field(None, description="Refused.")

    @property
    def prompts(self) -> list[Any]:
        return as_prompts(self.prompt)


class TextPart(Part):
    type: Literal["text"]
    text: str


class Function(Part):
    """What a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of its arguments; null for none.")
    strict: bool | None = Field(None, description="Arguments always follow the schema.")


class Tool(Part):
    type: Literal["function"]
    function: Function


class FunctionChoice(Part):
    name: FunctionName


class ToolChoice(Part):
    """One function, to be called once."""

    type: Literal["function"]
    function: FunctionChoice


class FunctionCall(Part):
    name: FunctionName
    arguments: str = Field(description="An object, as JSON.")


class ToolCall(Part):
    id: Name
    type: Literal["function"] | None = None
    function: FunctionCall


class SchemaFormat(Part):
    name: Name | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema of the reply.")
    strict: bool | None = Field(None, description="Replies always follow the schema.")


class ReplyFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description="The assistant's: what it called."
    )
    tool_call_id: Name | None = Field(None, description="Of a tool: the call that this is the result of.")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates know them."""
    found: list[dict[str, Any]] = []
    for number, each in enumerate(messages):
        where = f"messages[{number}]"
        called = each.role == "assistant" and each.tool_calls
        if each.content is None and not called:
            raise refused(f"{where}.content: Field required", f"{where}.content", "missing_required_parameter")
        if each.tool_calls and not called:
            raise refused(f"{where}.tool_calls requires the role assistant", f"{where}.tool_calls", "invalid_value")
        one: dict[str, Any] = {"role": {"developer": "system"}.get(each.role, each.role), "content": each.text}
        if called:
            one["tool_calls"] = [_called(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(each.tool_calls or ())]
        if each.tool_call_id is not None:
            one["tool_call_id"] = each.tool_call_id
        found.append(one)
    return found


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        where = f"{where}.function.arguments"
        raise refused(f"{where} must be a JSON object: {error}", where, "invalid_value") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class TokenizeBody(Part):
    """POST /tokenize: a prompt, or a conversation in the model's chat format."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Those of the tokenizer; by default for a prompt.")
    add_generation_prompt: bool | None = Field(None, description="Messages: up to where the reply begins; true by default.")
    return_token_strs: bool | None = Field(None, description="Also the text of each token.")


class EmbeddingBody(Part):
    """POST /v1/embeddings."""

    model: Name | None = None
    input: Prompts = Field(description="Text or token ids.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = Field(None, description="Only the model's own width is supported.")
    depth: Count | None = Field(
        None, description="Beyond OpenAI: after how many layers, of a routed model recursions; all by default."
    )

    @property
    def inputs(self) -> list[Any]:
        return as_prompts(self.input)


class DetokenizeBody(Part):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Tokens


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="'auto' leaves it to the model, 'required' allows only calls, a named function only calls of it."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call in a reply.")
    functions: list[Any] | None = Field(None, description="Refused: use tools.")
    function_call: Any = Field(None, description="Refused, but for 'none' and 'auto': use tool_choice.")
    response_format: ReplyFormat | None = Field(None, description="What the reply has to be: text, JSON, or of a schema.")
    modalities: Annotated[list[Name], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Only text is supported."
    )
    audio: Any = Field(None, description="Refused.")

    @property
    def length(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().length

    @property
    def prompts(self) -> list[Any]:
        return [as_messages(self.messages)]
