"""The options that `inspect` and `convert` share: the plan, and what each step adds of its own."""

from __future__ import annotations

import argparse
from typing import Any

from fathomlm.depth.plan import DEFAULT_RECURSIONS, KV_MODES
from fathomlm.depth.relaxation import DEFAULT_PREFIX_LENGTH, DEFAULT_RANK, RELAXATIONS
from fathomlm.depth.routing import NETWORKS, ROUTERS
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.errors import OptionError


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the plan").add_argument
    add("--sharing", metavar="S", choices=tuple(STRATEGIES), help=f"which layers are tied: {', '.join(STRATEGIES)} (cycle)")
    add("--recursions", metavar="N", type=int, help=f"how often the shared block is run ({DEFAULT_RECURSIONS})")
    how = "where the recursions do not divide the layers: add steps (what --resize alone means) or drop some"
    add("--resize", metavar="HOW", nargs="?", const="add", choices=("add", "drop"), help=how)


def add_relax_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what each step adds of its own").add_argument
    add("--relax", metavar="KIND", choices=tuple(RELAXATIONS), help=f"{', '.join(RELAXATIONS)} (nothing)")
    ranks = f"lora, dora: a rank for every linear, or q=64,kv=128,ffn=256 where unnamed linears get none ({DEFAULT_RANK})"
    add("--rank", metavar="K", help=ranks)
    add("--linears-only", action="store_true", help="lora, dora: keep norms and biases tied, as the thesis does")
    add("--prefix-length", metavar="P", type=int, help=f"prefix: vectors a step ({DEFAULT_PREFIX_LENGTH})")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokens that choose their depth").add_argument
    add("--router", metavar="R", choices=ROUTERS, help="expert (recursions pick tokens) or token (tokens pick a depth)")
    add("--router-network", metavar="N", choices=NETWORKS, help="linear, mlp or wide (linear)")
    add("--router-score", metavar="S", help="expert: sigmoid, tanh, identity (sigmoid); token: softmax, sigmoid (softmax)")
    add(
        "--router-alpha",
        metavar="A",
        type=float,
        help="weight of a recursion's output at score 1 (2 with interpolate and sigmoid, 0.1 with add)",
    )
    update = "expert: interpolate, x + g (f(x) - x), or add, x + g f(x) as the thesis trains from scratch (interpolate)"
    add("--router-update", metavar="U", help=update)
    add("--kv", metavar="MODE", choices=KV_MODES, help="keys and values: cache, share, or hybrid with a router (cache)")


def router_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """What `convert` calls `router`."""
    given = {name: getattr(args, f"router_{name}") for name in ("network", "score", "alpha", "update")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.router is None:
        for name in given:
            raise OptionError(f"--router-{name} goes with --router")
        return None
    return {"kind": args.router, **given}
