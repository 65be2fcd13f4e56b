"""Early exits: what may be asked for, how sure an exit is, the oracle, what an estimator is told, and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fathomlm
from decode.exit_models import LLAMA, LORA, MAIN, NEW, PROMPTS, SAMPLED, build, exiting, mixed, mixing_threshold, tokens
from fathomlm.decode.confidence import AtExit, confidences
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.decode.generation import exit_rate, mean_exit_layer
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.model.route import DepthControl

pytestmark = pytest.mark.usefixtures("one_thread")


class Told:
    """An estimator that writes down what it is told."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.sequences: list[list[tuple[float, bool]]] = []
        self._now: list[tuple[float, bool]] = []

    def observe(self, confidences: Sequence[float], agreements: Sequence[bool]) -> None:
        self._now += zip(confidences, agreements, strict=True)

    def end_sequence(self) -> None:
        self.sequences.append(self._now)
        self._now = []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mode": "paralel"}, "invalid mode 'paralel' .did you mean 'parallel'?"),
    ({"mode": "parallel", "confidence": "sure"}, "invalid confidence 'sure'; choose from gap, max, state, classifier"),
    (
        {"mode": "parallel", "threshold": 1.5},
        "threshold must be between 0 and 1",
    ),
    ({"mode": "parallel", "threshold": math.nan}, "threshold must be between 0"),
    ({"mode": "parallel", "threshold": "0.5"}, "threshold must be between 0"),
    ({"mode": "parallel", "threshold": True}, "threshold must be between 0"),
    ({"mode": "parallel", "refine": -1.0}, "refine must be >= 0, got -1.0"),
    ({"mode": "parallel", "refine": math.nan}, "refine must be a number >= 0"),
    ({"mode": "parallel", "max_stack": 0}, "max_stack must be >= 1, got 0"),
    ({"mode": "parallel", "max_stack": 2.5}, "max_stack must be an integer >= 1"),
    ({"mode": "static", "exit_layers": (0,)}, "exit_layers must be >= 1, got 0"),
    ({"mode": "static", "exit_layers": ()}, "exit_layers must be one or more layers"),
    ({"mode": "oracle", "min_exit_layer": 0}, "min_exit_layer must be >= 1, got 0"),
    ({"mode": "oracle", "exit_layers": (1,), "min_exit_layer": 2}, "cannot be combined"),
    (
        {"mode": "static", "threshold": 0.5},
        "threshold cannot be combined with static decoding, only with state-copy",
    ),
    ({"mode": "full", "exit_layers": (2,)}, "exit_layers cannot be combined with full decoding"),
    ({"mode": "speculative", "refine": 0.1}, "refine cannot be combined with speculative decoding, only with parallel"),
    (
        {"mode": "parallel", "min_exit_layer": 2},
        "min_exit_layer cannot be combined with parallel decoding, only with state-c",
    ),
    ({"mode": "state-copy", "max_stack": 3}, "max_stack cannot be combined with state-copy decoding"),
    ({"mode": "oracle", "threshold": 0.5}, "threshold cannot be combined with the oracle"),
    ({"mode": "oracle-copy", "threshold": 0.5}, "threshold cannot be combined with the oracle"),
    ({"mode": "parallel", "decay": 4.0}, "decay cannot be combined with parallel decoding, only with state-copy"),
    ({"mode": "state-copy", "decay": -1.0}, "decay must be >= 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_setting_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Exiting(**options)


WRONG_FOR_MODEL: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"mode": "parallel"}, "has no exits of its own; give an exit layer: one from 1 to 5, such as 2"),
    ("encoding", {"mode": "static"}, "give an exit layer: 3, where its recursions end, or any other from 1 to 5"),
    (
        "vanilla",
        {"mode": "parallel", "exit_layers": (6,)},
        "exit layers must be between 1 and 5 for this model's 6 layers, got 6",
    ),
    (
        "vanilla",
        {"mode": "oracle", "min_exit_layer": 9},
        "exit layers must be between 1 and 5 for this model's 6 layers, got 9",
    ),
    (
        "vanilla",
        {"mode": "speculative", "exit_layers": (2, 4)},
        "one exit, and here are 2, after layers 2 and 4; name one",
    ),
    (
        "vanilla",
        {"mode": "parallel", "exit_layers": (2, 4), "refine": 1.0},
        "parallel decoding with refine has one exit, and here are 2",
    ),
    (
        "vanilla",
        {"mode": "parallel", "confidence": "classifier"},
        "requires a trained classifier after layer 3; this model",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG_FOR_MODEL, ids=[case[2][:40] for case in WRONG_FOR_MODEL])
def test_a_setting_that_a_model_cannot_have_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    setting = Exiting(**options)
    with pytest.raises(OptionError, match=message):
        generate(build(name), PROMPTS, exiting=setting)
    with pytest.raises(OptionError, match=message):
        Session(build(name), exiting=setting)


def test_what_already_chooses_the_depth_is_refused() -> None:
    plan = DepthPlan.build("cycle", 2, 6).with_routing(build_routing("expert", 2))
    routed = FathomForCausalLM(FathomConfig.of(LLAMA, plan))
    with pytest.raises(OptionError, match="cannot be combined with a router, which already chooses each token's depth"):
        generate(routed, PROMPTS, exiting=Exiting(mode="parallel", exit_layers=(3,)))
    with pytest.raises(OptionError, match="cannot be combined"):
        generate(build("vanilla"), PROMPTS, control=DepthControl(), exiting=Exiting(mode="parallel"))
    single = FathomForCausalLM(FathomConfig.of(LLAMA, DepthPlan.build("cycle", 6, 6)))
    assert Exiting(mode="oracle", min_exit_layer=1).exits(single.plan) == (0, 1, 2, 3, 4)


def test_defaults_are_those_of_the_mode() -> None:
    setting = Exiting(mode="parallel")
    assert (setting.confidence, setting.threshold, setting.max_stack, setting.refine) == ("gap", 0.9, 16, None)
    static = Exiting(mode="static", exit_layers=[4, 2, 4])  # type: ignore[arg-type]
    assert (static.exit_layers, static.threshold, static.confidence) == ((2, 4), None, None)
    assert Exiting(mode="oracle").threshold is None
    assert fathomlm.Exiting is Exiting


def test_the_models_own_exits_are_the_default() -> None:
    for name, layer in (("vanilla", 3), ("lora", 3)):
        named = generate(build(name), PROMPTS, max_new_tokens=6, exiting=Exiting(mode="static", exit_layers=(layer,)))
        own = generate(build(name), PROMPTS, max_new_tokens=6, exiting=Exiting(mode="static"))
        assert tokens(named) == tokens(own)


@torch.inference_mode()
def test_an_exit_adds_its_own_delta_to_the_head() -> None:
    """What training adds at this exit (W h + B A h) and at no other; the last layer's head has none."""
    decoder = build("lora").decoder
    assert LORA.kind == "lora"
    delta = decoder.exit_delta(2)
    assert delta is not None
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    hidden = decoder.norm(x)
    assert torch.allclose(decoder.exit_logits(x, 2), delta(hidden, decoder.head), atol=1e-5)
    assert torch.equal(decoder.exit_logits(x, 5), decoder.logits(hidden))
    assert not torch.allclose(decoder.exit_logits(x, 2), decoder.exit_logits(x, 5), atol=1e-2)


def test_how_sure_an_exit_is() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]])
    before, after = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[3.0, 0.0], [-1.0, 1.0]])
    linear = nn.Linear(2, 1)
    nn.init.constant_(linear.weight, 1.0)
    nn.init.zeros_(linear.bias)
    at = AtExit(before, after, p.log() + 5, linear)
    assert confidences("gap", at) == pytest.approx([0.5, 0.0], abs=1e-6)
    assert confidences("max", at) == pytest.approx([0.7, 0.4], abs=1e-6)
    assert confidences("state", at) == pytest.approx([1.0, 0.0]), "cosines below 0 are no confidence"
    assert confidences("classifier", at) == pytest.approx([1 / (1 + math.exp(-3)), 0.5])


def test_a_trained_classifier_is_asked() -> None:
    model = FathomForCausalLM(FathomConfig.of(LLAMA, DepthPlan.vanilla(6))).eval()
    setting = Exiting(mode="parallel", exit_layers=(2,), confidence="classifier", threshold=0.5)
    with pytest.raises(OptionError, match=r"after layer 2; this model has none\. gap, max and state need no training"):
        generate(model, PROMPTS, max_new_tokens=4, exiting=setting)
    for bias, layer in ((9.0, 2), (-9.0, 6)):
        classifier = nn.Linear(32, 1)
        nn.init.zeros_(classifier.weight)
        nn.init.constant_(classifier.bias, bias)
        model.decoder.exit_classifiers["1"] = classifier
        (result,) = generate(model, PROMPTS[:1], max_new_tokens=4, exiting=setting)
        assert result.exit_layers == (layer,) * 4
        assert result.confidences == pytest.approx([1 / (1 + math.exp(-bias))] * 4)
    with pytest.raises(OptionError, match="after layer 3; this model has them after 2 only"):
        generate(model, PROMPTS, exiting=Exiting(mode="parallel", exit_layers=(3,), confidence="classifier"))


def test_threshold_zero_leaves_even_where_nothing_is_sure() -> None:
    """All scores equal: the gap is exactly 0, which is not above 0, and still every token leaves."""
    model = FathomForCausalLM(FathomConfig.of(LLAMA, DepthPlan.vanilla(6))).eval()
    nn.init.zeros_(model.decoder.head.weight)
    for threshold, layer in ((0.0, 2), (1e-9, 6)):
        setting = Exiting(mode="parallel", exit_layers=(2,), threshold=threshold)
        (result,) = generate(model, PROMPTS[:1], max_new_tokens=3, exiting=setting)
        assert (result.exit_layers, result.confidences) == ((layer,) * 3, (0.0,) * 3)


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.5}, SAMPLED], ids=["greedy", "penalty", "sampled"])
@pytest.mark.parametrize("name", MAIN)
def test_an_oracle_leaves_at_the_earliest_layer_that_agrees(name: str, sampling: dict[str, Any]) -> None:
    model, last = build(name), 5
    results = generate(model, PROMPTS, max_new_tokens=NEW, exiting=Exiting(mode="oracle", min_exit_layer=2), **sampling)
    assert tokens(results) == tokens(generate(model, PROMPTS, max_new_tokens=NEW, **sampling))
    assert all(result.oracle for result in results)
    penalty = sampling.get("repetition_penalty", 1.0)
    for result in results:
        text = [*result.prompt_tokens, *result.tokens[:-1]]
        states = model.decoder.states(torch.tensor([text]), at=range(1, 6))
        for i, layer in enumerate(result.exit_layers or ()):
            slot = len(result.prompt_tokens) - 1 + i
            seen = torch.zeros(96, dtype=torch.bool)
            seen[text[: slot + 1]] = True
            best = {}
            for index, state_BTM in states.items():
                logits = model.decoder.exit_logits(state_BTM[0, slot], index)
                moved = torch.where(logits < 0, logits * penalty, logits / penalty)
                best[index] = int(torch.where(seen, moved, logits).argmax())
            assert layer == 1 + next(index for index in sorted(best) if best[index] == best[last])
            assert result.agreements is not None
            assert result.agreements[i] == (layer <= last)
    assert len({layer for result in results for layer in result.exit_layers or ()}) > 2


def test_rates_and_means() -> None:
    results = generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=exiting("vanilla", "oracle"))
    layers = [layer for result in results for layer in result.exit_layers or ()]
    assert exit_rate(results) == layers.count(3) / len(layers)
    assert mean_exit_layer(results) == sum(layers) / len(layers)
    plain = generate(build("vanilla"), PROMPTS, max_new_tokens=2)
    assert (exit_rate(plain), mean_exit_layer(plain)) == (0, 0)
    assert (plain[0].exit_layers, plain[0].confidences, plain[0].agreements, plain[0].exits) == (None, None, None, None)


@pytest.mark.parametrize("mode", ["parallel", "speculative", "oracle"])
def test_an_estimator_is_told_of_every_token_text_by_text(mode: str) -> None:
    told = Told(mixing_threshold("gemma3"))
    results = generate(build("gemma3"), PROMPTS, max_new_tokens=NEW, exiting=exiting("gemma3", mode, threshold=told))
    assert mixed(results)
    assert told.sequences == [
        list(zip(result.confidences or (), result.agreements or (), strict=True)) for result in results
    ]
    number = exiting("gemma3", mode, **({} if mode == "oracle" else {"threshold": told.threshold}))
    assert tokens(results) == tokens(generate(build("gemma3"), PROMPTS, max_new_tokens=NEW, exiting=number))


def test_an_oracle_tells_of_every_exit_and_copied_states_of_none() -> None:
    told = Told()
    generate(build("vanilla"), PROMPTS, max_new_tokens=5, exiting=Exiting(mode="oracle", exit_layers=(2, 4), threshold=told))
    assert [len(sequence) for sequence in told.sequences] == [10] * len(PROMPTS)
    copying = Told(mixing_threshold("vanilla"))
    setting = exiting("vanilla", "state-copy", threshold=copying)
    results = generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=setting)
    assert copying.sequences == [[]] * len(PROMPTS), "their states are not the whole model's"
    for result in results:
        known = [agreed is not None for agreed in result.agreements or ()]
        assert known == [layer == 6 for layer in result.exit_layers or ()]


def test_a_threshold_is_learnt_from_text_to_text() -> None:
    estimator = ThresholdEstimator(ThresholdOptions(rule="thesis"))
    setting = exiting("gemma3", "parallel", threshold=estimator)
    first = generate(build("gemma3"), PROMPTS, max_new_tokens=20, exiting=setting)
    assert {result.exits.threshold for result in first if result.exits} == {0.9}
    assert (estimator.sequences, estimator.agree.count + estimator.disagree.count) == (3, 60)
    learnt = estimator.threshold
    assert learnt != 0.9
    session = Session(build("gemma3"), exiting=setting)
    reply = session.generate(PROMPTS[0], max_new_tokens=20)
    assert reply.exits is not None
    assert reply.exits.threshold == learnt
    assert estimator.sequences == 4


MODES: list[dict[str, Any]] = [
    {"mode": "static"},
    {"mode": "state-copy", "threshold": 0.05},
    {"mode": "parallel", "threshold": 0.05},
    {"mode": "parallel", "threshold": 0.02, "refine": 1.0, "max_stack": 5},
    {"mode": "speculative", "threshold": 0.02, "max_stack": 4},
    {"mode": "oracle"},
]


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(map(str, options.values())))
def test_text_is_shown_once_it_is_settled(tiny_model: FathomForCausalLM, options: dict[str, Any]) -> None:
    setting = Exiting(exit_layers=(2,), **options)
    prompts = ["the depth of the water", "a fathom", ""]
    shown, steps = ["", "", ""], list[int]()

    def on_text(row: int, piece: str) -> None:
        assert piece
        shown[row] += piece

    free = {"max_new_tokens": 20, "ignore_eos": True, "exiting": setting}
    watched = generate(tiny_model, prompts, on_text=on_text, on_step=steps.append, **free)
    assert [result.text for result in watched] == shown
    for result in watched:
        assert result.text == tiny_model.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert len(result.tokens) == len(result.exit_layers or ()) == 20
        assert result.tokens_per_second > 0
        assert result.prefill_seconds > 0
    assert steps == sorted(steps)
    assert steps[-1] <= 20
    assert [result.text for result in generate(tiny_model, prompts, **free)] == shown
    assert options["mode"] in ("static", "oracle") or mixed(watched)


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(map(str, options.values())))
def test_stop_strings_end_tokens_and_lengths(tiny_model: FathomForCausalLM, options: dict[str, Any]) -> None:
    setting = Exiting(exit_layers=(2,), **options)
    prompts = ["the depth of the water", "a fathom"]
    free = generate(tiny_model, prompts, max_new_tokens=24, ignore_eos=True, exiting=setting)
    text = free[0].text
    stop = next(text[i : i + 3] for i in range(6, len(text)) if text[i : i + 3] not in free[1].text)
    for on_text in (None, lambda row, piece: None):
        first, second = generate(
            tiny_model, prompts, max_new_tokens=24, ignore_eos=True, stop=stop, on_text=on_text, exiting=setting
        )
        assert (first.text, first.finish) == (text[: text.find(stop)], "stop")
        assert first.tokens == free[0].tokens[: len(first.tokens)]
        assert len(first.tokens) == len(first.exit_layers or ()) < 24
        assert (second.tokens, second.finish) == (free[1].tokens, "length")
    for most in (1, 7):
        short = generate(tiny_model, prompts, max_new_tokens=most, ignore_eos=True, exiting=setting)
        assert [(r.tokens, r.finish) for r in short] == [(r.tokens[:most], "length") for r in free]
    at = next(i for i in range(3, 12) if free[0].tokens[i] not in free[0].tokens[:i])
    before = tiny_model.config.eos_token_id
    try:
        tiny_model.config.eos_token_id = free[0].tokens[at]
        ended = generate(tiny_model, prompts[:1], max_new_tokens=24, exiting=setting)[0]
    finally:
        tiny_model.config.eos_token_id = before
    assert (ended.tokens, ended.finish) == (free[0].tokens[: at + 1], "eos")
    assert ended.exit_layers == (free[0].exit_layers or ())[: at + 1]


def test_no_drafts_are_made_past_an_end(tiny_model: FathomForCausalLM) -> None:
    """A draft that would end the text is settled at once: nothing may follow it."""
    setting = Exiting(mode="speculative", exit_layers=(2,), threshold=0.0, max_stack=64)
    (result,) = generate(tiny_model, ["the depth"], max_new_tokens=5, ignore_eos=True, exiting=setting)
    assert result.exits is not None
    assert len(result.tokens) == 5
    assert result.exits.layers_run <= 5 * 4 * 5
