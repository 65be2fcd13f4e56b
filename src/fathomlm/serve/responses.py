"""Responses: OpenAI's objects, complete and in chunks.

Log probabilities and depths have an entry for each token of the completion; the end token, which is no text, has none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fathomlm.engine.forward import prompt_logprobs
from fathomlm.engine.request import Finished, Request, Result, TokenEvent, TokenLogprobs
from fathomlm.errors import FathomError
from fathomlm.serve.bodies import ChatBody, CompletionBody, RequestBody
from fathomlm.serve.errors import INTERNAL, ApiError, as_api_error, to_json
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.tools import read_calls, shown

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot be; JSON has no infinity."""

MARK = "\ue000"
"""Stands for a token's text in a chunk that is made once for all of them."""

Json = dict[str, Any]
Chunk = Json | bytes
"""What is sent at once, perhaps as JSON already."""


def finish_reason(finished: Finished) -> str:
    """OpenAI's word for it, or the error that it was."""
    if finished.reason == "error":
        raise ApiError(500, INTERNAL, code="engine_error")
    if finished.reason == "cancelled":
        raise ApiError(503, "the server was stopped before the completion finished", code="draining")
    return "length" if finished.reason == "length" else "stop"


class ResponseFormat:
    """The response to one HTTP request, whose body became these requests, one for each choice. `CompletionFormat` and
    `ChatFormat` have what a choice looks like."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, served: ServedModel, body: RequestBody, requests: Sequence[Request]) -> None:
        self.served, self.requests = served, requests
        self.stream = bool(body.stream)
        self.prompt_tokens = sum(len(request.prompt) for request in requests[:: body.n or 1])
        """Each prompt once, however many choices it has."""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._depths = bool(body.fathom and body.fathom.depths)
        self._sent = [0] * len(requests)
        self._offsets = [0] * len(requests)
        self._frames: dict[int, list[bytes]] = {}
        """By choice: the JSON of a chunk that is but text, in front of the text and behind it."""

    async def prepare(self) -> None:
        """What has to be known before anything is sent, beside what the engine generates."""

    # Complete responses.

    def whole(self, results: Sequence[Result]) -> Json:
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        return self._frame(self.whole_object, choices) | {"usage": self.usage(results)}

    def usage(self, results: Sequence[Result]) -> Json:
        """Every generated token counts, the end token included."""
        prompt, completion = self.prompt_tokens, sum(len(result.tokens) for result in results)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _whole_choice(self, index: int, result: Result) -> Json:
        choice: Json = {"index": index, "finish_reason": finish_reason(result.finish)}
        choice |= self._text(self._echo(index) + result.text)
        count = sum(not self._is_end(index, token) for token in result.tokens)
        choice["logprobs"] = None
        if result.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, result.tokens[:count], result.logprobs[:count])
        if self._depths:
            depths, confidences = result.depths, result.confidences
            choice["fathom"] = {
                "depths": None if depths is None else list(depths[:count]),
                "confidences": None if confidences is None else list(confidences[:count]),
            }
        return choice

    def _is_end(self, index: int, token: int) -> bool:
        return token in self.served.ends and not self.requests[index].sampling.ignore_eos

    # In chunks.

    def opening(self, index: int) -> list[Json]:
        return []

    def token(self, index: int, event: TokenEvent) -> Sequence[Chunk]:
        """The chunk of a token; none where it has nothing to show yet. Most have a text and nothing else: their JSON is not
        made anew for each token, which would take longer than all that the engine does for one."""
        if event.logprob is None and self._only_text:
            self._sent[index] += len(event.text)
            return [to_json(event.text).join(self._frame_of_text(index))] if event.text else ()
        text = self._shown(index, event.text)
        self._sent[index] += len(text)
        details: Json = {}
        if not self._is_end(index, event.token):
            if event.logprob is not None:
                logprobs = TokenLogprobs(logprob=event.logprob, top=event.top)
                details["logprobs"] = self._logprobs(index, [event.token], [logprobs])
            if self._depths:
                details["fathom"] = {"depths": _listed(event.depth), "confidences": _listed(event.confidence)}
        if not text and not details:
            return []
        return [self._chunk(index, self._piece(text), None, details)]

    @property
    def _only_text(self) -> bool:
        """Whether tokens are shown as they come, and nothing but their text."""
        return not self._depths

    def _frame_of_text(self, index: int) -> list[bytes]:
        if index not in self._frames:
            chunk = self._chunk(index, self._piece(MARK), None, {})
            self._frames[index] = to_json(chunk).rsplit(to_json(MARK), 1)
        return self._frames[index]

    def closing(self, index: int, result: Result) -> list[Json]:
        """What was held back, and why the completion ended."""
        reason = finish_reason(result.finish)
        pieces, reason = self._rest(index, result, reason)
        held = [self._chunk(index, piece, None, {}) for piece in pieces]
        return [*held, self._chunk(index, self._piece(None), reason, {})]

    def counts(self, results: Sequence[Result]) -> list[Json]:
        """The last chunk, where the body wants it."""
        return [self._frame(self.chunk_object, []) | {"usage": self.usage(results)}] if self._usage else []

    def _chunk(self, index: int, piece: Json, reason: str | None, details: Json) -> Json:
        choice = {"index": index, **piece, "logprobs": None, "finish_reason": reason, **details}
        frame = self._frame(self.chunk_object, [choice])
        return frame | {"usage": None} if self._usage else frame

    def _frame(self, what: str, choices: list[Json]) -> Json:
        return {
            "id": self.id, "object": what, "created": self.created, "model": self.served.name, "choices": choices
        }  # fmt: skip

    # What differs.

    def _echo(self, index: int) -> str:
        """What comes in front of a completion."""
        return ""

    def _shown(self, index: int, text: str) -> str:
        """What may be sent of a choice's next text."""
        return text

    def _rest(self, index: int, result: Result, reason: str) -> tuple[list[Json], str]:
        """What was not sent before the end, and why it ended."""
        rest = result.text[self._sent[index] :]
        return [self._piece(rest)] if rest else [], reason

    def _text(self, text: str) -> Json:
        raise NotImplementedError

    def _piece(self, text: str | None) -> Json:
        """None is the end."""
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        raise NotImplementedError


class CompletionFormat(ResponseFormat):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: ServedModel, body: CompletionBody, requests: Sequence[Request]) -> None:
        super().__init__(served, body, requests)
        self._echoed: list[str] = []
        """With `echo`: each choice's prompt."""
        self._read: dict[tuple[int, ...], list[TokenLogprobs | None]] = {}
        """With `echo` and `logprobs`: those of a prompt's tokens."""
        if body.echo:
            given = [prompt for prompt in body.prompts for _ in range(body.n or 1)]
            both = zip(given, requests, strict=True)
            self._echoed = [one if isinstance(one, str) else served.tokens.whole(request.prompt) for one, request in both]

    async def prepare(self) -> None:
        """A prompt is read once more for its log probabilities, between two decode steps."""
        for request in self.requests if self._echoed else ():
            if request.logprobs is not None and request.prompt not in self._read:
                work = partial(
                    prompt_logprobs, self.served.model, request.prompt, request.logprobs, max_depth=request.max_depth
                )
                try:
                    self._read[request.prompt] = await self.served.engine.call(work)
                except FathomError as error:
                    raise as_api_error(error) from error

    def opening(self, index: int) -> list[Json]:
        if not self._echoed:
            return []
        read = self._read.get(self.requests[index].prompt)
        details = {} if read is None else {"logprobs": self._logprobs(index, [], [])}
        return [self._chunk(index, self._piece(self._echo(index)), None, details)]

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def _text(self, text: str) -> Json:
        return {"text": text}

    def _piece(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        """With `echo` the first to be asked for begin with the prompt's."""
        texts, prompt = self.served.tokens, self.requests[index].prompt
        entries: list[TokenLogprobs | None] = [*logprobs]
        if self._offsets[index] == 0 and prompt in self._read:
            tokens, entries = [*prompt, *tokens], [*self._read[prompt], *logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(texts.text(token))
        tops = [one and self._tops(one) for one in entries]
        return {
            "tokens": [texts.text(token) for token in tokens],
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in entries],
            "top_logprobs": tops if self.requests[index].logprobs else None,
            "text_offset": offsets,
        }

    def _tops(self, one: TokenLogprobs) -> Json:
        """By text. Of tokens that look alike, parts of a character, the likeliest counts."""
        found: Json = {}
        for token, value in one.top:
            found.setdefault(self.served.tokens.text(token), _finite(value))
        return found


class ChatFormat(ResponseFormat):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, body: ChatBody, requests: Sequence[Request]) -> None:
        super().__init__(served, body, requests)
        self._calls = bool(body.tools) and body.tool_choice != "none"
        """Whether replies may have calls in them."""
        self._said = [""] * len(requests)

    @property
    def _only_text(self) -> bool:
        return not self._calls and super()._only_text

    def _whole_choice(self, index: int, result: Result) -> Json:
        choice = super()._whole_choice(index, result)
        text, calls = read_calls(result.text) if self._calls else (result.text, [])
        if calls:
            choice["message"] |= {"content": text or None, "tool_calls": calls}
            choice["finish_reason"] = _called(choice["finish_reason"])
        return choice

    def _shown(self, index: int, text: str) -> str:
        if not self._calls:
            return text
        self._said[index] += text
        return shown(self._said[index])[self._sent[index] :]

    def _rest(self, index: int, result: Result, reason: str) -> tuple[list[Json], str]:
        calls = read_calls(result.text)[1] if self._calls else []
        if not calls:
            return super()._rest(index, result, reason)
        return [{"delta": {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}}], _called(reason)

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, {})]

    def _text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        content = []
        for token, one in zip(tokens, logprobs, strict=True):
            tops = [self._entry(other, value) for other, value in one.top]
            content.append(self._entry(token, one.logprob) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        texts = self.served.tokens
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.bytes(token)}


def _called(reason: str) -> str:
    """Why a reply with calls ended: a limit is still a limit."""
    return "tool_calls" if reason == "stop" else reason


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _listed(value: float | None) -> list[float] | None:
    return None if value is None else [value]
