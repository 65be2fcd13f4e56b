"""Narrower feed-forward parts: identities, and what the fit to activations is best at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.reduced import refitted, strongest
from fathomlm.errors import OptionError
from fathomlm.model.relax.lora import damped
from lab.analyze.tiny import TEXT, model_of
from parity.families import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
NEURONS = 24


def test_all_neurons_are_the_base(base: Any, measured: Activations) -> None:
    rows = measured.held_out_NT
    same = fathomlm.convert(base, drop=0, neurons=NEURONS, activations=measured)
    assert torch.equal(same(rows).logits, base(rows).logits)


def test_neurons_that_add_nothing_are_not_missed(base: Any) -> None:
    """The base with neurons whose columns are zero computes the same without them."""
    idle = torch.arange(0, NEURONS, 3)
    sparse = fathomlm.convert(base, drop=0)
    with torch.no_grad():
        for layer in sparse.decoder.layers:
            layer.mlp.down.weight[:, idle] = 0
    found = fathomlm.measure_activations(sparse, [TEXT] * 2, tokens=1024)
    small = fathomlm.convert(sparse, drop=0, neurons=NEURONS - len(idle), activations=found)
    assert (small.architecture.intermediate, small.config.kept_layers) == (16, list(range(8)))
    kept = torch.tensor([i for i in range(NEURONS) if i % 3])
    assert torch.equal(small.decoder.layers[2].mlp.up.weight, sparse.decoder.layers[2].mlp.up.weight[kept])
    rows = found.held_out_NT
    torch.testing.assert_close(small(rows).logits, sparse(rows).logits, rtol=0, atol=1e-3)


def test_neurons_that_never_fire_keep_their_columns(base: Any) -> None:
    silent = fathomlm.convert(base, drop=0)
    with torch.no_grad():
        silent.decoder.layers[3].mlp.up.weight.zero_()
    found = fathomlm.measure_activations(silent, [TEXT] * 2, tokens=1024)
    small = fathomlm.convert(silent, drop=0, neurons=8, activations=found)
    columns = silent.decoder.layers[3].mlp.down.weight
    assert all(any(torch.equal(one, other) for other in columns.T) for one in small.decoder.layers[3].mlp.down.weight.T)


def test_the_fit_is_the_best_there_is(base: Any, measured: Activations) -> None:
    down, moment = base.decoder.layers[3].mlp.down.weight.detach(), measured.moment(3, "down")
    kept = strongest(down, moment, 10)
    fit, metric = refitted(down, moment, kept).double(), damped(moment)

    def error(columns: torch.Tensor) -> float:
        left = down.double().clone()
        left[:, kept] -= columns
        return float(((left @ metric) * left).sum())

    best = error(fit)
    assert best < 0.95 * error(down[:, kept].double()), "than leaving the columns as they are"
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert best < error(fit + 0.01 * torch.randn(fit.shape, generator=generator, dtype=torch.float64))


def test_the_strongest_add_most() -> None:
    down = torch.tensor([[1.0, 2.0, 0.1, 1.0]])
    moment = torch.diag(torch.tensor([1.0, 1.0, 100.0, 9.0]))
    assert strongest(down, moment, 2).tolist() == [1, 3]  # 1, 4, 1, 9
    assert strongest(down, moment, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "neox", "gemma3"])
def test_the_result_is_an_ordinary_model(family: str, tmp_path: Path) -> None:
    """Gated or not, with biases, with layers dropped too: it exports, and the layers that stay are those of their place."""
    tiny(family).save_pretrained(tmp_path / "base")
    base = fathomlm.load(tmp_path / "base")
    rows = torch.randint(3, 90, (16, 32), generator=torch.Generator().manual_seed(0))
    found = fathomlm.measure_activations(base, rows)
    neurons = base.architecture.intermediate // 2
    small = fathomlm.convert(base, drop=2, by="stepwise", neurons=neurons, activations=found)
    assert (small.architecture.layers, small.architecture.intermediate) == (4, neurons)
    up, down = (base.decoder.layers[2].mlp.get_parameter(f"{name}.weight").detach() for name in ("up", "down"))
    kept = strongest(down, found.moment(2, "down"), neurons)
    assert torch.equal(small.decoder.layers[1].mlp.up.weight, up[kept])
    torch.testing.assert_close(
        small.decoder.layers[1].mlp.down.weight.detach(), refitted(down, found.moment(2, "down"), kept)
    )
    fathomlm.export(small, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(theirs(rows).logits, small(rows).logits, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"neurons": 8}, "neurons requires drop"),
        ({"drop": 1, "neurons": 25}, "neurons must be between 1 and the model's 24, got 25"),
        ({"drop": 1, "neurons": 0}, "neurons must be between 1"),
        ({"drop": 0, "neurons": 8, "recursions": 2}, "cannot be combined with sharing or recursions"),
    ],
)
def test_refusals(base: Any, measured: Activations, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        fathomlm.convert(base, **options, activations=measured)


def test_neurons_require_moments(base: Any) -> None:
    found = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, moments=False)
    for activations in (None, found):
        with pytest.raises(OptionError, match="neurons requires calibration text"):
            fathomlm.convert(base, drop=0, neurons=8, activations=activations)


def test_experts_keep_their_neurons() -> None:
    experts = model_of(
        None, sharing="cycle", recursions=1, traits={"family": "qwen3_moe", "experts": 4, "experts_per_token": 2}
    )
    found = fathomlm.measure_activations(experts, [TEXT] * 2, tokens=1024)
    with pytest.raises(OptionError, match="this model has experts"):
        fathomlm.convert(experts, drop=0, neurons=8, activations=found)
