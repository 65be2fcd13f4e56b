"""One sequence in the engine: its text is the reference's, and its passes are counted."""

from __future__ import annotations

from typing import Any

import pytest

from decode.exit_models import NEW, PROMPTS, build, exiting, mixing_threshold
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.lab.bench.play import OneSequence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["full", "static", "state-copy", "parallel", "speculative"])
def test_texts_are_the_references_and_passes_are_counted(mode: Any) -> None:
    model, thresholds = build("vanilla"), [None]
    setting = Exiting(mode="full") if mode == "full" else exiting("vanilla", mode)
    if mode in ("state-copy", "parallel", "speculative"):
        thresholds = [0.0, mixing_threshold("vanilla"), 1.0]
    one = OneSequence(model, setting, length=64)
    for threshold in thresholds:
        where = setting if threshold is None else exiting("vanilla", mode, threshold=threshold)
        (wanted,) = generate(model, PROMPTS[:1], max_new_tokens=NEW, ignore_eos=True, exiting=where)
        text = one.text(PROMPTS[0], NEW, threshold=threshold, ignore_eos=True)
        assert text.result.tokens == wanted.tokens
        single = one.text(PROMPTS[0], 1, threshold=threshold, ignore_eos=True)
        assert text.decode_seconds(single) == text.seconds - single.seconds
        assert single.result.tokens == wanted.tokens[:1]
        if mode in ("full", "static"):
            assert text.passes == {"full" if mode == "full" else "shallow": NEW}
        else:
            assert text.passes["full"] == 0
            left = sum(layer < model.plan.unrolled_layers for layer in wanted.exit_layers or ())
            if mode != "speculative":
                assert text.passes["shallow"] == NEW
                assert text.passes["deep"] >= NEW - left
            if threshold == 1.0:
                assert (text.passes["shallow"], text.passes["deep"]) == (NEW, NEW)
            elif mode == "parallel":
                assert text.passes["deep"] < NEW


@pytest.mark.parametrize("drafts", [{"max_stack": 4, "threshold": 0.0}, {"draft_tree": (3, 2)}])
def test_each_pass_behind_a_draft_layer_chooses_one_token_beside_its_drafts(drafts: dict[str, Any]) -> None:
    model, setting = build("draft"), Exiting(mode="speculative", **drafts)
    text = OneSequence(model, setting, length=64).text(PROMPTS[0], NEW, ignore_eos=True)
    (wanted,) = generate(model, PROMPTS[:1], max_new_tokens=NEW, ignore_eos=True)
    assert text.result.tokens == wanted.tokens
    assert text.passes == {"full": NEW - sum(layer < model.plan.unrolled_layers for layer in text.result.depths or ())}
