"""entry-copy decoding: what a token sees of those that left their loops early is what they made in their last loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fathomlm
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

SHAPE = Architecture(
    family="llama", layers=8, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=4, vocab=40, tied_embeddings=False
)
PROMPT = [3, 14, 15, 9, 2, 6]
NEW = 12


def model_of(plan: DepthPlan) -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(SHAPE, plan)).eval()
    model.decoder.reset_parameters(std=0.4, generator=torch.Generator().manual_seed(0))
    if model.decoder.exit_gate is not None:
        torch.nn.init.normal_(model.decoder.exit_gate.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module", params=["gate", "injection"])
def model(request: Any) -> FathomForCausalLM:
    if request.param == "gate":
        plan = DepthPlan.build("cycle", 4, 8).with_loop_norm()
        return model_of(plan.with_exits(plan.recursion_ends(), gate=True))
    return model_of(DepthPlan.build("middle-cycle", 5, 8, ends=(2, 1)).with_injection(norm=True))


class LastExited:
    """Entries by layer, loop and token; a token that left has those of its last loop in every deeper one."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.last_loop: dict[int, int] = {}
        self.length = 0

    def at(self, step: Any) -> Any:
        outer = self

        class At:
            stores = True

            def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                outer.entries[step.layer, step.recursion, outer.length] = k, v
                loops = [min(step.recursion, outer.last_loop.get(token, 99)) for token in range(outer.length + 1)]
                seen = [outer.entries[step.layer, loop, token] for token, loop in enumerate(loops)]
                return torch.cat([k for k, _ in seen], 2), torch.cat([v for _, v in seen], 2)

        return At()

    def reads(self, step: Any) -> None:
        return None


def confidence(name: str, decoder: Any, states: list[Tensor], logits: list[Tensor]) -> float:
    if name == "state":
        return float(torch.cosine_similarity(states[-2], states[-1], dim=0).clamp(0, 1))
    if name == "kl":
        before = torch.zeros(40) if len(logits) == 1 else logits[-2]
        p, q = before.softmax(-1), logits[-1].softmax(-1)
        return float(torch.exp(-(p * (p / q).log()).sum()))
    stays = 1.0
    for state in states[1:]:
        stays *= 1 - float(decoder.exit_gate(decoder.norm(state)).sigmoid())
    return 1 - stays


def plainly(model: FathomForCausalLM, measure: str, threshold: float) -> tuple[list[int], list[int]]:
    """Token by token: tokens, and the loops that each of them ran; prompts run all loops."""
    decoder, plan, cache = model.decoder, model.plan, LastExited()
    tokens, loops = list(PROMPT), []
    coda = [step for step in plan if step.part == "coda"]
    while len(tokens) < len(PROMPT) + NEW:
        position = cache.length
        x = decoder.enter(torch.tensor([[tokens[position]]]))
        masks = full_masks(SHAPE, plan, TokenBatch.of(x, None, None, past=position), x.dtype)
        x = decoder.run_steps(x, [step for step in plan if step.part == "prelude"], masks, cache)
        states = [torch.zeros(16) if plan.injection else x[0, 0]]
        logits: list[Tensor] = []
        for loop in range(plan.recursions):
            x = decoder.run_steps(x, plan.recursion_steps(loop), masks, cache)
            states.append(x[0, 0, :16])
            out = decoder.run_steps(x, coda, masks, cache)[0, 0]
            logits.append(decoder.logits(decoder.norm(out)))
            chooses = position >= len(PROMPT) - 1 and loop < plan.recursions - 1
            if chooses and confidence(measure, decoder, states, logits) > threshold:
                cache.last_loop[position] = loop
                break
        if position >= len(PROMPT) - 1:
            tokens.append(int(logits[-1].argmax()))
            loops.append(loop + 1)
        cache.length += 1
    return tokens[len(PROMPT) :], loops


@pytest.mark.parametrize("measure", ["gate", "state", "kl"])
@torch.inference_mode()
def test_it_is_decoding_over_the_entries_of_the_last_loop(model: FathomForCausalLM, measure: str) -> None:
    gated, plan = model.decoder.exit_gate is not None, model.plan
    if measure == "gate" and not gated:
        return
    threshold = 0.5
    tokens, loops = plainly(model, measure, threshold)
    assert len(set(loops)) > 1
    exiting = fathomlm.Exiting(mode="entry-copy", confidence=measure, threshold=threshold)
    both = fathomlm.generate(model, [PROMPT, PROMPT[2:]], max_new_tokens=NEW, ignore_eos=True, exiting=exiting)
    assert list(both[0].tokens) == tokens
    ends = {step.index + 1: step.recursion + 1 for step in plan if plan.is_last_of_recursion(step)}
    assert [ends.get(layer, plan.recursions) for layer in both[0].exit_layers] == loops
    alone = fathomlm.generate(model, [PROMPT[2:]], max_new_tokens=NEW, ignore_eos=True, exiting=exiting)[0]
    assert list(alone.tokens) == list(both[1].tokens)
    assert both[0].exits.layers_run < NEW * plan.unrolled_layers or plan.injection
    session = fathomlm.Session(model, exiting=exiting)
    assert list(session.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).tokens) == tokens


class Overwritten:
    """Entries by layer and loop modulo k: what tokens of a pass make takes the place of what they made k loops before."""

    def __init__(self, loops: int) -> None:
        self.loops, self.length = loops, 0
        self.past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.now: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def at(self, step: Any) -> Any:
        outer, place = self, (step.layer, step.recursion % self.loops)

        class At:
            stores = True

            def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                before = outer.past.get(place, (k[:, :, :0], v[:, :, :0]))
                outer.now[place] = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
                return outer.now[place]

        return At()

    def reads(self, step: Any) -> None:
        return None

    def advance(self, tokens: int) -> None:
        self.past, self.length = dict(self.now), self.length + tokens


@pytest.mark.parametrize("loops", [1, 2])
@torch.inference_mode()
def test_loops_that_store_over_each_other(model: FathomForCausalLM, loops: int) -> None:
    decoder, cache, tokens = model.decoder, Overwritten(loops), list(PROMPT)
    new = torch.tensor([PROMPT])
    while len(tokens) < len(PROMPT) + NEW:
        tokens.append(int(decoder.logits(decoder(new, cache=cache))[0, -1].argmax()))
        new = torch.tensor([tokens[-1:]])
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    control = fathomlm.DepthControl(kv_loops=loops)
    rows = fathomlm.generate(model, [PROMPT, PROMPT[3:]], control=control, **options)
    assert list(rows[0].tokens) == tokens[len(PROMPT) :]
    assert list(fathomlm.Session(model, control=control).generate(PROMPT, **options).tokens) == tokens[len(PROMPT) :]
    by_hand, few, dense, every = (
        Overwritten(loops),
        *(fathomlm.build_cache(model.plan, kv_loops=each) for each in (loops, None, model.plan.recursions)),
    )
    for piece in torch.tensor([tokens]).split((5, 1, 1, 4, 7), dim=1):
        right, found, full, same = (decoder(piece, cache=one) for one in (by_hand, few, dense, every))
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(same, full)
    assert (found - full).abs().max() > 1e-2
    kept = sum(step.recursion < loops for step in model.plan)
    assert few.bytes() * model.plan.unrolled_layers == dense.bytes() * kept
    with pytest.raises(OptionError, match="kv loops must be from 1 to"):
        fathomlm.generate(model, [PROMPT], control=fathomlm.DepthControl(kv_loops=99), **options)


def test_kv_loops_require_loops() -> None:
    with pytest.raises(OptionError, match="kv loops require a looped model"):
        fathomlm.generate(model_of(DepthPlan.vanilla(8)), [PROMPT], control=fathomlm.DepthControl(kv_loops=1))


@torch.inference_mode()
def test_at_threshold_one_it_is_the_full_model(model: FathomForCausalLM) -> None:
    exiting = fathomlm.Exiting(mode="entry-copy", confidence="state", threshold=1.0)
    found = fathomlm.generate(model, [PROMPT], max_new_tokens=NEW, ignore_eos=True, exiting=exiting)[0]
    full = fathomlm.generate(model, [PROMPT], max_new_tokens=NEW, ignore_eos=True)[0]
    assert found.tokens == full.tokens
    assert set(found.exit_layers) == {model.plan.unrolled_layers}


def test_what_it_cannot_do_is_said_in_words() -> None:
    plain = model_of(DepthPlan.build("cycle", 4, 8))
    looped = model_of(DepthPlan.build("middle-cycle", 2, 8))
    injected = model_of(DepthPlan.build("middle-cycle", 1, 8, ends=(2, 1)).with_injection())
    for model, layer in ((plain, 3), (looped, 4)):
        exiting = fathomlm.Exiting(mode="entry-copy", exit_layers=(layer,))
        with pytest.raises(OptionError, match="entry-copy decoding requires exits at the ends of loops"):
            fathomlm.generate(model, [PROMPT], max_new_tokens=2, exiting=exiting)
    with pytest.raises(OptionError, match="has no exits of its own"):
        fathomlm.generate(injected, [PROMPT], max_new_tokens=2, exiting=fathomlm.Exiting(mode="entry-copy"))
    with pytest.raises(OptionError, match="select decoding cannot be combined with an injection"):
        fathomlm.generate(injected, [PROMPT], max_new_tokens=2, exiting=fathomlm.Exiting(mode="select"))
    with pytest.raises(OptionError, match="confidence 'kl' requires entry-copy decoding"):
        fathomlm.Exiting(mode="select", confidence="kl")


@pytest.mark.parametrize("confidence", ["state", "gap", "kl"])
def test_the_engine_has_it_too(model: FathomForCausalLM, confidence: str) -> None:
    exiting = fathomlm.Exiting(mode="entry-copy", confidence=confidence, threshold=0.5)
    wanted = fathomlm.generate(model, [PROMPT], max_new_tokens=NEW, ignore_eos=True, exiting=exiting)[0]
    found = fathomlm.Engine(model, exiting=exiting, batch_size=2).generate([PROMPT], max_new_tokens=NEW, ignore_eos=True)[0]
    assert (found.tokens, found.depths) == (wanted.tokens, wanted.exit_layers)
    assert found.confidences == pytest.approx(wanted.confidences, abs=1e-5)
