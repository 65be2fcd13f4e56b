"""How near the training kernels come to the speed of memory, for several launch settings of each.

    python benchmarks/training_kernels.py --out kernels.json

Shapes are those of SmolLM-360M at 16 x 2048 tokens. All these kernels only move memory: the figure is bytes that must be
read and written at least once, over time. The settings in use are marked.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from fathomlm.kernels import cross_entropy, half, qkv, swiglu
from fathomlm.lab.common import environment

TOKENS, M, INNER, H, G, D, VOCAB = 16 * 2048, 960, 2560, 15, 5, 64, 49152


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure(module: Any, settings: dict[str, tuple[int, ...]], run: Callable[[], Any], moved: int) -> list[dict[str, Any]]:
    """Bandwidth under each combination of a module's constants, which are put back afterwards."""
    before = {name: getattr(module, name) for name in settings}
    found = []
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        for name, value in chosen.items():
            setattr(module, name, value)
        milliseconds = do_bench(run, warmup=10, rep=40)
        found.append({**chosen, "ms": milliseconds, "tb_per_s": moved / milliseconds / 1e9, "in_use": chosen == before})
    for name, value in before.items():
        setattr(module, name, value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    both, d_inner = bf16(TOKENS, 2 * INNER), bf16(TOKENS, INNER)
    x, d_normed, d_stream = (bf16(TOKENS, M) for _ in range(3))
    scale = torch.rand(TOKENS, device="cuda")
    logits, targets = bf16(8192, VOCAB), torch.randint(0, VOCAB, (8192,), device="cuda")
    heads = [bf16(16, 2048, n, D).transpose(1, 2) for n in (H, G, G)]
    product = bf16(16, 2048, (H + 2 * G) * D)
    angle = torch.rand(16, 1, 2048, D, device="cuda").bfloat16()
    record: dict[str, Any] = {
        "environment": environment(),
        "swiglu": measure(
            swiglu,
            {"BLOCK": (256, 512, 1024), "WARPS": (1, 2, 4, 8)},
            lambda: swiglu.swiglu_backward(both, d_inner, scale),
            2 * TOKENS * 6 * INNER,
        ),
        "norm": measure(
            half,
            {"GROUP": (1, 2, 4, 8), "WARPS": (1, 2, 4, 8)},
            lambda: half.norm_backward(x, d_normed, d_stream, scale),
            2 * TOKENS * 4 * M,
        ),
        "cross_entropy": measure(
            cross_entropy,
            {"BLOCK": (1024, 2048, 4096, 8192, 16384), "WARPS": (4, 8, 16, 32), "WIDE": (8, 16)},
            lambda: cross_entropy.cross_entropy_(logits, targets, 1.0),
            2 * 8192 * 2 * VOCAB,
        ),
        "qkv, back": measure(
            qkv,
            {"WARPS": (1, 2, 4, 8)},
            lambda: qkv.unrotate_and_pack(*heads, angle, angle, scale),
            2 * TOKENS * 2 * (H + 2 * G) * D,
        ),
        "qkv, forth": measure(
            qkv,
            {"WARPS": (1, 2, 4)},
            lambda: qkv.rotate_and_split(product, H, G, angle, angle, scale),
            2 * TOKENS * 2 * (H + 2 * G) * D,
        ),
    }
    for name, rows in record.items():
        for row in sorted(rows, key=lambda r: r["ms"])[:4] if name != "environment" else ():
            print(f"{name:14} {row}")
        if name != "environment":
            print(f"{name:14} in use: {next((row for row in rows if row['in_use']), None)}")
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
