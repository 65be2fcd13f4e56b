"""A compiled training step, which uses the faster forms of a layer's halves, has the gradients of an eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.model.blocks import Block, attention, feed_forward
from fathomlm.model.decoder import Decoder

SHAPE: dict[str, Any] = {
    "layers": 4, "hidden": 24, "intermediate": 40, "heads": 6, "kv_heads": 2, "head_dim": 4, "vocab": 50,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": ({}, None),
    "llama, lora": ({}, "lora"),
    "llama, dora": ({}, "dora"),
    "gemma": ({"norm": "rms_plus_one", "activation": "gelu_tanh", "embedding_scale": 24**0.5}, None),
    "qwen3": ({"qk_norm": True}, None),
    "qwen2": ({"qkv_bias": True}, None),
    "sandwich": ({"residual": "sandwich", "norm": "rms_plus_one"}, None),
    "neox": (
        {"residual": "parallel", "norm": "layer", "gated": False, "activation": "gelu", "rotary_fraction": 0.5,
         "mlp_bias": True, "qkv_bias": True, "o_bias": True},
        None,
    ),
}  # fmt: skip


def gradients(decoder: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    decoder.logits(decoder(tokens)).logsumexp(-1).square().sum().backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


COMPILED = ("llama", "llama, dora", "neox")
"""Kinds that are traced, which takes seconds each; the others run the same forms without a compiler."""


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_eager_step(kind: str, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, relax = KINDS[kind]
    architecture = Architecture(family="llama", **SHAPE | {"layers": 2}, **fields)
    relaxation = build_relaxation(architecture.linears(), relax, 2 if relax else None)
    torch.manual_seed(0)
    decoder = Decoder(architecture, DepthPlan.build("cycle", 2, 2), relaxation)  # one layer: each takes its time
    decoder.reset_parameters(std=0.2)
    tokens = torch.randint(0, 50, (2, 9))
    slow = gradients(decoder, tokens)
    if kind in COMPILED:
        for layer in decoder.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    fast = gradients(decoder, tokens)
    torch._dynamo.reset()
    assert fast.keys() == slow.keys()
    for name in slow:
        near = 1e-4 * float(slow[name].abs().max())
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=near + 1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("kv", "recompute"), [("share", "inner"), ("cache", "recursion")])
def test_a_looped_layer_is_packed_once_for_all_its_uses(
    kv: Any, recompute: Any, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plan = DepthPlan.build("middle-cycle", 2, 6).with_kv(kv)
    decoder = Decoder(Architecture(family="llama", **SHAPE | {"layers": 6}), plan)
    decoder.reset_parameters(std=0.2)
    tokens = torch.randint(0, 50, (2, 9))

    def found() -> dict[str, torch.Tensor]:
        decoder.zero_grad()
        decoder.states(tokens, recompute=recompute)[5].square().sum().backward()
        return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}

    slow = found()
    packed = []
    original = Block.pack
    monkeypatch.setattr(Block, "pack", lambda self, dtype: (packed.append(self), original(self, dtype))[1])
    decoder.compile_for_training("aot_eager")
    decoder._pack = lambda layer, dtype: layer.pack(dtype)
    fast = found()
    torch._dynamo.reset()
    assert packed == [decoder.layers[1], decoder.layers[2]]
    assert fast.keys() == slow.keys()
    for name in slow:
        near = 1e-4 * float(slow[name].abs().max())
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=near + 1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_plain_llama_layer_does_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare a thing with itself."""
    used = []
    for module, name in ((feed_forward, "norm_swiglu_mlp"), (attention, "norm_qkv_rope")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=original, _n=name: (used.append(_n), _f(*a))[1])
    decoder = Decoder(Architecture(family="llama", **SHAPE | {"layers": 1}), DepthPlan.vanilla(1))
    decoder.reset_parameters()
    decoder.layers[0].compile(backend="eager")
    gradients(decoder, torch.randint(0, 50, (1, 5)))
    torch._dynamo.reset()
    assert {"norm_swiglu_mlp", "norm_qkv_rope"} <= set(used)


@pytest.mark.parametrize("relax", [None, "lora", "dora", "prefix", "encoding"])
@pytest.mark.parametrize("biased", [False, True])
def test_under_autocast_the_whole_stream_is_narrow(relax: str | None, biased: bool, one_thread: None) -> None:
    """One float32 addition would widen all that comes after it, and with it the memory of a run."""
    fields = {"qkv_bias": biased, "o_bias": biased, "mlp_bias": biased}
    architecture = Architecture(family="llama", **SHAPE, **fields)
    rank = 2 if relax in ("lora", "dora") else None
    relaxation = build_relaxation(architecture.linears(), relax, rank, 3 if relax == "prefix" else None)
    decoder = Decoder(architecture, DepthPlan.build("cycle", 2, 4), relaxation)
    decoder.reset_parameters()
    with torch.autocast("cpu", torch.bfloat16):
        states = decoder.states(torch.randint(0, 50, (2, 9)), at=range(4))
    assert {state.dtype for state in states.values()} == {torch.bfloat16}
