"""How fast a training step is: tokens/s, MFU, memory, and where the time goes.

    python benchmarks/train_step.py --out benchmarks/results/train_step_h200.json

Steps are taken by the loop's own `Stepper` on random tokens: forward, backward, clipping and optimizer, bf16 with float32
masters, compiled, passes replayed as CUDA graphs (`capture`). MFU is 6 x parameters (a tied embedding once; looped layers at
every use) x tokens/s over the dense bf16 rate of the device's data sheet (`mfu`), and over the rate that it sustains on
large products (`mfu_sustained`); attention's own products are left out of it, so it understates the arithmetic done. A
routed model (mor2, mor3, mor4: that many recursions, expert-choice) is counted by the tokens that run each recursion.

Every variant is measured in several settings: steps of one pass of 16 x 2048 tokens; of eight such passes, whose gradients
are added up; and of two passes of 64 x 2048; the last two with the inner activations made again and with all kept; and of
four of 64 x 2048, the batch of the pretraining recipes. Ratios to vanilla are taken within a setting. All of them stand
under `settings`. Outside stand `vanilla` in the setting where it is fastest, and the others in the setting `main`, with
`vanilla_main` for the vanilla that their ratios compare with; each says its setting.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.depth.presets import preset
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.lab.common import environment
from fathomlm.model.decoder import Decoder, Recompute
from fathomlm.train.captured import WARM_UPS
from fathomlm.train.data.loader import Batch
from fathomlm.train.distributed import World
from fathomlm.train.flops import Rates, flops_per_token_6n
from fathomlm.train.loop import Stepper
from fathomlm.train.objective import Objective
from fathomlm.train.optim import build_optimizer
from fathomlm.train.recipe import ExitRecipe, HardwareRecipe, LossRecipe, Recipe
from fathomlm.train.schedule import LearningRate

CONTEXT = 2048
SETTINGS: dict[str, tuple[int, int, Recompute]] = {
    "16x2048": (16, 16, "inner"),
    "8 x 16x2048": (128, 16, "inner"),
    "8 x 16x2048, all kept": (128, 16, "none"),
    "2 x 64x2048": (128, 64, "inner"),
    "2 x 64x2048, all kept": (128, 64, "none"),
    "4 x 64x2048, all kept": (256, 64, "none"),
}
"""Rows of a step, rows of a pass, and what the backward pass computes again."""
GROUP = 5
"""Steps between waits for the GPU, as between two records of a run."""
GROUPS = 3
"""Such groups at least, however long steps take."""
SETTLE = 5.0
"""Seconds of steps before any is timed: every variant is measured on a GPU that is as warm, whichever came first."""


def variants() -> dict[str, tuple[Architecture, DepthPlan, Relaxation | None, LossRecipe]]:
    big, small = preset("smollm-360m").architecture, preset("smollm-135m").architecture
    lora = build_relaxation(small.linears(), "lora", 64)
    routed = {
        f"mor{n}": DepthPlan.build("middle-cycle", n, big.layers, "add").with_routing(build_routing("expert", n))
        for n in (2, 3, 4)
    }
    return {
        "vanilla": (big, DepthPlan.vanilla(big.layers), None, LossRecipe()),
        **{name: (big, plan, None, LossRecipe()) for name, plan in routed.items()},
        "recursive": (big, DepthPlan.build("middle-cycle", 3, big.layers), None, LossRecipe()),
        "vanilla_135m": (small, DepthPlan.vanilla(small.layers), None, LossRecipe()),
        "recursive_135m_lora_exits": (
            small,
            DepthPlan.build("cycle", 2, small.layers),
            lora,
            LossRecipe(exits=ExitRecipe()),
        ),
    }


def measure(
    name: str, rows: int, micro: int, recompute: Recompute, seconds: float, top: int, capture: bool = True
) -> dict[str, Any]:
    architecture, plan, relaxation, loss = variants()[name]
    device = torch.device("cuda")
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    decoder = Decoder(architecture, plan, relaxation)
    decoder.reset_parameters()
    decoder.to(device)
    decoder.compile_for_training()
    recipe = Recipe(precision="bf16", loss=loss, capture=capture)
    objective = Objective(decoder, loss, recompute=recompute)
    objective.compile_parts()
    optimizer = build_optimizer(objective, recipe.optimizer)
    world = World(0, 1, device)
    stepper = Stepper(recipe, objective, objective, optimizer, LearningRate.of(recipe.schedule, 1000), world)
    tokens = torch.randint(0, architecture.vocab, (rows, CONTEXT + 1))
    batches = Batch(tokens_BT=tokens[:, :-1].contiguous(), targets_BT=tokens[:, 1:].contiguous()).pin().split(micro)

    begin = time.perf_counter()
    for number in range(max(3, WARM_UPS // len(batches) + 2)):
        stepper.step(batches, number, wants_stop=False)
    torch.cuda.synchronize()
    warm = time.perf_counter() - begin
    begin = time.perf_counter()
    while time.perf_counter() - begin < SETTLE:  # a GPU that rested while layers were compiled runs faster for a while
        for number in range(GROUP):
            stepper.step(batches, number, wants_stop=False)
        torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < GROUPS or GROUP * sum(times) < seconds:
        begin, behind = time.perf_counter(), None
        for number in range(GROUP):
            pending = stepper.step(batches, number, wants_stop=False)
            if behind is not None:
                behind.read()
            behind = pending
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / GROUP)
    step = statistics.median(times)
    rate = rows * CONTEXT / step
    rates = Rates.of(HardwareRecipe(), torch.cuda.get_device_name())
    work = flops_per_token_6n(architecture, plan, relaxation)
    result = {
        "tokens_per_s": round(rate),
        **rates.parts(rate * work),
        "peak_gb": stepper.memory_gb(),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "captured": capture,
        "step_ms": round(1e3 * step, 2),
        "step_ms_spread": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
        "groups": len(times),
        "rows": rows,
        "micro": micro,
        "context": CONTEXT,
        "recompute": recompute,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "flops_per_token_6n": work,
        "peak_tflops": rates.peak,
        "sustained_tflops": rates.sustained,
        "compile_and_warm_up_s": round(warm, 1),
    }
    if top:
        print(f"{name}: kernels of a step")
    result["where"] = where_it_goes(stepper, batches, step, top)
    return result


KINDS = {
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa", "attention"),
    "matrix products": ("gemm", "cutlass", "nvjet", "wgmma", "matmul", "cublas"),
    "optimizer and clipping": ("multi_tensor", "foreach", "adam", "lpnorm"),
    "copies": ("memcpy", "memset"),
}


def where_it_goes(stepper: Stepper, batches: list[Batch], step: float, top: int) -> dict[str, float]:
    """The part of a step that each kind of kernel takes; `idle` is time in which the GPU runs none."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    with profiling(activities=[ProfilerActivity.CUDA]) as trace:
        stepper.step(batches, 900, wants_stop=False)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in trace.key_averages():
        seconds = event.self_device_time_total / 1e6
        if not seconds:
            continue
        lower = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "elementwise and norms")
        if kind != "attention" and "triton" in lower:
            kind = "elementwise and norms"
        spent[kind] = spent.get(kind, 0.0) + seconds
        kernels[event.key[:90]] = kernels.get(event.key[:90], 0.0) + seconds
    for name, seconds in sorted(kernels.items(), key=lambda pair: -pair[1])[:top]:
        print(f"    {1e3 * seconds:8.2f} ms  {name}")
    busy = sum(spent.values())
    parts = {kind: round(seconds / max(step, busy), 4) for kind, seconds in sorted(spent.items(), key=lambda pair: -pair[1])}
    return {**parts, "idle": round(max(0.0, 1 - busy / step), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(variants()))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--also", nargs="*", default=[], choices=list(SETTINGS), help="settings for vanilla alone")
    parser.add_argument("--main", default=next(iter(SETTINGS)), choices=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=6.0, help="measured at least, in groups of steps")
    parser.add_argument("--blas", choices=("cublas", "cublaslt"), help="which library multiplies; torch's choice by default")
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction, default=True, help="replay passes as CUDA graphs"
    )
    parser.add_argument("--top", type=int, default=14, help="kernels to list")
    args = parser.parse_args()
    if args.blas is not None:
        torch.backends.cuda.preferred_blas_library(args.blas)
    record: dict[str, Any] = {"environment": environment(), "main": args.main, "blas": args.blas or "torch's choice"}
    settings: dict[str, dict[str, Any]] = {setting: {} for setting in (*args.also, *args.settings)}
    for setting, place in settings.items():
        for name in args.only:
            if setting in args.also and name != "vanilla":
                continue
            place[name] = measure(name, *SETTINGS[setting], args.seconds, args.top, args.capture)
            compare(place, name)
            print(describe(name, place[name]), flush=True)
            gc.collect()
            if args.out is not None:
                whole = record | summary(settings, args.main) | {"settings": settings}
                args.out.write_text(json.dumps(whole, indent=1) + "\n")


def summary(settings: dict[str, dict[str, Any]], main: str) -> dict[str, Any]:
    """Vanilla where it is fastest, and everything in the setting `main`, as far as it is measured."""
    chosen = {name: found | {"setting": main} for name, found in settings.get(main, {}).items()}
    if "vanilla" in chosen:
        chosen["vanilla_main"] = chosen.pop("vanilla")
    plain = [place["vanilla"] | {"setting": setting} for setting, place in settings.items() if "vanilla" in place]
    return ({"vanilla": max(plain, key=lambda one: one["tokens_per_s"])} if plain else {}) | chosen


def compare(place: dict[str, Any], name: str) -> None:
    """Speed and memory against vanilla in the same setting of the same run."""
    if "vanilla" in place and name != "vanilla":
        base, found = place["vanilla"], place[name]
        found["speed_over_vanilla"] = round(found["tokens_per_s"] / base["tokens_per_s"], 3)
        found["memory_over_vanilla"] = round(found["peak_gb"] / base["peak_gb"], 3)


def describe(name: str, found: dict[str, Any]) -> str:
    against = ""
    if "speed_over_vanilla" in found:
        against = f"  {found['speed_over_vanilla']:.2f}x vanilla's speed, {found['memory_over_vanilla']:.2f}x its memory"
    return (
        f"{name:28} {found['tokens_per_s']:>9,} tokens/s  MFU {found['mfu'] or 0:.1%} ({found['mfu_sustained'] or 0:.1%} of "
        f"sustained)  {found['step_ms']:.0f} ms a step of {found['rows']} rows by {found['micro']}  "
        f"{found['peak_gb']:.1f} GB{against}  {found['where']}"
    )


if __name__ == "__main__":
    main()
