"""A decoder over an encoder's output: what is kept of it, parts of a plan and of a batch, routing, compiling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.cache import build_cache
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.depth.cost import count
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import OptionError
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.route import RoutingTrace

SHAPE: dict[str, Any] = {
    "family": "t5", "layers": 4, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 4, "head_dim": 6, "vocab": 50,
    "activation": "relu", "gated": False, "rotary_fraction": 0.0, "attention_scale": 1.0, "positions": "relative",
    "relative_buckets": 8, "relative_distance": 20, "cross": True, "memory_width": 24, "head_scale": 24**-0.5,
}  # fmt: skip
ARCHITECTURE = Architecture(**SHAPE)
TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))


def build(plan: DepthPlan | None = None, relax: str | None = None, **options: Any) -> Decoder:
    torch.manual_seed(0)
    relaxation = build_relaxation(ARCHITECTURE.linears(), relax, options.get("rank"), options.get("prefix_length"))
    decoder = Decoder(ARCHITECTURE, plan or DepthPlan.vanilla(4), relaxation)
    decoder.reset_parameters(std=0.25)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "deltas" in name or "relative" in name:
                parameter.normal_(std=0.2)
    return decoder.eval()


def source(padded: bool = True) -> EncoderMemory:
    states = torch.randn(3, 9, 24, generator=torch.Generator().manual_seed(1))
    keep = torch.ones(3, 9, dtype=torch.bool)
    if padded:
        keep[1, 5:] = False
    return EncoderMemory(states, keep)


def count_calls(decoder: Decoder) -> list[int]:
    calls: list[int] = []
    for number, layer in enumerate(decoder.layers):
        layer.cross.k.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


@torch.inference_mode()
def test_the_sources_keys_and_values_are_made_once_behind_a_cache_and_never_kept_without() -> None:
    decoder, memory = build(), source()
    calls = count_calls(decoder)
    decoder(TOKENS, memory=memory)
    decoder(TOKENS, memory=memory)
    assert calls == [0, 1, 2, 3] * 2
    cache = build_cache(decoder.plan)
    for at in range(12):
        decoder(TOKENS[:, at : at + 1], memory=memory, cache=cache)
    assert calls == [0, 1, 2, 3] * 3


@torch.inference_mode()
def test_a_looped_layer_keeps_its_uses_apart() -> None:
    """Each use of a layer may add something of its own to the source's keys and values."""
    decoder, memory = build(DepthPlan.build("cycle", 2, 4), "lora", rank=3), source()
    expected = decoder(TOKENS, memory=memory)
    cache = build_cache(decoder.plan)
    pieces = [decoder(TOKENS[:, at : at + 3], memory=memory, cache=cache) for at in range(0, 12, 3)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)
    first, second = (memory.at(step, keeps=True).k for step in decoder.plan.uses(0))
    assert first is not None
    assert second is not None
    assert (first - second).abs().max() > 0.1


def test_a_mask_of_ones_is_no_mask() -> None:
    assert source(padded=False).keep_BS is None
    assert source().keep_BS is not None


@torch.inference_mode()
def test_padding_of_the_source_is_not_seen() -> None:
    decoder, memory = build(), source()
    other = memory.states_BSM.clone()
    other[1, 5:] = 100.0
    assert torch.equal(decoder(TOKENS, memory=EncoderMemory(other, memory.keep_BS)), decoder(TOKENS, memory=memory))


@torch.inference_mode()
def test_a_walk_in_parts_sees_the_source_in_every_part() -> None:
    """What early exits do: some steps now, the others later over several tokens."""
    decoder, memory = build(), source()
    expected = decoder(TOKENS, memory=memory)
    cache = build_cache(decoder.plan)
    shallow, deep = decoder.plan.steps[:2], decoder.plan.steps[2:]
    waiting: list[Tensor] = []
    for at in range(12):
        x = decoder.enter(TOKENS[:, at : at + 1])
        rows = decoder.equipped(TokenBatch.of(x, None, None, past=at), memory)
        waiting.append(decoder.run_steps(x, shallow, full_masks(ARCHITECTURE, shallow, rows, x.dtype), cache))
    x = torch.cat(waiting, dim=1)
    rows = decoder.equipped(TokenBatch.of(x, None, None, past=0), memory)
    x = decoder.run_steps(x, deep, full_masks(ARCHITECTURE, deep, rows, x.dtype), cache)
    torch.testing.assert_close(decoder.norm(x), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_some_rows_take_their_part_of_what_was_kept() -> None:
    decoder, memory = build(), source()
    expected = decoder(TOKENS, memory=memory)
    calls = count_calls(decoder)
    for rows in ([1], [2, 0], [1, 1, 2, 0], [0, 1, 2]):
        some = memory.select(rows)
        found = decoder(TOKENS[rows], memory=some, cache=build_cache(decoder.plan))
        torch.testing.assert_close(found, expected[rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(decoder(TOKENS[rows], memory=memory.select(rows)), expected[rows], rtol=0, atol=1e-5)
    assert calls.count(0) == 1 + 4  # once for all rows behind caches, and once in each pass without
    assert memory.select([0, 1, 2]) is memory


def test_a_decoder_says_what_it_misses() -> None:
    decoder = build()
    with pytest.raises(ValueError, match="requires `memory`"):
        decoder(TOKENS)
    with pytest.raises(ValueError, match="a batch of 2 rows requires as many sources, `memory` holds 3"):
        decoder(TOKENS[:2], memory=source())
    plain = Architecture(family="llama", layers=2, hidden=8, intermediate=8, heads=2, kv_heads=1, head_dim=4, vocab=50)
    with pytest.raises(ValueError, match="does not take `memory`"):
        Decoder(plain, DepthPlan.vanilla(2))(TOKENS, memory=source())


@torch.inference_mode()
def test_the_heads_scale_is_in_logits_and_in_the_weight_that_losses_take() -> None:
    decoder = build()
    hidden = decoder(TOKENS, memory=source())
    expected = hidden @ decoder.embed.weight.T * 24**-0.5
    torch.testing.assert_close(decoder.logits(hidden), expected)
    torch.testing.assert_close(hidden @ decoder.head_weight.T, expected)


@torch.inference_mode()
def test_a_prefix_stands_in_front_without_a_position() -> None:
    decoder, memory = build(relax="prefix", prefix_length=3), source()
    whole = decoder(TOKENS, memory=memory)
    cache = build_cache(decoder.plan)
    pieces = [decoder(TOKENS[:, at : at + 4], memory=memory, cache=cache) for at in range(0, 12, 4)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-5)
    masks = full_masks(
        ARCHITECTURE, decoder.plan, decoder.equipped(TokenBatch.of(whole, None, None, 0), memory), whole.dtype
    )
    attention, context = decoder.layers[0].attn, decoder._context(decoder.plan.steps[0], masks, cache)
    _, _, mask = attention._with_prefix(*torch.zeros(2, 3, 4, 12, 6), queries=12, step=context)
    assert (mask[..., :3] == 0).all()
    assert torch.equal(mask[..., 3:], masks[None].mask)


@pytest.mark.parametrize("kind", ["expert", "token"])
@pytest.mark.parametrize("kv", ["cache", "share"])
@torch.inference_mode()
def test_a_routed_decoder_agrees_with_itself_behind_a_cache(kind: str, kv: Any) -> None:
    """Gathered tokens, at their true positions, over the whole source."""
    plan = DepthPlan.build("cycle", 2, 4).with_routing(build_routing(kind, 2)).with_kv(kv)
    decoder, memory = build(plan), source()
    keep = torch.ones_like(TOKENS)
    keep[0, :3] = 0
    trace = RoutingTrace()
    whole = decoder(TOKENS, memory=memory, keep_BS=keep, trace=trace)
    assert trace.depths_BT is not None
    assert 1 < trace.depths_BT[keep.bool()].float().mean() < 2
    cache, pieces = build_cache(plan), []
    for at in range(0, 12, 2):
        mask = keep[:, : at + 2]
        pieces.append(decoder(TOKENS[:, at : at + 2], memory=memory, keep_BS=mask, cache=cache))
    kept = keep.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[kept], whole[kept], rtol=0, atol=1e-5)


def test_a_routed_decoder_trains() -> None:
    plan = DepthPlan.build("cycle", 2, 4).with_routing(build_routing("expert", 2))
    decoder = build(plan)
    (state,) = decoder.states(TOKENS, memory=source()).values()
    decoder.logits(decoder.norm(state)).logsumexp(-1).square().sum().backward()
    assert [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("relax", [None, "lora"])
def test_compiled_layers_have_the_gradients_of_eager_ones_and_are_compiled_once(relax: str | None, one_thread: None) -> None:
    decoder = build(DepthPlan.build("cycle", 2, 4), relax, rank=2 if relax else None)
    fast = copy.deepcopy(decoder)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    for layer in fast.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    gradients = []
    for model in (decoder, fast):
        memory = source()
        memory.states_BSM.requires_grad_()
        for _ in range(2):
            (state,) = model.states(TOKENS, memory=memory).values()
        model.logits(model.norm(state)).logsumexp(-1).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()} | {"memory": memory.states_BSM.grad})
    torch._dynamo.reset()
    for name, expected in gradients[0].items():
        near = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=near + 1e-6)
    assert len(compiled) <= (2 if relax is None else 4), "each layer once, and again where a step adds modules of its own"


def test_under_autocast_the_stream_is_narrow() -> None:
    decoder = build()
    with torch.autocast("cpu", torch.bfloat16):
        states = decoder.states(TOKENS, at=range(4), memory=source())
    assert {state.dtype for state in states.values()} == {torch.bfloat16}


def test_costs_of_the_source_are_counted_once_a_sequence() -> None:
    plan = DepthPlan.vanilla(4)
    near, far = (count(ARCHITECTURE, plan, context=64, source=source).forward_flops_per_token for source in (64, 128))
    kv, scores = 2 * 2 * 24 * 24, 4 * 24 * 64
    assert far - near == 4 * (kv + scores)
    plain = 2 * (6 * 24 * 24 + 2 * 24 * 40) + 4 * 24 * 32
    assert near == 4 * (plain + kv + scores)
    assert count(ARCHITECTURE, plan, context=64).forward_flops_per_token == near
    with pytest.raises(OptionError, match="encoder-decoder"):
        count(Architecture(family="llama", **{k: SHAPE[k] for k in ("layers", "hidden", "intermediate", "heads", "kv_heads",
              "head_dim", "vocab")}), plan, source=5)  # fmt: skip
