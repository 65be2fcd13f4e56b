"""The options that verbs share for tokens that leave early and for exits in files of their own, and what `generate` says of
where tokens left."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.errors import OptionError
from fathomlm.packaged import packaged_exits

if TYPE_CHECKING:
    from fathomlm.decode.exiting import AdaptiveThreshold, Exiting
    from fathomlm.decode.generation import Generation
    from fathomlm.model.seq2seq import FathomModel

NEEDING = ("exits", "exit_layer", "confidence", "threshold", "min_exit_layer", "refine", "max_stack")
"""Options that mean something only behind --decode."""
NONE = "none"
"""What --exits takes to mean no pack, not even one that came with FathomLM; a directory of that name is ./none/."""


def add_exit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("leaving early", "how far down a model without a router each token goes").add_argument
    mode = (
        "full (default), static, state-copy, parallel, speculative or oracle; full, speculative and oracle give the whole "
        "model's text"
    )
    add("--decode", metavar="MODE", help=mode)
    where = "leave after layer N, counted from 1; a comma list or given again where a mode has several exits"
    add("--exit-layer", metavar="N", action="append", help=f"{where} (default: the model's own)")
    first = "state-copy and oracle: every layer from M on is an exit"
    add("--min-exit-layer", metavar="M", type=int, help=first)
    sure = "what is compared with the threshold: gap (default), max, state or classifier"
    add("--confidence", metavar="KIND", help=sure)
    above = "leave where the confidence is above T, from 0 (always) to 1 (never); 'adaptive' learns it (default: 0.9)"
    add("--threshold", metavar="T", help=above)
    surprise = "parallel: go back to a token that the whole model gives -log p above T; 0 is strictest"
    add("--refine", metavar="T", type=float, help=surprise)
    add("--max-stack", metavar="K", type=int, help="parallel and speculative: at most K tokens wait (default: 16)")
    add_pack_arguments(add, shipped=True)


def add_pack_arguments(add: Callable[..., Any], *, shipped: bool = False) -> None:
    """What `pack_options` reads; `add` is the `add_argument` of a parser or of a group. `shipped` is for verbs that call
    `settle_pack`."""
    what = "put trained exits on MODEL, from `fathomlm export --format exits`"
    default = " (default: those that come with FathomLM for MODEL, if any; 'none' leaves them out)" if shipped else ""
    add("--exits", metavar="PATH", type=_pack_path if shipped else Path, help=what + default)
    add("--any-base", action="store_true", help="with --exits: also where they were trained over another model")


def _pack_path(text: str) -> Path | str:
    return text if text == NONE else Path(text)


def settle_pack(args: argparse.Namespace, model: str, mode: str | None) -> bool:
    """Let `args.exits` be the pack that is used, and say whether it is one that came with FathomLM.

    Such a one is for a decoding mode that needs an exit, for a model that is named (a path that exists wins, as
    everywhere), and where nothing else says where tokens leave.
    """
    said = args.exits is not None or args.any_base  # which alone is a mistake, and `pack_options` refuses it
    args.exits = None if args.exits == NONE else args.exits
    placed = args.exit_layer is not None or getattr(args, "min_exit_layer", None) is not None
    if said or placed or mode in (None, "full") or Path(model).expanduser().exists():
        return False
    args.exits = packaged_exits(model)
    return args.exits is not None


def tell_shipped(model: str) -> None:
    """One line for people, once all else that was asked for is in order."""
    print(f"fathomlm: using the exits that come with FathomLM for {model} (--exits none: without)", file=sys.stderr)


def pack_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `load` is told of a pack."""
    if args.any_base and args.exits is None:
        raise OptionError("--any-base goes with --exits, and says that they may belong to another model")
    return {"exits": args.exits, "any_base": args.any_base}


def learnt_place(args: argparse.Namespace) -> Path:
    """Where a threshold is kept that was learnt for the exits in use: with them."""
    return Path(args.model if args.exits is None else args.exits).expanduser()


def lift_exit_vocab(model: FathomModel) -> None:
    """Before text is scored. An exit with a vocabulary of its own gives other tokens no probability: its loss would be
    infinite, and nothing would be said of how well it predicts."""
    model.limit_exits(None)


def read_exiting(args: argparse.Namespace) -> Exiting | None:
    """The checked settings, or None for full decoding; asked for before the model is loaded."""
    if args.decode is None:
        for name in NEEDING:
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} goes with --decode, which says how tokens leave early, such as --decode parallel"
                )
        return None
    if args.decode != "full" and args.max_depth is not None:
        raise OptionError("--max-depth and --decode both say how deep tokens go; give one of them")

    from fathomlm.decode.exiting import Exiting

    shipped = settle_pack(args, args.model, args.decode)
    threshold = _read_threshold(args, shipped)  # first: a calibrated one says which exit it is for
    exiting = Exiting(
        mode=args.decode,
        exit_layers=read_layers(args.exit_layer),
        confidence=args.confidence,
        threshold=threshold,
        min_exit_layer=args.min_exit_layer,
        refine=args.refine,
        max_stack=args.max_stack,
    )
    if shipped:
        tell_shipped(args.model)
    return None if exiting.mode == "full" else exiting


def read_layers(given: Sequence[str] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    words = [word.strip() for text in given for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise OptionError(f"--exit-layer takes layers such as 6 or 4,8, got '{word}'")
    return tuple(int(word) for word in words)


def _read_threshold(args: argparse.Namespace, shipped: bool) -> float | AdaptiveThreshold | None:
    if args.threshold is None:
        return _shipped_threshold(args) if shipped else None
    if args.threshold != "adaptive":
        try:
            return float(args.threshold)
        except ValueError as error:
            raise OptionError(f"--threshold takes a number from 0 to 1, or adaptive; got '{args.threshold}'") from error

    from fathomlm.decode.calibration import FILE, Calibration
    from fathomlm.decode.threshold import ThresholdEstimator

    path = learnt_place(args) / FILE
    if not path.is_file():
        return ThresholdEstimator()
    found = Calibration.load(path)
    asked = read_layers(args.exit_layer) or (found.exit_layer,)
    found.check([layer - 1 for layer in asked], args.confidence or found.confidence, str(path))
    args.exit_layer, args.confidence = [str(found.exit_layer)], found.confidence
    return found.estimator


def _shipped_threshold(args: argparse.Namespace) -> float | None:
    """What was calibrated for exits that came with FathomLM, as a plain number; None (the usual default) where the mode
    compares none, or with another confidence than it was calibrated for."""
    from fathomlm.decode.calibration import FILE, Calibration
    from fathomlm.decode.exiting import USED

    path = learnt_place(args) / FILE
    if args.decode == "oracle" or "threshold" not in USED.get(args.decode, ()) or not path.is_file():
        return None
    found = Calibration.load(path)
    if args.confidence not in (None, found.confidence):
        return None
    args.exit_layer, args.confidence = [str(found.exit_layer)], found.confidence
    return found.estimator.threshold


def exit_statistic(results: Sequence[Generation]) -> str:
    """How early tokens left, for the line on standard error; empty where none could."""
    from fathomlm.decode.generation import exit_rate, mean_exit_layer

    first = results[0].exits
    if first is None:
        return ""
    mode = "oracle (it knows the last layer's choice)" if results[0].oracle else first.mode
    threshold = "" if first.threshold is None else f", threshold {first.threshold:.2f}"
    drafted = sum(result.exits.drafted for result in results if result.exits)
    accepted = sum(result.exits.accepted for result in results if result.exits)
    drafts = f", {accepted} of {drafted} drafts kept" if drafted else ""
    return (
        f"{mode}: {exit_rate(results):.0%} left early, mean exit layer {mean_exit_layer(results):.2f} of {first.layers}"
        f"{threshold}{drafts}; "
    )


def exit_record(exiting: Exiting | None, model: FathomModel, results: Sequence[Generation]) -> dict[str, Any] | None:
    """The same for JSON, with the settings. Each result has its own tokens' layers and confidences."""
    from fathomlm.decode.generation import exit_rate, mean_exit_layer

    if exiting is None:
        return None
    first = results[0].exits
    assert first is not None
    return {
        "mode": exiting.mode,
        "oracle": results[0].oracle,
        "layers": first.layers,
        "exit_layers": [index + 1 for index in exiting.exits(model.plan)],
        "confidence": exiting.confidence,
        "threshold": first.threshold,
        "adaptive": exiting.estimator is not None,
        "refine": exiting.refine,
        "max_stack": exiting.max_stack,
        "exit_rate": exit_rate(results),
        "mean_exit_layer": mean_exit_layer(results),
    }
