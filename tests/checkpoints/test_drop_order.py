"""The greedy search for layers to leave out, against a search that converts and measures every candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.checkpoints.activations import Activations, token_rows
from fathomlm.checkpoints.assemble import ModelBase
from fathomlm.checkpoints.drop_order import candidates, drop_order, row_loss
from fathomlm.errors import CheckpointError, OptionError
from lab.analyze.tiny import TEXT, model_of

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 8
WINDOWS: dict[str, Any] = {"windows": (None, 16) * (LAYERS // 2)}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["plain", "windows"])
def base(request: pytest.FixtureRequest) -> Any:
    return model_of(None, sharing="cycle", recursions=1, traits=request.param)


def measured_rows(base: Any) -> torch.Tensor:
    """The rows that are not held out."""
    rows = token_rows([TEXT] * 2, ModelBase(base), 1024)
    return rows[torch.arange(len(rows)) % 8 != 7]


def loss_without(base: Any, gone: list[int], rows: torch.Tensor) -> float:
    """By the steps that are left."""
    kept = [step for step in base.plan.steps if step.layer not in gone]
    whole = base.decoder.plan
    base.decoder.plan = type("Few", (), {"__getattr__": lambda _, n: getattr(whole, n), "__iter__": lambda _: iter(kept)})()
    try:
        with torch.no_grad():
            losses = [row_loss(logits, row) for logits, row in zip(base(rows).logits, rows, strict=True)]
    finally:
        base.decoder.plan = whole
    return sum(losses) / len(losses)


def test_weights_that_are_not_finite_are_refused() -> None:
    broken = model_of(None, sharing="cycle", recursions=1)
    with torch.no_grad():
        broken.decoder.layers[3].mlp.up.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        fathomlm.measure_activations(broken, [TEXT] * 2, tokens=1024, greedy=2)


def test_a_candidate_without_a_loss_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its first layer a model may overflow."""
    base, nan = model_of(None, sharing="cycle", recursions=1), float("nan")
    monkeypatch.setattr(
        "fathomlm.checkpoints.drop_order._losses_without", lambda decoder, rows, kept: [nan, *range(len(kept), 1, -1)]
    )
    assert [layer for layer, _ in drop_order(base.decoder, [torch.zeros(1, 4)], 2)] == [7, 6]


def test_the_search_equals_brute_force(base: Any) -> None:
    found = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False, greedy=4)
    rows, gone, losses = measured_rows(base), [], []
    for _ in range(4):
        without = {layer: loss_without(base, [*gone, layer], rows) for layer in range(LAYERS) if layer not in gone}
        gone.append(min(without, key=lambda layer: without[layer]))
        losses.append(without[gone[-1]])
    assert found.order == tuple(gone)
    assert found.order_losses == pytest.approx(losses, abs=1e-5)
    small = fathomlm.convert(base, drop=4, by="greedy", activations=found)
    assert small.config.kept_layers == [layer for layer in range(LAYERS) if layer not in gone]
    with torch.no_grad():
        left = [row_loss(small(row[None]).logits[0], row) for row in rows]
    assert sum(left) / len(left) == pytest.approx(losses[-1], abs=1e-5)


def test_one_layer_less_costs_no_more_than_by_influence(base: Any) -> None:
    found = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False, greedy=1)
    rows = measured_rows(base)
    least = min(range(LAYERS), key=lambda layer: found.influence[layer])
    assert found.order_losses[0] <= loss_without(base, [least], rows) + 1e-6
    assert found.order[0] != least, "on this model both choose the same, and the test says nothing"


def test_a_shorter_order_is_the_beginning_of_a_longer_one(base: Any) -> None:
    rows = list(measured_rows(base).split(4))
    longer = drop_order(base.decoder, rows, 3)
    assert drop_order(base.decoder, rows, 2) == longer[:2]
    assert drop_order(base.decoder, rows, 0) == []
    found = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False, greedy=3)
    assert fathomlm.convert(base, drop=1, by="greedy", activations=found).config.kept_layers == [
        layer for layer in range(LAYERS) if layer != longer[0][0]
    ]


def test_what_the_pass_finds_is_the_same_with_a_search(base: Any) -> None:
    plain = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024)
    searched = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, greedy=2)
    assert (plain.order, plain.influence, plain.loss) == ((), searched.influence, searched.loss)
    assert torch.equal(plain.moment(5, "down"), searched.moment(5, "down"))
    assert searched.of([0, 1]).order == (), "an order is of the whole model"


def test_progress_counts_layers_and_candidates(base: Any) -> None:
    told: list[tuple[int, int]] = []
    fathomlm.measure_activations(
        base, [TEXT] * 2, tokens=1024, moments=False, greedy=3, on_layer=lambda done, total: told.append((done, total))
    )
    total = LAYERS + candidates(LAYERS, 3)
    assert (candidates(LAYERS, 3), {each for _, each in told}) == (8 + 7 + 6, {total})
    assert told == sorted(told)
    assert told[-1] == (total, total)


def test_the_whole_model_is_not_held_without_a_search(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.checkpoints import activations

    held: list[int] = []
    inner = activations.drop_order

    def count(decoder: Any, *given: Any) -> Any:
        held.append(sum(not parameter.is_meta for parameter in decoder.layers.parameters()))
        return inner(decoder, *given)

    monkeypatch.setattr(activations, "drop_order", count)
    for greedy in (0, 1):
        fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False, greedy=greedy)
    assert held[0] == 0
    assert held[1] == len(list(base.decoder.layers.parameters()))


@pytest.mark.parametrize("greedy", [-1, LAYERS])
def test_refusals(base: Any, greedy: int) -> None:
    with pytest.raises(OptionError, match="greedy must be between 0 and 7"):
        fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, greedy=greedy)


def test_an_order_that_is_too_short_is_refused(base: Any) -> None:
    found: Activations = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False, greedy=1)
    with pytest.raises(OptionError, match="measure the activations with greedy=2"):
        fathomlm.convert(base, drop=2, by="greedy", activations=found)
