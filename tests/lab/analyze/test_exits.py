"""Every layer as an exit: what a slow walk over prefixes says too, and times that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.breakdown import PARTS, measure_times
from fathomlm.lab.analyze.exits import ExitNumbers, check_exits, complete, measure
from fathomlm.lab.analyze.exits_report import fit_table, layer_table, time_table
from fathomlm.lab.bench.timed import StageClock
from fathomlm.lab.token_rows import TokenRows, find, read_rows
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from lab.analyze.tiny import model_of, text_file
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    return model_of(None)


@pytest.fixture(scope="module")
def rows(model: FathomForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return read_rows(find([text_file(tmp_path_factory.mktemp("data"))]), model, context=24, rows=3)


@pytest.fixture(scope="module")
def numbers(model: FathomForCausalLM, rows: TokenRows) -> ExitNumbers:
    return measure(model, rows, layers=(3, 5))


def slow(model: FathomForCausalLM, rows: TokenRows) -> dict[str, Any]:
    """Token by token, each behind its own prefix, in plain Python."""
    L = model.plan.unrolled_layers
    found: dict[str, Any] = {"agree": [0] * L, "right": [0] * L, "loss": [0.0] * L, "cosine": [0.0] * L, "first": [0] * L}
    found |= {"settled": [0] * L, "gaps": {3: [], 5: []}, "oracle": 0.0, "tokens": 0}
    assert rows.targets_NT is not None
    with torch.inference_mode():
        for row, targets in zip(rows.tokens_NT, rows.targets_NT.tolist(), strict=True):
            for end, target in enumerate(targets, start=1):
                states = model.decoder.states(row[None, :end], at=range(L))
                last = states[L - 1][0, -1]
                logits = [model.decoder.exit_logits(states[index][0, -1], index) for index in range(L)]
                chosen = [int(each.argmax()) for each in logits]
                agree = [choice == chosen[-1] for choice in chosen]
                cosines = [float(F.cosine_similarity(states[index][0, -1], last, dim=0)) for index in range(L)]
                for index in range(L):
                    found["agree"][index] += agree[index]
                    found["right"][index] += chosen[index] == target
                    found["loss"][index] -= float(logits[index].log_softmax(-1)[target])
                    found["cosine"][index] += cosines[index]
                first = agree.index(True)
                settled = next(index for index in range(L) if all(agree[index:]))
                found["first"][first] += 1
                found["settled"][settled] += 1
                found["oracle"] += cosines[first]
                found["tokens"] += 1
                for layer in (3, 5):
                    top = logits[layer - 1].softmax(-1).topk(2).values
                    found["gaps"][layer].append((float(top[0] - top[1]), agree[layer - 1]))
    return found


def test_every_layer_is_what_a_slow_walk_says(model: FathomForCausalLM, rows: TokenRows, numbers: ExitNumbers) -> None:
    expected = slow(model, rows)
    many = expected["tokens"]
    assert many == numbers.rows * numbers.context == 72
    fields = {"agree": "agreement", "right": "accuracy", "first": "first", "settled": "settled"}
    for name, field in fields.items():
        assert [getattr(each, field) * many for each in numbers.layers] == pytest.approx(expected[name], abs=1e-6), name
    for name in ("loss", "cosine"):
        values = [getattr(each, name) * many for each in numbers.layers]
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-3), name
    assert numbers.oracle_cosine == pytest.approx(expected["oracle"] / many, abs=1e-4)
    layers = range(1, len(numbers.layers) + 1)
    assert numbers.oracle_layer == pytest.approx(sum(n * c for n, c in zip(layers, expected["first"], strict=True)) / many)
    assert numbers.settled_layer == pytest.approx(
        sum(n * c for n, c in zip(layers, expected["settled"], strict=True)) / many
    )
    assert 1 < numbers.oracle_layer < numbers.settled_layer <= 8
    for fit in numbers.exits:
        for samples, agreed in ((fit.estimator.agree, True), (fit.estimator.disagree, False)):
            gaps = [gap for gap, agrees in expected["gaps"][fit.layer] if agrees == agreed]
            assert samples.count == len(gaps) > 0
            assert samples.mean == pytest.approx(sum(max(gap, 1e-4) for gap in gaps) / len(gaps), abs=1e-5)
        goes = [agreed for gap, agreed in expected["gaps"][fit.layer] if gap > fit.estimator.threshold]
        assert fit.early == pytest.approx(len(goes) / many)
        assert fit.agreed == (pytest.approx(sum(goes) / len(goes)) if goes else None)


def test_the_last_layer_agrees_with_itself(numbers: ExitNumbers) -> None:
    last = numbers.layers[-1]
    assert (last.agreement, last.recursion) == (1.0, None)
    assert last.cosine == last.cosine_agreed == pytest.approx(1.0)
    assert sum(each.first for each in numbers.layers) == pytest.approx(1.0)
    assert [each.recursion for each in numbers.layers] == [None, 1, 1, 2, 2, 3, 3, None]


def test_records_and_tables(numbers: ExitNumbers) -> None:
    whole, short = numbers.to_dict(), numbers.summary()
    assert len(whole["exits"][0]["agree"]["bins"]) == 50
    assert "bins" not in short["exits"][0]["agree"]
    assert short["breakdown"] is None
    assert [row[0] for row in fit_table(numbers)] == ["exit", "layer 3", "layer 5"]
    assert len(layer_table(numbers)) == 9


def test_which_exits_are_shown() -> None:
    plain, looped = DepthPlan.vanilla(12), DepthPlan.build("cycle", 3, 12)
    assert check_exits(plain, None, "gap") == (4, 8)
    assert check_exits(looped, None, "gap") == (4, 8)
    assert check_exits(looped.with_exits([1]), None, "gap") == (2,)
    assert check_exits(plain, (7, 2, 7), "max") == (2, 7)
    for layers, measure_name, message in (
        ((12,), "gap", "must be between 1 and 11 for this model's 12 layers, got 12"),
        (None, "hope", "unknown confidence 'hope'"),
        (None, "gate", "unknown confidence 'gate'"),
        (None, "kl", "unknown confidence 'kl'"),
    ):
        with pytest.raises(OptionError, match=message):
            check_exits(plain, layers, measure_name)
    with pytest.raises(OptionError, match="a routed model has no exits"):
        check_exits(model_of("expert").plan, None, "gap")
    with pytest.raises(OptionError, match="one layer"):
        check_exits(DepthPlan.vanilla(1), None, "gap")


def test_other_confidences(model: FathomForCausalLM, rows: TokenRows) -> None:
    state = measure(model, rows, layers=(3,), confidence="state").exits[0].estimator.agree.mean
    largest = measure(model, rows, layers=(3,), confidence="max").exits[0].estimator.agree.mean
    assert state != pytest.approx(largest)
    with pytest.raises(OptionError, match="requires a trained classifier after layer 3"):
        measure(model, rows, layers=(3,), confidence="classifier")


def test_the_clock_gives_time_to_the_innermost_part() -> None:
    ticks = iter(range(100))
    clock = StageClock(lambda: float(next(ticks)))
    with clock("outer"):  # 0
        with clock("inner"):  # 1 to 2
            pass
        with clock("inner"):  # 3 to 4
            pass
    assert clock.seconds == {"outer": 3.0, "inner": 2.0}
    clock.on = False
    with clock("outer"):
        pass
    assert clock.seconds == {"outer": 3.0, "inner": 2.0}


def test_times_add_up_and_texts_are_those_of_plain_decoding(model: FathomForCausalLM) -> None:
    prompts = [[1, 2, 3], [40, 50, 60]]
    found = measure_times(model, prompts, exits=(3,), threshold=0.02, new_tokens=6)
    assert [mode.name for mode in found.modes] == ["full depth", "state copying", "parallel"]
    full, copied, parallel = found.modes
    assert full.relative == 1.0
    for mode in found.modes:
        assert sum(mode.shares.values()) == pytest.approx(1.0)
        assert mode.tokens == 10
        assert min(mode.shares[part] for part in ("embedding", "attention", "feed-forward", "norms", "cache")) > 0
    assert full.shares["copying"] == full.shares["exit heads"] == full.exit_rate == 0
    assert full.shares["head"] > 0
    assert copied.shares["copying"] > 0
    assert parallel.shares["copying"] == 0
    assert parallel.shares["exit heads"] > 0
    exiting = Exiting(mode="parallel", exit_layers=(3,), threshold=0.02)
    texts = [generate(model, [prompt], max_new_tokens=6, ignore_eos=True, exiting=exiting)[0] for prompt in prompts]
    left = sum(layer < 8 for text in texts for layer in (text.exit_layers or ())[1:])
    assert parallel.exit_rate == pytest.approx(left / 10)
    assert [row[0] for row in time_table(found)[1:10]] == list(PARTS)
    assert not model.decoder.layers[0].attn._forward_hooks  # type: ignore[union-attr]


def test_an_encoder_decoder_is_evaluated_on_what_it_writes(tmp_path: Path) -> None:
    """Greedy text is the last layer's own choice, and its layers are those at which an oracle leaves."""
    write_tiny_t5("t5", tmp_path)
    model = load(tmp_path)
    assert isinstance(model, FathomForSeq2SeqLM)
    sources = [[5, 6, 7, 8, 1], [9, 3, 1]]
    rows = complete(model, sources, 12)
    numbers = measure(model, rows, layers=(1,))
    assert (numbers.rows, numbers.context) == (2, max(len(row.tokens_T) for row in rows))
    assert numbers.layers[-1].accuracy == numbers.layers[-1].agreement == 1.0
    assert all(layer.accuracy == layer.agreement for layer in numbers.layers)
    oracle = generate(model, sources, max_new_tokens=12, exiting=Exiting(mode="oracle", min_exit_layer=1))
    assert [list(text.tokens) for text in oracle] == [row.targets_T.tolist() for row in rows]
    layers = [layer for text in oracle for layer in text.exit_layers or ()]
    assert numbers.oracle_layer == pytest.approx(sum(layers) / len(layers))
    times = measure_times(model, sources, exits=(1,), threshold=0.5, new_tokens=4)
    assert [mode.tokens for mode in times.modes] == [6, 6, 6]
    assert all(mode.shares["attention"] > 0 for mode in times.modes)
