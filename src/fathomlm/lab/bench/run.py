"""`fathomlm bench throughput` and `bench latency`: measure the model, then its peers in the same process."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from fathomlm.checkpoints.resolve import describe, dtype_name, quantize_model
from fathomlm.cli.common import memory_errors, read_documents
from fathomlm.cli.display import progress_bar
from fathomlm.decode.prompts import encode_prompts
from fathomlm.engine.heap import settle_heap
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.errors import FathomError, OptionError
from fathomlm.lab.bench.depth import DepthChoice, resolve_depth
from fathomlm.lab.bench.floor import reading_speed
from fathomlm.lab.bench.measure import Measurement, Timing, measure
from fathomlm.lab.bench.models import (
    NEW,
    REQUESTS,
    batched,
    dummy_dtype,
    engine_device,
    hugging_face_model,
    load_planned,
    one_by_one,
    plain_model,
    planned_shape,
    random_model,
    with_context,
)
from fathomlm.lab.bench.options import EngineBenchOptions
from fathomlm.lab.bench.play import warm_up
from fathomlm.lab.bench.report import about, print_bench, tell_interrupted
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload, build_workload
from fathomlm.lab.common import free_memory
from fathomlm.model.hub import FathomForCausalLM

LOWER = "--batch-size, --max-sequences, --memory or --requests"


def run(options: EngineBenchOptions) -> int:
    with memory_errors(LOWER):
        return Bench(options).run()


class Bench:
    """One run of the command."""

    def __init__(self, options: EngineBenchOptions) -> None:
        plan = planned_shape(options, options.model)[1]
        depth = resolve_depth(options.depth, plan)  # now, and again with the model: a slip should cost no waiting
        if "vanilla" in options.peer and depth.source == "full" and plan.recursions == 1:
            raise OptionError("--peer vanilla is what this is already: a plain model whose tokens run every layer")
        self.options = options
        self.batched = options.batched
        self.model, self.workload = _read_model(options)
        self.depth = resolve_depth(options.depth, self.model.plan)
        if not self.batched:
            self.workload = self.workload.one_by_one()
        self.device = self.model.decoder.embed.weight.device

    def run(self) -> int:
        record: dict[str, Any] = about(self.options, dtype_name(self.model)) | {
            "plan": describe(self.model),
            "weights": "random" if self.options.dummy else "loaded",
            "workload": self.workload.record(),
            "ours": None,
            "peers": {},
            "interrupted": False,
        }
        try:
            self.speed = reading_speed(self.device)
            record["ours"] = self._engine("this model", self.model, self.depth)
            for peer in [] if _stopped(record["ours"]) else self.options.peer:
                found = self._peer(peer)
                record["peers"][peer] = found | {"speedup": _speedup(record["ours"], found)}
        except KeyboardInterrupt:
            record["interrupted"] = True
        record["interrupted"] |= any(_stopped(found) for found in (record["ours"], *record["peers"].values()))
        if record["ours"] is None:
            raise KeyboardInterrupt
        self.options.answer(record, print_bench)
        if record["interrupted"]:
            tell_interrupted()
        return 2 if record["interrupted"] else 0

    def _engine(
        self, name: str, model: FathomForCausalLM, depth: DepthChoice, batch_size: int | None = None
    ) -> dict[str, Any]:
        """An engine of ours over the workload."""
        options = self.engine_options(model, depth, batch_size)
        engine = TimedEngine(model, options, exiting=depth.exiting)
        _log(f"warming up {name}")
        warm_up(engine, self.workload)
        settle_heap()  # as `fathomlm serve` does
        with progress_bar(f"measuring {name}", "tokens", still=True) as update:
            found = measure(engine, self.workload, speed=self.speed, depth=depth, on_progress=update)
        del engine
        free_memory()
        record = found.record()
        return record | {"latency": _latency(found)} if not self.batched else record

    def engine_options(self, model: FathomForCausalLM, depth: DepthChoice, batch_size: int | None = None) -> EngineOptions:
        fields = {"max_length": self.workload.longest, **depth.fields}
        if not self.batched:
            # What waits before an exit runs behind it in one pass, so that pass must have room for all of it.
            stack = None if depth.exiting is None else depth.exiting.max_stack
            fields |= {"batch_size": stack or 1, "max_sequences": 1 if stack or model.plan.routing is not None else None}
        elif batch_size is not None:
            fields |= {"batch_size": batch_size, "max_sequences": None}
        options = replace(self.options.engine, **fields)
        if options.memory is not None:
            return options
        return replace(options, memory=ample_memory(model.decoder, options, self.workload.longest, depth.exiting))

    def _peer(self, peer: str) -> dict[str, Any]:
        """What was measured of it, or why it could not be: that must not cost what was measured before."""
        try:
            with memory_errors(LOWER):
                return self._vanilla() if peer == "vanilla" else self._transformers()
        except FathomError as error:
            return {"cannot": str(error)}

    @property
    def _peer_batch_size(self) -> int | None:
        engine = self.options.engine
        return (engine.peer_batch_size or engine.batch_size) if self.batched else None

    def _vanilla(self) -> dict[str, Any]:
        model = plain_model(self.model, self.options.seed)
        return {"weights": "random"} | self._engine("vanilla", model, DepthChoice(), self._peer_batch_size)

    def _transformers(self) -> dict[str, Any]:
        peer = hugging_face_model(self.model)
        _log("measuring transformers")
        if not self.batched:
            timing = Timing.of(one_by_one(peer, self.workload))
            return {"how": "generate", "timing": asdict(timing), "latency": _token_times(timing)}
        most = max(request.new for request in self.workload.requests)
        few = self.workload.uniform(REQUESTS, min(NEW, most))
        batch_size = self._peer_batch_size or 1
        timing = Timing.of(batched(peer, few, batch_size))
        return {"how": "continuous batching", "rows": batch_size, "workload": few.record(), "timing": asdict(timing)}


def _read_model(options: EngineBenchOptions) -> tuple[FathomForCausalLM, Workload]:
    """The model, and a workload that fits it."""
    device = engine_device(options.device)
    quantize = options.quantized(options.model)
    options.use_threads()
    wanted = options.workload
    documents = read_documents(wanted.data, wanted.column) if wanted.data else None  # first, so that a slip costs no waiting
    architecture, plan, relaxation = planned_shape(options, options.model)
    workload = _workload(options, architecture.vocab, None)
    if options.dummy:
        architecture = with_context(architecture, workload.longest)
        dtype = dummy_dtype(options, device)
        model = random_model(architecture, plan, relaxation, dtype=dtype, device=device, seed=options.seed)
        if quantize is not None:
            quantize_model(model, quantize)
        return model, workload
    if workload.longest > architecture.context:
        raise OptionError(
            f"the longest sequence of the workload has {workload.longest:,} tokens, more than the model's context of "
            f"{architecture.context:,}; choose another --workload, or --dummy, whose weights know no limit"
        )
    model = load_planned(options, options.model)
    tokens = None if documents is None else list(chain.from_iterable(encode_prompts(model, documents)))
    return model, _workload(options, model.architecture.vocab, tokens)


def _workload(options: EngineBenchOptions, vocab: int, text: list[int] | None) -> Workload:
    wanted = options.workload
    return build_workload(
        wanted.workload,
        vocab,
        requests=wanted.requests,
        rate=options.arrival_rate,
        seed=options.seed,
        text=text,
    )


def _latency(found: Measurement) -> dict[str, Any]:
    """A token's time, and the floor's part of it: the weights that its decode steps read."""
    times = _token_times(found.timing)
    decode_steps = found.work.decode_steps / found.timing.tokens if found.timing.tokens else 0.0
    floor = found.floor.ms_per_decode_step * decode_steps
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


def _log(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)
