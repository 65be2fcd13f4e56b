"""`fathomlm inspect MODEL`: what a model costs under a depth plan, counted without its weights.

Presets need no file at all; for anything else only the configuration is read.
"""

from __future__ import annotations

import argparse
import json
from decimal import Decimal, InvalidOperation
from pathlib import Path

from fathomlm.cli.plan_options import add_plan_arguments, add_relax_arguments
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing, cost
from fathomlm.depth.plan import DEFAULT_RECURSIONS, KV_MODES
from fathomlm.depth.presets import PRESETS
from fathomlm.depth.relaxation import build_relaxation, check_fits
from fathomlm.depth.routing import ROUTERS
from fathomlm.errors import OptionError

HELP = "count what a model costs: parameters, compute, cache memory"
DESCRIPTION = (
    "Count the parameters, forward FLOPs and key-value cache of a model under a depth plan, beside those of the untied "
    "base. No weights are read. Without --sharing and --recursions, MODEL is shown as it is."
)
MOST_TOKENS = 10**18
SUFFIXES = {"K": 3, "M": 6, "B": 9, "T": 12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, Hugging Face directory, hub id, GGUF file or FathomLM directory")
    add("--router", metavar="R", choices=ROUTERS, help="let a router choose how deep each token goes: expert or token")
    add(
        "--kv",
        metavar="MODE",
        choices=KV_MODES,
        help="keys and values: cache every recursion's (default), share the first one's, or hybrid (with a router)",
    )
    add("--tokens", metavar="D", help="training tokens to count FLOPs for: 20e9, 20B, 300M, 1.5T")
    add("--context", metavar="T", type=int, default=2048, help="sequence length to count attention at (default: 2048)")
    add("--json", action="store_true", help="print one JSON object")
    add_plan_arguments(parser)
    add_relax_arguments(parser)


def run(args: argparse.Namespace) -> int:
    asked = args.sharing is not None or args.recursions is not None
    if args.resize is not None and not asked:
        raise OptionError("--resize goes with --sharing or --recursions")
    architecture, own_plan, own_relaxation = _read(args.model)
    kept = None
    if asked:
        recursions = DEFAULT_RECURSIONS if args.recursions is None else args.recursions
        plan = DepthPlan.build(args.sharing or "cycle", recursions, architecture.layers, args.resize)
    elif own_plan is not None:
        plan, kept = own_plan, own_relaxation
    else:
        plan = DepthPlan.vanilla(architecture.layers)
    options = (args.relax, args.rank, args.prefix_length)
    relaxation = build_relaxation(architecture.linears(), *options, linears_only=args.linears_only) or kept
    check_fits(relaxation, plan)
    _needs_a_loop(args, plan)
    if args.router is not None:
        plan = plan.with_routing(build_routing(args.router, plan.recursions))
    if args.kv is not None:
        plan = plan.with_kv(args.kv)
    tokens = None if args.tokens is None else parse_tokens(args.tokens)
    counted = cost.count(
        architecture,
        plan,
        relaxation=relaxation,
        tokens=tokens,
        context=args.context,
    )
    exits = _exit_parameters(args.model, architecture, plan)
    if args.json:
        about = {
            "model": args.model,
            "family": architecture.family,
            "sharing": plan.sharing,
            "recursions": plan.recursions,
            "relaxation": None if relaxation is None else relaxation.to_dict(),
            "router": None if plan.routing is None else plan.routing.kind,
            "kv": plan.kv,
            "exits": [index + 1 for index in plan.exits],
            "exit_layer": plan.exit_layer,
            "exit_parameters": exits,
        }
        about |= {"encoder_parameters": _encoder_parameters(args.model)} if architecture.cross else {}
        print(json.dumps(about | counted.to_dict()))
        return 0
    base = cost.count(architecture, DepthPlan.vanilla(plan.base_layers), tokens=tokens, context=args.context)
    caption = (
        f"FLOPs at a context of {args.context} tokens; cache in 16 bits. Sequences that fit: where "
        f"{cost.REFERENCE_BATCH} of the same plan without routing or sharing fill the memory for the shared layers' cache."
    )
    rows = _rows(counted, base, exits)
    if architecture.cross:
        size = _short(_encoder_parameters(args.model))
        rows.insert(3, ("parameters of the encoder", size, size))
        caption += " The other figures are the decoder's, over a source as long as the context."
    _print_table(_title(args, architecture, plan, relaxation), rows, caption)
    return 0


def parse_tokens(text: str) -> int:
    """A number of tokens from 20e9, 20B, 300M, 1.5T or 20_000; it must be whole."""
    power = SUFFIXES.get(text[-1:].upper(), 0)
    try:
        number = Decimal(text[:-1] if power else text).scaleb(power)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or not 1 <= number <= MOST_TOKENS or number != number.to_integral_value():
        rule = "an integer from 1 to 1e18, such as 20e9, 20B, 300M or 1.5T"
        raise OptionError(f"--tokens must be {rule}; got '{text}'")
    return int(number)


def _read(model: str) -> tuple[Architecture, DepthPlan | None, Relaxation | None]:
    if model in PRESETS and not Path(model).exists():
        return PRESETS[model].architecture, None, None
    from fathomlm.checkpoints.resolve import architecture_of

    return architecture_of(model)


def _exit_parameters(model: str, architecture: Architecture, plan: DepthPlan) -> int:
    """What the exits of a trained model have of their own."""
    if not plan.exits:
        return 0
    from fathomlm.checkpoints.resolve import exits_of

    return exits_of(model).parameters(architecture, plan)


def _encoder_parameters(model: str) -> int:
    from fathomlm.checkpoints.resolve import encoder_of
    from fathomlm.model.encoder import encoder_parameters

    encoder = encoder_of(model)
    assert encoder is not None
    return encoder_parameters(encoder)


def _needs_a_loop(args: argparse.Namespace, plan: DepthPlan) -> None:
    """Refuse options that would do nothing when no layer is shared: a forgotten --recursions, most likely."""
    if plan.recursions > 1:
        return
    pointless = {
        "--router": args.router is not None,
        f"--kv {args.kv}": args.kv in ("share", "hybrid"),
    }
    for option, given in pointless.items():
        if given:
            raise OptionError(f"{option} needs shared layers; give --recursions 2 or more")


def _title(args: argparse.Namespace, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> str:
    if plan.recursions == 1:
        parts = [f"{args.model} ({architecture.family}), no shared layers"]
    else:
        parts = [f"{args.model} ({architecture.family}), {plan.sharing}, {plan.recursions} recursions"]
    if relaxation is not None:
        parts.append(relaxation.method.describe(relaxation))
    if plan.routing is not None:
        parts.append(f"{plan.routing.kind}-choice router")
    if plan.kv != "cache":
        parts.append("shared keys and values" if plan.kv == "share" else "keys and values shared where a token stops")
    if plan.exits:
        own = ", each with a layer of its own" if plan.exit_layer else ""
        parts.append(f"exits after {', '.join(str(index + 1) for index in plan.exits)}{own}")
    return ", ".join(parts)


def _rows(counted: cost.Cost, base: cost.Cost, exits: int) -> list[tuple[str, str, str]]:
    """One fact a row: what it is, this model's figure, the untied base's. `exits` are the parameters that exits add."""
    rows = [
        ("layers with weights of their own", counted.layout, base.layout),
        ("layers run at full depth", str(counted.unrolled_layers), str(base.unrolled_layers)),
        (
            "parameters without embeddings",
            _against(counted.non_embedding_parameters, base.non_embedding_parameters),
            _short(base.non_embedding_parameters),
        ),
    ]
    if counted.relaxation_parameters:
        rows.append(("  of these, relaxation", _short(counted.relaxation_parameters), "-"))
    if counted.router_parameters:
        rows.append(("  of these, router", _short(counted.router_parameters), "-"))
    rows.append(("parameters of embeddings", _short(counted.embedding_parameters), _short(base.embedding_parameters)))
    if exits:
        rows.append(("parameters of exits", _short(exits), "-"))
    rows += [
        (
            "forward FLOPs a token",
            _against(counted.forward_flops_per_token, base.forward_flops_per_token),
            _short(base.forward_flops_per_token),
        ),
        (
            "key-value cache a token",
            f"{_bytes(counted.kv_bytes_per_token)} ({counted.relative_kv:.2f}x the base)",
            _bytes(base.kv_bytes_per_token),
        ),
        ("sequences that fit", str(counted.relative_max_batch), str(base.relative_max_batch)),
    ]
    if counted.tokens is not None:
        label = f"forward FLOPs for {_short(counted.tokens)} tokens"
        rows.append((label, f"{counted.training_flops:.2e}", f"{base.training_flops:.2e}"))
    return rows


def _print_table(title: str, rows: list[tuple[str, str, str]], caption: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("this plan", justify="right")
    table.add_column("untied base", justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _against(value: int, base: int) -> str:
    return f"{_short(value)} ({value / base:.2f}x the base)"


def _short(value: int) -> str:
    """167.2M for 167 150 400."""
    for suffix, power in reversed(SUFFIXES.items()):
        if value >= 10**power:
            return f"{value / 10**power:.{2 if power >= SUFFIXES['B'] else 1}f}{suffix}"
    return str(value)


def _bytes(value: int) -> str:
    return f"{value / 1024:.1f} KiB" if value < 1024**2 else f"{value / 1024**2:.1f} MiB"
