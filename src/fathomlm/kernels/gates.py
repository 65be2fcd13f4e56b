"""What a gate's activation is, for kernels of decoding rows and their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
GATES = {name: number for number, name in enumerate(ACTIVATIONS)}
"""By name, the number that kernels are given."""


def gated(product_N2I: Tensor, scale_N1: Tensor, activation: str) -> Tensor:
    """act(gate) * up of a product [gate, up] that is still to be scaled row by row."""
    gate, up = (half.to(scale_N1.dtype) * scale_N1 for half in product_N2I.chunk(2, dim=-1))
    return (ACTIVATIONS[activation](gate) * up).to(product_N2I.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def activated(x, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
        """One of `GATES`, in float32."""
        if GATE == 0:
            x *= tl.sigmoid(x)
        elif GATE == 1:
            x *= 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        elif GATE == 2:  # 1 + tanh(z) is twice the sigmoid of 2 z
            x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        else:
            x = tl.maximum(x, 0.0)
        return x
