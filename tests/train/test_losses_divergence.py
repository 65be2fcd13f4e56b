"""Divergences: values and gradients against plain formulas over probabilities, in float64, differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from fathomlm.train.losses.divergence import DIVERGENCES

FORMULAS = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "jensen_shannon": lambda p, q: ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2,
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
}
"""p is the teacher, q the student."""


def logits(seed, spread=2.0, rows=7, words=11):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, words, dtype=torch.float64, generator=generator)


def both(kind, student, teacher):
    return DIVERGENCES[kind](student.log_softmax(-1), teacher.log_softmax(-1))


def test_every_kind_has_a_formula_here():
    assert FORMULAS.keys() == DIVERGENCES.keys()


@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient(kind, spread):
    student, teacher = logits(0, spread).requires_grad_(), logits(1, spread)
    wanted = FORMULAS[kind](teacher.softmax(-1), student.softmax(-1))
    (slope,) = torch.autograd.grad(wanted.sum(), student)
    value, gradient = both(kind, student.detach(), teacher)
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_distributions_are_at_no_distance_and_others_at_some(kind):
    value, gradient = both(kind, logits(0) + 3.0, logits(0))
    assert value.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12 or kind == "total_variation"  # which has a corner there
    assert both(kind, logits(0), logits(1))[0].min() > 0.01


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_gradient_shows_the_way_down(kind):
    student, teacher = logits(0), logits(1)
    value, gradient = both(kind, student, teacher)
    assert (both(kind, student - 0.01 * gradient, teacher)[0] < value).all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_values_stay_finite_where_a_probability_vanishes(kind):
    sure = torch.full((1, 5), -150.0).index_fill(1, torch.tensor([2]), 150.0)
    other = torch.full((1, 5), -150.0).index_fill(1, torch.tensor([4]), 150.0)
    value, gradient = both(kind, sure, other)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


def test_the_bounded_kinds_reach_their_bounds():
    sure, other = (torch.eye(4, dtype=torch.float64)[i : i + 1] * 60 for i in (0, 2))
    assert both("total_variation", sure, other)[0].item() == pytest.approx(1.0)
    assert both("jensen_shannon", sure, other)[0].item() == pytest.approx(math.log(2))
    assert both("jensen_shannon", sure, other)[0] == both("jensen_shannon", other, sure)[0]
    assert both("forward_kl", logits(0), logits(1))[0].tolist() == both("reverse_kl", logits(1), logits(0))[0].tolist()
