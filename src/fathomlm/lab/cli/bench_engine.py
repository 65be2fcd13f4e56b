"""What `bench throughput` and `bench latency` do: measure the model, then its peers in the same process."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import memory_errors
from fathomlm.errors import FathomError, OptionError
from fathomlm.lab.cli.bench_options import Depth, check, read_depth
from fathomlm.lab.cli.bench_record import about, print_record, say_interrupted
from fathomlm.lab.cli.bench_tables import print_bench
from fathomlm.sizes import parse_memory

if TYPE_CHECKING:
    from fathomlm.engine.options import EngineOptions
    from fathomlm.lab.bench.measure import Measurement, Timing
    from fathomlm.model.hub import FathomForCausalLM

TUNED = ("kv_dtype", "prefill_chunk", "page_size", "burst", "cores", "shallows")
"""Fields of the engine's options that are passed on as they are."""
Progress = Callable[[int, int], None]


LOWER = "--rows, --slots, --memory or --requests"


def run(args: argparse.Namespace) -> int:
    with memory_errors(LOWER):
        return Bench(args).run()


class Bench:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        check(args)
        from fathomlm.lab.cli.bench_model import read_model, read_shape

        plan = read_shape(args)[1]
        depth = read_depth(args, plan)  # now, and again with the model: a slip should cost no waiting
        if "vanilla" in args.peer and depth.choice.source == "full" and plan.recursions == 1:
            raise OptionError("--peer vanilla is what this is already: a plain model whose tokens run every layer")
        self.args = args
        self.alone = args.kind == "latency"
        self.model, self.workload = read_model(args)
        self.depth = read_depth(args, self.model.plan)
        if self.alone:
            self.workload = self.workload.one_by_one()
        self.device = self.model.decoder.embed.weight.device

    def run(self) -> int:
        from fathomlm.checkpoints.resolve import describe, dtype_name
        from fathomlm.lab.bench.floor import reading_speed

        record: dict[str, Any] = about(self.args, dtype_name(self.model)) | {
            "plan": describe(self.model),
            "weights": "random" if self.args.dummy else "loaded",
            "workload": self.workload.record(),
            "ours": None,
            "peers": {},
            "interrupted": False,
        }
        try:
            self.speed = reading_speed(self.device)
            record["ours"] = self._engine("this model", self.model, self.depth)
            for peer in [] if _stopped(record["ours"]) else self.args.peer:
                found = self._peer(peer)
                record["peers"][peer] = found | {"speedup": _speedup(record["ours"], found)}
        except KeyboardInterrupt:
            record["interrupted"] = True
        record["interrupted"] |= any(_stopped(found) for found in (record["ours"], *record["peers"].values()))
        if record["ours"] is None:
            raise KeyboardInterrupt
        if self.args.json:
            print_record(record)
        else:
            print_bench(record)
        if record["interrupted"]:
            say_interrupted()
        return 2 if record["interrupted"] else 0

    def _engine(self, name: str, model: FathomForCausalLM, depth: Depth, rows: int | None = None) -> dict[str, Any]:
        """An engine of ours over the workload."""
        from fathomlm.lab.bench.measure import measure
        from fathomlm.lab.bench.play import warm_up
        from fathomlm.lab.bench.timed import TimedEngine

        options = self._options(model, depth, rows)
        engine = TimedEngine(model, options, exiting=depth.exiting)
        _say(f"warming up {name}")
        warm_up(engine, self.workload)
        with _bar(f"measuring {name}") as tell:
            found = measure(engine, self.workload, speed=self.speed, depth=depth.choice, on_progress=tell)
        del engine
        _empty()
        record = found.record()
        return record | {"latency": _latency(found)} if self.alone else record

    def _options(self, model: FathomForCausalLM, depth: Depth, rows: int | None) -> EngineOptions:
        from dataclasses import replace

        from fathomlm.engine.options import EngineOptions
        from fathomlm.lab.bench.models import ample_memory

        args = self.args
        fields: dict[str, Any] = {name: getattr(args, name) for name in TUNED if getattr(args, name) is not None}
        fields |= {"max_length": self.workload.longest, **depth.fields}
        if self.alone:
            # What waits in front of an exit runs behind it in one pass, so that pass must have room for all of it.
            stack = None if depth.exiting is None else depth.exiting.max_stack
            fields |= {"batch_size": stack or 1, "max_sequences": 1 if stack or model.plan.routing is not None else None}
        else:
            fields |= {"batch_size": rows or args.rows, "max_sequences": args.slots if rows is None else None}
        options = EngineOptions(**fields)
        memory = ample_memory(model, options, self.workload.longest, depth.exit_layer)
        return replace(options, memory=memory if args.memory is None else parse_memory(args.memory))

    def _peer(self, peer: str) -> dict[str, Any]:
        """What was measured of it, or why it could not be: that must not cost what was measured before."""
        try:
            with memory_errors(LOWER):
                return self._vanilla() if peer == "vanilla" else self._transformers()
        except FathomError as error:
            return {"cannot": str(error)}

    def _vanilla(self) -> dict[str, Any]:
        from fathomlm.lab.bench.measure import DepthChoice
        from fathomlm.lab.bench.models import plain_model

        rows = None if self.alone else self.args.peer_rows or self.args.rows
        model = plain_model(self.model, self.args.seed)
        return {"weights": "random"} | self._engine("vanilla", model, Depth(DepthChoice()), rows)

    def _transformers(self) -> dict[str, Any]:
        from fathomlm.lab.bench import hugging_face
        from fathomlm.lab.bench.measure import Timing

        peer = hugging_face.hugging_face_model(self.model)
        _say("measuring transformers")
        if self.alone:
            timing = Timing.of(hugging_face.one_by_one(peer, self.workload))
            return {"how": "generate", "timing": asdict(timing), "latency": _token_times(timing)}
        most = max(request.new for request in self.workload.requests)
        few = self.workload.uniform(hugging_face.REQUESTS, min(hugging_face.NEW, most))
        rows = self.args.peer_rows or self.args.rows
        timing = Timing.of(hugging_face.batched(peer, few, rows))
        return {"how": "continuous batching", "rows": rows, "workload": few.record(), "timing": asdict(timing)}


def _latency(found: Measurement) -> dict[str, Any]:
    """A token's time, and the floor's part of it: the weights that its ticks read."""
    times = _token_times(found.timing)
    ticks = found.work.decode_steps / found.timing.tokens if found.timing.tokens else 0.0
    floor = found.floor.ms_per_decode_step * ticks
    mean = times["ms_per_token"]
    return times | {"floor_ms_per_token": floor, "floor_share": floor / mean if mean else None}


def _token_times(timing: Timing) -> dict[str, Any]:
    gaps = timing.inter_token_ms
    fields = {"ms_per_token": "mean", "ms_per_token_p50": "p50", "ms_per_token_p99": "p99"}
    return {name: None if gaps is None else getattr(gaps, field) for name, field in fields.items()}


def _speedup(ours: dict[str, Any], peer: dict[str, Any]) -> float | None:
    """How much faster this model is: in tokens a second, or one at a time in time for a token."""
    if "cannot" in peer:
        return None
    if "latency" in ours:
        mine, other = (found["latency"]["ms_per_token"] for found in (ours, peer))
        return other / mine if mine and other else None
    mine, other = (found["timing"]["tokens_per_s"] for found in (ours, peer))
    return mine / other if mine and other else None


def _stopped(found: dict[str, Any] | None) -> bool:
    return found is not None and "timing" in found and bool(found["timing"]["interrupted"])


def _empty() -> None:
    """Give back what an engine held before the next one is built."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


@contextmanager
def _bar(what: str) -> Iterator[Progress | None]:
    """Tokens, on a terminal. It is drawn only when told, because a thread that draws takes time from what is measured."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens, left"))
    shown = Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, auto_refresh=False
    )  # fmt: skip
    with shown as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total, refresh=True)
