"""Constrained decoding: which tokens may come next, so that a completion follows a JSON schema or a grammar.

llguidance (MIT) does the parsing, token by token on the host; the engine puts what it allows on the device before a token is
chosen (`sampler`). A grammar is compiled once for a request, and matched anew for each of its choices.

    grammars = Grammars(model)
    request = Request(id=1, prompt=(1, 2, 3), constraint=grammars.json({"type": "object"}))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fathomlm.decode.prompts import end_tokens
from fathomlm.errors import OptionError
from fathomlm.model.seq2seq import FathomModel

INSTALL = "pip install -c constraints.txt -e '.[grammar]'"
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace is what a small model writes without end."""
SHOWN = 300
"""Characters of an error that are told."""


class Grammars:
    """The grammars of one model's tokens."""

    def __init__(self, model: FathomModel) -> None:
        self._model = model

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """Text that is JSON and follows a schema."""
        return self._compiled(self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACING))

    def lark(self, text: str) -> Grammar:
        """Text that follows a grammar in llguidance's dialect of Lark."""
        return self._compiled(self._library.LLMatcher.grammar_from_lark(text))

    def _compiled(self, grammar: str) -> Grammar:
        matcher = self._library.LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise OptionError(f"the schema cannot be followed: {_first_line(matcher.get_error())}")
        return Grammar(matcher, self._model.architecture.vocab, end_tokens(self._model))

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise OptionError(f"constrained decoding requires llguidance: {INSTALL}") from error
        return llguidance

    @cached_property
    def _tokenizer(self) -> Any:
        """What llguidance knows of the tokens: made once for a model, in a second at most."""
        tokenizer, ends = self._model.tokenizer, sorted(end_tokens(self._model))
        if tokenizer is None or not tokenizer.is_fast:
            raise OptionError("constrained decoding requires a model with a fast tokenizer")
        if not ends:
            raise OptionError("constrained decoding requires a model with an end token")
        text, vocab = tokenizer.backend_tokenizer.to_str(), self._model.architecture.vocab
        try:
            return self._library.LLTokenizer(text, n_vocab=vocab, eos_token=ends[0])
        except ValueError as error:
            raise OptionError(f"constrained decoding does not support this tokenizer: {_first_line(str(error))}") from error


class Grammar:
    """A compiled grammar, the constraint of a `Request`; and how far one completion has come in it."""

    def __init__(self, matcher: Any, vocab: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab, self._ends = matcher, vocab, sorted(ends)

    def begin(self) -> Grammar:
        """The same for another completion."""
        return Grammar(self._matcher.deep_copy(), self._vocab, frozenset(self._ends))

    def advance(self, token: int) -> None:
        """A token that was allowed, and ends nothing."""
        self._check(self._matcher.consume_token(token))

    def allowed(self) -> bytes:
        """A byte for each token of the vocabulary: 1 where it may come next. Where the text may end every end token may
        come, and where it must nothing else."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little")[: self._vocab]
        found[self._ends] = found[self._ends[0]]
        self._check(bool(found.any()))
        return found.tobytes()

    def _check(self, right: bool) -> None:
        if not right or self._matcher.is_error():
            raise OptionError(f"the completion cannot go on in its grammar: {_first_line(self._matcher.get_error())}")


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:SHOWN]
