"""Early exits on a GPU: in float32 they choose what the CPU chooses, and in bfloat16 every mode runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, SAMPLED, build, exiting, mixing_threshold, tokens
from fathomlm.decode.full import generate
from fathomlm.engine.engine import Engine

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


@torch._dynamo.config.patch(recompile_limit=1)  # pytest's monkeypatch would delete the setting when it takes it back
def test_engines_of_one_process_may_compile_again() -> None:
    """A notebook makes many engines: what they compile has the same code, and dynamo limits how often that is compiled."""
    model, setting = deepcopy(build("lora")).to(CUDA), exiting("lora", "parallel", threshold=mixing_threshold("lora"))
    wanted = tokens(generate(build("lora"), PROMPTS[:1], max_new_tokens=NEW, exiting=setting))
    for stack in (4, 8):
        engine = Engine(model, exiting=replace(setting, max_stack=stack), max_sequences=1, batch_size=stack, max_length=64)
        assert [tuple(result.tokens) for result in engine.generate(PROMPTS[:1], max_new_tokens=NEW)] == wanted
