"""Spectra of what tying takes away, against what a conversion with that rank leaves over."""

from __future__ import annotations

import pytest
import torch

from fathomlm.checkpoints.assemble import ModelBase
from fathomlm.checkpoints.convert import convert
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.weights import bands, check_inits, measure, open_plain
from fathomlm.lab.analyze.weights_report import kind_table, rank_table
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.relax.lora import residual_energies
from lab.analyze.tiny import model_of, saved

pytestmark = pytest.mark.usefixtures("one_thread")
LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.fixture(scope="module")
def plain() -> FathomForCausalLM:
    return model_of(None, sharing="cycle", recursions=1)


def test_energies_are_squared_singular_values():
    for shape in ((5, 9), (9, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert residual_energies(matrix).tolist() == pytest.approx((torch.linalg.svdvals(matrix) ** 2).tolist())


@torch.no_grad()
@pytest.mark.parametrize(("sharing", "init"), [("cycle", "average"), ("middle-cycle", "stepwise"), ("sequence", "lower")])
def test_captured_energy_is_what_a_conversion_of_that_rank_recovers(plain, sharing, init):
    recursions, rank = 2, 5
    numbers = measure(ModelBase(plain), DepthPlan.build(sharing, recursions, 8), [init])
    options = {"sharing": sharing, "recursions": recursions, "init": init, "relax": "lora"}
    relaxed = convert(plain, **options, rank=rank).decoder
    lost = whole = 0.0
    for step in relaxed.plan:
        delta = relaxed.delta(step)
        if delta is None:
            continue
        for linear in LINEARS:
            path = f"{'attn' if linear in 'qkvo' else 'mlp'}.{linear}.weight"
            own = plain.decoder.get_parameter(f"layers.{step.origin}.{path}")
            tied = relaxed.get_parameter(f"layers.{step.layer}.{path}")
            module = delta.linears[linear]
            left, residual = (own - tied - module.b @ module.a).square().sum(), (own - tied).square().sum()
            (found,) = [each for each in numbers.of(init, linear) if each.step == step.index + 1]
            assert found.energy == pytest.approx(float(residual), rel=1e-4, abs=1e-9)
            assert found.relative == pytest.approx(float(residual.sqrt() / own.norm()), rel=1e-4, abs=1e-6)
            assert found.recursion == step.recursion + 1
            if found.energy:
                assert 1 - found.captured[rank - 1] == pytest.approx(float(left / residual), abs=1e-4)
            lost, whole = lost + float(left), whole + float(residual)
    assert 0.05 < lost / whole < 0.95
    missed = sum(each.energy * (1 - each.captured[rank - 1]) for each in numbers.spectra)
    assert missed / whole == pytest.approx(lost / whole, rel=1e-3)


def test_ranks_rise_to_everything_and_cost_what_inspect_counts(plain):
    numbers = measure(ModelBase(plain), DepthPlan.build("cycle", 2, 8))
    assert numbers.inits == ["average", "stepwise"]
    assert [row.rank for row in numbers.ranks] == [1, 2, 4, 8, 16]
    for init in numbers.inits:
        captured = [row.captured[init] for row in numbers.ranks]
        assert captured == sorted(captured)
        assert captured[-1] == pytest.approx(1.0)
    added = sum(inputs + outputs for inputs, outputs in [(16, 16)] * 4 + [(16, 24)] * 2 + [(24, 16)]) * 8
    assert numbers.ranks[0].added_parameters == added
    assert rank_table(numbers)[1][0] == "1"
    assert len(kind_table(numbers)) == 1 + 2 * 7


def test_a_step_that_starts_as_its_base_layer_needs_no_rank(plain):
    numbers = measure(ModelBase(plain), DepthPlan.build("cycle", 2, 8), ["stepwise"])
    q = numbers.of("stepwise", "q")
    assert [each.step for each in q] == list(range(1, 9))
    assert [each.energy == 0 for each in q] == [True, *[False] * 6, True]  # the first and the last layer are kept
    assert (q[0].rank_for(0.9), q[0].captured[0]) == (0, 1.0)
    assert q[1].rank_for(1.0) == 16
    assert q[1].captured[q[1].rank_for(0.9) - 1] >= 0.9 > q[1].captured[q[1].rank_for(0.9) - 2]
    band = bands(numbers, "stepwise", "q")
    assert all(low <= mean <= high for low, mean, high in zip(band["least"], band["mean"], band["most"], strict=True))
    assert band["most"][0] < 1  # steps without a residual are left out


def test_refusals(plain, tmp_path):
    with pytest.raises(OptionError, match="nothing is tied"):
        measure(ModelBase(plain), DepthPlan.vanilla(8))
    with pytest.raises(OptionError, match="unknown init 'random'"):
        check_inits(["average", "random"])
    looped = saved(model_of(None), tmp_path / "looped")
    with pytest.raises(OptionError, match="was converted already"):
        open_plain(looped)
