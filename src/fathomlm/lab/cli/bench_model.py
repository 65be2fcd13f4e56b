"""What `bench` measures: a model with its own weights or random ones under any plan, and a workload that fits it."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import TYPE_CHECKING

from fathomlm.cli.device import use_threads
from fathomlm.cli.plan_options import router_options
from fathomlm.cli.sampling_options import load_model
from fathomlm.depth.plan import DEFAULT_RECURSIONS
from fathomlm.errors import DataError, OptionError

if TYPE_CHECKING:
    import torch

    from fathomlm.depth import Architecture, DepthPlan, Relaxation
    from fathomlm.lab.bench.workload import Workload
    from fathomlm.model.hub import FathomForCausalLM

REPLANNED = (
    "sharing", "recursions", "resize", "relax", "rank", "prefix_length", "router", "router_network", "router_score",
    "router_alpha", "router_update", "kv",
)  # fmt: skip
"""Options that change a model's plan."""


def read_model(args: argparse.Namespace) -> tuple[FathomForCausalLM, Workload]:
    from fathomlm.decode.prompts import encode_prompts

    read_device(args.device)
    use_threads(args.threads)
    if args.dummy:
        return _random(args)
    texts = None if args.data is None else _texts(args)  # first, so that a slip costs no waiting
    architecture = read_shape(args)[0]
    longest = _workload(args, architecture.vocab, None).longest
    if longest > architecture.context:
        raise OptionError(
            f"the longest text of the workload has {longest:,} tokens, more than the model's context of "
            f"{architecture.context:,}; choose another --workload, or --dummy, whose weights know no limit"
        )
    model = _converted(args) if _replanned(args) else load_model(args)
    tokens = None if texts is None else list(chain.from_iterable(encode_prompts(model, texts)))
    return model, _workload(args, model.architecture.vocab, tokens)


def _random(args: argparse.Namespace) -> tuple[FathomForCausalLM, Workload]:
    from fathomlm.lab.bench.models import random_model, with_context

    device = read_device(args.device)
    architecture, plan, relaxation = read_shape(args)
    workload = _workload(args, architecture.vocab, None)
    architecture = with_context(architecture, workload.longest)
    dtype = read_dtype(args, device)
    return random_model(architecture, plan, relaxation, dtype=dtype, device=device, seed=args.seed), workload


def read_device(text: str) -> torch.device:
    """The engine's kernels and their twins are for CUDA and the CPU."""
    import torch

    from fathomlm.checkpoints.resolve import parse_device

    device = parse_device(text)
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"the engine runs on cpu, cuda or cuda:N, not on '{text}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no '{text}': this machine's {torch.cuda.device_count()} GPUs are counted from cuda:0")
    return device


def read_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """For random weights: what was asked for, or what a GPU is made for."""
    from fathomlm.checkpoints.resolve import parse_dtype

    return parse_dtype(args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))  # type: ignore[return-value]


def read_shape(args: argparse.Namespace) -> tuple[Architecture, DepthPlan, Relaxation | None]:
    """The model's shape and the plan that the options lay over it, without weights."""
    from fathomlm.checkpoints.convert import routed_plan
    from fathomlm.checkpoints.resolve import architecture_of
    from fathomlm.depth import DepthPlan
    from fathomlm.depth.relaxation import build_relaxation, check_fits

    architecture, plan, relaxation = architecture_of(args.model)
    if architecture.cross:
        raise OptionError(f"the engine takes decoder-only models; this is an encoder-decoder ({architecture.family})")
    if args.sharing is not None or args.recursions is not None:
        recursions = DEFAULT_RECURSIONS if args.recursions is None else args.recursions
        plan = DepthPlan.build(args.sharing or "cycle", recursions, architecture.layers, args.resize)
        relaxation = None
    elif args.resize is not None:
        raise OptionError("--resize goes with --sharing or --recursions")
    plan = DepthPlan.vanilla(architecture.layers) if plan is None else plan
    options = (args.relax, args.rank, args.prefix_length)
    relaxation = build_relaxation(architecture.linears(), *options, linears_only=args.linears_only) or relaxation
    check_fits(relaxation, plan)
    return architecture, routed_plan(plan, router_options(args), args.kv), relaxation


def _replanned(args: argparse.Namespace) -> bool:
    return args.linears_only or any(getattr(args, name) is not None for name in REPLANNED)


def _converted(args: argparse.Namespace) -> FathomForCausalLM:
    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.resolve import decoder_only

    names = ("sharing", "recursions", "resize", "relax", "rank", "prefix_length", "linears_only", "kv", "dtype", "device")
    fields = {name: getattr(args, name) for name in names}
    return decoder_only(convert(args.model, router=router_options(args), seed=args.seed, **fields), "the engine")


def _workload(args: argparse.Namespace, vocab: int, text: list[int] | None) -> Workload:
    from fathomlm.lab.bench.workload import build_workload

    rate = None if args.kind == "latency" else args.arrivals
    return build_workload(args.workload, vocab, requests=args.requests, rate=rate, seed=args.seed, text=text)


def _texts(args: argparse.Namespace) -> list[str]:
    """All documents that hold anything, in order."""
    from fathomlm.train.data.sources import expand, read

    documents = chain.from_iterable(read(source, (args.column,)) for source in expand(args.data))
    texts = [document.fields[0] for document in documents if document.fields[0].strip()]
    if not texts:
        raise DataError(f"{', '.join(args.data)} has no text")
    return texts
