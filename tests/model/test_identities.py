"""Identities that must hold in float32 for every family: what conversion may not change, and what it must restore."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fathomlm
from fathomlm.checkpoints.native import save
from fathomlm.depth import DepthPlan
from fathomlm.depth.cost import count, parameter_shapes
from fathomlm.depth.presets import PRESETS
from fathomlm.model.decoder import Decoder
from pairwise import cover, in_turn
from parity.families import CONFIGS, tiny

TOKENS = torch.randint(3, 96, (2, 18), generator=torch.Generator().manual_seed(2))
PLANS = ["cycle", "sequence", "cycle-rev", "middle-cycle", "middle-sequence"]


BASES = ["llama", "qwen2-window", "qwen3", "gemma3", "neox"]
RELAXATIONS = [
    {},
    {"relax": "lora", "rank": "attn=3"},
    {"relax": "dora", "rank": 2},
    {"relax": "prefix"},
    {"relax": "encoding"},
]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """Gives the model of a family. Shared by all tests: do not change it."""

    @cache
    def load(family):
        directory = tmp_path_factory.mktemp("base")
        tiny(family).save_pretrained(directory)
        return fathomlm.load(directory)

    return load


@pytest.fixture(scope="module", params=BASES)
def base(request, base_of):
    return base_of(request.param)


@pytest.fixture(scope="module")
def llama(base_of):
    return base_of("llama")


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("sharing", PLANS)
def test_one_recursion_is_the_base_model_bit_for_bit(base, sharing):
    assert torch.equal(logits(fathomlm.convert(base, sharing=sharing, recursions=1)), logits(base))


@cover(
    family=BASES,
    relax=["lora", "dora"],
    looped=[("cycle", 2), ("cycle", 3), ("sequence", 2), ("middle-cycle", 2)],
    init=["average", "stepwise", "random"],
)
def test_full_rank_svd_restores_the_original_model(base_of, family, relax, looped, init):
    base, (sharing, recursions) = base_of(family), looped
    restored = fathomlm.convert(base, sharing=sharing, recursions=recursions, init=init, relax=relax, rank=10_000)
    torch.testing.assert_close(logits(restored), logits(base), rtol=0, atol=1e-4)


def test_low_rank_does_not_restore_it(base):
    """The test above could not fail otherwise."""
    relaxed = fathomlm.convert(base, recursions=2, relax="lora", rank=2)
    assert (logits(relaxed) - logits(base)).abs().max() > 0.1


def test_norms_and_biases_need_their_own_offsets(base):
    """What the matrices of LoRA cannot restore: without offsets, full rank is not the original."""
    strict = fathomlm.convert(base, recursions=2, relax="lora", rank=10_000, linears_only=True)
    assert (logits(strict) - logits(base)).abs().max() > 0.01
    assert not any("offsets" in name for name, _ in strict.named_parameters())


@pytest.mark.parametrize("relax", ["lora", "dora"])
def test_zero_start_is_the_tied_model(base, relax):
    tied = fathomlm.convert(base, recursions=2, init="average")
    relaxed = fathomlm.convert(base, recursions=2, init="average", relax=relax, rank=4, relax_init="zero")
    torch.testing.assert_close(logits(relaxed), logits(tied), rtol=0, atol=0 if relax == "lora" else 1e-4)


def test_encoding_starts_as_the_tied_model_and_marks_every_recursion(llama):
    tied = fathomlm.convert(llama, recursions=3)
    encoded = fathomlm.convert(llama, recursions=3, relax="encoding")
    assert torch.equal(logits(encoded), logits(tied))
    with torch.no_grad():
        encoded.decoder.encodings[1].mul_(1.5)
    assert not torch.equal(logits(encoded), logits(tied))


def test_prefix_is_seen_by_every_token_and_hides_nothing(llama):
    tied = fathomlm.convert(llama, recursions=2)
    prefixed = fathomlm.convert(llama, recursions=2, relax="prefix", prefix_length=5)
    moved = (logits(prefixed) - logits(tied)).abs().amax(-1)
    assert (moved > 0).all()
    with torch.no_grad():
        for name, parameter in prefixed.named_parameters():
            if name.endswith("prefix"):
                parameter.copy_(torch.randn_like(parameter) * 3)
    assert ((logits(prefixed) - logits(tied)).abs().amax(-1) > 1e-2).all()
    causal = TOKENS.clone()
    causal[:, -1] = 5
    with torch.inference_mode():
        assert torch.equal(prefixed(causal).logits[:, :-1], prefixed(TOKENS).logits[:, :-1])


def shared_pointers(model):
    return [[p.data_ptr() for p in layer.parameters()] for layer in model.decoder.unrolled()]


@pytest.mark.parametrize("sharing", PLANS)
def test_ties_survive_every_transform(llama, sharing, tmp_path):
    model = fathomlm.convert(llama, sharing=sharing, recursions=2, relax="lora", rank=2)

    def check(made):
        pointers, steps = shared_pointers(made), list(made.plan)
        for one in steps:
            for other in steps:
                assert (pointers[one.index] == pointers[other.index]) == (one.layer == other.layer)

    check(model)
    check(copy.deepcopy(model))
    check(copy.deepcopy(model).to(torch.bfloat16))
    check(copy.deepcopy(model).half().float())
    save(model, tmp_path / "saved")
    check(fathomlm.load(tmp_path / "saved"))
    check(fathomlm.FathomForCausalLM.from_pretrained(tmp_path / "saved"))
    copied = copy.deepcopy(model)
    assert not {p for row in shared_pointers(copied) for p in row} & {p for row in shared_pointers(model) for p in row}


def test_a_saved_model_stores_each_weight_once(base, tmp_path):
    model = fathomlm.convert(base, recursions=3, relax="lora", rank=3)
    save(model, tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    cost = count(model.architecture, model.plan, relaxation=model.relaxation)
    assert stored == cost.non_embedding_parameters + cost.embedding_parameters


@pytest.mark.parametrize(
    ("name", "options"), [*in_turn(CONFIGS, RELAXATIONS, 0), *in_turn(CONFIGS, RELAXATIONS, 1)], ids=str
)
def test_the_cost_counter_counts_the_parameters_that_a_model_has(name, options, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    model = fathomlm.convert(tmp_path, sharing="middle-cycle", recursions=2, **options)
    cost = count(model.architecture, model.plan, relaxation=model.relaxation)
    assert sum(p.numel() for p in model.parameters()) == cost.non_embedding_parameters + cost.embedding_parameters


def test_gradients_reach_shared_weights_from_every_loop(base):
    """The gradient of a tied weight is the sum of its uses' gradients in the unrolled, untied model."""
    tied = fathomlm.convert(base, sharing="cycle", recursions=3, init="average")
    tied(TOKENS, labels=TOKENS).loss.backward()
    plan = tied.plan
    untied = fathomlm.convert(base, sharing="cycle", recursions=1)
    with torch.no_grad():
        for step in plan:
            untied.decoder.layers[step.index].load_state_dict(tied.decoder.layers[step.layer].state_dict())
    untied(TOKENS, labels=TOKENS).loss.backward()
    for layer in range(plan.unique_layers):
        for name, parameter in tied.decoder.layers[layer].named_parameters():
            parts = [untied.decoder.layers[step.index].get_parameter(name).grad for step in plan.uses(layer)]
            assert all(part.abs().max() > 0 for part in parts), name
            torch.testing.assert_close(parameter.grad, sum(parts), rtol=1e-4, atol=1e-6)


def test_gradients_reach_every_parameter_of_a_relaxed_model(base):
    for options in ({"relax": "lora", "rank": 3}, {"relax": "dora", "rank": 3}):
        model = fathomlm.convert(base, recursions=2, **options)
        model(TOKENS, labels=TOKENS).loss.backward()
        # Pythia's key bias shifts every score of a query alike, so softmax gives it no gradient; nor does padding's row.
        silent = [
            n for n, p in model.named_parameters() if p.grad is None or (p.grad.abs().max() == 0 and "k.bias" not in n)
        ]
        assert silent == []


def test_a_fresh_model_has_finite_weights_everywhere():
    torch.manual_seed(0)
    architecture = fathomlm.Architecture(
        family="llama", layers=4, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=40
    )
    plan = fathomlm.DepthPlan.build("cycle", 2, 4)
    for relaxation in (
        None,
        fathomlm.Relaxation(kind="dora", ranks={"q": 2}),
        fathomlm.Relaxation(kind="prefix", prefix_length=3),
        fathomlm.Relaxation(kind="encoding"),
    ):
        model = fathomlm.FathomForCausalLM(fathomlm.FathomConfig.of(architecture, plan, relaxation))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        first = model.decoder.layers[0]
        assert isinstance(first, nn.Module)
        assert 0.01 < first.attn.q.weight.std() < 0.03
        assert torch.isfinite(model(TOKENS % 40).logits).all()


def test_a_fresh_dora_model_starts_as_the_tied_one():
    architecture = fathomlm.Architecture(
        family="llama", layers=4, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=40
    )
    plan = fathomlm.DepthPlan.build("cycle", 2, 4)
    dora = fathomlm.FathomForCausalLM(
        fathomlm.FathomConfig.of(architecture, plan, fathomlm.Relaxation(kind="dora", ranks={"q": 2, "down": 2}))
    )
    tied = fathomlm.FathomForCausalLM(fathomlm.FathomConfig.of(architecture, plan))
    tied.load_state_dict({n: t for n, t in dora.state_dict().items() if "deltas" not in n})
    torch.testing.assert_close(dora(TOKENS % 40).logits, tied(TOKENS % 40).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_a_models_modules_have_the_tensors_that_are_counted(name: str) -> None:
    """By name and shape, so that the count of `inspect` and the model that is built cannot come apart."""
    architecture, plan = PRESETS[name].architecture, PRESETS[name].plan
    plan = DepthPlan.vanilla(architecture.layers) if plan is None else plan
    with torch.device("meta"):
        decoder = Decoder(architecture, plan)
    built = {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}
    assert built == parameter_shapes(architecture, plan)
    assert sum(weight.numel() for weight in decoder.parameters()) == count(architecture, plan).parameters
