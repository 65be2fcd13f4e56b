"""From the body of an HTTP request to the engine's requests, one for each choice, or a 400 with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fathomlm.decode.exiting import MODES, Threshold
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Constraint, Request
from fathomlm.errors import FathomError, OptionError
from fathomlm.serve.bodies import ChatBody, CompletionBody, FathomOptions, RequestBody, ToolChoice
from fathomlm.serve.errors import ApiError, as_api_error, refused
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.tokens import SHORT
from fathomlm.serve.tools import MOST_CALLS, call_grammar

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions; a chat goes on to the end of the context."""
SEEDS = 2**63

T = TypeVar("T")


async def completion_requests(body: CompletionBody, served: ServedModel, options: ServeOptions) -> list[Request]:
    _refuse((body.best_of or 1) > 1, "best_of", "request n completions and choose by their logprobs")
    _refuse(body.suffix is not None, "suffix", "the model continues text and cannot fill in the middle")
    prompts = body.prompts
    if not prompts:
        raise refused("prompt: give at least one prompt", "prompt", "invalid_value")
    _check_counts(body, len(prompts), options)

    def check() -> None:
        for prompt in prompts:
            least = served.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
            _length(body, served, options, least, COMPLETION_TOKENS, "prompt", least=True)

    await _unless_short(served, sum(map(len, prompts)), check)
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(await served.encode(prompt))
        except FathomError as error:
            raise as_api_error(error, "prompt") from error
    build = partial(_requests, body, served, options, encoded, body.logprobs, COMPLETION_TOKENS, "prompt")
    return await _unless_short(served, sum(map(len, encoded)) * (body.n or 1), build)


async def chat_requests(body: ChatBody, served: ServedModel, options: ServeOptions) -> list[Request]:
    _refuse(bool(body.functions), "functions", "use tools")
    _refuse(body.function_call not in (None, "none", "auto"), "function_call", "use tool_choice")
    tools, must, most = _tools(body)
    format, schema = _schema(body)
    if tools and schema is not None:
        raise refused(f"response_format '{format}' cannot be combined with tools", "response_format", "invalid_value")
    _refuse(body.modalities not in (None, ["text"]), "modalities", "there is text only")
    _refuse(body.audio is not None, "audio", "there is text only")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs requires logprobs: true", "top_logprobs", "invalid_value")
    _check_counts(body, 1, options)

    def check(text: str) -> None:
        _length(body, served, options, served.least_tokens(text), None, "messages", least=True)

    try:
        tokens = await served.encode_chat(body.prompts[0], check, tools=tools)
    except FathomError as error:
        raise as_api_error(error, "messages") from error
    constraint: Constraint | None = None
    if tools or schema is not None:
        try:
            make = partial(served.grammars.json, schema or {})
            if tools:
                make = partial(served.grammars.lark, call_grammar(tools, must=must, most=most))
            constraint = await served.tokenizers.run(0, make)
        except FathomError as error:
            raise as_api_error(error, "tools" if tools else "response_format") from error
        if body.ignore_eos:
            raise refused("ignore_eos cannot be combined with tools or response_format", "ignore_eos", "invalid_value")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    build = partial(_requests, body, served, options, [tokens], logprobs, None, "messages", constraint)
    return await _unless_short(served, len(tokens) * (body.n or 1), build)


def _tools(body: ChatBody) -> tuple[list[dict[str, Any]], bool, int]:
    """The functions that the model may call, whether it must, and how often it may."""
    tools, choice = [tool.model_dump(exclude_none=True) for tool in body.tools or ()], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice requires tools", "tool_choice", "invalid_value")
        return [], False, 0
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            known = ", ".join(tool["function"]["name"] for tool in tools)
            raise refused(f"tool_choice: no function '{name}' in tools, which has {known}", "tool_choice", "invalid_value")
        return named, True, 1
    most = 1 if body.parallel_tool_calls is False else MOST_CALLS
    return [] if choice == "none" else tools, choice == "required", most


def _schema(body: ChatBody) -> tuple[str, dict[str, Any] | None]:
    """What the reply has to be, and its JSON schema where it has one."""
    form = body.response_format
    if form is None or form.type == "text":
        return "text", None
    if form.type == "json_object":
        return form.type, {"type": "object"}
    if form.json_schema is None:
        where = "response_format.json_schema"
        raise refused(f"{where} is required where the type is json_schema", where, "missing_required_parameter")
    return form.type, form.json_schema.schema_


async def _unless_short(served: ServedModel, size: int, work: Callable[[], T]) -> T:
    """Here, or in a thread where it would keep others waiting. Nothing is tokenized, so it is short work all the same."""
    return work() if size <= SHORT else await served.tokenizers.run(0, work)


def _check_counts(body: RequestBody, prompts: int, options: ServeOptions) -> None:
    most, n = options.max_choices, body.n or 1
    if prompts * n > most:
        message = f"at most {most} completions per request, prompts times n; got {prompts * n}"
        raise refused(message, "n" if n > 1 else "prompt", "invalid_value")
    stops = body.stops
    if len(stops) > options.max_stops:
        raise refused(f"stop: at most {options.max_stops} strings, got {len(stops)}", "stop", "invalid_value")
    for text in stops:
        if not 1 <= len(text) <= options.max_stop_length:
            rule = f"each string has 1 to {options.max_stop_length} characters"
            raise refused(f"stop: {rule}, got one of {len(text)}", "stop", "invalid_value")


def _refuse(wanted: bool, param: str, why: str) -> None:
    if wanted:
        raise refused(f"{param} is not supported: {why}", param, "unsupported_parameter")


def _length(
    body: RequestBody, served: ServedModel, options: ServeOptions, prompt_tokens: int, default: int | None, where: str,
    least: bool = False,
) -> int:  # fmt: skip
    """Max new tokens of a completion. A length given in the body must fit; the default is reduced to what fits.
    `least`: the prompt has so many tokens or more, and is not worth counting where even those do not fit."""
    source, most = served.max_source, options.max_tokens
    room = served.max_length - (1 if source else prompt_tokens)
    name, wanted = body.length
    if wanted is not None and most is not None and wanted > most:
        raise refused(f"{name}: at most {most} tokens per completion on this server, got {wanted}", name, "invalid_value")
    count = f"at least {prompt_tokens}" if least else str(prompt_tokens)
    if source and prompt_tokens > source:
        message = f"this model's encoder reads at most {source} tokens, but the prompt has {count}"
        raise refused(message, where, "context_length_exceeded")
    if source and wanted is not None and wanted > room:
        raise refused(f"this model's decoder writes at most {room} tokens, got {name}={wanted}", name, "invalid_value")
    if room < 1 or (wanted is not None and wanted > room):
        and_new = "" if wanted is None else f" and {name}={wanted} make {prompt_tokens + wanted}"
        message = f"this model's context is {served.max_length} tokens, but {count} prompt tokens{and_new}"
        raise refused(message if and_new else f"{message} leave no room", where, "context_length_exceeded")
    return wanted if wanted is not None else min(value for value in (default, most, room) if value is not None)


def _requests(
    body: RequestBody, served: ServedModel, options: ServeOptions, encoded: Sequence[Sequence[int]],
    logprobs: int | None, default: int | None, where: str, constraint: Constraint | None = None,
) -> list[Request]:  # fmt: skip
    """Each prompt's choices. With a seed, the first is what n = 1 would give and the others differ from it."""
    depth, threshold = _depth(body, served)
    biases = {int(token): float(value) for token, value in (body.logit_bias or {}).items()}
    vocab = served.model.architecture.vocab
    if (most := max(biases, default=0)) >= vocab:
        raise refused(f"logit_bias: token id {most} is outside the vocabulary of {vocab}", "logit_bias", "invalid_value")
    requests = []
    for tokens in encoded:
        length = _length(body, served, options, len(tokens), default, where)
        for number in range(body.n or 1):
            try:
                request = Request(
                    id=served.engine.new_id(), prompt=tuple(tokens), sampling=_sampling(body, served, length, number),
                    logprobs=logprobs, presence_penalty=float(body.presence_penalty or 0.0),
                    frequency_penalty=float(body.frequency_penalty or 0.0), logit_bias=biases,
                    constraint=constraint, max_depth=depth, exit_threshold=threshold,
                )  # fmt: skip
            except OptionError as error:
                first = str(error).split()[0]
                raise as_api_error(error, first if first in type(body).model_fields else None) from error
            requests.append(request)
    return requests


def _sampling(body: RequestBody, served: ServedModel, max_new_tokens: int, number: int) -> Sampling:
    """What a body leaves open is as the model's generation_config has it; OpenAI's defaults, which sample from the model's
    own distribution, are for the rest."""
    usual: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    usual |= served.sampling
    given = {name: value if (own := getattr(body, name)) is None else own for name, value in usual.items()}
    return Sampling(
        max_new_tokens=max_new_tokens,
        top_k=max(int(given.pop("top_k")), 0),
        seed=None if body.seed is None else (body.seed + number) % SEEDS,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        **{name: float(value) for name, value in given.items()},
    )


def _depth(body: RequestBody, served: ServedModel) -> tuple[int | None, Threshold | None]:
    """The most recursions, and the confidence that an exit must exceed."""
    fathom = body.fathom or FathomOptions.model_validate({})
    depth, threshold = fathom.max_depth, fathom.threshold
    if depth is not None and not served.routed:
        raise _wrong("max_depth", "requires a model with a router")
    deepest = served.max_depth or served.model.plan.recursions
    if depth is not None and depth > deepest:
        raise _wrong("max_depth", f"must be between 1 and {deepest} on this server, got {depth}")
    if threshold is not None and served.exiting is None:
        raise _wrong("threshold", "requires a server with early exit")
    if isinstance(threshold, list) and served.exiting is not None:
        exits = len(served.exiting.exits(served.model.plan))
        if len(threshold) != exits:
            raise _wrong("threshold", f"must be one number, or one for each of {exits} exit(s), got {len(threshold)}")
    if _full(fathom, served):
        return served.max_depth, None if served.exiting is None else 1.0
    own: Threshold | None = tuple(threshold) if isinstance(threshold, list) else threshold
    return served.max_depth if depth is None else depth, own


def _full(fathom: FathomOptions, served: ServedModel) -> bool:
    """Whether the full depth is wanted. An engine is built for one way of exiting, so others are refused."""
    decode = fathom.decode
    if decode is None:
        return False
    if decode not in served.decodes:
        can = " or ".join(f"'{mode}'" for mode in served.decodes)
        if decode not in MODES:
            raise _wrong("decode", f"must be {can} on this server, got '{decode}'")
        hint = "; threshold 0 lets every token exit" if decode == "static" and served.exiting is not None else ""
        raise _wrong("decode", f"must be {can} on this server, which was not set up for '{decode}'{hint}")
    if decode == "full":
        for name in ("threshold", "max_depth"):
            if getattr(fathom, name) is not None:
                raise _wrong(name, "cannot be combined with decode 'full'")
    return decode == "full"


def _wrong(field: str, why: str) -> ApiError:
    return refused(f"fathom.{field} {why}", f"fathom.{field}", "invalid_value")
