"""Sweeps: each setting decodes as it alone would, costs what ran, and is worth what a slow count says."""

from __future__ import annotations

import math

import pytest
import torch

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.cost import count
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate import frontier as module
from fathomlm.lab.evaluate.frontier import (
    FULL_DEPTH,
    DecodedSweep,
    SweepPoint,
    TradeOffCurve,
    area,
    build_curve,
    decode_settings,
    frontier,
    sweep_settings,
    threshold_settings,
)
from fathomlm.lab.evaluate.qualities import agreement, perplexities, text_metric
from fathomlm.lab.evaluate.samples import Sample, find_metric
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder, predict
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from lab.evaluate.evaluate_models import model_of
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[1, 2, 3, 4], [70, 80, 90]]
SAMPLING = Sampling(max_new_tokens=5, ignore_eos=True)
TEXTS = ["six feet deep", "a line of lead"]


def test_settings_end_with_the_whole_model():
    looped = model_of("looped").plan
    assert [each.value for each in sweep_settings(looped, "depth", None)] == [1, 2, None]
    assert [each.value for each in sweep_settings(looped, "exit-layer", None)] == [2, 4, None]
    assert [each.value for each in sweep_settings(model_of("plain").plan, "exit-layer", None)] == [1, 2, 3, 4, 5, None]
    found = threshold_settings(model_of("plain").plan, (0.5, 0.1), exit_layer=2)
    assert [(each.value, each.kind) for each in found] == [(0.1, "sweep"), (0.5, "sweep"), (None, "full")]


def test_thresholds_share_an_engine_and_one_setting_of_the_reference_makes_all_so(monkeypatch):
    """Times of the engine and of the reference are not compared."""
    made, plain = [], model_of("plain")
    built = module.EngineSession
    monkeypatch.setattr(module, "EngineSession", lambda *given: made.append(given) or built(*given))
    settings = threshold_settings(plain.plan, (0.0, 0.2, 1.0), exit_layer=2)
    fast = decode_settings(plain, PROMPTS, SAMPLING, settings, repeats=1)
    assert len(made) == 2
    slow = decode_settings(plain, PROMPTS, SAMPLING, settings, repeats=1, reference=True)
    for ours, wanted in zip(fast, slow, strict=True):
        assert [one.tokens for one in ours.results] == [one.tokens for one in wanted.results]
        assert [one.exit_layers for one in ours.results] == [one.exit_layers for one in wanted.results]
        assert ours.flops_per_token == pytest.approx(wanted.flops_per_token)
    looped = model_of("looped")
    decode_settings(looped, PROMPTS, SAMPLING, sweep_settings(looped.plan, "depth", None), repeats=1)
    assert len(made) == 2


def test_the_smallest_setting_that_keeps_99_percent():
    def point(kind, value, score):
        rest = dict.fromkeys(("quality", "ms_per_token", "relative_latency", "flops_per_token", "relative_flops"), 1.0)
        return SweepPoint(name=f"{value}", kind=kind, value=value, score=score, exit_rate=None, mean_exit_layer=None, **rest)

    points = [point("sweep", value, score) for value, score in ((0.0, 0.2), (0.3, 0.396), (0.6, 0.39), (1.0, 0.4))]
    points += [point("full", None, 0.4), point("adaptive", 0.1, 0.5)]
    curve = TradeOffCurve(model="m", plan="p", points=tuple(points), latency_area=0, flops_area=0)
    assert curve.kept is points[1]
    assert curve.to_dict()["keeps_99"] == "0.3"
    assert (
        TradeOffCurve(model="m", plan="p", points=tuple(points[:1] + points[4:]), latency_area=0, flops_area=0).kept is None
    )


def test_settings_that_a_model_does_not_have():
    plain, expert = model_of("plain").plan, model_of("expert").plan
    with pytest.raises(OptionError, match="requires a looped model"):
        sweep_settings(plain, "depth", None)
    with pytest.raises(OptionError, match="a routed model has no exits"):
        sweep_settings(expert, "exit-layer", None)
    with pytest.raises(OptionError, match="cannot be combined with a router"):
        threshold_settings(expert, (0.5,), exit_layer=1)
    with pytest.raises(OptionError, match="has no exits of its own"):
        threshold_settings(plain, (0.5,))
    with pytest.raises(OptionError, match="unknown decoding mode 'static'"):
        threshold_settings(plain, (0.5,), mode="static", exit_layer=1)


def test_texts_are_those_of_each_setting_alone_and_flops_what_ran():
    model = model_of("plain")
    settings = sweep_settings(model.plan, "exit-layer", "2,4")
    found = decode_settings(model, PROMPTS, SAMPLING, settings, repeats=2)
    for setting, each in zip(settings, found, strict=True):
        alone = [generate(model, [prompt], SAMPLING, exiting=setting.exiting)[0].tokens for prompt in PROMPTS]
        assert [result.tokens for result in each.results] == alone
        assert each.ms_per_token > 0
    whole = found[-1].flops_per_token
    assert [each.flops_per_token / whole for each in found] == pytest.approx([2 / 6, 4 / 6, 1])


def test_copied_states_run_fewer_layers_and_parallel_all_of_them():
    model = model_of("plain")
    for mode, least in (("state-copy", 2 / 6), ("parallel", 1.0)):
        settings = threshold_settings(model.plan, (0.0, 1.0), mode=mode, exit_layer=2)
        always, never, whole = (
            each.flops_per_token for each in decode_settings(model, PROMPTS, SAMPLING, settings, repeats=1)
        )
        assert always / whole == pytest.approx(least)
        assert never / whole == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["looped", "expert"])
def test_flops_of_depths(name):
    model = model_of(name)
    settings = sweep_settings(model.plan, "depth", None)
    found = decode_settings(model, PROMPTS, SAMPLING, settings, repeats=1)
    flops = [each.flops_per_token for each in found]
    assert flops == sorted(flops)
    R = model.plan.recursions
    shallow = count(model.architecture, model.plan, relaxation=model.relaxation, capacity=[1.0] + [0.0] * (R - 1), context=8)
    assert flops[0] == pytest.approx(shallow.forward_flops_per_token, rel=0.02)  # contexts are 8 or 9 tokens


def test_agreement_is_a_count_behind_the_same_text():
    model = model_of("plain")
    full = generate(model, PROMPTS, SAMPLING)
    assert agreement(model, full) == (1.0, 1.0)
    early = generate(model, PROMPTS, SAMPLING, exiting=Exiting(mode="static", exit_layers=(2,)))
    same = 0
    for result in early:
        text = list(result.prompt_tokens)
        for token in result.tokens:
            (chosen,) = generate(model, [text], max_new_tokens=1)
            same += chosen.tokens[0] == token
            text.append(token)
    assert agreement(model, early)[0] == pytest.approx(same / 10)
    assert same < 10


def test_perplexities_of_outputs_are_those_of_eval_ppl():
    model = model_of("looped")
    settings = sweep_settings(model.plan, "depth", None)
    found = perplexities(model, settings, TEXTS)
    slow = predict(Scorer(model, [setting.output for setting in settings]), TextEncoder(model), TEXTS)
    assert [quality for quality, _ in found] == pytest.approx([each.perplexity for each in slow], rel=1e-5)
    assert [score for _, score in found] == pytest.approx([math.exp(-each.nats_per_token) for each in slow], rel=1e-5)


@torch.no_grad()
def test_perplexities_of_thresholds_lie_between_exit_and_end():
    model = model_of("plain")
    settings = threshold_settings(model.plan, (0.0, 0.02, 1.0), exit_layer=2)
    always, between, never, full = (quality for quality, _ in perplexities(model, settings, TEXTS))
    exits = sweep_settings(model.plan, "exit-layer", "2")
    early, late = (quality for quality, _ in perplexities(model, exits, TEXTS))
    assert (always, never, full) == pytest.approx((early, late, late), rel=1e-5)
    nats, left, tokens = 0.0, 0, 0
    encoder = TextEncoder(model)
    for text in encoder.encode_plain(TEXTS):  # the slow way: every token behind its own prefix
        row = [encoder.prefix, *text]
        for end in range(1, len(row)):
            states = model.decoder.states(torch.tensor([row[:end]]), at={1})
            early_V, late_V = (model.decoder.exit_logits(states[index][0, -1], index).softmax(-1) for index in (1, 5))
            first, second = early_V.topk(2).values
            leaves = bool(first - second > 0.02)
            nats -= math.log(float((early_V if leaves else late_V)[row[end]]))
            left, tokens = left + leaves, tokens + 1
    assert 0 < left < tokens
    assert between == pytest.approx(math.exp(nats / tokens), rel=1e-4)


def test_a_metric_of_texts():
    (result,) = generate(model_of("plain"), [PROMPTS[0]], SAMPLING)
    right = Sample(prompt="", references=(result.text.strip(),), where="row 1", source="")
    assert text_metric("squad", find_metric("squad"), [right], [result])[1] in (0.0, 1.0)
    wrong = Sample(prompt="", references=("something else",), where="row 1", source="")
    assert text_metric("squad", find_metric("squad"), [wrong], [result]) == (0.0, 0.0)


def test_area_and_frontier_by_hand():
    assert area([(0.5, 0.4), (1.0, 1.0)]) == pytest.approx(0.2)
    assert area([(0.25, 0.8), (0.5, 0.4), (1.0, 1.0), (1.5, 9.0)]) == pytest.approx(0.6)
    assert area([(0.0, 1.0)]) == 1.0
    assert area([(1.0, 1.0)]) == 0.0
    assert frontier([(0.25, 0.8), (0.5, 0.4), (0.5, 0.8), (1.0, 1.0)]) == [True, False, False, True]


def test_costs_are_stated_against_the_reference():
    model = model_of("plain")
    results = tuple(generate(model, PROMPTS, SAMPLING))
    half, whole = (DecodedSweep(results=results, seconds=seconds, flops_per_token=100 * seconds) for seconds in (1.0, 2.0))
    curve = build_curve("m", "6 layers", [FULL_DEPTH], [half], [(3.0, 0.5)], reference=whole)
    (point,) = curve.points
    assert (point.relative_latency, point.relative_flops, point.exit_rate) == (0.5, 0.5, None)
    assert point.ms_per_token == 1000 / 8
    assert curve.latency_area == curve.flops_area == 0.25
    assert curve.to_dict()["points"][0]["quality"] == 3.0


def test_completions_that_came_at_once_cannot_be_timed():
    whole = DecodedSweep(results=tuple(generate(model_of("plain"), PROMPTS, SAMPLING)), seconds=0.0, flops_per_token=1.0)
    with pytest.raises(DataError, match="came at once"):
        build_curve("m", "6 layers", [FULL_DEPTH], [whole], [(3.0, 0.5)], reference=whole)


def test_a_frontier_of_no_repeats_is_refused():
    with pytest.raises(OptionError, match=">= 1"):
        decode_settings(model_of("plain"), PROMPTS, SAMPLING, [FULL_DEPTH], repeats=0)


def test_an_encoder_decoder_agrees_with_itself_behind_its_own_source(tmp_path):
    write_tiny_t5("flan-t5", tmp_path)
    model = load(tmp_path)
    assert isinstance(model, FathomForSeq2SeqLM)
    settings = sweep_settings(model.plan, "exit-layer", "1")
    early, full = decode_settings(model, [[5, 6, 7], [9, 8]], SAMPLING, settings, repeats=1)
    assert agreement(model, full.results) == (1.0, 1.0)
    assert agreement(model, early.results)[0] < 1
    assert early.flops_per_token / full.flops_per_token == pytest.approx(1 / model.plan.unrolled_layers)
