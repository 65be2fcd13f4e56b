"""What the host costs: the engine, its scheduler and its asyncio front over a device that does nothing.

Everything is real but the passes: `NullProgram` hands out each slot's next token at once, from a text, at a depth that is
drawn. Time is the processor's, of the thread, so that what else runs on the machine matters little; the time of the
`NullProgram` itself is left out. Requests come as others end, so the engine is full all the time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from fathomlm.cli.display import print_table, progress_bar
from fathomlm.cli.serve import check_installed
from fathomlm.decode.exiting import Threshold
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.burst_length import BURST
from fathomlm.engine.device_state import COLUMNS, ENTER, IDLE, PrefillBatch
from fathomlm.engine.engine import Engine
from fathomlm.engine.heap import collect_heap, settle_heap
from fathomlm.engine.options import PAGE, EngineOptions
from fathomlm.engine.programs.base import ENDED, VALID, SamplingVariant
from fathomlm.engine.request import Event, Request
from fathomlm.engine.runner import Runner
from fathomlm.engine.schedule import Placement
from fathomlm.engine.sizing import GPU_CHUNK, ample_memory
from fathomlm.errors import OptionError
from fathomlm.lab.bench.asgi import Complete, streaming_client
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.bench.options import Host
from fathomlm.lab.bench.timed import StageClock, clock_methods
from fathomlm.lab.bench.workload import build_workload
from fathomlm.lab.common import environment, optional
from fathomlm.train.data.tokenizers import find_tokenizer

PlanName = Literal["plain", "routed"]
Listeners = Literal["none", "callback", "async", "http"]
"""Nobody waits for tokens before the end; a function is called with each burst; a task for each request, by asyncio; a
streamed completion of the server's for each."""
PLANS: dict[PlanName, DepthPlan] = {
    "plain": DepthPlan.vanilla(1),
    "routed": DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3)).with_kv("cache"),
}
LISTENERS: tuple[Listeners, ...] = get_args(Listeners)
PARTS = ("collect", "schedule", "launch", "text")
"""Taking in tokens and telling listeners; new requests, who runs, and with which pages; telling the device; text."""
WITH_PROMPTS: tuple[Listeners, ...] = ("none", "callback")
"""Without the asyncio front."""
LONGEST = 512
"""Tokens of the longest completion; they are those of the thesis' workload."""
TEXT = (
    "The sea is everything. It covers seven tenths of the terrestrial globe. Its breath is pure and healthy. It is an "
    "immense desert, where man is never lonely, for he feels life stirring on all sides \u2013 na\u00efve, but true. "
)
ROUNDS = 3
FEW_ROWS = 32
"""Below so many tokens a pass each token takes so long that fewer are enough."""
TURNS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Microseconds of processor time for each token, the least of some rounds."""

    plan: PlanName
    batch_size: int
    sequences: int
    listeners: Listeners
    tokens: int
    """Of a round. With prompts those of prompts, else those of completions."""
    us_per_token: float
    event_loop_us_per_token: float | None
    """Of that in the event loop's thread, with the asyncio front."""
    parts_us_per_token: dict[str, float] | None
    """By part, from a round with more clocks; None with the asyncio front."""


class NullProgram:
    """In place of a program: every slot that has a page gets its next token, without a model."""

    def __init__(self, runner: Runner, tokens: Sequence[int]) -> None:
        state, layout, plan = runner.state, runner.layout, runner.decoder.plan
        self.output = runner.program.output
        self.seconds = 0.0
        """What it took itself, by the thread's clock."""
        self._batch_size, self._spare = runner.options.batch_size, state.spare
        self._turns = len(self.output.ints_NC) // self._batch_size
        self._columns = dict(zip(COLUMNS, state.numbers_SC.numpy().T, strict=True))  # views of the device's memory
        self._entries_ST, self._capacity_ST = state.entries_ST.numpy(), state.capacity_ST.numpy()
        self._tokens = np.array(tokens)
        parts = (1.0,) if plan.routing is None else plan.routing.capacity
        drawn = np.random.default_rng(0).random(4099)
        self._depths = np.sum([drawn < part for part in parts], axis=0)
        self._added_DT = np.array([layout.added(depth) for depth in range(plan.recursions + 1)])
        self._clock = 0

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        """Slots have nothing of their own here."""

    def prefill(self, batch: PrefillBatch) -> None:
        begun = time.thread_time()
        slots, many = np.unique(batch.slots_N.numpy(), return_counts=True)
        self._entries_ST[slots] += many[:, None]
        self._entries_ST[self._spare] = 0
        self.seconds += time.thread_time() - begun

    def decode_step(self, variant: SamplingVariant) -> None:
        begun = time.thread_time()
        ints_NC = self.output.ints_NC.numpy()
        for turn in range(self._turns):
            self._turn(ints_NC[turn * self._batch_size : (turn + 1) * self._batch_size])
        self.seconds += time.thread_time() - begun

    def _turn(self, ints_NC: np.ndarray[Any, Any]) -> None:
        """Whoever has waited longest gets a token."""
        columns, self._clock = self._columns, self._clock + 1
        ready_S = (columns["stage"] == ENTER) & (self._entries_ST < self._capacity_ST).all(1)
        ready_S[self._spare] = False
        slots = np.flatnonzero(ready_S)
        if len(slots) > self._batch_size:
            slots = slots[np.argsort(columns["since"][slots], kind="stable")[: self._batch_size]]
        made = columns["generated"][slots]
        tokens = self._tokens[(slots * 37 + made) % len(self._tokens)]
        depths = self._depths[(slots * 61 + made) % len(self._depths)]
        self._entries_ST[slots] += self._added_DT[depths]
        over = made + 1 >= columns["limit"][slots]
        columns["token"][slots], columns["since"][slots] = tokens, self._clock
        columns["position"][slots] += 1
        columns["generated"][slots] += 1
        columns["stage"][slots[over]] = IDLE
        ints_NC[:] = (self._spare, 0, 0, 0, 0, 0)
        rows = (slots, columns["epoch"][slots], tokens, depths, VALID + ENDED * over, made)
        ints_NC[: len(slots)] = np.stack(rows, 1)


def null_engine(
    plan: PlanName,
    batch_size: int,
    tokenizer: Any,
    stream_interval: int = 1,
    burst: int = BURST,
    page_size: int = PAGE,
    prompt: int = 1,
) -> Engine:
    """An engine over a device that does nothing. It has pages for everybody, and prefills in chunks of a GPU's size."""
    depth = PLANS[plan]
    architecture = Architecture(
        family="llama", layers=depth.unrolled_layers, hidden=8, intermediate=8, heads=1, kv_heads=1, head_dim=4,
        vocab=len(tokenizer), context=2 * LONGEST + prompt, tied_embeddings=True,
    )  # fmt: skip
    model = random_model(architecture, depth, dtype=torch.float32, device=torch.device("cpu"))
    model.tokenizer = tokenizer
    options = EngineOptions(
        batch_size=batch_size, max_length=LONGEST + prompt, penalties=False, burst=burst, lag=1,
        max_queue=2 * batch_size + 8, stream_interval=stream_interval, page_size=page_size, prefill_chunk=GPU_CHUNK,
    )  # fmt: skip
    options = replace(options, memory=ample_memory(model.decoder, options, LONGEST + prompt))
    engine = Engine(model, options)
    engine.runner.program = NullProgram(engine.runner, tokenizer(TEXT)["input_ids"])
    return engine


def measure_host(
    plan: PlanName,
    batch_size: int,
    listeners: Listeners,
    tokenizer: Any,
    *,
    tokens: int,
    stream_interval: int = 1,
    burst: int = BURST,
    page_size: int = PAGE,
    prompt: int = 1,
) -> HostCost:
    """Some rounds of so many tokens each; the quickest counts. With a `prompt` of more than a token it is the prompts'
    tokens that count: requests have one new token each, and none begins like another."""
    assert prompt == 1 or listeners in WITH_PROMPTS, f"prompts are not measured with {listeners}"
    engine = null_engine(plan, batch_size, tokenizer, stream_interval, burst, page_size, prompt)
    sequences = engine.runner.sizes.max_sequences
    settle_heap()  # as `fathomlm serve` does
    try:
        if listeners in ("async", "http"):
            total, loop = asyncio.run((_measure_front if listeners == "async" else _measure_server)(engine, tokens))
            parts = None
        else:
            total, parts = _measure_engine(engine, listeners == "callback", tokens, prompt)
            loop = None
    finally:
        del engine
        collect_heap()
    return HostCost(
        plan=plan, batch_size=batch_size, sequences=sequences, listeners=listeners, tokens=tokens,
        us_per_token=total, event_loop_us_per_token=loop, parts_us_per_token=parts,
    )  # fmt: skip


def python_speed() -> float:
    """Nanoseconds of this processor for a turn of an empty loop, so that figures of two machines can be compared."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(TURNS):
            pass
        best = min(best, time.thread_time() - begun)
    return best / TURNS * 1e9


def _lengths(engine: Engine) -> Iterator[int]:
    """Of completions: at first any that may be left of one, so that they end one after another; then whole ones."""
    workload = build_workload("thesis", engine.model.architecture.vocab)
    draw, lengths = random.Random(0), itertools.cycle(request.new for request in workload.requests)
    for _ in range(engine.runner.sizes.max_sequences):
        yield draw.randint(1, next(lengths))
    yield from lengths


def _requests(engine: Engine, prompt: int) -> Iterator[Request]:
    draw, vocab = np.random.default_rng(0), engine.model.architecture.vocab
    for new in _lengths(engine):
        tokens = (0,) if prompt == 1 else tuple(draw.integers(vocab, size=prompt).tolist())
        sampling = Sampling(max_new_tokens=new if prompt == 1 else 1, ignore_eos=True)
        yield Request(id=engine.new_id(), prompt=tokens, sampling=sampling)


def _null_seconds(engine: Engine) -> float:
    assert isinstance(engine.runner.program, NullProgram)
    return engine.runner.program.seconds


def _measure_engine(engine: Engine, listens: bool, tokens: int, prompt: int) -> tuple[float, dict[str, float]]:
    requests, heard = _requests(engine, prompt), list[list[Event]]()

    def hear(events: list[Event]) -> None:
        heard[:] = (events,)

    def counted() -> int:
        return engine.totals.tokens if prompt == 1 else engine.totals.prefill_tokens

    def run(many: int) -> float:
        """Seconds of the host for so many tokens and a few more, by token."""
        spent, begun = 0.0, counted()
        while counted() < begun + many:
            missing = engine.runner.sizes.max_sequences + 1 - engine.unfinished
            new = list(itertools.islice(requests, max(0, missing)))  # made by whoever asks: not the engine's time
            before, null = time.thread_time(), _null_seconds(engine)
            for request in new:
                engine.submit(request, hear if listens else None)
            engine.step()
            spent += time.thread_time() - before - (_null_seconds(engine) - null)
        return spent / (counted() - begun)

    run(tokens // 2)
    best = min(run(tokens) for _ in range(ROUNDS))
    clock, null, begun = StageClock(time.thread_time, PARTS), _null_seconds(engine), counted()
    clock_methods(clock, engine, step="schedule", submit="schedule", _collect="collect", _read="text", _read_end="text")
    clock_methods(clock, engine.runner, apply="launch", prefill="launch", launch_burst="launch")
    clock_methods(clock, engine.scheduler, confirm_prefill="collect")
    run(tokens)
    clock.seconds["launch"] -= _null_seconds(engine) - null
    parts = {part: seconds / (counted() - begun) * 1e6 for part, seconds in clock.seconds.items()}
    return best * 1e6, parts


async def _measure_front(engine: Engine, tokens: int) -> tuple[float, float]:
    async with AsyncEngine(engine) as front:

        async def complete(new: int) -> None:
            async for _ in front.stream(front.request((0,), max_new_tokens=new, ignore_eos=True)):
                pass

        return await _measure_tasks(engine, tokens, complete)


async def _measure_server(engine: Engine, tokens: int) -> tuple[float, float]:
    async with streaming_client(engine) as complete:
        return await _measure_tasks(engine, tokens, complete)


async def _measure_tasks(engine: Engine, tokens: int, complete: Complete) -> tuple[float, float]:
    """All of it, and the event loop's part."""
    lengths, over = _lengths(engine), False

    async def consume() -> None:
        while not over:
            await complete(next(lengths))

    async def reach(goal: int) -> None:
        while engine.totals.tokens < goal:
            await asyncio.sleep(0.005)
            for task in consumers:
                if task.done():
                    task.result()  # raises what ended it

    consumers = [asyncio.create_task(consume()) for _ in range(engine.runner.sizes.max_sequences + 1)]
    try:
        await reach(tokens // 2)
        found = []
        for _ in range(ROUNDS):
            begun, loop, process, null = engine.totals.tokens, time.thread_time(), time.process_time(), _null_seconds(engine)
            await reach(begun + tokens)
            many = engine.totals.tokens - begun
            spent = time.process_time() - process - (_null_seconds(engine) - null)
            found.append((spent / many * 1e6, (time.thread_time() - loop) / many * 1e6))
    finally:
        over = True
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    return min(found)


def run(options: Host) -> int:
    if "http" in options.listeners:
        check_installed()
    front = [name for name in options.listeners if name not in WITH_PROMPTS]
    if options.prompt > 1 and front:
        raise OptionError(f"--prompt is measured without the asyncio front, so not with --listeners {','.join(front)}")
    tokenizer = find_tokenizer(options.tokenizer)
    torch.set_num_threads(1)
    cases = list(itertools.product(options.plans, options.batch_sizes, options.listeners))
    costs = []
    with progress_bar("measuring", unit="cases", still=True) as update:
        for done, (plan, size, listeners) in enumerate(cases, start=1):
            tokens = options.tokens if size >= FEW_ROWS else options.tokens // 8
            found = measure_host(
                plan, size, listeners, tokenizer,  # type: ignore[arg-type]
                tokens=tokens, stream_interval=options.stream_interval, burst=options.burst,
                page_size=options.page_size, prompt=options.prompt,
            )  # fmt: skip
            costs.append(asdict(found))
            update(done, len(cases))
    record = {
        "kind": options.kind,
        "environment": environment("cpu") | {"empty_loop_ns": python_speed()},
        "tokenizer": options.tokenizer,
        "stream_interval": options.stream_interval,
        "burst": options.burst,
        "page_size": options.page_size,
        "prompt": options.prompt,
        "costs": costs,
    }
    return options.answer(record, print_host)


def print_host(record: dict[str, Any]) -> None:
    parts = list(next((one["parts_us_per_token"] for one in record["costs"] if one["parts_us_per_token"]), {}))
    rows = []
    for one in record["costs"]:
        inner = one["parts_us_per_token"] or {}
        figures = [one["us_per_token"], *(inner.get(part) for part in parts), one["event_loop_us_per_token"]]
        told = [optional(figure, ".2f") for figure in figures]
        rows.append([f"{one['plan']}, {one['batch_size']}, {one['listeners']}", *told])
    speed = record["environment"]["empty_loop_ns"]
    what = "token" if record["prompt"] == 1 else f"token of prompts of {record['prompt']}"
    caption = (
        "Microseconds of processor time, the least of three rounds; the device that does nothing is left out.\n"
        f"Parts: a further round with more clocks. A turn of an empty Python loop takes {speed:.0f} ns here."
    )
    head = ["plan, batch, listeners", "us", *parts, "loop"]
    print_table([head, *rows], f"the host: microseconds per {what}, without a model", caption=caption)
