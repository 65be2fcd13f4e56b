"""Where the time goes while tokens are decoded, part by part (thesis 2.4.3, its observation 3): what confidences and copied
states cost beside the layers that they save.

The decoding is `decode/early_exit.py`'s own, with passes and a cache that look at the clock. Time belongs to the innermost
part that runs, so the parts add up to the whole. It is this machine's time, one text at a time: shares mean something,
milliseconds only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathomlm.cache import SlotCache, Span
from fathomlm.cache.dense import Entries, StepKV
from fathomlm.decode.early_exit import EXIT_MODES
from fathomlm.decode.exit_forward import ExitPolicy, PartialForward
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import ExitingSequence, SequenceState
from fathomlm.decode.prompts import read_sources, start_token
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan, Step
from fathomlm.lab.bench.timed import StageClock, clock_methods
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.model.blocks import Block, CrossBlock
from fathomlm.model.decoder import Decoder
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

PARTS = ("embedding", "attention", "feed-forward", "norms", "head", "exit heads", "cache", "copying", "rest")
"""exit heads: the scores at exits, which confidences are made of. copying: keys and values of layers that a token skipped.
rest: confidences themselves, choosing, and what is between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTime:
    """One way of decoding."""

    name: str
    tokens: int
    ms_per_token: float
    relative: float
    """Against full depth."""
    exit_rate: float
    """The part of the tokens that exited early."""
    shares: dict[str, float]
    """The part of the time that each part took; together 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    threshold: float
    modes: list[ModeTime]


class _TimedKV:
    """One step's entries; storing them is the cache's time."""

    def __init__(self, kv: StepKV, clock: StageClock) -> None:
        self._kv, self._clock = kv, clock
        self.stores = kv.stores

    def append(self, k_RGND: Tensor, v_RGND: Tensor) -> Entries:
        with self._clock("cache"):
            return self._kv.append(k_RGND, v_RGND)

    def prefix(self, make: Callable[[], Entries]) -> Entries:
        return self._kv.prefix(make)


class _TimedCache(SlotCache):
    def __init__(self, plan: DepthPlan, clock: StageClock, reserve: int) -> None:
        super().__init__(plan, 1, reserve=reserve)
        self._clock = clock

    def at(self, step: Step) -> StepKV | None:
        kv = super().at(step)
        return None if kv is None else _TimedKV(kv, self._clock)


@contextmanager
def _watched(decoder: Decoder, clock: StageClock) -> Iterator[None]:
    """Layers' parts on the clock. Within copying they stay copying: there only norms and projections run."""

    def begin(part: str) -> Callable[..., None]:
        return lambda module, arguments: clock.begin(part)

    def end(module: nn.Module, arguments: Any, out: Any) -> None:
        clock.end()

    watched: list[tuple[nn.Module, str]] = []
    for layer in decoder.layers:
        assert isinstance(layer, Block)
        watched += [(layer.attn, "attention"), (layer.mlp, "feed-forward")]
        watched += [(layer.cross, "attention")] if isinstance(layer, CrossBlock) else []
    handles = []
    for module, part in watched:
        handles += [module.register_forward_pre_hook(begin(part)), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure_times(
    model: FathomModel,
    prompts: Sequence[Sequence[int]],
    *,
    exits: Sequence[int],
    threshold: float,
    new_tokens: int = 32,
    on_text: OnProgress = unwatched,
) -> TimeBreakdown:
    """Decode the prompts at full depth, with copied states at every layer from the first exit on, and in parallel from the
    first exit. `exits` are layers from 1; `on_text` is called with (done, total)."""
    first = min(exits)
    modes = {
        "full depth": Exiting(mode="full"),
        "state copying": Exiting(mode="state-copy", min_exit_layer=first, threshold=threshold),
        "parallel": Exiting(mode="parallel", exit_layers=(first,), threshold=threshold),
    }
    clocks = {name: _clock(model) for name in modes}
    left, made = dict.fromkeys(modes, 0), dict.fromkeys(modes, 0)
    for exiting in modes.values():  # what a process does once is not timed
        _decode(model, prompts[0], exiting, _clock(model), min(2, new_tokens))
    total = len(modes) * len(prompts)
    for number, prompt in enumerate(prompts):
        for place, (name, exiting) in enumerate(modes.items()):  # turn by turn, so that all meet the same weather
            row = _decode(model, prompt, exiting, clocks[name], new_tokens)
            made[name] += len(row.tokens) - 1
            left[name] += sum(token_exit.layer < model.plan.unrolled_layers for token_exit in row.token_exits[1:])
            on_text(number * len(modes) + place + 1, total)
    return TimeBreakdown(threshold=threshold, modes=_shares(clocks, made, left))


def _clock(model: FathomModel) -> StageClock:
    if model.decoder.embed.weight.device.type == "cpu":
        return StageClock(on=False)

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return StageClock(now, on=False)


@torch.inference_mode()
def _decode(model: FathomModel, prompt: Sequence[int], exiting: Exiting, clock: StageClock, most: int) -> SequenceState:
    """One text; its prompt, which an encoder reads where there is one, and its first token are not on the clock."""
    decoder = model.decoder
    sampling = Sampling(max_new_tokens=most, ignore_eos=True)
    policy = ExitPolicy(decoder, exiting)
    cache = _TimedCache(model.plan, clock, reserve=len(prompt) + most)
    memory, source = None, None
    if isinstance(model, FathomForSeq2SeqLM):
        memory, source, prompt = read_sources(model, [prompt]), list(prompt), [start_token(model)]
    forward = PartialForward(decoder, cache, batch_size=1, memory=memory)
    last = model.plan.unrolled_layers - 1
    clock_methods(clock, cache, reads="cache")
    clock_methods(
        clock, forward, enter="embedding", copy="copying",
        run="norms",  # what is neither attention nor feed-forward in it: norms, and sums
        logits=lambda x_RNM, index: "head" if index == last else "exit heads",
    )  # fmt: skip
    mode = EXIT_MODES[exiting.mode](forward, policy)
    sequence = ExitingSequence(0, SequenceState(model, list(prompt), sampling, None, source), sampling, [])
    if held := sequence.position:
        forward.run(forward.enter([sequence.token_ids[:held]]), mode.prompt_steps, forward.gather([Span(0, 0, held)]))
    mode.step([sequence])
    with _watched(decoder, clock), clock("rest"):
        clock.on = True
        while sequence.state.finish is None:
            mode.step([sequence])
    clock.on = False
    return sequence.state


def _shares(clocks: dict[str, StageClock], made: dict[str, int], left: dict[str, int]) -> list[ModeTime]:
    seconds = {name: sum(clock.seconds.values()) for name, clock in clocks.items()}
    each = {name: seconds[name] / max(1, made[name]) for name in clocks}
    full = each["full depth"]
    return [
        ModeTime(
            name=name,
            tokens=made[name],
            ms_per_token=1000 * each[name],
            relative=each[name] / full,
            exit_rate=left[name] / max(1, made[name]),
            shares={part: clock.seconds.get(part, 0.0) / seconds[name] for part in PARTS},
        )
        for name, clock in clocks.items()
    ]
