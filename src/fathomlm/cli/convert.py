"""`fathomlm convert`: a plain model in, a (relaxed) recursive one out."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fathomlm.checkpoints.tying import INITS, NORM_INITS, RELAX_INITS
from fathomlm.cli.plan_options import (
    add_plan_arguments,
    add_relax_arguments,
    add_router_arguments,
    router_options,
)
from fathomlm.cli.progress import amount, layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument

HELP = "tie a model's layers into a looped block"
DESCRIPTION = (
    "Ties the layers of MODEL into one block that is run several times, optionally with something of its own at each "
    "step (--relax), and writes the result to the directory OUT. The result needs uptraining to be good again; at full "
    "LoRA rank it computes what MODEL computes. With --router, tokens choose their own depth; a model that is recursive "
    "already is given a router and keeps its weights."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="preset, Hugging Face directory or hub id, GGUF file")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; must not exist unless --force")
    add_plan_arguments(parser)
    start = parser.add_argument_group("where tied layers and what steps add start from")
    start.add_argument(
        "--init", choices=INITS, help="default: average with lora and dora, stepwise otherwise, as the thesis found best"
    )
    start.add_argument("--norm-init", choices=NORM_INITS, help="norms under --init average (average)")
    add_relax_arguments(parser)
    start.add_argument(
        "--relax-init", choices=RELAX_INITS, help="lora, dora: towards the original weights, or nothing (svd)"
    )
    add_router_arguments(parser)
    add_dtype_argument(parser)
    parser.add_argument("--device", default="cpu", help="where the result is held: cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="for what starts random (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a model directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.resolve import describe, dtype_name
    from fathomlm.checkpoints.save import directory_bytes, save
    from fathomlm.checkpoints.writing import check_target
    from fathomlm.depth import DepthPlan
    from fathomlm.depth.cost import count

    check_target(args.out, args.force)
    begin = time.perf_counter()
    with layer_bar("converting") as tick:
        model = convert(
            args.model,
            sharing=args.sharing,
            recursions=args.recursions,
            init=args.init,
            norm_init=args.norm_init,
            relax=args.relax,
            rank=args.rank,
            relax_init=args.relax_init,
            prefix_length=args.prefix_length,
            linears_only=args.linears_only,
            resize=args.resize,
            router=router_options(args),
            kv=args.kv,
            dtype=args.dtype,
            device=args.device,
            seed=args.seed,
            on_layer=tick,
        )
    save(model, args.out, args.force)
    seconds = time.perf_counter() - begin

    after = count(model.architecture, model.plan, relaxation=model.relaxation)
    before = count(model.architecture, DepthPlan.vanilla(model.plan.base_layers))
    size = directory_bytes(args.out)
    if args.json:
        record = {
            "model": args.model,
            "out": str(args.out),
            "plan": model.plan.to_dict(),
            "layout": model.plan.layout,
            "router": None if model.plan.routing is None else model.plan.routing.kind,
            "relaxation": None if model.relaxation is None else model.relaxation.to_dict(),
            "dtype": dtype_name(model),
            "seed": args.seed,
            "non_embedding_parameters": after.non_embedding_parameters,
            "base_non_embedding_parameters": before.non_embedding_parameters,
            "embedding_parameters": after.embedding_parameters,
            "bytes": size,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(record))
        return 0
    share = after.non_embedding_parameters / before.non_embedding_parameters
    print(f"{args.out}: {describe(model)}, from {before.unrolled_layers} layers")
    print(
        f"  {amount(after.non_embedding_parameters)} parameters without embeddings "
        f"({share:.0%} of {amount(before.non_embedding_parameters)}), {amount(size, 'B')} on disk, {seconds:.1f} s"
    )
    if model.plan.recursions > 1:
        print("  tied weights are a starting point: uptrain the model before you judge its text")
    return 0
