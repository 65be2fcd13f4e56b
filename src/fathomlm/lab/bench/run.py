"""`fathomlm bench throughput` and `bench latency`: measure the model, then its peers in the same process. Tables have units
in every row, and "forced" wherever depths were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from fathomlm.checkpoints.resolve import describe, dtype_name, quantize_model
from fathomlm.cli.common import memory_errors, read_documents
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.decode.exiting import Exiting, Mode
from fathomlm.decode.prompts import encode_prompts
from fathomlm.depth import DepthPlan
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.errors import FathomError, OptionError
from fathomlm.lab.bench.floor import reading_speed
from fathomlm.lab.bench.measure import DepthChoice, Measurement, Timing, measure
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
from fathomlm.lab.bench.options import EXIT_FLAGS, EngineBenchOptions, ForcedDepthOptions, Kernels
from fathomlm.lab.bench.play import warm_up
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload, build_workload
from fathomlm.lab.common import environment, free_memory
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.sizes import amount

LOWER = "--batch-size, --max-sequences, --memory or --requests"


def run(options: EngineBenchOptions) -> int:
    with memory_errors(LOWER):
        return Bench(options).run()


def resolve_depth(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    """What the options ask for, checked against a model."""
    source = options.source
    if source in (None, "router"):
        if plan.routing is None and source is not None:
            raise OptionError("--depth router requires a model with a router, or --router expert")
        routed = DepthChoice(source="router", label="each token as deep as its router says")
        return DepthChoice() if plan.routing is None else routed
    if source == "forced" and plan.routing is not None:
        return _forced_depths(options, plan)
    if options.depths is not None:
        raise OptionError("--depths requires a model with a router; --exit-rate forces exits without one")
    if source == "forced" and options.exit_rate is None:
        raise OptionError("--depth forced requires --exit-rate P without a router")
    return _exits(options, plan)


def _forced_depths(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    assert plan.routing is not None
    for name, flag in EXIT_FLAGS.items():
        if getattr(options, name) is not None:
            raise OptionError(f"{flag} requires a model without a router; --depths forces depths with one")
    if not plan.routing.method.picks_tokens:
        raise OptionError("forced depths require an expert-choice router; a token-choice router gives each token its depth")
    parts = plan.routing.capacity if options.depths is None else options.depths
    if len(parts) != plan.recursions:
        raise OptionError(f"--depths has {len(parts)} parts, but the model has {plan.recursions} recursions")
    shown = ", ".join(f"{part:.4g}" for part in parts)
    label = f"forced: parts {shown} of all tokens run recursions 1 to {plan.recursions}, drawn and not decided"
    return DepthChoice(source="forced", label=label, fields={"forced_depths": parts})


def _exits(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    mode: Mode = options.mode or "parallel"  # type: ignore[assignment]
    exits = Exiting(mode=mode, exit_layers=options.exit_layers).exits(plan)
    layers = tuple(index + 1 for index in exits)
    exiting = Exiting(mode=mode, exit_layers=layers, threshold=options.threshold, max_stack=options.max_stack)
    layer = ", ".join(map(str, layers))
    if options.exit_rate is None:
        label = f"tokens exit after layer {layer} where the confidence exceeds {exiting.threshold_now():g} ({mode})"
        return DepthChoice(source="confidence", label=label, exiting=exiting)
    label = f"forced: {options.exit_rate:.4g} of all tokens exit after layer {layer}, drawn and not decided ({mode})"
    return DepthChoice(source="forced", label=label, exiting=exiting, fields={"forced_exits": options.exit_rate})


def about(options: EngineBenchOptions | Kernels, dtype: str) -> dict[str, Any]:
    """How every record begins."""
    return {
        "kind": options.kind,
        "model": options.model,
        "dtype": dtype,
        "device": options.device,
        "environment": environment(options.device),
    }


def tell_interrupted() -> None:
    print("fathomlm: interrupted; this is what was measured so far", file=sys.stderr)


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


Found = dict[str, Any]
Row = tuple[str, Callable[[Found], str | None]]
"""Its name, and what it says of one column; None where that has no such thing."""


def print_bench(record: Found) -> None:
    ours = record["ours"]
    forced = ours["depth"]["source"] == "forced"
    columns = {f"this model{' (forced)' if forced else ''}": ours, **record["peers"]}
    present = [row for row in (*ROWS, *_stage_rows(ours)) if any(row[1](found) is not None for found in columns.values())]
    rows = [[name, *(format_value(found) or "-" for found in columns.values())] for name, format_value in present]
    print_table([["", *columns], *rows], _title(record), caption=_caption(record))


def _title(record: Found) -> str:
    workload = record["workload"]
    many = f"{workload['requests']:,} request{'s' if workload['requests'] > 1 else ''}"
    when = f"{workload['rate_per_s']:g} requests a second" if workload["rate_per_s"] else workload["arrivals"]
    return (
        f"{record['model']}: {record['plan']}, {record['weights']} weights, {record['dtype']}, "
        f"{record['environment']['device']}\n"
        f"workload {workload['name']}: {many}, {workload['prompt_tokens']:,} prompt and "
        f"{workload['new_tokens']:,} new tokens, {when}"
    )


def _caption(record: Found) -> str:
    ours = record["ours"]
    speed = amount(ours["floor"]["reading_bytes_per_s"], "B/s")
    lines = [
        f"Depth: {ours['depth']['label']}.",
        f"The floor is the time that reading a decode step's weights takes at {speed}, this device's own reading speed.",
    ]
    if ours["timing"]["failed"]:
        lines.append(f"{ours['timing']['failed']} requests failed: {ours['timing']['error']}.")
    for name, peer in record["peers"].items():
        if "cannot" in peer:
            lines.append(f"{name} was not measured: {peer['cannot']}.")
        elif "workload" in peer:
            few = peer["workload"]
            lines.append(
                f"{name}: {peer['how']}, {few['requests']} requests of {few['new_tokens'] // few['requests']} tokens."
            )
    return "\n".join(lines)


def _part(part: str, name: str, format_value: Callable[[Any], str]) -> Callable[[Found], str | None]:
    def cell(found: Found) -> str | None:
        value = found.get(part, {}).get(name)
        return None if value is None else format_value(value)

    return cell


def percent(value: float) -> str:
    return f"{value:.1%}"


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _spread(times: dict[str, float]) -> str:
    return f"{ms(times['p50'])} / {ms(times['p99'])}"


def _depth(found: Found) -> str | None:
    depth = found.get("depth")
    if depth is None or depth["mean"] is None:
        return None
    return f"{depth['mean']:.2f} of {depth['full']} {depth['unit']}"


def _exit_rate(found: Found) -> str | None:
    depth = found.get("depth")
    return None if depth is None or depth["source"] == "full" or depth["exit_rate"] is None else percent(depth["exit_rate"])


def _against(found: Found) -> str | None:
    speedup = found.get("speedup")
    return None if speedup is None else f"{speedup:.2f} x"


ROWS: Sequence[Row] = (
    ("milliseconds a token, mean", _part("latency", "ms_per_token", ms)),
    ("  p50", _part("latency", "ms_per_token_p50", ms)),
    ("  p99", _part("latency", "ms_per_token_p99", ms)),
    ("  floor", _part("latency", "floor_ms_per_token", ms)),
    ("  floor's share", _part("latency", "floor_share", percent)),
    ("tokens/s", _part("timing", "tokens_per_s", lambda value: f"{value:,.1f}")),
    ("this model is faster by", _against),
    ("tokens", _part("timing", "tokens", lambda value: f"{value:,}")),
    ("time to first token p50 / p99, ms", _part("timing", "time_to_first_token_ms", _spread)),
    ("between tokens p50 / p99, ms", _part("timing", "inter_token_ms", _spread)),
    ("mean depth", _depth),
    ("tokens that stopped early", _exit_rate),
    ("batch size", _part("work", "batch_size", str)),
    ("max concurrent sequences", _part("work", "max_sequences", str)),
    ("batch filled", _part("work", "batch_filled", percent)),
    ("put aside for want of memory", _part("work", "preemptions", lambda value: f"{value:,}")),
    ("decode step, ms", _part("work", "ms_per_decode_step", ms)),
    ("  floor, ms", _part("floor", "ms_per_decode_step", ms)),
    ("  floor's share", _part("floor", "share", percent)),
    ("weights", _part("memory", "weights", lambda value: amount(value, "B"))),
    ("keys and values, held", _part("memory", "kv", lambda value: amount(value, "B"))),
    ("  used at most", _part("memory", "kv_most", lambda value: amount(value, "B"))),
    ("  in", _part("memory", "kv_dtype", lambda value: str(value).partition("_")[0])),
)


def _stage_rows(ours: Found) -> list[Row]:
    def row(stage: str) -> Row:
        def cell(found: Found) -> str | None:
            share = found.get("work", {}).get("stages", {}).get(stage)
            return None if share is None else percent(share)

        return f"time {stage}", cell

    return [row(stage) for stage in ours["work"]["stages"]]
