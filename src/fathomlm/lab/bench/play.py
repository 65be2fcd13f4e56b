"""A workload played to an engine: each request handed in when its time has come, each token's moment noted; and one
sequence, timed with the passes that it took.

The host learns of tokens some decode steps late, so the time between two of them says little about a short sequence. That is
timed from its request to its end, and once more with a single new token: the difference is what its other tokens took,
without reading the prompt and without waiting for the last result.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fathomlm.decode.exiting import Exiting, Threshold
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.whole import WholeProgram
from fathomlm.engine.request import Event, Finished, FinishReason, Request, Result
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.bench.timed import TimedEngine, wrap
from fathomlm.lab.bench.workload import Workload, WorkloadRequest
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.model.seq2seq import FathomModel

Sleep = Callable[[float], None]
REPORT_SECONDS = 1.0
"""Seconds between two reports of progress: drawing a bar takes time that is being measured."""
WARM_UP = 8
"""Tokens of a request that warms up: enough that decode steps follow each other, few enough that it costs little."""


@dataclass(slots=True)
class RequestTimes:
    """When one request came in, and each of its tokens out, on the engine's clock."""

    prompt_tokens: int
    arrival: float
    """When it should have come in: had it to wait until the host looked, that wait is the engine's."""
    times: list[float] = field(default_factory=list)
    """The moment of each token."""
    depths: Counter[int] = field(default_factory=Counter)
    """How many tokens were chosen at each depth, where the engine has several."""
    reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class WorkloadRun:
    """A workload that was played."""

    begun: float
    """The first submission."""
    requests: list[RequestTimes] = field(default_factory=list)
    """Those that were submitted: fewer than the workload has where somebody stopped it."""
    ended: float = 0.0
    """When nothing was left to do."""
    idle: float = 0.0
    """Seconds without any request in the engine."""
    interrupted: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(one.times) for one in self.requests)

    @property
    def last(self) -> float:
        """The last token, or the beginning where there was none."""
        return max((one.times[-1] for one in self.requests if one.times), default=self.begun)


class _Player:
    def __init__(self, engine: TimedEngine, workload: Workload) -> None:
        self.engine, self.clock = engine, engine.clock
        self.one_by_one = workload.arrivals == "one by one"
        self.waiting = deque(workload.requests)
        self.under_way: set[int] = set()
        self.played = WorkloadRun(begun=self.clock())
        self.done = 0

    def submit_due(self) -> None:
        """Everybody whose time has come, as far as the queue holds them."""
        limit = self.engine.options.max_queue
        while self.waiting and self._is_due() and len(self.under_way) < limit:
            request = self.waiting.popleft()
            now = self.clock()
            self._submit(request, now if self.one_by_one else self.played.begun + request.at)

    def _is_due(self) -> bool:
        if self.one_by_one:
            return not self.under_way
        return self.played.begun + self.waiting[0].at <= self.clock()

    def _submit(self, planned: WorkloadRequest, arrival: float) -> None:
        times = RequestTimes(len(planned.prompt), arrival)
        sampling = Sampling(max_new_tokens=planned.new, ignore_eos=True)
        request = Request(id=self.engine.new_id(), prompt=planned.prompt, sampling=sampling, arrival=arrival)

        def tell(events: list[Event]) -> None:
            now = self.clock()
            for event in events:
                if isinstance(event, Finished):
                    times.reason, times.error = event.reason, event.error
                    self.under_way.discard(request.id)
                    return
                times.times.append(now)
                self.done += 1
                if event.depth is not None:
                    times.depths[event.depth] += 1

        self.engine.submit(request, tell)
        self.under_way.add(request.id)
        self.played.requests.append(times)

    def pause(self, sleep: Sleep) -> None:
        """Until the next request comes in."""
        begun = self.clock()
        sleep(max(0.0, self.played.begun + self.waiting[0].at - begun))
        self.played.idle += self.clock() - begun


def play(
    engine: TimedEngine,
    workload: Workload,
    *,
    sleep: Sleep = time.sleep,
    on_progress: OnProgress = unwatched,
) -> WorkloadRun:
    """Run a workload to its end, or to Ctrl-C: what came until then is kept, and the rest cancelled."""
    player = _Player(engine, workload)
    played, total, reported = player.played, workload.new_tokens, player.played.begun
    try:
        while player.waiting or player.under_way:
            player.submit_due()
            if not player.under_way:
                player.pause(sleep)
                continue
            engine.step()
            if player.clock() - reported >= REPORT_SECONDS:
                reported = player.clock()
                on_progress(player.done, total)
        while engine.busy:  # decode steps that were started before the last token was collected
            engine.step()
    except KeyboardInterrupt:
        played.interrupted = True
        for id in list(player.under_way):
            engine.cancel(id)
    played.ended = engine.clock()
    return played


def warm_up(engine: TimedEngine, workload: Workload) -> None:
    """Let the engine compile and record what the workload will need, and forget that it ever ran."""
    few = workload.shortened(2 * engine.options.batch_size, WARM_UP)
    if play(engine, few).interrupted:
        raise KeyboardInterrupt
    engine.scheduler.page_manager.prefixes.clear()
    engine.forget()


class PassCounts:
    """Counts an engine's passes as they start: `shallow` up to the first exit, `middle k`, `deep` behind the last one,
    `both` where rows of all of them share a pass, and `full` through every layer, behind a draft layer's drafts too. A
    model with a router has none of these."""

    def __init__(self, engine: Engine) -> None:
        self.counts: Counter[str] = Counter()
        self._program, self._alone = engine.runner.program, 0
        wrap(engine.runner, launch=self._counted, launch_burst=self._counted_burst)

    def _counted(
        self, launch: Callable[..., int], drafts: bool = True, sequences: int | None = None,
        only: tuple[str, int] | None = None,
    ) -> int:  # fmt: skip
        self.counts.update(self._names(drafts, only))
        self._alone += 1
        return launch(drafts, sequences, only)

    def _counted_burst(
        self, launch: Callable[..., list[int]], steps: int, drafts: bool = True, sequences: int | None = None
    ) -> list[int]:
        """A burst may be one piece of work, or as many launches as it has decode steps, which were counted."""
        before = self._alone
        numbers = launch(steps, drafts, sequences)
        for _ in range(len(numbers) - (self._alone - before)):
            self.counts.update(self._names(drafts, None))
        return numbers

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
