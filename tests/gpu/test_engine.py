"""The engine on a GPU: recorded ticks, compiled bookkeeping and Triton kernels choose what the reference decoder chooses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import build, exiting, mixing_threshold
from engine.test_engine import NEW, many
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import model_of, routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, Any] = {"page_size": 16, "rows": 4, "chunk": 5, "max_length": 48}


def on_gpu(model: FathomForCausalLM) -> FathomForCausalLM:
    return copy.deepcopy(model).cuda()


@pytest.fixture(autouse=True)
def _exact() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


CASES: dict[str, Any] = {
    "whole": (lambda: build("vanilla"), None),
    "whole, lora": (lambda: build("lora"), None),
    "routed": (lambda: model_of(routed()), None),
    "routed, shared": (lambda: model_of(routed("expert", "share")), None),
    "token": (lambda: model_of(routed("token")), None),
    "exits, two passes": (
        lambda: build("vanilla"), lambda: exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"), max_stack=4)
    ),
    "exits, one pass": (
        lambda: build("lora"), lambda: exiting("lora", "parallel", threshold=mixing_threshold("lora"), max_stack=4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fuse", [True, False])
def test_tokens_are_the_reference_decoders(name: str, fuse: bool) -> None:
    make, leave = CASES[name]
    model: FathomForCausalLM = make()
    setting: Exiting | None = None if leave is None else leave()
    wanted = [generate(model, [prompt], max_new_tokens=NEW, exiting=setting)[0] for prompt in many(model)]
    engine = Engine(on_gpu(model), exiting=setting, fuse=fuse, compile=fuse, **SIZES)
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    if setting is None:
        assert [result.depths for result in results] == [result.depths for result in wanted]
    while engine.busy:
        engine.step()
    counters = engine.counters()
    assert counters.pages_used == counters.pages_cached


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = on_gpu(model_of(routed()))
    settings = [Sampling(max_new_tokens=NEW, temperature=0.9, seed=i, top_k=(0, 20)[i % 2]) for i in range(len(many(model)))]
    engine = Engine(model, compile=False, **SIZES)
    together = engine.run([Request(id=i, prompt=tuple(p), sampling=settings[i]) for i, p in enumerate(many(model))])
    again = Engine(model, compile=False, **(SIZES | {"rows": 2, "slots": 3}))
    alone = again.run([Request(id=i, prompt=tuple(p), sampling=settings[i]) for i, p in enumerate(many(model))])
    assert [result.tokens for result in together] == [result.tokens for result in alone]
