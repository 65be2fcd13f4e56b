"""Routed models on a GPU: they generate what the CPU generates, and train compiled as they do not compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fathomlm.cache import build_cache
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.engine.runner import PrefilledEntries
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import RoutingTrace
from fathomlm.train.objective import Objective
from fathomlm.train.recipe import LossRecipe
from model.route.small import FEW, KV, VOCAB, model_of, routed
from pairwise import in_turn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = "cuda"


def decoder_of(kind: str, kv: str, width: int = 64, **options: object) -> Decoder:
    shape = {"layers": 8, "hidden": width, "intermediate": 2 * width, "heads": 4, "kv_heads": 2, "vocab": 300}
    plan = DepthPlan.build("middle-cycle", 3, 8).with_routing(build_routing(kind, 3, **options)).with_kv(kv)  # type: ignore[arg-type]
    torch.manual_seed(0)
    decoder = Decoder(Architecture(family="llama", head_dim=width // 4, **shape), plan)
    decoder.reset_parameters(std=0.15)
    return decoder


@pytest.mark.parametrize("kv", ["cache", "share", "hybrid"])
@pytest.mark.parametrize("kind", ["expert", "token"])
def test_causal_passes_equal_the_cpu(kind: str, kv: str) -> None:
    decoder = decoder_of(kind, kv)
    tokens = torch.randint(0, 300, (3, 24))
    found = []
    for device in ("cpu", CUDA):
        decoder.to(device)
        cache, traces, outs = build_cache(decoder.plan), [], []
        with torch.inference_mode():
            for part in tokens.to(device).split([17, 1, 1, 5], dim=1):
                traces.append(RoutingTrace())
                outs.append(decoder(part, cache=cache, trace=traces[-1]))
        depths = torch.cat([trace.depths_BT for trace in traces if trace.depths_BT is not None], 1)
        found.append((torch.cat(outs, 1).cpu(), depths.cpu(), cache.bytes()))
    (slow, slow_depths, slow_bytes), (fast, fast_depths, fast_bytes) = found
    assert torch.equal(fast_depths, slow_depths)
    assert fast_bytes == slow_bytes
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-3)


CASES = [(router, kv, "middle") for router, kv in in_turn((*FEW, "expert, mlp"), KV, 0)]
CASES += [("expert", kv, "cycle") for kv in KV] + [("token", "cache", "cycle"), ("token", "share", "middle")]


@pytest.mark.parametrize(("case", "fuse"), in_turn(CASES, (True, False), 0))
def test_captured_prompts_choose_what_the_reference_chooses(case: tuple[str, str, str], fuse: bool) -> None:
    """A size's first pass is launched as it is, the second is captured, which fails where the device is asked anything, and
    later ones are replayed."""
    model = model_of(routed(*case))
    engine = Engine(
        copy.deepcopy(model).to(CUDA), fuse=fuse, compile=False, batch_size=8, page_size=16, prefill_chunk=70, max_length=48
    )
    short = engine.runner.short_prefill
    for turn in range(4):
        prompts = [[(1 + 7 * many + at * (at + turn)) % VOCAB for at in range(3 + 4 * many)] for many in range(7)]
        wanted = generate(model, prompts, max_new_tokens=8, ignore_eos=True)
        found = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
        assert [(r.tokens, r.depths) for r in found] == [(w.tokens, w.depths) for w in wanted]
        assert short._met == {64, 128}
    assert set(short._graphs) == {64, 128}


@pytest.mark.parametrize(
    "case", [("expert", "cache", "middle"), ("token", "share", "middle"), ("expert", "hybrid", "cycle")]
)
def test_passes_that_are_confirmed_behind_the_next_one(case: tuple[str, str, str]) -> None:
    """Long passes are not captured: the device is asked how many tokens go on; the host is a pass ahead of what it left."""
    model = model_of(routed(*case))
    engine = Engine(
        copy.deepcopy(model).to(CUDA), compile=False, batch_size=8, page_size=16, prefill_chunk=70, max_length=48,
        memory=1 << 23,
    )  # fmt: skip
    engine.runner.short_prefill.sizes = ()
    prompts = [[(1 + 7 * many + at * (at + 3)) % VOCAB for at in range(3 + 4 * (many % 9))] for many in range(40)]
    wanted = generate(model, prompts, max_new_tokens=8, ignore_eos=True)
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    sequences = [engine.submit(Request(id=at, prompt=tuple(one), sampling=sampling)) for at, one in enumerate(prompts)]
    unconfirmed, prefill = 0, engine.runner.prefill

    def begun(*given: Any) -> PrefilledEntries:
        nonlocal unconfirmed
        unconfirmed += engine._prefills._unconfirmed is not None
        return prefill(*given)

    engine.runner.prefill = begun  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    assert unconfirmed >= 3
    for sequence, one in zip(sequences, wanted, strict=True):
        assert sequence.result is not None
        assert (sequence.result.tokens, sequence.result.depths) == (one.tokens, one.depths)


@pytest.mark.parametrize(
    "case", [("expert", "cache", "middle"), ("token", "share", "middle"), ("expert", "hybrid", "cycle")]
)
def test_a_sequence_alone_has_whole_bursts_as_one_graph(case: tuple[str, str, str]) -> None:
    """Long enough that the number of passes follows the depth, while bursts of either number are replayed."""
    model = model_of(routed(*case))
    engine = Engine(copy.deepcopy(model).to(CUDA), compile=False, batch_size=1, burst=4, page_size=16, max_length=48)
    assert engine.runner._at_once == (1, 4)
    for turn in range(12):
        prompts = [[(1 + 7 * turn + at * (at + turn)) % VOCAB for at in range(2 + turn)]] * 2
        wanted = generate(model, prompts[:1], max_new_tokens=33, ignore_eos=True)[0]
        for found in engine.generate(prompts, max_new_tokens=33, ignore_eos=True):
            assert (found.tokens, found.depths) == (wanted.tokens, wanted.depths)


@pytest.mark.parametrize("kv", ["cache", "share", "hybrid"])
def test_compiled_bfloat16_gradients_are_as_near_to_float32_as_eager_ones(kv: str) -> None:
    """Tokens go on by position here: in bfloat16 a router's near ties may fall the other way."""
    decoder = decoder_of("expert", kv, width=256, random=True).to(CUDA)
    tokens, targets = torch.randint(0, 300, (2, 4, 192), device=CUDA)

    def gradients(narrow: bool) -> dict[str, torch.Tensor]:
        decoder.zero_grad()
        with torch.autocast(CUDA, torch.bfloat16, enabled=narrow):
            loss, _ = Objective(decoder, LossRecipe())(tokens, targets)
        loss.backward()
        return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}

    exact, eager = gradients(narrow=False), gradients(narrow=True)
    decoder.compile_for_training()
    compiled = gradients(narrow=True)
    assert compiled.keys() == exact.keys()
    for name, wanted in exact.items():
        errors = [float((found[name] - wanted).norm() / wanted.norm()) for found in (compiled, eager)]
        assert errors[0] < 1.5 * errors[1] + 5e-3, (name, errors)
