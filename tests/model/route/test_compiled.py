"""Training by the top k has shapes that follow from the capacity alone: it compiles as one graph, with eager gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fathomlm.depth import DepthPlan, build_routing
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import draw
from model.route.small import KV, LLAMA, model_of, some_tokens

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def result(decoder: Decoder, run: Callable[[Tensor], Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The states and the gradients of a loss on them."""
    decoder.zero_grad()
    out = run(tokens)
    decoder.logits(decoder.norm(out)).logsumexp(-1).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    return {"states": out.detach()} | grads


def check_alike(fast: dict[str, Tensor], slow: dict[str, Tensor]) -> None:
    assert fast.keys() == slow.keys()
    for name in slow:
        near = 1e-4 * float(slow[name].abs().max())
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=near + 1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert any("routers" in name for name in slow)


def looped(kv: str, recursions: int) -> Decoder:
    """One layer, looped: compiling takes its time for every step."""
    plan = DepthPlan.build("cycle", recursions, recursions).with_routing(build_routing("expert", recursions))
    plan = plan.with_kv(kv)  # type: ignore[arg-type]
    return model_of(plan, architecture=dataclasses.replace(LLAMA, layers=recursions)).decoder


def states(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    return lambda tokens: decoder.states(tokens)[decoder.plan.unrolled_layers - 1]


@pytest.mark.parametrize("kv", KV)
def test_the_whole_pass_is_one_graph(kv: str) -> None:
    """The gradients are traced too for one of them; `test_layers_compiled_one_by_one` traces those of another."""
    decoder = looped(kv, 2)
    backend = "aot_eager" if kv == "share" else "eager"
    compiled = torch.compile(states(decoder), backend=backend, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other tokens go elsewhere, in the same shapes
        for seed in (3, 8):
            tokens = some_tokens(2, 9, seed)
            slow = result(decoder, states(decoder), tokens)
            check_alike(result(decoder, compiled, tokens), slow)


def test_a_model_that_never_ran_compiles_too() -> None:
    """Nothing of the plan may wait to be computed inside the graph: before Python 3.12 a cached property takes a lock."""
    decoder = looped("cache", 2)
    with torch.no_grad():
        torch.compile(states(decoder), backend="eager", fullgraph=True)(some_tokens(2, 9))


def test_the_draw_is_the_same_where_it_is_compiled() -> None:
    positions = torch.arange(1000)[None]
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(positions, 1), draw(positions, 1))


def test_layers_compiled_one_by_one() -> None:
    decoder = looped("hybrid", 2)
    slow = result(decoder, states(decoder), some_tokens(2, 9))
    for layer in decoder.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    check_alike(result(decoder, states(decoder), some_tokens(2, 9)), slow)
    with torch._dynamo.config.patch(error_on_recompile=True):
        result(decoder, states(decoder), some_tokens(2, 9, seed=8))
