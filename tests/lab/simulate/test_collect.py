"""Depths from text through a model: against what the reference decoder's parts say, token by token."""

from __future__ import annotations

import pytest
import torch

from decode.exit_models import build
from fathomlm.decode.confidence import MEASURES, AtExit
from fathomlm.errors import OptionError
from fathomlm.lab.simulate import collect as module
from fathomlm.lab.simulate.collect import collect, exits_of
from fathomlm.model.route import RoutingTrace
from model.route.small import model_of, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (3, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("exit_rule", ["oracle", "confidence"])
def test_the_first_exit_that_agrees_or_is_sure(exit_rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("vanilla")
    tokens_NT, layers, threshold = rows(model.architecture.vocab), (2, 4), 0.1
    monkeypatch.setattr(module, "MOST_SCORES", 5 * model.architecture.vocab)  # a row is asked in several parts
    found = collect(model, tokens_NT, exit_rule=exit_rule, threshold=threshold, layers=layers, prompt=4)  # type: ignore[arg-type]
    assert (found.deepest, found.source) == (3, exit_rule)
    assert found.label.startswith(exit_rule)
    assert len({depth for text in found.sequences for depth in text.depths}) > 1
    decoder, last = model.decoder, model.plan.unrolled_layers - 1
    for text, tokens_T in zip(found.sequences, tokens_NT, strict=True):
        states = decoder.states(tokens_T[None], at=(1, 3))
        assert (text.prompt, len(text.depths)) == (4, 24 - 3)
        for position, depth in enumerate(text.depths, start=3):
            at = [states[index][0, position][None] for index in (1, 3, last)]
            logits = [decoder.exit_logits(x, index) for x, index in zip(at, (1, 3, last), strict=True)]
            if exit_rule == "oracle":
                leaves = [bool(one.argmax() == logits[-1].argmax()) for one in logits]
            else:
                leaves = [float(MEASURES["gap"](AtExit(at[0], at[0], one))) > threshold for one in logits[:2]] + [True]
            assert depth == leaves.index(True) + 1


def test_thresholds_at_their_ends() -> None:
    model = build("vanilla")
    tokens_NT = rows(model.architecture.vocab)
    assert collect(model, tokens_NT, exit_rule="confidence", threshold=0.0, layers=(2, 4)).mean_depth == 1.0
    assert collect(model, tokens_NT, exit_rule="confidence", threshold=1.0, layers=(2, 4)).mean_depth == 3.0


def test_a_routers_own_depths() -> None:
    model = model_of(routed())
    tokens_NT = some_tokens(2, 20)
    found = collect(model, tokens_NT, exit_rule="router")
    for text, tokens_T in zip(found.sequences, tokens_NT, strict=True):
        trace = RoutingTrace()
        with torch.no_grad():
            model.decoder.states(tokens_T[None], causal=True, trace=trace)
        assert trace.depths_BT is not None
        assert list(text.depths) == trace.depths_BT[0].tolist()
    assert (found.deepest, found.source) == (model.plan.recursions, "router")
    assert len({depth for text in found.sequences for depth in text.depths}) > 1


def test_where_tokens_may_leave() -> None:
    assert exits_of(build("vanilla").plan, None) == (2,)
    assert exits_of(build("encoding").plan, None) == build("encoding").plan.recursion_ends()
    assert exits_of(build("vanilla").plan, (4, 2, 2)) == (1, 3)
    with pytest.raises(OptionError, match="must be between 1 and 5"):
        exits_of(build("vanilla").plan, (6,))
    with pytest.raises(OptionError, match="no recursions to exit after"):
        exits_of(build("gemma3").plan, None)
    with pytest.raises(OptionError, match="the model has no router"):
        collect(build("vanilla"), rows(90), exit_rule="router")
    with pytest.raises(OptionError, match="the model's router chooses depths"):
        collect(model_of(routed()), some_tokens(1, 8), exit_rule="oracle")
    with pytest.raises(OptionError, match="--prompt must be from 1 to 23"):
        collect(build("vanilla"), rows(90), exit_rule="oracle", prompt=24)
