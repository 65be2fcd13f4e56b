"""Where `simulate throughput` has its texts and their depths from."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import use_threads
from fathomlm.cli.exit_options import read_layers
from fathomlm.errors import OptionError
from fathomlm.lab.bench.workload import WORKLOADS

if TYPE_CHECKING:
    from fathomlm.depth import Architecture, DepthPlan, Relaxation
    from fathomlm.lab.simulate.collect import Leaving
    from fathomlm.lab.simulate.presets import PresetTimes
    from fathomlm.lab.simulate.trajectories import Trajectories

LEAVING = ("oracle", "confidence", "router")
TOKENS = 512
"""Tokens of a text from --data, where the model can read so many."""


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how deep tokens go")
    add = group.add_argument
    add("--trajectories", metavar="FILE", type=Path, help='JSON lines, a text each: {"prompt": 12, "depths": [1, 2, 1]}')
    add("--depths", metavar="P,P", help="drawn: the part of the tokens that runs each depth, such as 1,0.2 (forced)")
    add("--workload", metavar="W", choices=tuple(WORKLOADS), help="--depths: lengths as in bench: thesis, 512-2048, 64-256")
    add("--requests", metavar="N", type=int, help="--depths: how many texts (as in bench)")
    add("--data", metavar="FILE", action="append", help="text through MODEL (.txt, .md, .jsonl, a corpus); also several")
    add("--column", metavar="NAME", default="text", help="where the text is in JSON lines (text)")
    add(
        "--exit", metavar="HOW", choices=LEAVING, help="--data: oracle, confidence or router (oracle; with a router, router)"
    )
    add("--threshold", metavar="T", type=float, default=0.9, help="--exit confidence: leave above T (0.9)")
    add(
        "--exit-layer", metavar="N", action="append", help="--data: exits, from 1: 8 or 4,8 (the model's, or its recursions)"
    )
    add("--texts", metavar="N", type=int, default=32, help="--data: how many texts (32)")
    add("--tokens", metavar="N", type=int, help=f"--data: tokens of each (what the model reads, at most {TOKENS})")
    add("--prompt", metavar="N", type=int, default=1, help="--data: how many of them are read and not made (1)")
    add("--save", metavar="FILE", type=Path, help="write the depths, to be used again with --trajectories")


def check_texts(args: argparse.Namespace) -> None:
    chosen = [name for name in ("trajectories", "depths", "data") if getattr(args, name)]
    if len(chosen) != 1:
        raise OptionError("say how deep tokens go with one of --trajectories FILE, --depths P,P and --data FILE")
    if args.data is not None and args.model is None:
        raise OptionError("--data needs a MODEL that the text is run through")
    if args.data is not None and args.dummy:
        raise OptionError("--data needs the model's own weights, which --dummy does not read; leave one of them out")
    for name in ("workload", "requests"):
        if getattr(args, name) is not None and args.depths is None:
            raise OptionError(f"--{name} goes with --depths; other texts have their own lengths")
    if (args.exit is not None or args.exit_layer is not None) and args.data is None:
        raise OptionError("--exit and --exit-layer go with --data")
    if args.model is not None and args.data is None and not args.measure and args.memory is None:
        raise OptionError("MODEL goes with --data, --measure or --memory; the preset and the table of times need none")
    if not 0 <= args.threshold <= 1:
        raise OptionError(f"--threshold must be from 0 (always) to 1 (never), got {args.threshold:g}")
    for name in ("requests", "texts", "prompt"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} must be >= 1, got {value}")
    if args.save is not None and not args.save.absolute().parent.is_dir():
        raise OptionError(f"cannot write {args.save}: {args.save.parent} is no directory")


@dataclass(frozen=True, slots=True)
class SimulationSource:
    """The texts, and the model that they are of, where there is one."""

    trajectories: Trajectories
    architecture: Architecture | None = None
    plan: DepthPlan | None = None
    relaxation: Relaxation | None = None

    def planned(self, times: PresetTimes | None) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The model that is asked for, or the preset's."""
        if self.architecture is not None:
            assert self.plan is not None
            return self.architecture, self.plan, self.relaxation
        from fathomlm.depth import DepthPlan
        from fathomlm.depth.presets import PRESETS
        from fathomlm.depth.relaxation import build_relaxation

        assert times is not None
        architecture = PRESETS[times.model].architecture
        plan = DepthPlan.build("cycle", times.blocks, architecture.layers, "add")
        return architecture, plan, build_relaxation(architecture.linears(), "lora", times.rank) if times.rank else None

    def shape(self, args: argparse.Namespace) -> dict[str, Any]:
        from fathomlm.checkpoints.resolve import parse_device
        from fathomlm.lab.cli.bench_model import read_dtype

        device = parse_device(args.device)
        architecture, plan, relaxation = self.planned(None)
        named = {"architecture": architecture, "plan": plan, "relaxation": relaxation}
        return named | {"dtype": read_dtype(args, device), "device": device}


def read_source(args: argparse.Namespace) -> SimulationSource:
    use_threads(args.threads)
    if args.data is not None:
        return _through_model(args)
    found: tuple[Any, ...] = ()
    if args.model is not None:
        from fathomlm.lab.cli.bench_model import read_shape

        found = read_shape(args)
    deepest = found[1].recursions if found else None
    if args.trajectories is not None:
        from fathomlm.lab.simulate.trajectories import read_trajectories

        return SimulationSource(read_trajectories(args.trajectories, deepest), *found)
    parts = _parts(args.depths)
    if deepest is not None and len(parts) != deepest:
        raise OptionError(f"--depths names {len(parts)} parts, but the model has {deepest} recursions")
    return SimulationSource(_drawn(args, parts), *found)


def _parts(text: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise OptionError(f"--depths takes parts of all tokens such as 1,0.4, got '{text}'") from error
    if not all(math.isfinite(part) for part in parts):
        raise OptionError(f"--depths takes parts of all tokens such as 1,0.4, got '{text}'")
    return parts


def _drawn(args: argparse.Namespace, parts: tuple[float, ...]) -> Trajectories:
    from fathomlm.lab.bench.workload import build_workload
    from fathomlm.lab.simulate.trajectories import draw

    workload = build_workload(args.workload or "thesis", 2, requests=args.requests, seed=args.seed)
    return draw(((len(asked.prompt), asked.new) for asked in workload.requests), parts, args.seed)


def _through_model(args: argparse.Namespace) -> SimulationSource:
    from fathomlm.cli.progress import layer_bar
    from fathomlm.cli.sampling_options import load_model
    from fathomlm.lab.analyze.token_rows import find, read_rows, row_length
    from fathomlm.lab.cli.bench_model import REPLANNED
    from fathomlm.lab.simulate.collect import collect

    if args.linears_only or any(getattr(args, name) is not None for name in REPLANNED):
        raise OptionError("--data runs text through MODEL as it is; make another with `fathomlm convert` first")
    layers = read_layers(args.exit_layer)
    places = find(args.data)
    model = load_model(args)
    tokens = row_length(model, args.tokens, most=TOKENS)
    rows = read_rows(places, model, context=tokens, rows=args.texts, column=args.column)
    leaving: Leaving = args.exit or ("router" if model.plan.routing is not None else "oracle")
    with layer_bar("prefill", unit="texts") as tell:
        found = collect(
            model, rows.tokens_NT, leaving=leaving, threshold=args.threshold, layers=layers, prompt=args.prompt, on_rows=tell
        )
    return SimulationSource(found, model.architecture, model.plan, model.relaxation)
