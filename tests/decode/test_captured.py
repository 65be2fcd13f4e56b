"""Captured decoding gives the tokens of the slow modes, and the same exits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fathomlm.decode.captured import CapturedDecoder
from fathomlm.decode.confidence import AtExit, gap
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import OptionError
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from pairwise import in_turn

SHAPE: dict[str, Any] = {
    "family": "llama", "layers": 6, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 61,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "looped, lora": {"recursions": 2, "relax": "lora"},
    "windows": {"windows": (4, None) * 3},
    "prefix": {"recursions": 2, "relax": "prefix"},
    "shared kv": {"recursions": 2, "kv": "share"},
    "own layers": {"exits": (0, 1, 3)},
    "own layers, windows": {"exits": (1,), "windows": (4, None) * 3},
}
NEW = 10


@cache
def tiny(kind: str) -> FathomForCausalLM:
    given = dict(KINDS[kind])
    recursions, relax, kv = given.pop("recursions", 1), given.pop("relax", None), given.pop("kv", "cache")
    exits = given.pop("exits", ())
    architecture = Architecture(**SHAPE, **given)
    rank, length = (4 if relax == "lora" else None), (3 if relax == "prefix" else None)
    relaxation = build_relaxation(architecture.linears(), relax, rank, length)
    plan = DepthPlan.build("cycle", recursions, 6).with_kv(kv).with_exits(exits, layer=bool(exits))
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation))
    generator = torch.Generator().manual_seed(0)
    model.decoder.reset_parameters(std=0.3, generator=generator)
    for parameter in model.decoder.deltas.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.eval()


def slowly(model: FathomForCausalLM, prompt: list[int], exiting: Exiting, new: int = NEW) -> tuple[list[int], list[int]]:
    (found,) = generate(model, [prompt], max_new_tokens=new, ignore_eos=True, exiting=exiting)
    assert found.exit_layers is not None
    return list(found.tokens), list(found.exit_layers)


@cache
def thresholds(kind: str) -> list[float]:
    """0, 1, and two between which tokens really leave and stay."""
    always = Exiting(mode="parallel", exit_layers=(2,), threshold=0.0)
    (found,) = generate(tiny(kind), [[3, 1, 4, 1, 5]], max_new_tokens=20, ignore_eos=True, exiting=always)
    assert found.confidences is not None
    sure = torch.tensor(found.confidences)
    return [0.0, float(sure.quantile(0.3)), float(sure.quantile(0.7)), 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["full", "static", "state-copy", "parallel", "speculative"])
def test_tokens_and_exits_are_those_of_the_slow_mode(kind: str, mode: Any) -> None:
    model, prompt = tiny(kind), [3, 1, 4, 1, 5]
    captured = {stack: CapturedDecoder(model.decoder, length=64, exit_layers=2, max_stack=stack) for stack in (1, 5)}
    mixed = False
    stacked = mode in ("parallel", "speculative")
    chosen = in_turn(thresholds(kind), (1, 5), list(KINDS).index(kind)) if stacked else []
    if not stacked:
        chosen = [(threshold, 5) for threshold in (thresholds(kind) if mode == "state-copy" else [None])]
    for threshold, stack in chosen:
        bound = {"max_stack": stack} if stacked else {}
        layers = {} if mode == "full" else {"exit_layers": (2,)}
        exiting = Exiting(mode=mode, threshold=threshold, **layers, **bound)
        tokens, exits = slowly(model, prompt, exiting)
        found = captured[stack].generate(prompt, exiting, NEW)
        assert found.tokens == tokens
        assert found.exit_layers == exits
        mixed |= set(exits) == {2, 6} or found.drafted > 0
    assert mixed or mode in ("full", "static")


@pytest.mark.parametrize("kind", ["plain", "own layers"])
@pytest.mark.parametrize("mode", ["full", "parallel", "speculative"])
def test_packed_weights_choose_the_same_tokens(mode: Any, kind: str) -> None:
    model, prompt = tiny(kind), [3, 1, 4, 1, 5]
    given: dict[str, Any] = {} if mode == "full" else {"exit_layers": (2,), "threshold": thresholds(kind)[1]}
    plain, packed = (CapturedDecoder(model.decoder, length=64, exit_layers=2, pack=pack) for pack in (False, True))
    assert packed.steps._packed is not None
    assert len(packed.steps._packed) == 6 + (kind == "own layers"), "of the one exit only"
    wanted = plain.generate(prompt, Exiting(mode=mode, **given), NEW)
    found = packed.generate(prompt, Exiting(mode=mode, **given), NEW)
    assert (found.tokens, found.exit_layers) == (wanted.tokens, wanted.exit_layers)


@pytest.mark.parametrize("kind", ["plain", "own layers"])
def test_several_exits_are_those_of_the_slow_mode(kind: str) -> None:
    model, prompt = tiny(kind), [3, 1, 4, 1, 5]
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=(1, 2, 4))
    seen: set[int] = set()
    for threshold in thresholds(kind):
        exiting = Exiting(mode="state-copy", exit_layers=(1, 2, 4), threshold=threshold)
        found = captured.generate(prompt, exiting, 28)
        assert (found.tokens, found.exit_layers) == slowly(model, prompt, exiting, 28)
        seen |= set(found.exit_layers)
    assert seen == {1, 2, 4, 6}


@pytest.mark.parametrize("mode", ["parallel", "speculative"])
def test_an_estimator_learns_what_it_learns_slowly(mode: Any) -> None:
    model = tiny("plain")
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=2)
    estimators = [ThresholdEstimator(ThresholdOptions(rule="thesis", initial=0.05, least=5)) for _ in range(2)]
    for prompt in ([3, 1, 4], [1, 5, 9, 2], [6]):
        fast, slow = (Exiting(mode=mode, exit_layers=(2,), threshold=estimator) for estimator in estimators)
        assert captured.generate(prompt, fast, NEW).tokens == slowly(model, prompt, slow)[0]
    assert estimators[0].history[-1].threshold != 0.05
    assert [(h.agreements, h.disagreements) for h in estimators[0].history] == [
        (h.agreements, h.disagreements) for h in estimators[1].history
    ]
    assert estimators[0].threshold == pytest.approx(estimators[1].threshold, abs=2e-3)


@pytest.mark.parametrize(("stack", "kind"), [(1, "plain"), (2, "own layers"), (5, "plain"), (5, "own layers")])
def test_a_cycle_is_what_the_host_would_have_done_step_by_step(kind: str, stack: int, monkeypatch: Any) -> None:
    """Also where drafts meet an end, and at the end of the room. Any token may be an end that is drafted and never kept, so
    those that were never kept are ends too, a quarter of them at a time."""
    model, prompt = tiny(kind), [3, 1, 4, 1, 5]
    exiting = Exiting(mode="speculative", exit_layers=(2,), threshold=0.0, max_stack=stack)
    captured = CapturedDecoder(model.decoder, length=len(prompt) + NEW, exit_layers=2, max_stack=stack)
    whole = captured.generate(prompt, exiting, NEW).tokens
    never_kept = [token for token in range(61) if token not in whole]
    cases: list[tuple[int, set[int]]] = [
        (NEW, set()),
        (NEW - 1, set()),
        *((NEW, {token}) for token in sorted(set(whole))[::2]),
    ]
    cases += [(NEW, set(never_kept[first::4])) for first in range(4)]
    found = [captured.generate(prompt, exiting, most, ends) for most, ends in cases]
    assert captured.steps._recorded.keys() == {("cycle", 0, False)}
    monkeypatch.setattr("fathomlm.decode.captured._recorded_mode", lambda exiting: exiting.mode)
    for (most, ends), fast in zip(cases, found, strict=True):
        slow = captured.generate(prompt, exiting, most, ends)
        fields = ("tokens", "exit_layers", "confidences", "deep_passes", "drafted", "judged", "accepted")
        for name in fields:
            assert getattr(fast, name) == getattr(slow, name), name


def test_drafts_are_both_kept_and_replaced() -> None:
    """Or the comparison above would not see both."""
    model, prompt = tiny("plain"), [3, 1, 4, 1, 5]
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=2)
    found = captured.generate(prompt, Exiting(mode="speculative", exit_layers=(2,), threshold=0.0), NEW)
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize("kind", ["plain", "own layers"])
def test_waiting_tokens_get_their_exact_entries(kind: str) -> None:
    model, prompt = tiny(kind), [3, 1, 4, 1, 5]
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=2, max_stack=4)
    threshold = thresholds(kind)[1]
    found = captured.generate(prompt, Exiting(mode="parallel", exit_layers=(2,), threshold=threshold, max_stack=4), NEW)
    whole = CapturedDecoder(model.decoder, length=64, exit_layers=2)
    whole.generate([*prompt, *found.tokens], Exiting(mode="full"), 1)
    last = max(at for at, layer in enumerate(found.exit_layers) if layer == len(model.plan.steps))
    assert 2 in found.exit_layers[:last], "or nothing has waited"
    slots = len(prompt) + last  # what waits at the end stays behind: nothing is decoded after it
    for step in (*model.plan, *model.plan.exit_steps((1,))):
        for one, other in zip(captured.steps.cache.entries(step), whole.steps.cache.entries(step), strict=True):
            near = 1e-5 * float(other.abs().max())
            torch.testing.assert_close(one[:, :slots], other[:, :slots], rtol=1e-5, atol=near)


def test_what_waits_at_the_end_of_a_text_takes_no_pass() -> None:
    """Unless it is to be learnt from."""
    model = tiny("plain")
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=2, max_stack=4)
    always = Exiting(mode="parallel", exit_layers=(2,), threshold=0.0, max_stack=4)
    found = captured.generate([3, 1, 4], always, 10)
    assert (len(found.tokens), found.deep_passes, found.left_waiting) == (10, 2, 2)
    assert captured.generate([3, 1, 4], always, 10).tokens == found.tokens, "what stayed behind is forgotten"
    estimator = ThresholdEstimator(ThresholdOptions(rule="thesis", initial=0.0))
    learning = Exiting(mode="parallel", exit_layers=(2,), threshold=estimator, max_stack=4)
    assert captured.generate([3, 1, 4], learning, 10).deep_passes == 3


def test_a_row_begins_anew_each_time_and_ends_at_an_end_token() -> None:
    model = tiny("plain")
    captured = CapturedDecoder(model.decoder, length=64, exit_layers=2)
    exiting = Exiting(mode="speculative", exit_layers=(2,), threshold=0.05)
    first = captured.generate([7, 7], exiting, 20)
    captured.generate([1, 2, 3], exiting, 20)
    assert captured.generate([7, 7], exiting, 20).tokens == first.tokens
    end = first.tokens[9]
    assert captured.generate([7, 7], exiting, 20, ends={end}).tokens == first.tokens[: first.tokens.index(end) + 1]


def test_the_gap_is_the_slow_ones_to_the_last_bit() -> None:
    logits = 3 * torch.randn(50, 61)
    logits[7, 3] = logits[7].max()  # two likeliest
    state = torch.zeros(50, 1)
    choice, sure = best_and_gap(logits)
    assert torch.equal(sure, gap(AtExit(state, state, logits)))
    assert torch.equal(choice, logits.argmax(-1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exiting": Exiting(mode="oracle", exit_layers=(2,))}, "not oracle"),
        ({"exiting": Exiting(mode="parallel", exit_layers=(3,))}, "exit after layer 2"),
        ({"exiting": Exiting(mode="parallel", exit_layers=(2,), refine=1.0)}, "without refinement"),
        ({"exiting": Exiting(mode="parallel", exit_layers=(2,), max_stack=3)}, "a stack of 16"),
        ({"exiting": Exiting(mode="parallel", exit_layers=(2,), confidence="max")}, "'gap'"),
        ({"prompt": []}, "no token"),
        ({"prompt": [1] * 60}, "do not fit"),
    ],
)
def test_what_it_cannot_do_is_refused(given: dict[str, Any], message: str) -> None:
    captured = CapturedDecoder(tiny("plain").decoder, length=64, exit_layers=2)
    with pytest.raises(OptionError, match=message):
        captured.generate(given.get("prompt", [1, 2]), given.get("exiting", Exiting(mode="full")), 10)


@pytest.mark.parametrize("given", [{"exit_layers": 6}, {"exit_layers": 0}, {"max_stack": 0}, {"length": 1}])
def test_bad_sizes_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        CapturedDecoder(tiny("plain").decoder, **{"length": 64} | given)
