"""`--captured`, for the verbs that make one text at a time: steps that a GPU replays by itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fathomlm.errors import OptionError

if TYPE_CHECKING:
    from fathomlm.decode.captured_session import CapturedSession
    from fathomlm.decode.exiting import Exiting
    from fathomlm.decode.full import Session
    from fathomlm.decode.sampling import Sampling
    from fathomlm.model.hub import FathomForCausalLM
    from fathomlm.model.route import DepthControl


def add_captured_argument(parser: argparse.ArgumentParser) -> None:
    how = (
        "compile layers and replay steps as CUDA graphs: greedy, one text at a time, a minute to get ready, then much faster"
    )
    parser.add_argument("--captured", action="store_true", help=how)


def check_captured(args: argparse.Namespace, sampling: Sampling) -> None:
    """Refuse what captured steps cannot do, before a model is loaded."""
    if not args.captured:
        return
    from fathomlm.decode.captured_session import check_greedy

    check_greedy(sampling)
    if args.max_depth is not None or args.depth_bias:
        raise OptionError("--captured runs every step of a model; leave out --max-depth and --depth-bias")


def open_session(
    args: argparse.Namespace, model: FathomForCausalLM, control: DepthControl | None, exiting: Exiting | None
) -> Session | CapturedSession:
    """What makes texts for one who waits. Without a GPU captured steps are simply run, uncompiled."""
    if not args.captured:
        from fathomlm.decode.full import Session

        return Session(model, control, exiting)
    from fathomlm.decode.captured_session import CapturedSession

    on_gpu = model.decoder.embed.weight.device.type == "cuda"
    return CapturedSession(model, exiting, compile=on_gpu, pack=on_gpu)
