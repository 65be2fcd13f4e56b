"""Taking tokens out of rows and putting them back: what `gather` and `scatter` compute, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fathomlm.kernels.rows import put, take

B, T, M = 3, 7, 5


def places(count: int, seed: int = 0) -> Tensor:
    """Different tokens of each row, in any order, (B, count)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(T, generator=generator)[:count] for _ in range(B)])


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def wide(at_BN: Tensor) -> Tensor:
    return at_BN[..., None].expand(-1, -1, M)


@pytest.mark.parametrize("count", [1, 4, T])
def test_taking_is_a_gather(count: int) -> None:
    x, at, weigh = random(B, T, M), places(count), random(B, count, M, seed=2).detach()
    got, expected = take(x, at), torch.gather(x, 1, wide(at))
    assert torch.equal(got, expected)
    for one, other in zip(
        torch.autograd.grad((got * weigh).sum(), x), torch.autograd.grad((expected * weigh).sum(), x), strict=True
    ):
        assert torch.equal(one, other)
    assert torch.autograd.gradcheck(take, (x, at))


@pytest.mark.parametrize("count", [1, 4, T])
def test_putting_is_a_scatter(count: int) -> None:
    x, at, new = random(B, T, M), places(count), random(B, count, M, seed=2)
    weigh = random(B, T, M, seed=3).detach()
    got, expected = put(x, at, new), torch.scatter(x, 1, wide(at), new)
    assert torch.equal(got, expected)
    ours, theirs = (torch.autograd.grad((out * weigh).sum(), (x, new)) for out in (got, expected))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert torch.autograd.gradcheck(put, (x, at, new))


def test_what_is_put_back_where_it_was_taken_changes_nothing() -> None:
    x, at = random(B, T, M), places(4)
    back = put(x, at, take(x, at))
    assert torch.equal(back, x)
    (gradient,) = torch.autograd.grad((back * 2).sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2.0))


def test_a_chain_of_both_has_the_gradients_of_gather_and_scatter() -> None:
    """As a routed core uses them: taken from what was taken, put back in reverse."""
    x, first, second = random(B, T, M), places(5), places(5, seed=4).argsort(1)[:, :2]

    def walk(taken: object, placed: object) -> Tensor:
        a = taken(x, first)  # type: ignore[operator]
        b = taken(a.sin(), second)  # type: ignore[operator]
        return placed(x, first, placed(a.cos(), second, b.exp()))  # type: ignore[no-any-return,operator]

    plain = (lambda y, at: torch.gather(y, 1, wide(at)), lambda y, at, new: torch.scatter(y, 1, wide(at), new))
    weigh = random(B, T, M, seed=3).detach()
    ours, theirs = (torch.autograd.grad((walk(*pair) * weigh).sum(), x)[0] for pair in ((take, put), plain))
    torch.testing.assert_close(ours, theirs)


def test_strided_inputs_and_gradients() -> None:
    """Views whose memory does not lie row by row, and a gradient that was expanded from one number."""
    x = random(T, B, M).transpose(0, 1)
    at, new = places(3), random(B, M, 3, seed=2).transpose(1, 2)
    assert torch.equal(take(x, at), torch.gather(x, 1, wide(at)))
    assert torch.equal(put(x, at, new), torch.scatter(x, 1, wide(at), new))
    y = random(B, T, M)
    (gradient,) = torch.autograd.grad(take(y, at).sum(), y)
    assert torch.equal(gradient, torch.zeros_like(y).scatter(1, wide(at), 1.0))


def test_the_input_is_left_alone_and_dtypes_stay() -> None:
    x = torch.randn(B, T, M, dtype=torch.bfloat16, requires_grad=True)
    before, at = x.detach().clone(), places(3)
    new = torch.randn(B, 3, M, dtype=torch.bfloat16, requires_grad=True)
    out = put(x, at, new)
    out.float().sum().backward()
    assert torch.equal(x.detach(), before)
    assert out.dtype == take(x, at).dtype == torch.bfloat16
    assert x.grad is not None
    assert new.grad is not None
    assert x.grad.dtype == new.grad.dtype == torch.bfloat16
    assert float(x.grad.float().sum()) == B * (T - 3) * M
