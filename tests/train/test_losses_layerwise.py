"""Layerwise distillation: the best monotone mapping by trying all of them, and the loss by its plain formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathomlm.errors import OptionError
from fathomlm.train.losses.layerwise import (
    candidates,
    layerwise_loss,
    monotone_map,
    squared_errors,
    taught_layers,
    uniform_layers,
)

B, T, M = 3, 5, 4


def brute_force(errors):
    """The non-decreasing map of least error; of equal ones the shallowest, layer by layer from the last."""
    layers, choices = len(errors), range(len(errors[0]))
    maps = [m for m in itertools.product(choices, repeat=layers) if list(m) == sorted(m)]
    return min(maps, key=lambda m: (sum(errors[i][j] for i, j in enumerate(m)), m[::-1]))


@given(
    st.integers(1, 4).flatmap(
        lambda layers: st.integers(1, 4).flatmap(
            lambda deep: st.lists(
                st.lists(st.lists(st.integers(0, 3), min_size=deep, max_size=deep), min_size=layers, max_size=layers),
                min_size=1,
                max_size=3,
            )
        )
    )
)
@settings(max_examples=200, deadline=None)
def test_the_dynamic_programme_finds_what_trying_all_finds(errors):
    """Small integers, so that ties are frequent and sums exact."""
    found = monotone_map(torch.tensor(errors, dtype=torch.float32))
    assert [tuple(row) for row in found.tolist()] == [brute_force(row) for row in errors]


def test_crossing_nearest_layers_are_not_crossed():
    """Each by itself, layer 0 is nearest to 1 and layer 1 to 0."""
    errors = torch.tensor([[[2.0, 0.0, 9.0], [0.0, 3.0, 9.0], [9.0, 9.0, 0.0]]])
    assert errors.argmin(-1).tolist() == [[1, 0, 2]]
    assert monotone_map(errors).tolist() == [[0, 0, 2]]


def test_layers_at_equal_distances():
    assert uniform_layers(6, 24) == (4, 8, 12, 16, 20, 24)
    assert uniform_layers(1, 4) == (4,)
    assert uniform_layers(3, 4) == (1, 3, 4)
    assert candidates("last", 6, 24) == candidates("last_pair", 6, 24) == (24,)
    assert taught_layers("last_pair", 6) == (6,)
    assert taught_layers("dyna", 3) == taught_layers("last", 3) == (1, 2, 3)
    assert candidates("unif", 6, 24) == candidates("dyna", 6, 24) == (4, 8, 12, 16, 20, 24)
    for layers in range(2, 40):
        for shallow in range(1, layers):
            spread = uniform_layers(shallow, layers)
            assert len(set(spread)) == shallow
            assert list(spread) == sorted(spread)
            assert spread[-1] == layers


@pytest.mark.parametrize("shallow", [0, 4, 9])
def test_a_shallow_model_is_shallower(shallow):
    with pytest.raises(OptionError, match=f"must have 1 to 3 of the 4 layers, got {shallow}"):
        uniform_layers(shallow, 4)


def make(seed=0, shallow=3, deep=3, rows=B):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return [torch.randn(rows, T, M, generator=generator).requires_grad_() for _ in range(n)]

    counted = (torch.rand(rows, T, generator=generator) < 0.7).float()
    return draw(shallow), draw(deep), counted


def plain(shallow, deep, counted, mapping):
    """One row, one layer, one token after another."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(counted.shape[0]):
        errors = [
            [
                sum((s[b, t].double() - d[b, t].double().detach()).pow(2).sum() / M for t in range(T) if counted[b, t])
                for d in deep
            ]
            for s in shallow
        ]
        size = [[float(e.detach()) for e in row] for row in errors]
        if mapping == "dyna":  # each deep layer chooses
            pairs = [(i, j) for j, i in enumerate(brute_force(list(zip(*size, strict=True))))]
        elif mapping == "dyna_equation":
            pairs = list(enumerate(brute_force(size)))
        else:
            pairs = [(i, i if mapping == "unif" else 0) for i in range(len(shallow))]
        total = total + sum(errors[i][j] for i, j in pairs) / len(pairs)
    return total


@pytest.mark.parametrize("mapping", ["last", "last_pair", "unif", "dyna", "dyna_equation"])
def test_the_loss_and_its_gradient_are_the_formulas(mapping):
    for seed in range(4):
        sizes = {"last": (3, 1), "last_pair": (1, 1)}.get(mapping, (3, 3))
        shallow, deep, counted = make(seed, *sizes)
        found = layerwise_loss(shallow, deep, counted, mapping)
        wanted = plain(shallow, deep, counted, mapping)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad(wanted, shallow, allow_unused=True)
        found.backward()
        for state, gradient in zip(shallow, gradients, strict=True):
            assert state.grad is not None
            torch.testing.assert_close(state.grad, torch.zeros_like(state) if gradient is None else gradient)
        assert all(state.grad is None for state in deep)


@pytest.mark.parametrize("mapping", ["unif", "dyna", "dyna_equation"])
def test_a_batch_may_be_split(mapping):
    shallow, deep, counted = make(rows=4)
    whole = layerwise_loss(shallow, deep, counted, mapping)
    rows = [
        layerwise_loss([s[i : i + 1] for s in shallow], [d[i : i + 1] for d in deep], counted[i : i + 1], mapping)
        for i in range(4)
    ]
    torch.testing.assert_close(torch.stack(rows).sum(), whole)


def test_the_last_layer_teaches_the_exit_only_in_the_direction_of_the_sentence():
    """States that move on from layer to layer, as in a real model: by the equation shallow layers teach each other."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(12, 1, T, M, generator=generator).cumsum(0)
    counted = torch.ones(1, T)
    for mapping, moved in (("dyna", True), ("dyna_equation", False)):
        shallow = [state.clone().requires_grad_() for state in states[:4]]
        deep = [states[layer - 1] for layer in candidates(mapping, 4, 12)]  # 3, 6, 9, 12
        changed = [*deep[:-1], deep[-1] + 1]
        layerwise_loss(shallow, deep, counted, mapping).backward()
        before = [state.grad.clone() for state in shallow]
        for state in shallow:
            state.grad = None
        layerwise_loss(shallow, changed, counted, mapping).backward()
        assert any(not torch.equal(old, state.grad) for old, state in zip(before, shallow, strict=True)) == moved
        taught = [bool(gradient.any()) for gradient in before]
        assert taught[-1], "the exit is drawn"
        assert taught[:3] == ([False] * 3 if moved else [True, True, False])


def test_rows_choose_for_themselves():
    shallow, deep, counted = make(rows=6)
    choices = monotone_map(squared_errors(shallow, deep, counted))
    assert len(set(map(tuple, choices.tolist()))) > 1


def test_padding_has_no_say():
    shallow, deep, counted = make()
    changed = [torch.where(counted[..., None] > 0, s, 100.0) for s in shallow]
    assert layerwise_loss(changed, deep, counted, "dyna") == layerwise_loss(shallow, deep, counted, "dyna")


def test_states_in_bfloat16_are_compared_in_float32():
    shallow, deep, counted = make()
    narrow = [[s.bfloat16() for s in states] for states in (shallow, deep)]
    found = layerwise_loss(*narrow, counted, "unif")
    assert found.dtype == torch.float32
    wanted = layerwise_loss(*([s.float() for s in states] for states in narrow), counted, "unif")
    assert found == wanted
