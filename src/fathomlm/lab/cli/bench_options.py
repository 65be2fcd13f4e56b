"""The options that `bench throughput` and `bench latency` share, and what they ask of the engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.device import check_threads
from fathomlm.cli.plan_options import add_plan_arguments, add_relax_arguments, add_router_arguments
from fathomlm.cli.sampling_options import add_dtype_argument
from fathomlm.engine.options import KV_DTYPES
from fathomlm.errors import OptionError
from fathomlm.lab.bench.workload import WORKLOADS, shape_of
from fathomlm.sizes import parse_memory

if TYPE_CHECKING:
    from fathomlm.decode.exiting import Exiting, Mode
    from fathomlm.depth import DepthPlan
    from fathomlm.lab.bench.measure import DepthChoice

SOURCES = ("router", "confidence", "forced")
PEERS = ("vanilla", "transformers")
FILLS = ("parallel", "state-copy")
EXITS = ("exit_layer", "exit_rate", "threshold", "decode", "max_stack")
"""Options that are for tokens that leave early."""
LEAST = {
    "requests": 1, "rows": 1, "slots": 1, "prefill_chunk": 1, "page_size": 1, "cores": 1, "shallows": 1, "burst": 1,
    "peer_rows": 1,
    "threads": 1, "exit_layer": 1, "max_stack": 1, "seed": 0,
}  # fmt: skip
"""The least that a number may be."""
MOST, MOST_SEED = 2**31 - 1, 2**63 - 1
"""The most that a count, a seed and a size may be: beyond these numbers overflow somewhere below."""


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, Hugging Face directory, hub id, GGUF file or FathomLM directory")
    add("--dummy", action="store_true", help="random weights: only the configuration is read, and nothing downloaded")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)
    add("--seed", metavar="N", type=int, default=0, help="of requests and random weights (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_plan_arguments(parser)
    add_relax_arguments(parser)
    add_router_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser, workload: str, requests: int | None) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("what is asked for")
    kinds = "thesis (no prompts, about 256 new tokens), 512-2048 or 64-256 (prompt and new tokens)"
    group.add_argument("--workload", metavar="W", choices=tuple(WORKLOADS), default=workload, help=f"{kinds} ({workload})")
    many = ", ".join(f"{name}: {shape.requests}" for name, shape in WORKLOADS.items())
    group.add_argument("--requests", metavar="N", type=int, default=requests, help=f"how many ({requests or many})")
    text = "cut prompts from text (.txt, .md, .jsonl; may be given more than once) instead of drawing token ids"
    group.add_argument("--data", metavar="FILE", action="append", help=text)
    group.add_argument("--column", metavar="NAME", default="text", help="where the text is in JSON lines (text)")
    return group


def add_engine_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("the engine", "what is not given is chosen for the model and the device")
    group.add_argument("--memory", metavar="SIZE", help="for keys and values, such as 8GB (default: enough for every slot)")
    held = "what keys and values are held in, vanilla's too: auto (as the weights) or fp8, a byte a number (auto)"
    group.add_argument("--kv-dtype", metavar="T", choices=KV_DTYPES, help=held)
    group.add_argument("--prefill-chunk", metavar="N", type=int, help="prompt tokens prefilled between two decode steps")
    group.add_argument("--page-size", metavar="N", type=int, help="entries of a page, a power of two")
    group.add_argument("--burst", metavar="N", type=int, help="ticks started before the host looks again")
    group.add_argument("--cores", metavar="N", type=int, help="routed: passes of the block to one turn")
    group.add_argument("--shallows", metavar="N", type=int, help="exits: passes in front of the exit to one behind it")
    return group


def add_depth_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how deep tokens go").add_argument
    says = "what says so: router (the default with one), confidence (tokens leave where an exit is sure) or forced (drawn)"
    add("--depth", metavar="D", choices=SOURCES, help=says)
    parts = "forced, with a router: the part of the tokens that runs each recursion, such as 1,0.67,0.33 (the capacities)"
    add("--depths", metavar="P,P", help=parts)
    add("--exit-rate", metavar="P", type=float, help="forced, without a router: the part of the tokens that leaves, 0 to 1")
    add("--exit-layer", metavar="N", type=int, help="leave after layer N, counted from 1 (the model's own exit)")
    add("--threshold", metavar="T", type=float, help="confidence: leave above T, from 0 (always) to 1 (never) (0.9)")
    fill = "what becomes of the deeper entries of a token that left: parallel (made later, exact) or state-copy (parallel)"
    add("--decode", metavar="MODE", choices=FILLS, help=fill)
    add("--max-stack", metavar="K", type=int, help="parallel: at most K tokens of a text wait (16)")


def add_peer_argument(parser: argparse.ArgumentParser, transformers: str) -> None:
    help = f"compare with vanilla (our engine, the plain model as deep, random weights) or transformers ({transformers})"
    parser.add_argument(
        "--peer", metavar="P", action="append", choices=PEERS, default=[], help=f"{help}; may be given twice"
    )


def check(args: argparse.Namespace) -> None:
    """What can be seen to be wrong without a model."""
    check_numbers(args, LEAST)
    if args.page_size is not None and args.page_size & (args.page_size - 1):
        raise OptionError(f"--page-size must be a power of two, got {args.page_size}")
    if args.kind != "latency" and args.arrivals is not None and not (math.isfinite(args.arrivals) and args.arrivals > 0):
        raise OptionError(f"--arrivals must be > 0 requests a second, got {args.arrivals:g}")
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        raise OptionError(f"--threshold must be from 0 (always leave) to 1 (never), got {args.threshold:g}")
    if args.exit_rate is not None and not 0 <= args.exit_rate <= 1:
        raise OptionError(f"--exit-rate must be between 0 and 1, got {args.exit_rate:g}")
    if args.memory is not None:
        parse_memory(args.memory)
    if args.data is not None and args.dummy:
        raise OptionError("--data needs the model's tokenizer, which --dummy does not read; leave one of them out")
    if args.data is not None and shape_of(args.workload).prompt == 1:
        raise OptionError(f"the workload {args.workload} has no prompts to cut from --data; choose another --workload")
    if len(set(args.peer)) < len(args.peer):
        raise OptionError("--peer names the same peer twice")
    _check_depth(args)


def check_numbers(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Whole numbers that are too small, or so large that nothing could be made of them."""
    for name, low in least.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if value < low:
            raise OptionError(f"{option(name)} must be >= {low}, got {value}")
        high = MOST_SEED if name == "seed" else MOST
        if value > high:
            raise OptionError(f"{option(name)} must be <= {high:,}, got {value:,}")
    check_threads(args.threads)


def _check_depth(args: argparse.Namespace) -> None:
    source = _source(args)
    if args.depths is not None and args.exit_rate is not None:
        raise OptionError("--depths is for models with a router and --exit-rate for those without; give one of them")
    allowed = {
        "router": (),
        "confidence": ("exit_layer", "threshold", "decode", "max_stack"),
        "forced": ("depths", "exit_layer", "exit_rate", "decode", "max_stack"),
    }
    for name in ("depths", *EXITS):
        if getattr(args, name) is not None and source is not None and name not in allowed[source]:
            raise OptionError(f"{option(name)} does not go with {_said(args)}")
    if args.depths is not None:
        _parts(args.depths)


def _source(args: argparse.Namespace) -> str | None:
    """What says how deep tokens go, as far as the options say it."""
    if args.depth is not None:
        return str(args.depth)
    if args.depths is not None or args.exit_rate is not None:
        return "forced"
    return "confidence" if any(getattr(args, name) is not None for name in EXITS) else None


def _said(args: argparse.Namespace) -> str:
    if args.depth is not None:
        return f"--depth {args.depth}"
    return "forced depths: they are drawn and not compared with anything"


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parts(text: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise OptionError(f"--depths takes parts of all tokens such as 1,0.67,0.33, got '{text}'") from error
    if not all(math.isfinite(part) and 0 < part <= before for part, before in zip(parts, (1.0, *parts), strict=False)):
        raise OptionError(f"--depths must fall from 1 and stay above 0, got '{text}'")
    if parts[0] != 1:
        raise OptionError(f"--depths must begin with 1, because every token runs the first recursion; got '{text}'")
    return parts


@dataclass(frozen=True, slots=True)
class Depth:
    """What the options ask for, checked against a model."""

    choice: DepthChoice
    exiting: Exiting | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Of `EngineOptions`."""

    @property
    def exit_layer(self) -> int | None:
        return None if self.exiting is None or self.exiting.exit_layers is None else self.exiting.exit_layers[0]


def read_depth(args: argparse.Namespace, plan: DepthPlan) -> Depth:
    from fathomlm.lab.bench.measure import DepthChoice

    source = _source(args)
    if source is None:
        routed = DepthChoice(source="router", label="each token as deep as its router says")
        return Depth(DepthChoice() if plan.routing is None else routed)
    if source == "router":
        if plan.routing is None:
            raise OptionError("--depth router is for models with a router; --router expert gives this one one")
        return Depth(DepthChoice(source="router", label="each token as deep as its router says"))
    if source == "forced" and plan.routing is not None:
        return _forced_depths(args, plan)
    if args.depths is not None:
        raise OptionError("--depths is for models with a router; --exit-rate forces how many tokens leave this one early")
    if source == "forced" and args.exit_rate is None:
        raise OptionError("--depth forced needs --exit-rate P: the part of the tokens that leaves early")
    return _leaving(args, plan)


def _forced_depths(args: argparse.Namespace, plan: DepthPlan) -> Depth:
    from fathomlm.lab.bench.measure import DepthChoice

    assert plan.routing is not None
    for name in EXITS:
        if getattr(args, name) is not None:
            raise OptionError(
                f"{option(name)} is for models without a router; --depths forces how deep this one's tokens go"
            )
    if not plan.routing.method.picks_tokens:
        raise OptionError("forced depths are for expert-choice routers; a token-choice router gives each token its depth")
    parts = plan.routing.capacity if args.depths is None else _parts(args.depths)
    if len(parts) != plan.recursions:
        raise OptionError(f"--depths names {len(parts)} parts, but the model has {plan.recursions} recursions")
    shown = ", ".join(f"{part:.4g}" for part in parts)
    label = f"forced: parts {shown} of all tokens run recursions 1 to {plan.recursions}, drawn and not decided"
    return Depth(DepthChoice(source="forced", label=label), fields={"forced_depths": parts})


def _leaving(args: argparse.Namespace, plan: DepthPlan) -> Depth:
    from fathomlm.decode.exiting import Exiting
    from fathomlm.lab.bench.measure import DepthChoice

    mode: Mode = args.decode or "parallel"
    layers = None if args.exit_layer is None else (args.exit_layer,)
    exits = Exiting(mode=mode, exit_layers=layers).exits(plan)
    if len(exits) > 1:
        raise OptionError(
            f"the engine lets tokens leave after one layer, and the model names {len(exits)}: give --exit-layer"
        )
    layer = exits[0] + 1
    exiting = Exiting(mode=mode, exit_layers=(layer,), threshold=args.threshold, max_stack=args.max_stack)
    if args.exit_rate is None:
        label = f"tokens leave after layer {layer} where the confidence is above {exiting.threshold_now():g} ({mode})"
        return Depth(DepthChoice(source="confidence", label=label), exiting)
    label = f"forced: {args.exit_rate:.4g} of all tokens leave after layer {layer}, drawn and not decided ({mode})"
    return Depth(DepthChoice(source="forced", label=label), exiting, {"forced_exits": args.exit_rate})
