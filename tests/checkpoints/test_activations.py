"""The calibration pass, and what conversions make of it: measured against the whole model, and identities in float32."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fathomlm
from fathomlm.checkpoints.activations import Activations, token_rows
from fathomlm.checkpoints.assemble import ModelBase
from fathomlm.checkpoints.tied import Tying, greedy_matches, weighted_mean
from fathomlm.checkpoints.tying import starting_layers
from fathomlm.depth import DepthPlan
from fathomlm.errors import DataError, OptionError
from fathomlm.model.relax.lora import energy, residual_energies, svd_factors
from lab.analyze.tiny import TEXT, model_of

pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(rows).logits


def test_the_pass_finds_what_hooks_on_the_whole_model_find(base: Any, measured: Activations) -> None:
    rows = token_rows([TEXT] * 2, ModelBase(base), 1024)
    kept = rows[torch.arange(len(rows)) % 8 != 7]
    seen: dict[str, torch.Tensor] = {}
    layer = base.decoder.layers[3]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].flatten(0, 1)}))
        for name, module in (("v", layer.attn.v), ("o", layer.attn.o), ("gate", layer.mlp.gate), ("down", layer.mlp.down))
    ]
    states: list[torch.Tensor] = []
    with torch.no_grad():
        base.decoder(kept, states=states)
    for hook in hooks:
        hook.remove()
    for name, x in seen.items():
        torch.testing.assert_close(measured.moment(3, name), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    influence = [1 - F.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairwise(states)]
    assert measured.influence == pytest.approx(influence, abs=1e-5)
    assert measured.loss == pytest.approx(measured.loss_of(base), abs=1e-5)
    assert measured.tokens == rows.numel() == 1024


def test_the_pass_is_repeatable_and_leaves_nothing(base: Any, measured: Activations) -> None:
    again = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024)
    assert again.influence == measured.influence
    assert torch.equal(again.moment(2, "down"), measured.moment(2, "down"))
    assert again.directory is not None
    place = Path(again.directory.name)
    assert place.is_dir()
    del again
    assert not place.exists()


def test_text_is_read_only_as_far_as_needed(base: Any) -> None:
    def texts() -> Any:
        yield TEXT
        raise AssertionError("read on")

    assert token_rows(texts(), ModelBase(base), 128).shape == (2, 64)
    with pytest.raises(DataError, match="has 4 tokens; at least 64"):
        token_rows(["four"], ModelBase(base), 1024)
    with pytest.raises(DataError, match="vocabulary of 257"):
        fathomlm.measure_activations(base, torch.full((1, 8), 999))


def test_a_looped_model_is_not_measured() -> None:
    with pytest.raises(OptionError, match="converted already"):
        fathomlm.measure_activations(model_of(None), [TEXT])


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (20, 20)])
class TestAwareSvd:
    """Tall, wide and square matrices."""

    def sample(self, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A residual, and inputs that are strongly correlated and of very different sizes."""
        generator = torch.Generator().manual_seed(1)
        mixed = torch.randn(shape[1], shape[1], generator=generator) * torch.logspace(0, -2, shape[1])
        return torch.randn(shape, generator=generator), torch.randn(500, shape[1], generator=generator) @ mixed

    def test_full_rank_gives_the_residual_back(self, shape: tuple[int, int]) -> None:
        residual, x = self.sample(shape)
        a, b = svd_factors(residual, 100, moment=x.T @ x / len(x))
        torch.testing.assert_close(b @ a, residual, rtol=0, atol=1e-5)
        torch.testing.assert_close(a.norm(dim=1), torch.ones(len(a)), rtol=0, atol=1e-5)

    def test_identity_moments_give_the_plain_svd(self, shape: tuple[int, int]) -> None:
        residual, _ = self.sample(shape)
        (a, b), (plain_a, plain_b) = (svd_factors(residual, 5, moment=m) for m in (3 * torch.eye(shape[1]), None))
        torch.testing.assert_close(b @ a, plain_b @ plain_a, rtol=0, atol=1e-5)
        torch.testing.assert_close((a @ plain_a.T).abs(), torch.eye(5), rtol=0, atol=1e-4)

    def test_on_correlated_inputs_outputs_are_closer_and_as_predicted(self, shape: tuple[int, int]) -> None:
        residual, x = self.sample(shape)
        moment = x.T @ x / len(x)
        errors = []
        for given in (moment, None):
            a, b = svd_factors(residual, 4, moment=given)
            errors.append((x @ (residual - b @ a).T).square().sum(1).mean().item())
        assert errors[0] < 0.5 * errors[1]
        energies = residual_energies(residual, moment)
        assert energy(residual, moment).item() == pytest.approx(energies.sum().item(), rel=1e-9)
        left = energies[4:].sum().item()
        assert errors[0] == pytest.approx(left, rel=0.15), "damping adds a little to what is left"


def test_full_rank_gives_the_base_back(base: Any, measured: Activations) -> None:
    rows = measured.held_out_NT
    for kind, init in (("lora", "aligned"), ("dora", "influence")):
        full = fathomlm.convert(base, relax=kind, rank=100, init=init, activations=measured)
        torch.testing.assert_close(logits(full, rows), logits(base, rows), rtol=0, atol=2e-3)


def test_aware_is_what_the_activations_say(base: Any, measured: Activations) -> None:
    model = fathomlm.convert(base, relax="lora", rank=3, init="average", activations=measured)
    step = model.plan.steps[5]
    delta = model.decoder.delta(step).linears["up"]
    weight = base.decoder.layers[step.origin].mlp.up.weight - model.decoder.layers[step.layer].mlp.up.weight
    a, b = svd_factors(weight.detach(), 3, moment=measured.moment(5, "up"))
    torch.testing.assert_close(delta.b @ delta.a, b @ a, rtol=0, atol=1e-5)


def test_influence_picks_the_layers_that_change_most(base: Any, measured: Activations) -> None:
    model = fathomlm.convert(base, recursions=2, activations=measured)
    picked = sorted(sorted(range(8), key=lambda layer: -measured.influence[layer])[:4])
    for layer, start in enumerate(picked):
        assert torch.equal(model.decoder.layers[layer].mlp.up.weight, base.decoder.layers[start].mlp.up.weight)
    middle = starting_layers(DepthPlan.build("middle-cycle", 2, 8), "influence", [9, 1, 5, 2, 6, 3, 4, 8])
    assert middle == [(0,), (2,), (4,), (6,), (7,)]


def test_a_weighted_mean_is_exact_where_it_must_be() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 6, 4, generator=generator)
    x = torch.randn(50, 4, generator=generator)
    moment, eye = x.T @ x, torch.eye(4)
    torch.testing.assert_close(weighted_mean([(one, moment), (one, eye)]), one)
    torch.testing.assert_close(weighted_mean([(one, eye), (two, eye)]), (one + two) / 2)
    loud = weighted_mean([(one, 1e6 * moment), (two, moment)])
    torch.testing.assert_close(loud, one, rtol=0, atol=1e-4)


def test_greedy_matches_takes_the_best_pairs_first() -> None:
    likeness = torch.rand(30, 30, generator=torch.Generator().manual_seed(0))
    left, expected = likeness.clone(), torch.empty(30, dtype=torch.long)
    for _ in range(30):
        row, column = divmod(int(left.argmax()), 30)
        expected[row] = column
        left[row], left[:, column] = -1, -1
    assert torch.equal(greedy_matches(likeness), expected)


@pytest.mark.parametrize("traits", [{}, {"mlp_bias": True, "gated": False, "activation": "relu"}])
def test_neurons_in_another_order_are_the_same_layer_and_found_again(traits: dict[str, Any]) -> None:
    """The second half of the layers is the first with its neurons in another order: aligned, they average to the first."""
    model = model_of(None, sharing="cycle", recursions=1, traits=traits)
    weights = dict(model.decoder.named_parameters())
    shuffle = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, tensor in weights.items():
            if not name.startswith("layers.") or int(name.split(".")[1]) < 4:
                continue
            other = weights[name.replace(name.split(".")[1], str(int(name.split(".")[1]) - 4), 1)]
            rows, columns = "mlp.up" in name or "mlp.gate" in name, name.endswith("mlp.down.weight")
            tensor.copy_(other[shuffle] if rows else other[:, shuffle] if columns else other)
    found = fathomlm.measure_activations(model, [TEXT] * 2, tokens=1024)
    base, plan = ModelBase(model), DepthPlan.build("cycle", 2, 8)
    tying = Tying.of(base, "aligned", "average", starting_layers(plan, "aligned"), found)
    for layer in range(4):
        assert torch.equal(shuffle[tying.orders[layer + 4]], torch.arange(24)), "neurons stand where they stood"
    aligned = fathomlm.convert(model, init="aligned", recursions=2, activations=found)
    torch.testing.assert_close(logits(aligned, found.held_out_NT), logits(model, found.held_out_NT), rtol=0, atol=2e-3)
    averaged = fathomlm.convert(model, init="average", recursions=2)
    assert (logits(averaged, found.held_out_NT) - logits(model, found.held_out_NT)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_budget_is_kept_and_used(base: Any, measured: Activations, kind: str, calibrated: bool) -> None:
    whole = sum(p.numel() for p in base.parameters())
    for budget in (0.75, 0.95):
        model = fathomlm.convert(base, relax=kind, budget=budget, activations=measured if calibrated else None)
        share = sum(p.numel() for p in model.parameters()) / whole
        assert budget - 0.1 < share <= budget
        assert all(rank in (8, 16) for rank in model.relaxation.ranks.values())


def test_a_budget_is_of_the_model_before_layers_were_dropped(base: Any, measured: Activations) -> None:
    model = fathomlm.convert(base, drop=2, recursions=2, relax="lora", budget=0.7, activations=measured)
    assert (model.plan.layout, model.plan.unrolled_layers) == ("3", 6)
    assert sum(p.numel() for p in model.parameters()) <= 0.7 * sum(p.numel() for p in base.parameters())


def test_choosing_ranks_and_converting_is_one_progress(base: Any) -> None:
    told: list[tuple[int, int]] = []
    fathomlm.convert(base, relax="lora", budget=0.8, on_layer=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((0, 8), (8, 8))


def test_ranks_go_where_tying_lost_most(base: Any) -> None:
    """All linears but v are the same in every layer, so v gets all there is."""
    model = model_of(None, sharing="cycle", recursions=1)
    with torch.no_grad():
        for layer in model.decoder.layers[1:]:
            for name, tensor in layer.named_parameters():
                if name != "attn.v.weight":
                    tensor.copy_(model.decoder.layers[0].get_parameter(name))
    small = fathomlm.convert(model, relax="lora", budget=0.8, linears_only=True)
    assert max(small.relaxation.ranks, key=lambda name: small.relaxation.ranks[name]) == "v"
    assert small.relaxation.ranks["v"] == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"init": "aligned"}, "init aligned requires calibration text"),
        ({"init": "influence"}, "init influence requires calibration text"),
        ({"relax": "lora", "relax_init": "aware"}, "relax-init aware requires calibration text"),
        ({"budget": 0.6}, "budget chooses ranks; it requires a lora or dora relaxation"),
        ({"budget": 0.6, "relax": "prefix"}, "it requires a lora or dora relaxation"),
        ({"budget": 0.6, "relax": "lora", "rank": 4}, "cannot be combined with rank"),
        ({"budget": 1.5, "relax": "lora"}, "must be > 0 and <= 1"),
        ({"budget": 0.1, "relax": "lora"}, "give a larger budget or more recursions"),
        ({"budget": 0.9, "relax": "lora", "init": "random"}, "cannot be combined with the init random"),
    ],
)
def test_refusals(base: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        fathomlm.convert(base, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"relax": "lora"}, "relax-init aware requires second moments"),
        ({"relax": "dora", "budget": 0.9}, "relax-init aware requires second moments"),
        ({"init": "aligned"}, "init aligned requires second moments"),
        ({"relax": "lora", "relax_init": "svd"}, None),
        ({"relax": "encoding"}, None),
        ({}, None),
    ],
)
def test_what_reads_moments_requires_them(base: Any, options: dict[str, Any], says: str | None) -> None:
    measured = fathomlm.measure_activations(base, [TEXT], tokens=256, moments=False)
    with nullcontext() if says is None else pytest.raises(OptionError, match=says):
        fathomlm.convert(base, activations=measured, **options)


def test_a_text_is_a_document(base: Any) -> None:
    one, several = (fathomlm.measure_activations(base, text, tokens=256, moments=False) for text in (TEXT, [TEXT]))
    assert one.influence == several.influence


@pytest.mark.parametrize(
    ("traits", "says"),
    [
        ({"layers": 4}, "with layers 8, and this one has 4"),
        ({"hidden": 32}, "with hidden 16, and this one has 32"),
        ({"intermediate": 32}, "with intermediate 24, and this one has 32"),
        ({"kv_heads": 1}, "with kv_heads 2, and this one has 1"),
        ({"vocab": 300}, "with vocab 257, and this one has 300"),
    ],
)
def test_activations_of_a_model_of_another_shape_are_refused(
    traits: dict[str, int], says: str, measured: Activations
) -> None:
    other = model_of(None, sharing="cycle", recursions=1, traits=traits)
    with pytest.raises(OptionError, match=f"measured on another model {says}; measure the model that is converted"):
        fathomlm.convert(other, activations=measured)


def test_activations_of_other_weights_are_refused_and_those_of_a_copy_are_not(
    base: Any, measured: Activations, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"another model of the same shape: its weights differ by \d+%"):
        fathomlm.convert(model_of(None, sharing="cycle", recursions=1, seed=1), drop=2, activations=measured)
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.decoder.layers[5].norm_attn.weight.mul_(1.1)
    with pytest.raises(OptionError, match=r"the same shape: \d+ of \d+ sampled norms and biases are others"):
        fathomlm.convert(tuned, drop=2, activations=measured)
    rounded = copy.deepcopy(base).to(torch.bfloat16)
    assert fathomlm.convert(rounded, drop=2, activations=measured).architecture.layers == 6
    fathomlm.save(base, tmp_path / "int8", quantize="int8")
    assert fathomlm.convert(tmp_path / "int8", drop=2, activations=measured).architecture.layers == 6


def test_activations_of_some_layers_are_of_the_model_that_has_them(base: Any, measured: Activations) -> None:
    small = fathomlm.convert(base, drop=4, by="last", activations=measured)
    fathomlm.convert(small, recursions=2, activations=measured.of([0, 1, 2, 3]))
    with pytest.raises(OptionError, match="measured on another model"):
        fathomlm.convert(small, recursions=2, activations=measured.of([0, 1, 2, 4]))
