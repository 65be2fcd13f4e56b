"""One prompt on its way to a text: what was chosen, what was shown, how deep it went, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fathomlm.decode.prompts import end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.text import TextStream
from fathomlm.errors import OptionError
from fathomlm.model.seq2seq import FathomModel

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatistics:
    """What leaving early saved in one text, and what it cost."""

    mode: str
    layers: int
    """The model's unrolled depth: the layer behind which a token that did not leave early was chosen."""
    threshold: float | None
    """The one in force for this text; None where the mode has none."""
    layers_run: int
    """Layers times tokens while decoding, discarded drafts included; the prompt but for its last token is left out."""
    deep_passes: int = 0
    """parallel, speculative: how often the layers behind the exit ran, over one token or several."""
    drafted: int = 0
    """speculative, parallel with refine: tokens that were chosen at the exit and then judged by the whole model."""
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
    """Reading the prompt, up to the first new token. Rows of a batch are read together and share it."""
    decode_seconds: float
    """From the first new token to this row's last."""
    depths: tuple[int, ...] | None = None
    """For each token, how many recursions ran at the position that chose it; None where the model has no router."""
    exit_layers: tuple[int, ...] | None = None
    """For each token, the layer after which it was chosen, from 1; the last layer is full depth. None without exits."""
    confidences: tuple[float, ...] | None = None
    """For each token, the confidence at the exit where it left, or at the last exit that it passed."""
    agreements: tuple[bool | None, ...] | None = None
    """For each token, whether the likeliest token at that exit was the whole model's too; None where that is unknown."""
    oracle: bool = False
    """Whether the exits were chosen with knowledge of the last layer, which no real decoding has."""
    exits: ExitStatistics | None = None

    @property
    def tokens_per_second(self) -> float:
        """The rate of decoding; the first token belongs to the prefill. 0 where there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else 0.0


def exit_rate(results: Sequence[Generation]) -> float:
    """The part of the tokens that was chosen before the last layer."""
    early = [layer < result.exits.layers for result in results if result.exits for layer in result.exit_layers or ()]
    return sum(early) / len(early) if early else 0.0


def mean_exit_layer(results: Sequence[Generation]) -> float:
    """The layer after which a token was chosen, on average."""
    layers = [layer for result in results for layer in result.exit_layers or ()]
    return sum(layers) / len(layers) if layers else 0.0


@dataclass(slots=True)
class Leave:
    """Where a token was chosen. The agreement of one that left early is known once the layers behind have run."""

    layer: int
    confidence: float | None = None
    agreement: bool | None = None


class Row:
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
            raise OptionError("stop strings need a tokenizer, and this model has none")
        self.prompt = prompt
        self._source = source
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.leaves: list[Leave] = []
        self.finish: Finish | None = None
        self.ends = frozenset() if sampling.ignore_eos else end_tokens(model)
        self.most = sampling.max_new_tokens
        context = prompt if source is None else []
        self._stream = None if model.tokenizer is None else TextStream(model.tokenizer, stop=sampling.stop, context=context)
        self._watched = bool(sampling.stop) or on_text is not None
        self._on_text = on_text
        self._pieces: list[str] = []
        self._ended = self._prefill_seconds = self._decode_seconds = 0.0

    def take(self, token: int, depth: int | None = None, leave: Leave | None = None) -> bool:
        """Add a token, and the depth that it was chosen at; says whether the row goes on. A row that is over ignores what
        its place in the batch computes."""
        if self.finish is not None:
            return False
        self.tokens.append(token)
        if depth is not None:
            self.depths.append(depth)
        if leave is not None:
            self.leaves.append(leave)
        if token in self.ends:
            self.finish = "eos"
        elif self._watched and self._stream is not None:
            self._show(self._stream.push(token))
            if self._stream.stopped:
                self.finish = "stop"
        if self.finish is None and len(self.tokens) == self.most:
            self.finish = "length"
        if self.finish is None:
            return True
        self.note_end()
        if self._watched:
            self._close_text()
        return False

    def note_end(self) -> None:
        """Nothing more is computed for this row."""
        self._ended = time.perf_counter()

    def note_times(self, begun: float, prefilled: float) -> None:
        self._prefill_seconds, self._decode_seconds = prefilled - begun, self._ended - prefilled

    def result(self) -> Generation:
        assert self.finish is not None
        if self._stream is not None and not self._watched:
            # Nobody waits for pieces, so the text is made once the model has had the processor to itself.
            for token in self.tokens[:-1] if self.finish == "eos" else self.tokens:
                self._pieces.append(self._stream.push(token))
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
        confidences = tuple(leave.confidence for leave in self.leaves if leave.confidence is not None)
        return replace(
            self.result(),
            exit_layers=tuple(leave.layer for leave in self.leaves),
            confidences=confidences or None,
            agreements=tuple(leave.agreement for leave in self.leaves) if confidences else None,
            oracle=exits.mode == "oracle",
            exits=exits,
        )

    def _close_text(self) -> None:
        if self._stream is None:
            return
        self._show(self._stream.finish())
        if self._stream.stopped:
            self.finish = "stop"

    def _show(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)
