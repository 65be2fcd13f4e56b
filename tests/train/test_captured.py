"""Recorded passes: the same gradients and losses as passes that are simply run, whatever is recorded with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fathomlm.errors import OptionError
from fathomlm.train.captured import WARM_UPS, CapturedPass
from fathomlm.train.data.loader import Batch
from fathomlm.train.reading import check_recipe
from fathomlm.train.recipe import ModelRecipe, Recipe

Results = tuple[Tensor, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4)
        self.unused = nn.Linear(4, 4)

    def run(self, batch: Batch, scale: Tensor) -> Results:
        loss = (self.embed(batch.tokens_BT).sum(-1) * batch.targets_BT).square().sum()
        (loss * scale).backward()
        return loss.detach(), loss.detach()[None] * 2


class Recorder:
    """Does what a graph does: keeps the work, and puts results where the first ones were."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        self.made += 1
        places = torch.zeros(()), torch.zeros(1)

        def replay() -> None:
            for place, new in zip(places, work(), strict=True):
                place.copy_(new)

        return replay, places


def batch(seed: int, rows: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 11, (2, rows, 5), generator=generator)
    return Batch(tokens_BT=tokens, targets_BT=targets)


@pytest.mark.parametrize("passes", [1, 3])
def test_recorded_passes_are_passes(passes: int) -> None:
    """Over several steps, gradients dropped or cleared between them as the loop does."""
    plain, model, recorder = Model(), Model(), Recorder()
    captured = CapturedPass(model.run, list(model.parameters()), recorder)
    for step in range(6):
        for number in range(passes):
            given, scale = batch(10 * step + number), torch.tensor(0.5 + step)
            for one, other in zip(captured(given, scale, also=0.0), plain.run(given, scale), strict=True):
                assert torch.equal(one, other)
        assert torch.equal(model.embed.weight.grad, plain.embed.weight.grad)
        assert model.unused.weight.grad is None  # or an optimizer would decay it
        model.zero_grad(set_to_none=not captured.holds_gradients)
        plain.zero_grad()
    assert recorder.made == 1
    assert captured.holds_gradients


def test_another_shape_or_setting_is_another_recording() -> None:
    model, recorder = Model(), Recorder()
    captured = CapturedPass(model.run, list(model.parameters()), recorder)
    scale = torch.ones(())
    for also in (1.0, 0.9, 0.8, 0.7, 0.6):  # a warm-up: every pass differs, none is recorded
        captured(batch(0), scale, also)
    assert recorder.made == 0
    for rows in (2, 3):
        for number in range(WARM_UPS + 2):
            captured(batch(number, rows), scale, 0.0)
    assert recorder.made == 2
    captured(batch(1, 2), scale, 0.0)
    assert recorder.made == 2


def test_rows_of_different_lengths_are_never_recorded() -> None:
    model, recorder = Model(), Recorder()
    captured = CapturedPass(model.run, list(model.parameters()), recorder)
    given = batch(0)
    padded = Batch(tokens_BT=given.tokens_BT, targets_BT=given.targets_BT, keep_BT=torch.ones(2, 5, dtype=torch.bool))
    for _ in range(WARM_UPS + 2):
        captured(padded, torch.ones(()), 0.0)
    assert recorder.made == 0
    assert not captured.holds_gradients


@pytest.mark.parametrize("recompute", ["layer", "recursion"])
def test_what_cannot_be_recorded_is_refused(recompute: str) -> None:
    from fathomlm.train.recipe import BatchRecipe, BudgetRecipe

    parts = {"model": ModelRecipe(shape="smollm-135m"), "budget": BudgetRecipe(steps=1), "batch": BatchRecipe(sequences=1)}
    check_recipe(Recipe(capture=True, recompute="inner", **parts))
    with pytest.raises(OptionError, match=f"capture cannot be combined with recompute: {recompute}"):
        check_recipe(Recipe(capture=True, recompute=recompute, **parts))  # type: ignore[arg-type]
