"""Conversion picks, averages and approximates exactly what the thesis names."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

import fathomlm
from fathomlm.checkpoints.assemble import ModelBase
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.tying import starting_layers
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, PlanError
from parity.families import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    tiny("llama-biased").save_pretrained(directory)
    return fathomlm.load(directory)


def layer(model, index):
    return dict(model.decoder.layers[index].named_parameters())


@pytest.mark.parametrize(
    ("sharing", "init", "layers", "recursions", "expected"),
    [
        # Thesis figure "looping init overview": six layers, two blocks; Gemma's 18 in two and three blocks.
        ("cycle", "stepwise", 6, 2, [(0,), (2,), (5,)]),
        ("cycle", "average", 6, 2, [(0, 3), (1, 4), (2, 5)]),
        ("cycle", "lower", 6, 2, [(0,), (1,), (2,)]),
        ("cycle", "upper", 6, 2, [(3,), (4,), (5,)]),
        ("cycle", "stepwise", 18, 2, [(0,), (2,), (4,), (6,), (8,), (11,), (13,), (15,), (17,)]),
        ("cycle", "stepwise", 18, 3, [(0,), (3,), (7,), (10,), (14,), (17,)]),
        ("sequence", "average", 6, 2, [(0, 1), (2, 3), (4, 5)]),
        ("sequence", "stepwise", 6, 3, [(0,), (5,)]),
        ("cycle-rev", "average", 6, 2, [(0, 5), (1, 4), (2, 3)]),
        # Middle variants keep the first and last layer and spread over the rest: linspace(1, L-2, K).
        ("middle-cycle", "stepwise", 8, 2, [(0,), (1,), (4,), (6,), (7,)]),
        ("middle-cycle", "average", 8, 2, [(0,), (1, 4), (2, 5), (3, 6), (7,)]),
        ("middle-cycle", "lower", 8, 2, [(0,), (1,), (2,), (3,), (7,)]),
        ("middle-cycle", "upper", 8, 2, [(0,), (4,), (5,), (6,), (7,)]),
        ("middle-sequence", "average", 8, 3, [(0,), (1, 2, 3), (4, 5, 6), (7,)]),
        ("cycle", "random", 6, 2, [(), (), ()]),
        ("middle-cycle", "random", 8, 2, [(0,), (), (), (), (7,)]),
    ],
)
def test_starting_layers(sharing, init, layers, recursions, expected):
    assert starting_layers(DepthPlan.build(sharing, recursions, layers), init) == expected


@pytest.mark.parametrize("init", ["stepwise", "lower", "upper"])
@pytest.mark.parametrize("sharing", ["cycle", "middle-cycle"])
def test_picked_layers_are_copied_bit_for_bit(base, init, sharing):
    model = fathomlm.convert(base, sharing=sharing, recursions=2, init=init)
    for index, (start,) in enumerate(starting_layers(model.plan, init)):
        for name, tensor in layer(model, index).items():
            assert torch.equal(tensor, layer(base, start)[name])


def test_average_is_the_mean_of_every_tensor_norms_too(base):
    model = fathomlm.convert(base, recursions=3, init="average")
    for index, starts in enumerate(starting_layers(model.plan, "average")):
        for name, tensor in layer(model, index).items():
            mean = torch.stack([layer(base, start)[name] for start in starts]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)


def test_norm_choice_takes_one_layers_norms_and_averages_the_rest(base):
    model = fathomlm.convert(base, recursions=2, init="average", norm_init="choice")
    assert torch.equal(layer(model, 1)["norm_mlp.weight"], layer(base, 1)["norm_mlp.weight"])
    mean = (layer(base, 1)["attn.q.weight"] + layer(base, 4)["attn.q.weight"]) / 2
    torch.testing.assert_close(layer(model, 1)["attn.q.weight"], mean, rtol=0, atol=1e-6)


def test_norm_zero_zeroes_shared_norms_only(base):
    model = fathomlm.convert(base, sharing="middle-cycle", recursions=2, init="average", norm_init="zero")
    assert not layer(model, 1)["norm_attn.weight"].any()
    assert layer(model, 1)["attn.q.bias"].any()
    assert layer(model, 0)["norm_attn.weight"].any()


def test_random_draws_the_looped_layers_and_keeps_the_rest(base):
    one = fathomlm.convert(base, sharing="middle-cycle", recursions=2, init="random", seed=1)
    again = fathomlm.convert(base, sharing="middle-cycle", recursions=2, init="random", seed=1)
    other = fathomlm.convert(base, sharing="middle-cycle", recursions=2, init="random", seed=2)
    weight = layer(one, 1)["attn.q.weight"]
    assert torch.equal(weight, layer(again, 1)["attn.q.weight"])
    assert not torch.equal(weight, layer(other, 1)["attn.q.weight"])
    assert 0.015 < weight.std() < 0.025
    assert torch.equal(layer(one, 1)["norm_attn.weight"], torch.ones(32))
    assert torch.equal(layer(one, 0)["attn.q.weight"], layer(base, 0)["attn.q.weight"])
    assert torch.equal(one.decoder.embed.weight, base.decoder.embed.weight)


def test_svd_is_the_best_approximation_of_the_residual_at_that_depth(base):
    model = fathomlm.convert(base, recursions=2, init="lower", relax="lora", rank=5)
    for step in model.plan:
        delta = model.decoder.delta(step).linears["down"]
        residual = layer(base, step.origin)["mlp.down.weight"] - layer(model, step.layer)["mlp.down.weight"]
        if step.recursion == 0:
            assert not delta.b.any(), "the looped layer is the original here, so B starts at zero"
            assert delta.a.std() > 0.05
            continue
        u, s, vh = torch.linalg.svd(residual.double(), full_matrices=False)
        best = (u[:, :5] * s[:5]) @ vh[:5]
        torch.testing.assert_close((delta.b @ delta.a).double(), best, rtol=0, atol=1e-5)
        torch.testing.assert_close(delta.a @ delta.a.T, torch.eye(5), rtol=0, atol=1e-5)
        torch.testing.assert_close(delta.b.norm(dim=0).double(), s[:5], rtol=1e-5, atol=0)


def test_ranks_are_capped_by_the_matrix_and_follow_their_names(base):
    model = fathomlm.convert(base, recursions=2, relax="lora", rank="q=3,kv=1000,ffn=7")
    linears = model.decoder.delta(model.plan.steps[0]).linears
    assert {name: delta.a.shape[0] for name, delta in linears.items()} == {
        "q": 3, "k": 16, "v": 16, "gate": 7, "up": 7, "down": 7,
    }  # fmt: skip


def test_only_shared_steps_have_deltas(base):
    model = fathomlm.convert(base, sharing="middle-cycle", recursions=2, relax="lora", rank=2)
    assert sorted(model.decoder.deltas) == ["1", "2", "3", "4"]
    prefixed = fathomlm.convert(base, sharing="middle-cycle", recursions=2, relax="prefix", prefix_length=2)
    assert sorted(prefixed.decoder.deltas) == ["0", "1", "2", "3", "4", "5"]


def test_resize_adds_steps_as_the_thesis_does(base):
    model = fathomlm.convert(base, sharing="middle-cycle", recursions=3, resize=True)
    assert (model.plan.layout, model.plan.unrolled_layers) == ("1+2+1", 8)
    assert [step.origin for step in model.plan] == [0, 1, 2, 2, 3, 3, 4, 5]


def test_converting_from_a_directory_equals_converting_the_loaded_model(base, tmp_path):
    save(base, tmp_path / "plain")
    tokens = torch.arange(3, 20)[None]
    options = {"recursions": 2, "relax": "lora", "rank": 3}
    from_path, from_model = fathomlm.convert(tmp_path / "plain", **options), fathomlm.convert(base, **options)
    assert torch.equal(from_path(tokens).logits, from_model(tokens).logits)


def test_conversion_holds_one_tensor_group_at_a_time(base, monkeypatch):
    """Originals are read when they are needed and let go at once: never more alive than one looped tensor stands for."""
    alive, most = weakref.WeakSet(), [0]

    class Watched(torch.Tensor):
        pass

    read = ModelBase.tensor

    def tensor(self, name):
        fresh = read(self, name).as_subclass(Watched)
        if name.startswith("layers."):
            alive.add(fresh)
            most[0] = max(most[0], len(alive))
        return fresh

    monkeypatch.setattr(ModelBase, "tensor", tensor)
    fathomlm.convert(base, recursions=3, init="average", relax="lora", rank=2)
    assert 0 < most[0] <= 3


def test_the_base_is_left_as_it_was(base):
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = fathomlm.convert(base, recursions=2, init="stepwise")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_dtype_of_the_result(base):
    assert fathomlm.convert(base, recursions=2, dtype="bfloat16").decoder.embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"recursions": 4}, PlanError, "these do: 1, 2, 3, 6"),
        ({"recursions": 0}, PlanError, "must be >= 1"),
        ({"sharing": "cicle"}, PlanError, "did you mean 'cycle'"),
        ({"init": "averge"}, OptionError, "did you mean 'average'"),
        ({"init": "lower", "norm_init": "zero"}, OptionError, "norm-init requires the init average"),
        ({"relax": "lora", "rank": 0}, OptionError, ">= 1"),
        ({"relax": "lora", "rank": "q=x"}, OptionError, "q=x"),
        ({"relax": "lora", "rank": "fnn=3"}, OptionError, "did you mean 'ffn'"),
        ({"rank": 4}, OptionError, "rank requires a lora or dora relaxation"),
        ({"relax": "prefix", "rank": 4}, OptionError, "rank requires"),
        ({"relax": "prefix", "prefix_length": 0}, OptionError, ">= 1"),
        ({"relax": "lora", "prefix_length": 3}, OptionError, "prefix-length requires"),
        ({"relax": "encoding", "relax_init": "svd"}, OptionError, "relax-init requires"),
        ({"relax": "encoding", "sharing": "sequence"}, OptionError, "encoding"),
        ({"recursions": 1, "relax": "lora"}, OptionError, "nothing is tied"),
        ({"recursions": 1, "init": "average"}, OptionError, "init says how layers are tied, and at 1 recursion none are"),
        ({"recursions": 1, "init": "lower"}, OptionError, "init says how layers are tied"),
        ({"recursions": 1, "norm_init": "zero"}, OptionError, "norm_init says how layers are tied"),
        ({"recursions": 1, "resize": True}, OptionError, "resize says how layers are tied"),
        ({"recursions": 1, "resize": "drop"}, OptionError, "resize says how layers are tied"),
        ({"seed": -1}, OptionError, "seed must be"),
        ({"relax": "lara"}, OptionError, "did you mean 'lora'"),
        ({"dtype": "int8"}, OptionError, "unknown dtype"),
    ],
)
def test_options_that_make_no_sense(base, options, error, says):
    with pytest.raises(error, match=says):
        fathomlm.convert(base, **options)


def test_a_recursive_model_is_not_converted_twice(base, tmp_path):
    model = fathomlm.convert(base, recursions=2)
    with pytest.raises(OptionError, match="converted already"):
        fathomlm.convert(model, recursions=3)
    save(model, tmp_path / "looped")
    with pytest.raises(OptionError, match="converted already"):
        fathomlm.convert(tmp_path / "looped", recursions=3)


@pytest.mark.parametrize("kind", ["plain", "own"])
def test_a_configuration_is_read_once(base, tmp_path, monkeypatch, kind):
    place = tmp_path / kind
    fathomlm.export(base, place) if kind == "plain" else base.save_pretrained(place)
    read = []
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args: read.append(path.name) or opened(path, *args))
    fathomlm.convert(place, recursions=2)
    assert read.count("config.json") == 1
