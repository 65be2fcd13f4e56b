"""Early exits on a GPU: in float32 they choose what the CPU chooses, and in bfloat16 every mode runs."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, SAMPLED, build, exiting, mixing_threshold, tokens
from fathomlm.decode.full import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = "cuda"
MODES = ["full", "static", "state-copy", "parallel", "speculative", "oracle"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["lora", "gemma3", "own-layer"])
def test_every_mode_equals_the_cpu(name: str, mode: str) -> None:
    options = {"threshold": mixing_threshold(name)} if mode in ("state-copy", "parallel", "speculative") else {}
    setting = exiting(name, mode, **options)
    model = deepcopy(build(name)).to(CUDA)
    for penalty in (1.0, 1.5):
        slow, fast = (
            generate(one, PROMPTS, max_new_tokens=NEW, repetition_penalty=penalty, exiting=setting)
            for one in (build(name), model)
        )
        assert tokens(fast) == tokens(slow)
        assert [result.exit_layers for result in fast] == [result.exit_layers for result in slow]


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_and_sampling_run(mode: str) -> None:
    options = {"threshold": mixing_threshold("lora")} if mode in ("state-copy", "parallel", "speculative") else {}
    model = deepcopy(build("lora")).to(CUDA, torch.bfloat16)
    first, again = (
        generate(model, PROMPTS, max_new_tokens=NEW, exiting=exiting("lora", mode, **options), **SAMPLED) for _ in range(2)
    )
    assert tokens(first) == tokens(again)
    assert all(len(result.tokens) == NEW for result in first)
