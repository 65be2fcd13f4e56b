"""A routed model on disk and in transformers' hands: what it is survives, and what transformers cannot hold is said."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from fathomlm.checkpoints.export import export
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import architecture_of, load
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import KV, LLAMA, ROUTERS, model_of, routed, same, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = some_tokens(2, 10)
PROMPTS = [[5, 9, 33, 7, 41, 2, 60], [17], [3, 20, 11, 42]]
SHARED = [
    DepthPlan.vanilla(8).with_kv("share", "cycle", 2),
    DepthPlan.vanilla(8).with_kv("share", "middle-sequence", 3),
    DepthPlan.build("sequence", 2, 8).with_kv("share"),
]
SAVED = {
    **{router: routed(router) for router in ROUTERS},
    **{
        f"{router}, {kv}": routed(router, kv, "cycle")
        for router in ("expert", "token, loss-free")
        for kv in ("share", "hybrid")
    },
    **{f"unrouted {i}": plan for i, plan in enumerate(SHARED)},
}


@torch.inference_mode()
def logits(model: FathomForCausalLM) -> torch.Tensor:
    return model(TOKENS).logits


def check_same(loaded: FathomForCausalLM, model: FathomForCausalLM) -> None:
    assert (loaded.architecture, loaded.plan, loaded.relaxation) == (model.architecture, model.plan, model.relaxation)
    assert torch.equal(logits(loaded), logits(model))
    got, expected = loaded.state_dict(), model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    layers = loaded.decoder.unrolled()
    for one in loaded.plan:
        for other in loaded.plan:
            shared = layers[one.index].attn.q.weight.data_ptr() == layers[other.index].attn.q.weight.data_ptr()
            assert shared == (one.layer == other.layer)


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    plan = SAVED[name]
    model = model_of(plan)
    if plan.routing is not None and plan.routing.balancing == "loss_free":
        assert model.decoder.routers.bias.abs().min() > 0
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    check_same(loaded, model)
    assert architecture_of(tmp_path / "saved") == (LLAMA, plan, None)
    if plan.routing is not None and plan.routing.balancing == "loss_free":
        assert not loaded.decoder.routers.bias.requires_grad


def test_transformers_reads_it_too_and_copies_stay_apart(tmp_path: Path) -> None:
    relaxation = build_relaxation(LLAMA.linears(), "lora", 2)
    model = model_of(routed("token, loss-free", "hybrid"), relaxation)
    model.save_pretrained(tmp_path / "saved")
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)
    check_same(copy.deepcopy(model), model)
    check_same(load(tmp_path / "saved"), model)


def test_narrow_weights_keep_the_routing(tmp_path: Path) -> None:
    model = model_of(routed("token, loss-free")).to(torch.bfloat16)
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    check_same(loaded, model)
    assert torch.isfinite(logits(load(tmp_path / "saved", dtype="float32"))).all()


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, random", "token, loss-free"])
def test_greedy_equals_transformers(router: str, kv: str) -> None:
    model = model_of(routed(router, kv))
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = [list(result.tokens) for result in generate(model, PROMPTS, max_new_tokens=8)]
    for options in ({"use_cache": False}, {}):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, do_sample=False, **options)
        assert out[:, longest:].tolist() == expected


@pytest.mark.parametrize("plan", SHARED, ids=["cycle", "middle-sequence", "looped"])
def test_a_transformers_cache_serves_shared_entries(plan: DepthPlan) -> None:
    model = model_of(plan)
    expected = [list(generate(model, [prompt], max_new_tokens=8)[0].tokens) for prompt in PROMPTS]
    for use_cache in (True, False):
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=use_cache
            )
            assert out[0, len(prompt) :].tolist() == tokens
    with torch.inference_mode():
        cache = DynamicCache()
        parts = [model(chunk, past_key_values=cache, use_cache=True).logits for chunk in TOKENS.split([6, 1, 3], dim=1)]
    same(torch.cat(parts, dim=1), logits(model))


@pytest.mark.parametrize("router", ["expert", "token"])
def test_a_transformers_cache_is_refused_where_tokens_are_routed(router: str) -> None:
    model = model_of(routed(router))
    with pytest.raises(
        ValueError, match=r"which a routed model has not: call with use_cache=False, or generate with fathomlm"
    ):
        model(TOKENS, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="call with use_cache=False"):
        model.generate(TOKENS, max_new_tokens=2, do_sample=False, pad_token_id=0, use_cache=True)
    assert model(TOKENS).past_key_values is None


@pytest.mark.parametrize(
    "plan", [routed(), routed("token"), SHARED[0], SHARED[2]], ids=["expert", "token", "plain", "looped"]
)
def test_what_a_plain_checkpoint_cannot_say_is_not_exported(plan: DepthPlan, tmp_path: Path) -> None:
    """Unrolled, every token would run every layer and make its own keys and values: another model."""
    with pytest.raises(OptionError):
        export(model_of(plan), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_labels_give_the_causal_loss() -> None:
    model = model_of(routed())
    loss = model(TOKENS, labels=TOKENS).loss
    expected = torch.nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(loss.detach(), expected)
