"""What packages around transformers ask of a model: gradient checkpointing, a backbone by `input_ids`, a head, caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"layers": 4, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab": 37, "context": 64}
MODELS: dict[str, dict[str, Any]] = {
    "looped": {},
    "lora": {"relax": "lora", "rank": 2},
    "dora": {"relax": "dora", "rank": 2},
    "prefix": {"relax": "prefix", "prefix_length": 2},
    "routed": {"router": "expert"},
}


def make(name: str, *, tied: bool = True, **changes: Any) -> FathomForCausalLM:
    torch.manual_seed(0)
    architecture = Architecture(family="llama", tied_embeddings=tied, **SHAPE | changes)
    plain = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(4), dtype=torch.float32))
    for value in plain.parameters():
        torch.nn.init.normal_(value, std=0.2)
    return fathomlm.convert(plain, sharing="cycle", recursions=2, **MODELS[name])


def tokens() -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab"], (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    model = make(name).train()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    found = []
    for each in (model, other):
        out = each(tokens(), labels=tokens())
        out.loss.backward()
        found.append(out)
    assert torch.equal(found[0].loss, found[1].loss)
    assert found[1].past_key_values is None, "a cache cannot be filled twice"
    for (path, value), again in zip(model.named_parameters(), other.parameters(), strict=True):
        assert value.grad is not None, path
        torch.testing.assert_close(again.grad, value.grad)


def test_gradient_checkpointing_computes_again() -> None:
    """Each of the four steps runs a second time in the backward pass, and none where it is off or nothing is trained."""
    model = make("looped").train()
    ran = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    many = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        ran.clear()
        model(tokens(), labels=tokens()).loss.backward()
        many.append(len(ran))
    assert many == [4, 8]
    model.eval()
    assert model(tokens(), use_cache=True).past_key_values is not None


def test_gradient_checkpointing_is_refused_where_entries_are_shared() -> None:
    shared = fathomlm.convert(make("looped"), kv="share")
    with pytest.raises(ValueError, match=r"cannot be combined with kv mode 'share'.*; train without gradient checkpointing"):
        shared.gradient_checkpointing_enable()


@pytest.mark.parametrize("name", ["looped", "routed"])
@pytest.mark.parametrize("tied", [True, False])
def test_backbone_and_head_make_the_logits(name: str, tied: bool) -> None:
    model = make(name, tied=tied).eval()
    parameters = dict(model.named_parameters())
    hidden = model.base_model(input_ids=tokens(), attention_mask=torch.ones(2, 12), use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    assert any(head is module for module in model.modules()), "PEFT looks for it there"
    torch.testing.assert_close(torch.nn.functional.linear(hidden, head.weight, head.bias), model(tokens()).logits)
    assert isinstance(model.base_model(input_ids=tokens(), return_dict=False), tuple)
    assert dict(model.named_parameters()).keys() == parameters.keys(), "nothing was added to the model"


def test_the_backbone_is_in_the_models_mode() -> None:
    model = make("looped").eval()
    model.decoder.layers[0].train()
    assert not model.base_model.training
    assert model.decoder.layers[0].training, "asking for it changes no module"


def test_a_tied_head_follows_a_resized_embedding() -> None:
    model = make("looped").eval()
    model.resize_token_embeddings(41)
    assert model.decoder.head is None
    assert model.get_output_embeddings().weight is model.decoder.embed.weight
    assert model(tokens()).logits.shape[-1] == 41


def test_a_scaled_head_is_told_to_who_multiplies_by_itself() -> None:
    model = make("looped", head_scale=0.125).eval()
    hidden = model.base_model(input_ids=tokens()).last_hidden_state
    logits = model.config.logit_scale * torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
    torch.testing.assert_close(logits, model(tokens()).logits)


def test_a_cache_is_returned_or_refused() -> None:
    found = make("looped").eval()(tokens(), use_cache=True).past_key_values
    assert found is not None
    assert found.get_seq_length() == 12
    with pytest.raises(ValueError, match="use_cache=True is not supported by routed models"):
        make("routed").eval()(tokens(), use_cache=True)
