"""Drafts from a layer behind the model: lossless, distributed as the whole model's, with exact entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.exit_models import DRAFTS, NEW, PROMPTS, build, exiting, tokens, told
from decode.test_exits_drafts import FAR, FILTERS, TINY, distance, drawn, exact, full_run
from fathomlm.decode import early_exit, parallel_decoding
from fathomlm.decode.draft_layer import DraftLayerDecoding
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from pairwise import in_turn
from random_weights import randomise

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("name", "penalty"), [("draft", 1.0), *in_turn(DRAFTS, (1.5, 1.0), 0)])
def test_it_is_full_greedy_decoding(name: str, penalty: float) -> None:
    full = full_run(name, penalty)
    for threshold, stack in ((0.0, 4), (0.0, 16), (0.02, 5), (1.0, 4), (0.0, 1), (0.0, 2)):
        setting = exiting(name, "speculative", threshold=threshold, max_stack=stack)
        got = generate(build(name), PROMPTS, max_new_tokens=NEW, repetition_penalty=penalty, exiting=setting)
        assert tokens(got) == full
        drafted, passes = (sum(getattr(r.exits, what) for r in got) for what in ("drafted", "deep_passes"))
        accepted = sum(r.exits.accepted for r in got if r.exits)
        assert (drafted > 0) == (threshold < 1 and stack > 1)
        assert passes + accepted == sum(len(row) for row in full), "a pass settles its drafts and one token more"
        kept = [layer for r in got for layer in r.exit_layers or ()]
        assert kept.count(1) == accepted


def naive_drafts(model: FathomForCausalLM, text: list[int], many: int) -> list[int]:
    """Greedy drafts behind a text, everything computed anew for each."""
    decoder, plan = model.decoder, model.plan
    known = decoder.states(torch.tensor([text]))[plan.unrolled_layers - 1]
    drafts: list[int] = []
    rolled: list[Tensor] = []
    for _ in range(many):
        now = torch.tensor([[*text, *drafts]])
        last = torch.cat((known[:, :-1], *rolled, known[:, -1:]), dim=1)  # the last is read by nobody
        state = next(decoder.draft_states(now, last, 1))[:, -1:]
        rolled.append(state)
        drafts.append(int(decoder.exit_logits(state, plan.draft_step.index, layered=True).argmax()))
    return drafts


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_what_the_layer_says_of_true_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was drafted and dropped before."""
    model, seen = build(name), []
    settle = DraftLayerDecoding._settle

    def spy(self: Any, seq: Any, logits_NV: Tensor, verify: Any) -> None:
        seen.append((seq.token_ids[: seq.stack[0].position + 1], [w.chosen for w in seq.stack[:-1]]))
        settle(self, seq, logits_NV, verify)

    monkeypatch.setattr(DraftLayerDecoding, "_settle", spy)
    generate(model, PROMPTS, max_new_tokens=NEW, exiting=exiting(name, "speculative", threshold=0.0, max_stack=4))
    assert len(seen) > len(PROMPTS)
    with torch.inference_mode():
        for text, drafts in seen:
            assert drafts == naive_drafts(model, text, len(drafts))


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    setting = exiting("draft", "speculative", threshold=0.02, max_stack=4)
    for sampling in ({}, {"temperature": 0.9, "seed": 3}):
        together = told(generate(build("draft"), PROMPTS, max_new_tokens=NEW, exiting=setting, **sampling))
        if not sampling:
            assert together == [told(generate(build("draft"), [p], max_new_tokens=NEW, exiting=setting))[0] for p in PROMPTS]
        assert len(together) == len(PROMPTS)


@pytest.fixture(scope="module")
def tiny() -> FathomForCausalLM:
    plan = DepthPlan.vanilla(3).with_exits((), draft=True)
    model = FathomForCausalLM(FathomConfig.of(TINY, plan, dtype=torch.float32)).eval()
    randomise(model, 1, std=lambda key: 0.8 if "embed" in key else 0.4 if "head" in key or "mix" in key else 0.2)
    return model


@pytest.mark.parametrize(("threshold", "max_stack"), [(0.0, 4), (0.3, 3)])
def test_samples_are_distributed_as_the_whole_models(
    tiny: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch, threshold: float, max_stack: int
) -> None:
    setting = Exiting(mode="speculative", threshold=threshold, max_stack=max_stack)
    whole = exact(tiny, Sampling(**FILTERS))
    results = drawn(tiny, setting, monkeypatch)
    assert distance(results, whole) < FAR
    assert 0 < sum(r.exits.accepted for r in results if r.exits) < sum(r.exits.drafted for r in results if r.exits)
    if threshold == 0:
        with monkeypatch.context() as patch:
            patch.setattr(parallel_decoding, "residual", lambda p_V, q_V: p_V)
            assert distance(drawn(tiny, setting, monkeypatch), whole) > FAR, "replacements from the whole distribution"


def goes_on(setting: Exiting) -> Session:
    """A session that has gone on with its text, each time as if it had read all of it at once."""
    session, text = Session(build("draft"), exiting=setting), PROMPTS[0]
    for more in ([], [5, 6], [7]):
        text = [*text, *more]
        found = session.generate(text, max_new_tokens=NEW)
        (alone,) = generate(build("draft"), [text], max_new_tokens=NEW, exiting=setting)
        assert (found.tokens, found.exit_layers) == (alone.tokens, alone.exit_layers)
        text = [*text, *found.tokens]
    return session


def test_a_session_goes_on_from_what_it_holds() -> None:
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    session = goes_on(setting)
    again = session.generate(PROMPTS[0][:5], max_new_tokens=NEW)
    assert again.tokens == tokens(generate(build("draft"), [PROMPTS[0][:5]], max_new_tokens=NEW))[0]


def test_other_modes_say_that_it_is_no_exit() -> None:
    for mode in ("static", "parallel", "state-copy"):
        with pytest.raises(OptionError, match="has a draft layer, for speculative decoding, and no exits"):
            generate(build("draft"), PROMPTS, max_new_tokens=2, exiting=Exiting(mode=mode))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="classifier"):
        generate(build("draft"), PROMPTS, max_new_tokens=2, exiting=Exiting(mode="speculative", confidence="classifier"))
    full = generate(build("draft"), PROMPTS, max_new_tokens=NEW, exiting=Exiting(mode="full"))
    assert tokens(full) == full_run("draft")
    assert early_exit.exit_cache(build("draft").plan, Exiting(mode="full"), 1, 8).length == 0
