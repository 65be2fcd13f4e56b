"""From what a client sent to requests that the engine takes, or a 400 that says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fathomlm.decode.exiting import MODES
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Request
from fathomlm.errors import FathomError, OptionError
from fathomlm.serve.errors import ApiError, as_api_error, refused
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.reading import SHORT
from fathomlm.serve.schemas import Asked, ChatAsked, CompletionAsked, FathomOptions
from fathomlm.serve.served import Offer

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions; a chat goes on to the end of the context."""
SEEDS = 2**63

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one HTTP request comes to."""

    requests: tuple[Request, ...]
    """One for each choice, in the order of their index."""
    prompt_tokens: int
    """Each prompt once, however many choices it has."""
    stream: bool
    usage: bool
    """Whether a stream ends with its token counts."""
    depths: bool
    prompts: tuple[Any, ...]
    """As they came, for logs that may hold them."""


async def read_completion(asked: CompletionAsked, offer: Offer, options: ServeOptions) -> Order:
    _check_model(asked, offer)
    _refuse(bool(asked.echo), "echo", "prompts are not echoed; put the prompt in front of the text yourself")
    _refuse((asked.best_of or 1) > 1, "best_of", "there is no best_of; ask for n texts and choose by their logprobs")
    _refuse(asked.suffix is not None, "suffix", "the model continues texts and cannot fill in the middle")
    prompts = _prompts(asked.prompt)
    if not prompts:
        raise refused("prompt: give at least one prompt", "prompt", "invalid_value")
    _check_counts(asked, len(prompts), options)

    def check() -> None:
        for prompt in prompts:
            least = offer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
            _length(asked, offer, options, least, COMPLETION_TOKENS, "prompt", least=True)

    await _unless_short(offer, sum(map(len, prompts)), check)
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(await offer.encode(prompt))
        except FathomError as error:
            raise as_api_error(error, "prompt") from error
    order = partial(
        _order, asked, offer, options, encoded, tuple(prompts), asked.logprobs, COMPLETION_TOKENS, "prompt"
    )  # fmt: skip
    return await _unless_short(offer, sum(map(len, encoded)) * (asked.n or 1), order)


async def read_chat(asked: ChatAsked, offer: Offer, options: ServeOptions) -> Order:
    _check_model(asked, offer)
    for name in ("tools", "functions"):
        _refuse(bool(getattr(asked, name)), name, "this server calls no tools")
    for name in ("tool_choice", "function_call"):
        _refuse(getattr(asked, name) not in (None, "none", "auto"), name, "this server calls no tools")
    form = asked.response_format
    _refuse(form is not None and form.get("type") != "text", "response_format", "texts are free and follow no schema")
    _refuse(asked.modalities not in (None, ["text"]), "modalities", "there is text only")
    _refuse(asked.audio is not None, "audio", "there is text only")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise refused("top_logprobs goes with logprobs: true", "top_logprobs", "invalid_value")
    _check_counts(asked, 1, options)
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in asked.messages
    ]

    def check(text: str) -> None:
        _length(asked, offer, options, offer.least_tokens(text), None, "messages", least=True)

    try:
        tokens = await offer.encode_chat(messages, check)
    except FathomError as error:
        raise as_api_error(error, "messages") from error
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    order = partial(_order, asked, offer, options, [tokens], (messages,), logprobs, None, "messages")
    return await _unless_short(offer, len(tokens) * (asked.n or 1), order)


async def _unless_short(offer: Offer, size: int, work: Callable[[], T]) -> T:
    """Here, or in a thread where it would keep others waiting. Nothing is tokenised, so it is short work all the same."""
    return work() if size <= SHORT else await offer.readers.read(0, work)


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """One text or one list of token ids is one prompt."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt


def _check_model(asked: Asked, offer: Offer) -> None:
    if asked.model is not None and asked.model != offer.name:
        message = f"the model '{asked.model}' does not exist here; this server offers '{offer.name}'"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_counts(asked: Asked, prompts: int, options: ServeOptions) -> None:
    most = options.max_choices
    if prompts * (asked.n or 1) > most:
        at = "n" if (asked.n or 1) > 1 else "prompt"
        message = f"at most {most} texts for one request, prompts times n; this asks for {prompts * (asked.n or 1)}"
        raise refused(message, at, "invalid_value")
    _refuse(bool(asked.logit_bias), "logit_bias", "scores cannot be changed token by token")
    stops = _stops(asked)
    if len(stops) > options.max_stops:
        raise refused(f"stop: at most {options.max_stops} strings, got {len(stops)}", "stop", "invalid_value")
    for text in stops:
        if not 1 <= len(text) <= options.max_stop_length:
            rule = f"each string has 1 to {options.max_stop_length} characters"
            raise refused(f"stop: {rule}, got one of {len(text)}", "stop", "invalid_value")


def _refuse(asked: bool, param: str, why: str) -> None:
    if asked:
        raise refused(f"{param} is not supported: {why}", param, "unsupported_parameter")


def _stops(asked: Asked) -> tuple[str, ...]:
    return (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())


def _order(
    asked: Asked, offer: Offer, options: ServeOptions, encoded: Sequence[Sequence[int]], prompts: tuple[Any, ...],
    logprobs: int | None, default: int | None, where: str,
) -> Order:  # fmt: skip
    fathom = asked.fathom
    requests: list[Request] = []
    for tokens in encoded:
        length = _length(asked, offer, options, len(tokens), default, where)
        requests += [_request(asked, offer, tokens, length, number, logprobs) for number in range(asked.n or 1)]
    return Order(
        requests=tuple(requests), prompt_tokens=sum(map(len, encoded)), stream=bool(asked.stream),
        usage=bool(asked.stream_options and asked.stream_options.include_usage),
        depths=bool(fathom and fathom.depths), prompts=prompts,
    )  # fmt: skip


def _length(
    asked: Asked, offer: Offer, options: ServeOptions, prompt_tokens: int, default: int | None, where: str,
    least: bool = False,
) -> int:  # fmt: skip
    """How many tokens a text may have. What was asked for has to fit; what was not is made to. `least`: the prompt has so
    many tokens or more, and is not worth counting where even those do not fit."""
    room = offer.max_length - prompt_tokens
    most = options.max_tokens
    name, wanted = "max_tokens", asked.max_tokens
    if isinstance(asked, ChatAsked) and asked.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", asked.max_completion_tokens
    if wanted is not None and most is not None and wanted > most:
        raise refused(f"{name}: this server makes at most {most} tokens for a text, got {wanted}", name, "invalid_value")
    if room < 1 or (wanted is not None and wanted > room):
        and_new = "" if wanted is None else f" and {name}={wanted} make {prompt_tokens + wanted}"
        count = f"at least {prompt_tokens}" if least else str(prompt_tokens)
        message = f"this model's context is {offer.max_length} tokens, but {count} prompt tokens{and_new}"
        raise refused(message if and_new else f"{message} leave no room", where, "context_length_exceeded")
    return wanted if wanted is not None else min(value for value in (default, most, room) if value is not None)


def _depth(asked: Asked, offer: Offer) -> tuple[int | None, float | None]:
    """The most recursions, and how sure an exit must be."""
    fathom = asked.fathom or FathomOptions.model_validate({})
    depth, threshold = fathom.max_depth, fathom.threshold
    if depth is not None and not offer.routed:
        raise _wrong("max_depth", "is for models with a router, and this one has none")
    deepest = offer.max_depth or offer.model.plan.recursions
    if depth is not None and depth > deepest:
        raise _wrong("max_depth", f"is 1 to {deepest} on this server, got {depth}")
    if threshold is not None and offer.exiting is None:
        raise _wrong("threshold", "is for a server whose tokens may leave early, and this one has no exit")
    if _full(fathom, offer):
        return offer.max_depth, None if offer.exiting is None else 1.0
    return offer.max_depth if depth is None else depth, None if threshold is None else float(threshold)


def _full(fathom: FathomOptions, offer: Offer) -> bool:
    """Whether the full depth was asked for. An engine is built for one way of leaving early, so others are refused."""
    decode = fathom.decode
    if decode is None:
        return False
    if decode not in offer.decodes:
        can = " or ".join(f"'{mode}'" for mode in offer.decodes)
        if decode not in MODES:
            raise _wrong("decode", f"is {can} on this server, got '{decode}'")
        hint = "; threshold 0 lets every token leave" if decode == "static" and offer.exiting is not None else ""
        raise _wrong("decode", f"is {can} on this server, which was not set up for '{decode}'{hint}")
    if decode == "full":
        for name in ("threshold", "max_depth"):
            if getattr(fathom, name) is not None:
                raise _wrong(name, "does not go with decode 'full', which runs every token as deep as it can")
    return decode == "full"


def _wrong(field: str, why: str) -> ApiError:
    return refused(f"fathom.{field} {why}", f"fathom.{field}", "invalid_value")


def _request(asked: Asked, offer: Offer, tokens: Sequence[int], length: int, number: int, logprobs: int | None) -> Request:
    """Choice `number` of a prompt. With a seed, the first is what n = 1 would give and the others differ from it."""
    depth, threshold = _depth(asked, offer)
    try:
        sampling = Sampling(
            max_new_tokens=length,
            temperature=1.0 if asked.temperature is None else float(asked.temperature),
            top_p=1.0 if asked.top_p is None else float(asked.top_p),
            top_k=max(asked.top_k or 0, 0),
            min_p=float(asked.min_p or 0.0),
            repetition_penalty=1.0 if asked.repetition_penalty is None else float(asked.repetition_penalty),
            seed=None if asked.seed is None else (asked.seed + number) % SEEDS,
            stop=_stops(asked),
            ignore_eos=bool(asked.ignore_eos),
        )
        return offer.front.request(
            tokens, sampling, logprobs=logprobs, presence_penalty=float(asked.presence_penalty or 0.0),
            frequency_penalty=float(asked.frequency_penalty or 0.0), max_depth=depth,
            exit_threshold=threshold,
        )  # fmt: skip
    except OptionError as error:
        first = str(error).split()[0]
        raise as_api_error(error, first if first in type(asked).model_fields else None) from error
