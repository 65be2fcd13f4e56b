"""What clients get: OpenAI's objects, whole and in chunks.

Log probabilities and depths have an entry for each token of the text; the end token, which is no text, has none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fathomlm.engine.request import Result, TokenEvent, TokenLogprobs
from fathomlm.serve.asking import Order
from fathomlm.serve.choices import finish_reason
from fathomlm.serve.served import Offer

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot be; JSON has no infinity."""

Record = dict[str, Any]


class Answer:
    """The shape of one answer. `CompletionAnswer` and `ChatAnswer` say what a choice looks like."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, offer: Offer, order: Order) -> None:
        self.offer, self.order = offer, order
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._sent = [0] * len(order.requests)
        self._offsets = [0] * len(order.requests)

    # Whole.

    def whole(self, results: Sequence[Result]) -> Record:
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        return self._frame(self.whole_object, choices) | {"usage": self.usage(results)}

    def usage(self, results: Sequence[Result]) -> Record:
        """Every token that was made counts, the end token included."""
        made, read = sum(len(result.tokens) for result in results), self.order.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _whole_choice(self, index: int, result: Result) -> Record:
        choice: Record = {"index": index, "finish_reason": finish_reason(result.finish)} | self._text(result.text)
        count = self._shown(index, result)
        choice["logprobs"] = None
        if result.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, result.tokens[:count], result.logprobs[:count])
        if self.order.depths:
            depths, sures = result.depths, result.confidences
            choice["fathom"] = {
                "depths": None if depths is None else list(depths[:count]),
                "confidences": None if sures is None else list(sures[:count]),
            }
        return choice

    def _shown(self, index: int, result: Result) -> int:
        """How many of a text's tokens are told one by one."""
        return sum(not self._is_end(index, token) for token in result.tokens)

    def _is_end(self, index: int, token: int) -> bool:
        return token in self.offer.ends and not self.order.requests[index].sampling.ignore_eos

    # In chunks.

    def opening(self, index: int) -> list[Record]:
        return []

    def token(self, index: int, event: TokenEvent) -> list[Record]:
        """The chunk of a token; none where it has nothing to say yet."""
        self._sent[index] += len(event.text)
        details: Record = {}
        if not self._is_end(index, event.token):
            if event.logprob is not None:
                told = TokenLogprobs(logprob=event.logprob, top=event.top)
                details["logprobs"] = self._logprobs(index, [event.token], [told])
            if self.order.depths:
                details["fathom"] = {"depths": _listed(event.depth), "confidences": _listed(event.confidence)}
        if not event.text and not details:
            return []
        return [self._chunk(index, self._piece(event.text), None, details)]

    def closing(self, index: int, result: Result) -> list[Record]:
        """What was held back, and why the text ended."""
        reason = finish_reason(result.finish)
        rest = result.text[self._sent[index] :]
        held = [self._chunk(index, self._piece(rest), None, {})] if rest else []
        return [*held, self._chunk(index, self._piece(None), reason, {})]

    def counts(self, results: Sequence[Result]) -> list[Record]:
        """The last chunk, where it was asked for."""
        return [self._frame(self.chunk_object, []) | {"usage": self.usage(results)}] if self.order.usage else []

    def _chunk(self, index: int, piece: Record, reason: str | None, details: Record) -> Record:
        choice = {"index": index, **piece, "logprobs": None, "finish_reason": reason, **details}
        frame = self._frame(self.chunk_object, [choice])
        return frame | {"usage": None} if self.order.usage else frame

    def _frame(self, what: str, choices: list[Record]) -> Record:
        return {
            "id": self.id, "object": what, "created": self.created, "model": self.offer.name, "choices": choices
        }  # fmt: skip

    # What differs.

    def _text(self, text: str) -> Record:
        raise NotImplementedError

    def _piece(self, text: str | None) -> Record:
        """None is the end."""
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Sequence[int], told: Sequence[TokenLogprobs]) -> Record:
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _text(self, text: str) -> Record:
        return {"text": text}

    def _piece(self, text: str | None) -> Record:
        return {"text": text or ""}

    def _logprobs(self, index: int, tokens: Sequence[int], told: Sequence[TokenLogprobs]) -> Record:
        texts = self.offer.tokens
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(texts.text(token))
        tops = [{texts.text(token): _finite(value) for token, value in one.top} for one in told]
        return {
            "tokens": [texts.text(token) for token in tokens],
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": tops if self.order.requests[index].logprobs else None,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[Record]:
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, {})]

    def _text(self, text: str) -> Record:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str | None) -> Record:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, index: int, tokens: Sequence[int], told: Sequence[TokenLogprobs]) -> Record:
        content = []
        for token, one in zip(tokens, told, strict=True):
            tops = [self._entry(other, value) for other, value in one.top]
            content.append(self._entry(token, one.logprob) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Record:
        texts = self.offer.tokens
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.bytes(token)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _listed(value: float | None) -> list[float] | None:
    return None if value is None else [value]
