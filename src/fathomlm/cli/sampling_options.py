"""The options that `generate` and `chat` share: how to load the model and how to choose tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.device import use_threads
from fathomlm.errors import OptionError

if TYPE_CHECKING:
    from fathomlm.decode.sampling import Sampling
    from fathomlm.model.hub import FathomForCausalLM
    from fathomlm.model.route import DepthControl
    from fathomlm.model.seq2seq import FathomModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, Hugging Face directory, hub id, GGUF file or FathomLM directory")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    dtypes = ("float32", "bfloat16", "float16")
    what = f"number format: {', '.join(dtypes)} (default: as stored; float32 for quantised GGUF files)"
    parser.add_argument("--dtype", metavar="FORMAT", choices=dtypes, help=what)


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    add = parser.add_argument_group("how tokens are chosen").add_argument
    length = f"end after this many tokens (default: {max_new_tokens})"
    add("--max-new-tokens", metavar="N", type=int, default=max_new_tokens, help=length)
    heat = "0, the default, takes the likeliest token; 1 samples as the model's probabilities say"
    add("--temperature", metavar="T", type=float, default=0.0, help=heat)
    add("--top-k", metavar="K", type=int, default=0, help="sample among the K likeliest tokens (default: 0, all)")
    nucleus = "sample among the likeliest tokens that together have probability P (default: 1)"
    add("--top-p", metavar="P", type=float, default=1.0, help=nucleus)
    floor = "leave out tokens below P times the likeliest one's probability (default: 0)"
    add("--min-p", metavar="P", type=float, default=0.0, help=floor)
    penalty = "above 1 makes tokens that occurred already less likely (default: 1)"
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help=penalty)
    add("--seed", metavar="N", type=int, help="make sampling repeatable")
    add("--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given more than once")


def add_depth_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how deep tokens go").add_argument
    add("--max-depth", metavar="N", type=int, help="looped models: at most this many recursions (default: all)")
    bias = (
        "routed models: added to what routers say; above 0 sends tokens deeper, below 0 lets them stop earlier (default: 0)"
    )
    add("--depth-bias", metavar="B", type=float, default=0.0, help=bias)


def read_depth(args: argparse.Namespace, model: FathomModel) -> DepthControl | None:
    """What the depth options ask for, checked against the model."""
    from fathomlm.model.route import DepthControl

    if args.max_depth is None and not args.depth_bias:
        return None
    if args.depth_bias and model.plan.routing is None:
        raise OptionError(f"--depth-bias is for routed models; {args.model} has no router")
    control = DepthControl(max_depth=args.max_depth, bias=args.depth_bias)
    control.check(model.plan.recursions)
    return control


def read_sampling(args: argparse.Namespace) -> Sampling:
    """The checked settings; asked for before the model is loaded, so that a slip costs no waiting."""
    from fathomlm.decode.sampling import Sampling

    return Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def load_model(args: argparse.Namespace, *, exits: Path | None = None, any_base: bool = False) -> FathomForCausalLM:
    """A decoder-only model, ready to run, with the exits of a pack where one is given."""
    from fathomlm.checkpoints.resolve import decoder_only

    return decoder_only(load_any_model(args, exits=exits, any_base=any_base), "this command")


def load_any_model(args: argparse.Namespace, *, exits: Path | None = None, any_base: bool = False) -> FathomModel:
    from fathomlm.checkpoints.resolve import load

    use_threads(args.threads)
    return load(args.model, args.dtype, args.device, exits=exits, any_base=any_base)
