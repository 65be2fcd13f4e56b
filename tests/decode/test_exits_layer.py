"""Exits with a layer of their own: what they start as, what they read, and who refuses them. The identities that every way
of leaving early must keep are in test_exits_identities.py, over these models too."""

from __future__ import annotations

import pytest
import torch

from decode.exit_models import (
    ALL,
    GEMMA3,
    LLAMA,
    LOOP,
    MIDDLE,
    NEW,
    PROMPTS,
    SAMPLED,
    VANILLA,
    build,
    check_interrupted,
    exit_layer,
    exiting,
    mixed,
    mixing_threshold,
    naive,
    tokens,
    told,
)  # fmt: skip
from fathomlm.cache import SlotCache, Span
from fathomlm.checkpoints.assemble import replan
from fathomlm.decode import early_exit
from fathomlm.decode.exit_forward import PartialForward
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.layout import build_layout
from fathomlm.errors import PlanError, UnsupportedModel
from fathomlm.lab.evaluate.outputs import OutputStates
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

RELATIVE = {"positions": "relative", "rotary_fraction": 0.0}
pytestmark = pytest.mark.usefixtures("one_thread")


def plain(architecture: Architecture, plan: DepthPlan) -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, dtype=torch.float32)).eval()
    model.decoder.reset_parameters(std=0.2, generator=torch.Generator().manual_seed(0))
    return model


# What a fresh layer is.


@pytest.mark.parametrize(
    ("architecture", "plan"),
    [(LLAMA, VANILLA), (GEMMA3, VANILLA), (LLAMA, LOOP), (LLAMA, MIDDLE)],
    ids=["vanilla", "windows", "looped", "middle"],
)
def test_a_fresh_layer_gives_what_the_model_gives_one_layer_further_on(architecture: Architecture, plan: DepthPlan) -> None:
    source = plain(architecture, plan)
    model = replan(source, plan.with_exits([1, 2, 4], layer=True))
    for exit in (2, 3, 5):
        got = Exiting(mode="static", exit_layers=(exit,))
        deeper = Exiting(mode="static", exit_layers=(exit + 1,)) if exit < 5 else Exiting(mode="full")
        assert tokens(generate(model, PROMPTS, max_new_tokens=NEW, exiting=got)) == tokens(
            generate(source, PROMPTS, max_new_tokens=NEW, exiting=deeper)
        )
    text = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        own = model.plan.exit_steps((1, 2, 4))
        states = model.decoder.states(text, at=[step.index for step in own])
        wanted = source.decoder.states(text, at=(2, 3, 5))
        for step, index in zip(own, (2, 3, 5), strict=True):
            assert torch.equal(states[step.index], wanted[index])
        assert torch.equal(states[5], wanted[5]), "the model itself is what it was"
        assert torch.equal(
            model.decoder.exit_logits(states[own[0].index], 1, layered=True), source.decoder.exit_logits(wanted[2], 2)
        )


def test_a_fresh_layer_is_no_tie() -> None:
    model = replan(plain(LLAMA, VANILLA), VANILLA.with_exits([2], layer=True))
    with torch.no_grad():
        model.decoder.exit_blocks["2"].attn.q.weight.zero_()  # type: ignore[union-attr]
    assert model.decoder.layers[3].attn.q.weight.any()  # type: ignore[union-attr]


# What it reads.


def test_exits_with_layers_of_their_own_one_behind_the_other() -> None:
    """State copying: an exit that a token did not get to has an entry of it too, made of the state that left."""
    model = build("own-gemma3")
    found: set[int] = set()
    for part in (0.5, 0.8):
        setting = Exiting(mode="state-copy", threshold=mixing_threshold("own-gemma3", part))
        for prompt, result in zip(PROMPTS, generate(model, PROMPTS, max_new_tokens=NEW, exiting=setting), strict=True):
            assert (list(result.tokens), list(result.exit_layers or ())) == naive(model, prompt, setting)
            found.update(result.exit_layers or ())
    assert found == {2, 3, 5, 6}


def test_an_exit_that_the_model_has_no_layer_for_is_plain() -> None:
    model, source = build("own-layer"), plain(LLAMA, VANILLA)
    source.decoder.load_state_dict(
        {name: value for name, value in model.decoder.state_dict().items() if not name.startswith("exit_blocks.")}
    )
    for mode in ("static", "parallel"):
        setting = Exiting(mode=mode, exit_layers=(4,), **{} if mode == "static" else {"threshold": 0.3})  # type: ignore[arg-type]
        got, wanted = (generate(each, PROMPTS, max_new_tokens=NEW, exiting=setting, **SAMPLED) for each in (model, source))
        assert told(got) == told(wanted)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("own")])
def test_a_prompt_only_leaves_entries_of_it(name: str) -> None:
    """Of every token, and nothing of the layer but its norm and two projections runs."""
    model = build(name)
    (own,) = model.plan.exit_steps((exit_layer(name) - 1,))
    cache = early_exit.exit_cache(model.plan, exiting(name, "parallel"), 2, 4)
    forward, spans = PartialForward(model.decoder, cache, 2), [Span(0, 0, 3), Span(1, 0, 2)]
    ran: list[int] = []
    block = model.decoder.exit_blocks[str(exit_layer(name) - 1)]
    hook = block.register_forward_hook(lambda *_: ran.append(1))
    with torch.inference_mode():
        forward.prefill(
            forward.enter([[5, 9, 33], [17, 2]]), model.plan.steps, (exit_layer(name) - 1,), forward.gather(spans)
        )
    hook.remove()
    assert [cache.held(own, row) for row in (0, 1)] == [3, 2]
    assert not ran
    assert forward.layers_run == [18, 12]
    cache.truncate(1, row=0)
    assert [cache.held(own, row) for row in (0, 1)] == [1, 2]


def test_static_decoding_runs_and_keeps_one_layer_more() -> None:
    setting = exiting("own-layer", "static")
    model = build("own-layer")
    cache = early_exit.exit_cache(model.plan, setting, 1, 4)
    assert {step.index for step in (*model.plan, *model.plan.exit_steps((2,))) if cache.at(step)} == {0, 1, 2, 6}
    (result,) = generate(model, [PROMPTS[0]], max_new_tokens=NEW, exiting=setting)
    assert result.exits is not None
    assert result.exits.layers_run == 4 * NEW
    assert isinstance(cache, SlotCache)


def test_a_classifier_reads_what_the_layer_makes() -> None:
    model = FathomForCausalLM(FathomConfig.of(LLAMA, VANILLA.with_exits([2], layer=True), exit_classifier=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    setting = Exiting(mode="parallel", confidence="classifier", threshold=0.36)
    (result,) = generate(model, [PROMPTS[0]], max_new_tokens=NEW, exiting=setting, temperature=3.0, seed=1)
    text = torch.tensor([[*result.prompt_tokens, *result.tokens[:-1]]])
    with torch.inference_mode():
        (own,) = model.plan.exit_steps((2,))
        states = model.decoder.states(text, at=(2, own.index))
        sure = model.decoder.exit_score(states[own.index], 2, layered=True).sigmoid()[0, len(PROMPTS[0]) - 1 :]
        other = model.decoder.exit_score(states[2], 2, layered=True).sigmoid()[0, len(PROMPTS[0]) - 1 :]
    assert result.confidences == pytest.approx(sure.tolist(), abs=1e-5)
    assert not torch.allclose(sure, other, atol=0.05)
    assert mixed([result])


@pytest.mark.parametrize("stop_at", range(2, 60, 6))
@pytest.mark.parametrize("mode", ["parallel", "speculative"])
def test_an_interrupted_session_is_still_right(mode: str, stop_at: int) -> None:
    check_interrupted("own-layer", mode, stop_at)


# Who cannot.


def test_who_does_not_run_the_layer_is_refused() -> None:
    model = build("own-layer")
    state = torch.zeros(2, 32)
    for ask in (model.decoder.exit_logits, model.decoder.exit_hidden):
        with pytest.raises(UnsupportedModel, match="the exit after layer 3 has a layer of its own"):
            ask(state, 2)
        ask(state, 5)
    with pytest.raises(UnsupportedModel, match="a layer of its own"):
        OutputStates(0, state, 2).logits(model.decoder, slice(0, 1))


def test_the_engine_has_pages_for_the_layer_of_an_exit_that_is_used() -> None:
    plan = build("own-layer").plan
    (own,) = plan.exit_steps((2,))
    used = build_layout(LLAMA, plan, None, [2])
    assert (used.kind, used.planes, used.home(own)) == ("exits", (7,), (0, 6))
    for exits, kind in (((), "whole"), ((1,), "exits")):
        other = build_layout(LLAMA, plan, None, exits)
        assert (other.kind, other.planes, own.index in other.homes) == (kind, (6,), False)


def test_decoders_behind_an_encoder_are_refused() -> None:
    shape = {"layers": 3, "hidden": 8, "intermediate": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "vocab": 9}
    crossing = Architecture.from_dict({"family": "t5", "cross": True, "memory_width": 8, **RELATIVE, **shape})
    Decoder(crossing, DepthPlan.vanilla(3).with_exits([0]))
    with pytest.raises(UnsupportedModel, match="t5"):
        Decoder(crossing, DepthPlan.vanilla(3).with_exits([0], layer=True))


def test_plans_with_such_exits() -> None:
    plan = VANILLA.with_exits([1, 3], layer=True)
    assert DepthPlan.from_dict(plan.to_dict()) == plan != VANILLA.with_exits([1, 3])
    assert not plan.with_exits([1]).exit_layer
    own = plan.exit_steps((1, 2, 3))
    assert [(step.index, step.layer, step.part, step.origin) for step in own] == [(6, 6, "exit", 2), (7, 7, "exit", 4)]
    assert VANILLA.with_exits([1]).exit_steps((1,)) == ()
    assert "exit_layer" not in VANILLA.with_exits([1]).to_dict()
    with pytest.raises(PlanError, match="requires exits"):
        VANILLA.with_exits([], layer=True)
    with pytest.raises(PlanError, match="exit_layer must be true or false"):
        DepthPlan.from_dict({**plan.to_dict(), "exit_layer": "yes"})
