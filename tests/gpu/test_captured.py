"""Captured decoding on a GPU, where its steps are recorded: the tokens of the slow modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fathomlm.decode.captured import CapturedDecoder
from fathomlm.decode.captured_session import CapturedSession
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS, NEW = [[3, 1, 4, 1, 5], [9, 2], [6]], 48


def tiny() -> FathomForCausalLM:
    shape: dict[str, Any] = {
        "layers": 6,
        "hidden": 64,
        "intermediate": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab": 97,
    }
    model = FathomForCausalLM(FathomConfig.of(Architecture(family="llama", **shape), DepthPlan.vanilla(6)))
    model.decoder.reset_parameters(std=0.25, generator=torch.Generator().manual_seed(0))
    return model.to("cuda").eval()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", ["full", "static", "state-copy", "parallel", "speculative", "cycles"])
def test_recorded_steps_choose_what_the_slow_mode_chooses(mode: Any, compile: bool) -> None:
    model, drafts_all = tiny(), mode == "cycles"
    mode = "speculative" if drafts_all else mode
    exits = (1, 2, 4) if mode == "state-copy" else (2,)
    given: dict[str, Any] = {} if mode == "full" else {"exit_layers": exits}
    if mode in ("state-copy", "parallel", "speculative"):
        always = Exiting(mode="parallel", exit_layers=(2,), threshold=0.0)
        (sure,) = generate(model, PROMPTS[:1], max_new_tokens=NEW, ignore_eos=True, exiting=always)
        given["threshold"] = 0.0 if drafts_all else float(torch.tensor(sure.confidences).median())
    exiting = Exiting(mode=mode, **given)
    slow = [generate(model, [prompt], max_new_tokens=NEW, ignore_eos=True, exiting=exiting)[0] for prompt in PROMPTS]
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=exits, compile=compile)
    for prompt, wanted in zip(PROMPTS, slow, strict=True):
        found = captured.generate(prompt, exiting, NEW)
        assert tuple(found.tokens) == wanted.tokens
        assert tuple(found.exit_layers) == wanted.exit_layers
        assert (("cycle", 0, False) in captured.steps._recorded) == drafts_all


@pytest.mark.parametrize("compile", [False, True])
def test_a_conversation_says_what_the_slow_session_says(compile: bool) -> None:
    model = tiny()
    for given in ({"mode": "full"}, {"mode": "speculative", "exit_layers": (2,), "threshold": 0.05}):
        exiting = Exiting(**given)
        fast = CapturedSession(model, exiting, compile=compile, pack=True)
        for prompt in PROMPTS:
            wanted = Session(model).generate(prompt, max_new_tokens=NEW)
            assert fast.generate(prompt, max_new_tokens=NEW).tokens == wanted.tokens
