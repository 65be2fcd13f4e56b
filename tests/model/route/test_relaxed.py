"""Routing beside every relaxation: what a step adds of its own follows the tokens that run it."""

from __future__ import annotations

import pytest
import torch

from fathomlm.cache import build_cache
from fathomlm.decode.full import generate
from fathomlm.depth import Relaxation
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.model.route import RoutingTrace
from model.route.small import KV, LLAMA, LOOPS, model_of, padded, routed, same, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

RELAXATIONS: dict[str, Relaxation | None] = {
    "lora": build_relaxation(LLAMA.linears(), "lora", 3),
    "dora": build_relaxation(LLAMA.linears(), "dora", 3),
    "prefix": build_relaxation(LLAMA.linears(), "prefix", prefix_length=3),
    "encoding": build_relaxation(LLAMA.linears(), "encoding"),
}


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "token"])
@pytest.mark.parametrize("name", RELAXATIONS)
def test_prefill_and_decode_equal_one_forward(name: str, router: str, kv: str) -> None:
    plan = routed(router, kv)
    decoder, cache = model_of(plan, RELAXATIONS[name]).decoder, build_cache(plan)
    tokens, keep = padded([13, 5, 9])
    trace = RoutingTrace()
    expected = decoder(tokens, keep_BS=keep, trace=trace)
    ends = [4, 9, 10, 11, 12, 13]
    parts = [
        decoder(tokens[:, start:end], keep_BS=keep[:, :end], cache=cache)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    same(torch.cat(parts, dim=1)[keep], expected[keep])
    assert trace.depths_BT is not None
    assert set(trace.depths_BT[keep].tolist()) == {1, 2, 3}
    for row, length in enumerate([13, 5, 9]):
        same(decoder(tokens[row : row + 1, -length:])[0], expected[row, -length:])
    plain = model_of(plan).decoder
    plain.load_state_dict(decoder.state_dict(), strict=False)
    assert not torch.allclose(plain(tokens, keep_BS=keep)[keep], expected[keep], atol=0.01), "it must add something"


@torch.inference_mode()
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", RELAXATIONS)
def test_everyone_interpolated_to_the_end_is_the_relaxed_recursive_model(
    name: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = routed("expert, interpolate", kv, capacity=[1.0, 1.0, 1.0])
    decoder = model_of(plan, RELAXATIONS[name]).decoder
    plain = model_of(LOOPS["middle"].with_kv("share" if kv == "share" else "cache"), RELAXATIONS[name]).decoder
    plain.load_state_dict({key: t for key, t in decoder.state_dict().items() if "routers" not in key})
    assert decoder.routers is not None
    monkeypatch.setattr(decoder.routers, "score", torch.ones_like)
    tokens = some_tokens(2, 10)
    same(decoder.states(tokens)[7], plain.states(tokens)[7])
    same(decoder(tokens), plain(tokens))


@pytest.mark.parametrize("name", RELAXATIONS)
def test_a_batch_equals_singles(name: str) -> None:
    model = model_of(routed("expert", "hybrid"), RELAXATIONS[name])
    prompts = [[5, 9, 33, 7, 41, 2], [17], [3, 20, 11]]
    together = generate(model, prompts, max_new_tokens=6)
    alone = [generate(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert [(r.tokens, r.depths) for r in together] == [(r.tokens, r.depths) for r in alone]
