"""One prompt on its way to a completion: what was chosen, what was streamed, how deep it went, and what came of it.

Shapes: M hidden width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fathomlm.cache import Span
from fathomlm.decode.exiting import ORACLES, Threshold
from fathomlm.decode.logits import likeliest, pick, sampling_probabilities, seen_tokens
from fathomlm.decode.prompts import end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.text import TextStream
from fathomlm.errors import OptionError
from fathomlm.model.seq2seq import FathomModel

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatistics:
    """What early exit saved in one completion, and what it cost."""

    mode: str
    layers: int
    """The model's unrolled depth: the layer behind which a token that did not exit early was chosen."""
    threshold: Threshold | None
    """The one in force for this completion; None where the mode has none."""
    layers_run: int
    """Layers times tokens while decoding, discarded drafts included; the prompt but for its last token is left out."""
    deep_passes: int | None = 0
    """parallel, speculative: how often the layers behind the exit ran, over one token or several; None where other
    sequences share those passes."""
    drafted: int = 0
    """speculative, parallel with refine: tokens that were chosen at the exit and then judged by the full model."""
    accepted: int = 0
    """Those of them that stayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one prompt."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """Every token that was chosen, the end token included."""
    text: str
    """The tokens as text, without special tokens and cut before the stop string; empty without a tokenizer."""
    finish: Finish
    """Why it ended: the model's end token, a stop string, or max_new_tokens."""
    prefill_seconds: float
    """The prompt, up to the first new token. Sequences of a batch are prefilled together and share it."""
    decode_seconds: float
    """From the first new token to this sequence's last."""
    depths: tuple[int, ...] | None = None
    """For each token, how many recursions ran at the position that chose it; None where the model has no router."""
    exit_layers: tuple[int, ...] | None = None
    """For each token, the layer after which it was chosen, from 1; the last layer is full depth. None without exits."""
    confidences: tuple[float, ...] | None = None
    """For each token, the confidence at the exit where it exited, or at the last exit that it passed."""
    agreements: tuple[bool | None, ...] | None = None
    """For each token, whether the most likely token at that exit was the full model's too; None where that is unknown."""
    oracle: bool = False
    """Whether the exits were chosen with knowledge of the last layer, which no real decoding has."""
    exits: ExitStatistics | None = None

    @property
    def tokens_per_second(self) -> float:
        """The rate of decoding; the first token belongs to the prefill. 0 where there was only one, or where all came at
        once, as an engine may hand over the few tokens of a short text."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


def exit_rate(results: Sequence[Generation]) -> float:
    """The part of the tokens that was chosen before the last layer."""
    early = [layer < result.exits.layers for result in results if result.exits for layer in result.exit_layers or ()]
    return sum(early) / len(early) if early else 0.0


def mean_exit_layer(results: Sequence[Generation]) -> float:
    """The layer after which a token was chosen, on average."""
    layers = [layer for result in results for layer in result.exit_layers or ()]
    return sum(layers) / len(layers) if layers else 0.0


@dataclass(slots=True)
class TokenExit:
    """Where a token was chosen. The agreement of one that exited early is known once the layers behind have run."""

    layer: int
    confidence: float | None = None
    agreement: bool | None = None


class SequenceState:
    """One prompt on its way."""

    def __init__(
        self,
        model: FathomModel,
        prompt: list[int],
        sampling: Sampling,
        on_text: Callable[[str], None] | None,
        source: list[int] | None = None,
    ) -> None:
        """`source` is what an encoder read; `prompt` is then what the decoder begins from."""
        if sampling.stop and model.tokenizer is None:
            raise OptionError("stop strings require a tokenizer, and this model has none")
        self.prompt = prompt
        self._source = source
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.token_exits: list[TokenExit] = []
        self.finish: Finish | None = None
        self.end_tokens = frozenset() if sampling.ignore_eos else end_tokens(model)
        self.max_new_tokens = sampling.max_new_tokens
        context = prompt if source is None else []
        self._stream = None if model.tokenizer is None else TextStream(model.tokenizer, stop=sampling.stop, context=context)
        self._watched = bool(sampling.stop) or on_text is not None
        self._on_text = on_text
        self._pieces: list[str] = []
        self._ended = self._prefill_seconds = self._decode_seconds = 0.0

    def take(self, token: int, depth: int | None = None, token_exit: TokenExit | None = None) -> bool:
        """Add a token, and the depth that it was chosen at; returns whether the sequence goes on. One that is over ignores
        what its place in the batch computes."""
        if self.finish is not None:
            return False
        self.tokens.append(token)
        if depth is not None:
            self.depths.append(depth)
        if token_exit is not None:
            self.token_exits.append(token_exit)
        if token in self.end_tokens:
            self.finish = "eos"
        elif self._watched and self._stream is not None:
            self._emit(self._stream.push(token))
            if self._stream.stopped:
                self.finish = "stop"
        if self.finish is None and len(self.tokens) == self.max_new_tokens:
            self.finish = "length"
        if self.finish is None:
            return True
        self.note_end()
        if self._watched:
            self._close_text()
        return False

    def note_end(self) -> None:
        """Nothing more is computed for this sequence."""
        self._ended = time.perf_counter()

    def note_times(self, begun: float, prefilled: float) -> None:
        self._prefill_seconds, self._decode_seconds = prefilled - begun, self._ended - prefilled

    def result(self) -> Generation:
        assert self.finish is not None
        if self._stream is not None and not self._watched:
            # Nobody waits for pieces, so the text is decoded once the model has had the processor to itself.
            self._pieces.append(self._stream.push_all(self.tokens[:-1] if self.finish == "eos" else self.tokens))
            self._close_text()
        return Generation(
            prompt_tokens=tuple(self.prompt if self._source is None else self._source),
            tokens=tuple(self.tokens),
            text="".join(self._pieces),
            finish=self.finish,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            depths=tuple(self.depths) if self.depths else None,
        )

    def exited_result(self, exits: ExitStatistics) -> Generation:
        """The same, with where each token was chosen."""
        confidences = tuple(token_exit.confidence for token_exit in self.token_exits if token_exit.confidence is not None)
        return replace(
            self.result(),
            exit_layers=tuple(token_exit.layer for token_exit in self.token_exits),
            confidences=confidences or None,
            agreements=tuple(token_exit.agreement for token_exit in self.token_exits) if confidences else None,
            oracle=exits.mode in ORACLES,
            exits=exits,
        )

    def _close_text(self) -> None:
        if self._stream is None:
            return
        self._emit(self._stream.finish())
        if self._stream.stopped:
            self.finish = "stop"

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)


@dataclass(slots=True)
class WaitingToken:
    """A token that has run the layers up to an exit and not yet those behind it."""

    position: int
    state_M: Tensor
    """The residual stream at the exit, before the final norm."""
    logits_V: Tensor
    """The exit's scores for what comes next."""
    likeliest: int
    token_exit: TokenExit
    chosen: int | None = None
    """What was chosen at the exit; None where a deeper exit or the full model is to choose."""
    level: int = 1
    """How many exits it has met."""


class ExitingSequence:
    """A sequence of a batch whose tokens exit early: what waits for the deeper layers, and how it draws. `token_ids` are the
    prompt, the tokens and behind them drafts that are not verified."""

    def __init__(self, index: int, state: SequenceState, sampling: Sampling, generators: list[torch.Generator]) -> None:
        """`generators` is its one random generator, or none where nothing is random."""
        self.index = index
        self.state = state
        self.sampling = sampling
        self.token_ids = list(state.prompt)
        self.stack: list[WaitingToken] = []
        self.samples: list[tuple[float, bool]] = []
        """Confidences at an exit, each with whether the full model's most likely token was the same."""
        self.deep_passes = self.drafted = self.accepted = 0
        self._generators = generators

    @property
    def position(self) -> int:
        """Of the last token: the next to run."""
        return len(self.token_ids) - 1

    @property
    def span(self) -> Span:
        return Span(self.index, self.position, 1)

    @property
    def unverified(self) -> int:
        """How many drafts the state has not taken yet."""
        return len(self.token_ids) - len(self.state.prompt) - len(self.state.tokens)

    def take(self, token: int, token_exit: TokenExit) -> None:
        """A token that stays, whatever comes."""
        self.token_ids.append(token)
        self.state.take(token, token_exit=token_exit)

    def record_agreement(self, token_exit: TokenExit, agreed: bool) -> None:
        token_exit.agreement = agreed
        assert token_exit.confidence is not None
        self.samples.append((token_exit.confidence, agreed))

    def pick(self, logits_V: Tensor, position: int | None = None) -> int:
        """The token that follows a position (default: the last), as the sampling says."""
        return int(pick(logits_V[None], self.sampling, self._generators, self._seen(logits_V, position)))

    def likeliest(self, logits_V: Tensor, position: int | None = None) -> int:
        """What a greedy choice would be."""
        return int(likeliest(logits_V[None], self.sampling, self._seen(logits_V, position)))

    def probabilities(self, logits_V: Tensor, position: int | None = None) -> Tensor:
        """The probabilities that a token is drawn with."""
        return sampling_probabilities(logits_V[None], self.sampling, self._seen(logits_V, position))[0]

    def draw(self, weights_V: Tensor) -> int:
        """A token at random, as likely as its weight says."""
        return int(torch.multinomial(weights_V, 1, generator=self._generators[0]))

    def uniform(self) -> float:
        """A random number from 0 to below 1."""
        (generator,) = self._generators
        return float(torch.rand(1, generator=generator, device=generator.device))

    def _seen(self, logits_V: Tensor, position: int | None) -> Tensor | None:
        """What the repetition penalty counts at a position: the tokens up to it, drafts included, and nothing behind it."""
        tokens = self.token_ids if position is None else self.token_ids[: position + 1]
        return seen_tokens(self.sampling, [tokens], logits_V.shape[-1], logits_V.device)
