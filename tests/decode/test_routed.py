"""Generation with a routed model: its tokens and the depth of each, alone, in a batch and over several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fathomlm.decode.full import Generation, Session, generate
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, RoutingTrace
from model.route.small import KV, LOOPS, model_of, routed, routed_cases
from pairwise import cover, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 9, 33, 7, 41, 2, 60, 13, 50], [17], [3, 20, 11, 42]]
NEW = 6


def told(results: list[Generation]) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    return [(result.tokens, result.depths) for result in results]


@torch.inference_mode()
def deciding_depths(model: FathomForCausalLM, result: Generation, control: DepthControl | None = None) -> list[int]:
    """Depths at the positions that chose the tokens: from the prompt's last to the one before the last token."""
    trace = RoutingTrace()
    sequence = torch.tensor([[*result.prompt_tokens, *result.tokens]])
    out = model.decoder(sequence, trace=trace, control=control)
    start = len(result.prompt_tokens) - 1
    assert model.decoder.logits(out)[0, start:-1].argmax(-1).tolist() == list(result.tokens)
    assert trace.depths_BT is not None
    return trace.depths_BT[0, start:-1].tolist()


@routed_cases(turn=2)
def test_a_batch_equals_singles_and_one_causal_forward(plan: DepthPlan) -> None:
    model = model_of(plan)
    together = generate(model, PROMPTS, max_new_tokens=NEW)
    assert told(together) == [told(generate(model, [prompt], max_new_tokens=NEW))[0] for prompt in PROMPTS]
    for result in together:
        assert result.depths is not None
        assert list(result.depths) == deciding_depths(model, result)
        assert set(result.depths) <= set(range(1, model.plan.recursions + 1))
    assert len({result.tokens for result in together}) > 1


def test_sampled_rows_equal_singles() -> None:
    model = model_of(routed())
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "seed": 7, "max_new_tokens": NEW}
    together = generate(model, PROMPTS, **options)
    assert told(together) == [told(generate(model, [prompt], **options))[0] for prompt in PROMPTS]


def test_a_row_that_ended_has_a_depth_for_each_of_its_tokens() -> None:
    model = model_of(routed("token"))
    free = generate(model, PROMPTS, max_new_tokens=NEW)
    at = next(i for i in range(1, NEW) if free[0].tokens[i] not in free[0].tokens[:i])
    model.config.eos_token_id = free[0].tokens[at]
    ended = generate(model, PROMPTS, max_new_tokens=NEW)[0]
    assert (ended.finish, ended.tokens) == ("eos", free[0].tokens[: at + 1])
    assert free[0].depths is not None
    assert ended.depths == free[0].depths[: at + 1]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "expert, random", "token, last"])
def test_a_depth_limit_caps_depths_and_the_whole_depth_is_none(router: str, kv: str) -> None:
    model = model_of(routed(router, kv))
    free = told(generate(model, PROMPTS, max_new_tokens=NEW))
    for limit in (1, 2, 3):
        control = DepthControl(max_depth=limit)
        limited = generate(model, PROMPTS, max_new_tokens=NEW, control=control)
        for result in limited:
            assert result.depths is not None
            assert max(result.depths) <= limit
            assert list(result.depths) == deciding_depths(model, result, control)
    assert told(limited) == free
    assert max(depth for _, depths in free for depth in depths or ()) == 3, "the limits above must bind"


@pytest.mark.parametrize("kv", KV)
def test_a_large_bias_sends_everyone_to_one_end(kv: str) -> None:
    model = model_of(routed("expert", kv))
    for bias, depth in ((1e9, 3), (-1e9, 1)):
        for result in generate(model, PROMPTS, max_new_tokens=NEW, control=DepthControl(bias=bias)):
            assert result.depths == (depth,) * NEW
    shallow = generate(model, PROMPTS, max_new_tokens=NEW, control=DepthControl(bias=-1e9))
    assert told(shallow) == told(generate(model, PROMPTS, max_new_tokens=NEW, control=DepthControl(max_depth=1)))


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("router", ["expert", "token", None])
def test_a_depth_out_of_range_is_refused(router: str | None, limit: int) -> None:
    model = model_of(LOOPS["middle"] if router is None else routed(router))
    message = f"max depth must be from 1 to the model's 3 recursions, got {limit}"
    with pytest.raises(OptionError, match=message):
        generate(model, PROMPTS, max_new_tokens=2, control=DepthControl(max_depth=limit))
    with pytest.raises(OptionError, match=message):
        Session(model, DepthControl(max_depth=limit)).generate(PROMPTS[0], max_new_tokens=2)


@torch.inference_mode()
@pytest.mark.parametrize("kv", ["cache", "share"])
def test_without_a_router_there_are_no_depths_and_a_limit_still_holds(kv: str) -> None:
    plan = LOOPS["middle"].with_kv(kv)  # type: ignore[arg-type]
    model = model_of(plan)
    free = generate(model, PROMPTS, max_new_tokens=NEW)
    assert {result.depths for result in free} == {None}
    control = DepthControl(max_depth=2)
    limited = generate(model, PROMPTS, max_new_tokens=NEW, control=control)
    assert told(limited) != told(free)
    assert told(generate(model, PROMPTS, max_new_tokens=NEW, control=DepthControl(max_depth=3))) == told(free)
    for result in limited:
        out = model.decoder(torch.tensor([[*result.prompt_tokens, *result.tokens]]), control=control)
        start = len(result.prompt_tokens) - 1
        assert model.decoder.logits(out)[0, start:-1].argmax(-1).tolist() == list(result.tokens)


@cover(router=["expert", "token, loss-free"], kv=KV, control=[None, DepthControl(max_depth=2, bias=0.5)])
def test_a_session_equals_fresh_generation(router: str, kv: str, control: DepthControl | None) -> None:
    model = model_of(routed(router, kv))
    session = Session(model, control)
    first = session.generate(PROMPTS[0], max_new_tokens=NEW)
    longer = [*PROMPTS[0], *first.tokens, 30, 31]
    edited = [*PROMPTS[0], 55, *first.tokens[1:], 30]
    for prompt in (longer, edited, longer[:6]):
        got = session.generate(prompt, max_new_tokens=NEW)
        assert told([got]) == told(generate(model, [prompt], max_new_tokens=NEW, control=control))
        assert session.held == (*prompt, *got.tokens[:-1])
    session.reset()
    assert told([session.generate(longer, max_new_tokens=NEW)]) == told(
        generate(model, [longer], max_new_tokens=NEW, control=control)
    )


@pytest.mark.parametrize(("stop_at", "kv"), in_turn([1, 2, 4, 7, 9, 12, 17], KV, turn=0))
def test_an_interrupted_session_is_still_right(kv: str, stop_at: int) -> None:
    model = model_of(routed("token", kv))
    session, ran = Session(model), 0

    def interrupt(*_: Any) -> None:
        nonlocal ran
        ran += 1
        if ran == stop_at:
            raise KeyboardInterrupt

    hooks = [layer.mlp.register_forward_pre_hook(interrupt) for layer in model.decoder.layers]
    with pytest.raises(KeyboardInterrupt):
        session.generate(PROMPTS[0], max_new_tokens=NEW)
    for hook in hooks:
        hook.remove()
    prompt = [*PROMPTS[0], 30, 31]
    assert told([session.generate(prompt, max_new_tokens=NEW)]) == told(generate(model, [prompt], max_new_tokens=NEW))
