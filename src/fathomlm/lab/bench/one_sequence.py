"""How long the tokens of one sequence take in the engine, and which passes they took.

The host learns of tokens some decode steps late, so the time between two of them says little about a short sequence. One is
timed from its request to its end, and once more with a single new token: the difference is what its other tokens took,
without reading the prompt and without waiting for the last result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.decode.exiting import Exiting, Threshold
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.whole import WholeProgram
from fathomlm.engine.request import Request, Result
from fathomlm.lab.bench.floor import finish
from fathomlm.model.seq2seq import FathomModel


class PassCounts:
    """Counts an engine's passes as they start: `shallow` up to the first exit, `middle k`, `deep` behind the last one,
    `both` where rows of all of them share a pass, and `full` through every layer, behind a draft layer's drafts too. A
    model with a router has none of these."""

    def __init__(self, engine: Engine) -> None:
        self.counts: Counter[str] = Counter()
        self._program, self._launch = engine.runner.program, engine.runner.launch
        engine.runner.launch = self._counted  # type: ignore[method-assign]

    def _counted(self, drafts: bool = True, sequences: int | None = None, only: tuple[str, int] | None = None) -> int:
        self.counts.update(self._names(drafts, only))
        return self._launch(drafts, sequences, only)

    def _names(self, drafts: bool, only: tuple[str, int] | None) -> Sequence[str]:
        program = self._program
        if isinstance(program, ExitProgram):
            return program.passes if drafts and only is None else ("full",) if only is None else only[:1]
        if isinstance(program, DraftLayerProgram):
            return ("full",)
        assert isinstance(program, WholeProgram)
        return ("shallow" if len(program.steps) < program.parts.plan.unrolled_layers else "full",)


@dataclass(frozen=True, slots=True)
class TimedText:
    """One greedy sequence."""

    result: Result
    seconds: float
    """From the request to the end."""
    passes: Counter[str]

    def decode_seconds(self, single: TimedText) -> float:
        """What the tokens behind the first took; `single` is the same sequence with one token."""
        return self.seconds - single.seconds


class OneSequence:
    """An engine for one sequence at a time, which drafts where its mode says so, whether or not that pays."""

    def __init__(
        self,
        model: FathomModel,
        exiting: Exiting | None = None,
        *,
        length: int,
        source: int | None = None,
        **options: Any,
    ) -> None:
        """`length` is the most tokens of a sequence, `source` of an encoder's source; `options` are the engine's."""
        full = exiting is None or exiting.mode == "full"
        stack = 1 if exiting is None else exiting.most_waiting(model.plan)
        sizes: dict[str, Any] = {"batch_size": stack, "max_sequences": 1, "max_length": length, "max_source": source}
        unused = {"prefix_caching": False, "penalties": False, "max_logprobs": 0}
        self.engine = Engine(model, exiting=None if full else exiting, **({"always_draft": True} | sizes | unused | options))
        self._passes = PassCounts(self.engine)

    def text(
        self, prompt: Sequence[int], new: int, *, threshold: Threshold | None = None, ignore_eos: bool = False
    ) -> TimedText:
        """Continue a prompt; `threshold` stands in for that of the engine's exits."""
        sampling = Sampling(max_new_tokens=new, ignore_eos=ignore_eos)
        asked = Request(id=self.engine.new_id(), prompt=tuple(prompt), sampling=sampling, exit_threshold=threshold)
        device = self.engine.runner.device
        self._passes.counts.clear()
        finish(device)
        begun = time.perf_counter()
        (result,) = self.engine.run([asked])
        finish(device)
        return TimedText(result, time.perf_counter() - begun, Counter(self._passes.counts))
