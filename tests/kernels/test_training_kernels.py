"""The training forms of a layer's halves have the meaning, and the gradients, of the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fathomlm.kernels.cross_entropy import plain_cross_entropy_
from fathomlm.kernels.half import folded, halved_product
from fathomlm.kernels.qkv import norm_qkv_rope, plain_norm_qkv_rope
from fathomlm.kernels.swiglu import norm_swiglu_mlp, plain_norm_swiglu_mlp


def random(*shape: int) -> Tensor:
    """Float32: a norm computes in it whatever it is given."""
    return torch.randn(*shape, requires_grad=True)


def outputs_and_gradients(function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a fixed mixture of them."""
    outs = list(function())
    generator = torch.Generator().manual_seed(7)
    mixture = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outs)
    return [*outs, *torch.autograd.grad(mixture, inputs)]


def assert_same(fast: list[Tensor], slow: list[Tensor]) -> None:
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("keep_inner", [False, True])
@pytest.mark.parametrize("plus_one", [False, True])
def test_the_gated_half_is_its_plain_form(plus_one: bool, keep_inner: bool) -> None:
    inputs = x, norm, gate, up, down = random(10, 6), random(6), random(8, 6), random(8, 6), random(6, 8)
    assert_same(
        outputs_and_gradients(
            lambda: [norm_swiglu_mlp(x, 1e-5, folded((gate, up), norm, plus_one, torch.float32), down, keep_inner)], inputs
        ),
        outputs_and_gradients(lambda: [plain_norm_swiglu_mlp(x, norm, 1e-5, plus_one, gate, up, down)], inputs),
    )


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (4, 2), (2, 2)])
def test_the_entrance_of_attention_is_its_plain_form(heads: int, groups: int, plus_one: bool) -> None:
    B, T, D, M = 2, 5, 8, 6
    inputs = x, norm, q, k, v = (
        random(B, T, M),
        random(M),
        random(heads * D, M),
        random(groups * D, M),
        random(groups * D, M),
    )
    angle = torch.randn(B, 1, T, D // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)

    def fast() -> Sequence[Tensor]:
        return norm_qkv_rope(x, 1e-5, folded((q, k, v), norm, plus_one, torch.float32), heads, groups, cos, sin)

    assert_same(
        outputs_and_gradients(fast, inputs),
        outputs_and_gradients(lambda: plain_norm_qkv_rope(x, norm, 1e-5, plus_one, q, k, v, cos, sin, D), inputs),
    )


def test_a_norm_in_bfloat16_is_folded_in_float32() -> None:
    """1 + w, rounded before the product, would lose most of a small w."""
    weight, norm = torch.randn(8, 256).bfloat16(), (0.02 * torch.randn(256)).bfloat16()
    found = folded((weight,), norm, plus_one=True, dtype=torch.bfloat16)
    assert torch.equal(found, (weight.double() * (1 + norm.double())).float().bfloat16())


def test_cross_entropy_leaves_its_gradient_in_the_logits() -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, -100, 3, 3, 7])
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    (gradient,) = torch.autograd.grad(0.4 * losses.sum(), logits)
    left = logits.detach().clone()
    ours = plain_cross_entropy_(left, targets, 0.4)
    torch.testing.assert_close(ours, losses.detach())
    torch.testing.assert_close(left, gradient)


def test_a_product_in_halves_is_the_product() -> None:
    d, x = torch.randn(10, 3), torch.randn(10, 4)
    torch.testing.assert_close(halved_product(d, x), d.T @ x)
    torch.testing.assert_close(halved_product(d.T.contiguous().T, x[:, :2]), d.T @ x[:, :2])  # however they lie in memory
