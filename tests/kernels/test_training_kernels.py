"""The training forms of a layer's halves have the meaning, and the gradients, of the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fathomlm.kernels.cross_entropy import plain_cross_entropy_
from fathomlm.kernels.norm_fork import plain_rms_norm_fork, rms_norm_fork
from fathomlm.kernels.qkv import plain_qkv_rope, qkv_rope
from fathomlm.kernels.swiglu import plain_swiglu_mlp, swiglu_mlp


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def outputs_and_gradients(function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a fixed mixture of them."""
    outs = list(function())
    generator = torch.Generator().manual_seed(7)
    mixture = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outs)
    return [*outs, *torch.autograd.grad(mixture, inputs)]


def assert_same(fast: list[Tensor], slow: list[Tensor]) -> None:
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_swiglu_mlp_is_its_plain_form() -> None:
    inputs = random(10, 6), random(8, 6), random(8, 6), random(6, 8), random(10, 6)
    assert_same(
        outputs_and_gradients(lambda: [swiglu_mlp(*inputs)], inputs),
        outputs_and_gradients(lambda: [plain_swiglu_mlp(*inputs)], inputs),
    )


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (4, 2), (2, 2)])
def test_qkv_rope_is_its_plain_form(heads: int, groups: int) -> None:
    B, T, D, M = 2, 5, 8, 6
    inputs = random(B, T, M), random(heads * D, M), random(groups * D, M), random(groups * D, M)
    angle = torch.randn(B, 1, T, D // 2, dtype=torch.float64)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    assert_same(
        outputs_and_gradients(lambda: qkv_rope(*inputs, cos, sin, D), inputs),
        outputs_and_gradients(lambda: plain_qkv_rope(*inputs, cos, sin, D), inputs),
    )


@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_fork_is_its_plain_form(plus_one: bool) -> None:
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 12), (12,)))
    fast = outputs_and_gradients(lambda: rms_norm_fork(x, weight, 1e-5, plus_one), (x, weight))
    slow = outputs_and_gradients(lambda: plain_rms_norm_fork(x, weight, 1e-5, plus_one), (x, weight))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_norm_fork_computes_in_float32_with_weights_in_bfloat16() -> None:
    x, weight = torch.randn(8, 256).bfloat16(), (0.02 * torch.randn(256)).bfloat16()
    _, normed = rms_norm_fork(x, weight, 1e-5, plus_one=True)
    assert torch.equal(normed, plain_rms_norm_fork(x, weight, 1e-5, plus_one=True)[1])


def test_cross_entropy_leaves_its_gradient_in_the_logits() -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, -100, 3, 3, 7])
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    (gradient,) = torch.autograd.grad(0.4 * losses.sum(), logits)
    left = logits.detach().clone()
    ours = plain_cross_entropy_(left, targets, 0.4)
    torch.testing.assert_close(ours, losses.detach())
    torch.testing.assert_close(left, gradient)
