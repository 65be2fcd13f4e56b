"""Drafts that the whole model judges: speculative decoding is lossless, refinement as strict as its limit says."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from decode.exit_models import MAIN, NEW, PROMPTS, SAMPLED, build, exit_layer, exiting, mixed, mixing_threshold, tokens, told
from fathomlm.decode import early_exit, parallel_decoding
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Generation, generate
from fathomlm.decode.logits import sampling_probabilities, seen_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from pairwise import cover
from random_weights import randomise

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def full_run(name: str, penalty: float = 1.0) -> list[tuple[int, ...]]:
    """The tokens of full greedy decoding: computed once, read only."""
    return tokens(generate(build(name), PROMPTS, max_new_tokens=NEW, repetition_penalty=penalty))


@cover(name=MAIN, max_stack=(1, 4, 16), penalty=(1.0, 1.5))
def test_speculative_is_full_greedy_decoding(name: str, max_stack: int, penalty: float) -> None:
    full = full_run(name, penalty)
    drafted = accepted = 0
    for threshold in (0.0, mixing_threshold(name, 0.5), 1.0):
        setting = exiting(name, "speculative", threshold=threshold, max_stack=max_stack)
        got = generate(build(name), PROMPTS, max_new_tokens=NEW, repetition_penalty=penalty, exiting=setting)
        assert tokens(got) == full
        for result in got:
            assert result.exits is not None
            drafted, accepted = drafted + result.exits.drafted, accepted + result.exits.accepted
            assert result.agreements is not None
            assert None not in result.agreements
            for layer, agreed in zip(result.exit_layers or (), result.agreements, strict=True):
                assert agreed or layer == 6, "only what the whole model would have chosen is kept"
    assert 0 < accepted < drafted


TINY = Architecture(
    family="llama", layers=3, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=5, context=32,
    tied_embeddings=False,
)  # fmt: skip
FILTERS: dict[str, Any] = {"temperature": 1.2, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.3}
ROWS, LENGTH, START = 500, 3, [2]


@pytest.fixture(scope="module")
def tiny() -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(TINY, DepthPlan.vanilla(3), dtype=torch.float32)).eval()
    randomise(model, 1, std=lambda key: 0.8 if "embed" in key else 0.4 if "head" in key else 0.2)
    return model


@torch.inference_mode()
def exact(model: FathomForCausalLM, sampling: Sampling, layers: int = 3) -> dict[tuple[int, ...], float]:
    """The probability of every text, from plain passes over every beginning."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, p in found.items():
            before = [*START, *text]
            state_M = model.decoder.states(torch.tensor([before]), at=[layers - 1])[layers - 1][:, -1]
            seen = seen_tokens(sampling, [before], 5, state_M.device)
            next_V = sampling_probabilities(model.decoder.exit_logits(state_M, layers - 1), sampling, seen)[0]
            longer |= {(*text, token): p * q for token, q in enumerate(next_V.tolist())}
        found = longer
    return found


def drawn(model: FathomForCausalLM, setting: Exiting, monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Many texts in one batch, each row with a seed of its own."""
    seeds = torch.randint(0, 2**62, (ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    seeded = [torch.Generator().manual_seed(seed) for seed in seeds]
    monkeypatch.setattr(early_exit, "row_generators", lambda *_: seeded)
    return generate(model, [START] * ROWS, max_new_tokens=LENGTH, ignore_eos=True, exiting=setting, **FILTERS)


def distance(results: list[Generation], expected: dict[tuple[int, ...], float]) -> float:
    """How far the chi-square statistic is above its mean, in standard deviations. Texts that are expected less than five
    times are counted as one."""
    counts = Counter(tokens(results))
    cells = {text: p * ROWS for text, p in expected.items()}
    rare = [text for text, much in cells.items() if much < 5]
    pairs = [(counts[text], much) for text, much in cells.items() if much >= 5]
    pairs.append((sum(counts[text] for text in rare), max(1.0, sum(cells[text] for text in rare))))
    free = len(pairs) - 1
    return (sum((count - much) ** 2 / much for count, much in pairs) - free) / math.sqrt(2 * free)


FAR = 4.0
"""By chance less than once in a thousand times; the seeds are fixed."""


@pytest.mark.parametrize(("threshold", "max_stack"), [(0.0, 2), (0.3, 16)])
def test_samples_are_distributed_as_the_whole_models(
    tiny: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch, threshold: float, max_stack: int
) -> None:
    setting = Exiting(mode="speculative", exit_layers=(1,), threshold=threshold, max_stack=max_stack)
    results = drawn(tiny, setting, monkeypatch)
    assert distance(results, exact(tiny, Sampling(**FILTERS))) < FAR
    drafts = sum(result.exits.drafted for result in results if result.exits)
    kept = sum(result.exits.accepted for result in results if result.exits)
    assert 0 < kept < drafts
    assert threshold != 0.3 or mixed(results)


def test_the_test_would_see_a_missing_correction(tiny: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, shallow = exact(tiny, Sampling(**FILTERS)), exact(tiny, Sampling(**FILTERS), layers=1)
    setting = Exiting(mode="speculative", exit_layers=(1,), threshold=0.0)
    assert distance(drawn(tiny, Exiting(mode="static", exit_layers=(1,)), monkeypatch), shallow) < FAR
    with monkeypatch.context() as patch:
        patch.setattr(parallel_decoding, "residual", lambda p_V, q_V: p_V)
        assert distance(drawn(tiny, setting, monkeypatch), whole) > 3 * FAR, "replacements from the whole distribution"
    with monkeypatch.context() as patch:
        patch.setattr(parallel_decoding, "verified", lambda seq, waiting, logits_V: None)
        assert distance(drawn(tiny, setting, monkeypatch), whole) > 3 * FAR, "every draft accepted"


def test_the_residual_survives_equal_distributions() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert parallel_decoding.residual(p, q).tolist() == pytest.approx([0.3, 0, 0])
    assert parallel_decoding.residual(p, p) is p


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("name", MAIN)
def test_refinement_at_its_ends(name: str, penalty: float) -> None:
    """No surprise allowed is full greedy decoding, any allowed is plain parallel decoding."""
    options = {"max_new_tokens": NEW, "repetition_penalty": penalty}
    threshold = mixing_threshold(name, 0.3)
    strict = exiting(name, "parallel", threshold=threshold, refine=0.0)
    assert tokens(generate(build(name), PROMPTS, exiting=strict, **options)) == full_run(name, penalty)
    lax, plain = (exiting(name, "parallel", threshold=threshold, refine=limit) for limit in (math.inf, None))
    for sampling in ({}, SAMPLED):
        got, expected = (generate(build(name), PROMPTS, exiting=s, **{**options, **sampling}) for s in (lax, plain))
        assert [(r.tokens, r.exit_layers, r.agreements) for r in got] == [
            (r.tokens, r.exit_layers, r.agreements) for r in expected
        ]
        assert mixed(got)


@torch.inference_mode()
@pytest.mark.parametrize("limit", [0.5, 1.5, 4.0])
def test_refinement_keeps_what_surprises_little(limit: float) -> None:
    name = "gemma3"
    model = build(name)
    setting = exiting(name, "parallel", threshold=mixing_threshold(name, 0.2), refine=limit)
    results = generate(model, PROMPTS, max_new_tokens=8, exiting=setting)
    kept = 0
    for result in results:
        start = len(result.prompt_tokens) - 1
        text_BT = torch.tensor([[*result.prompt_tokens, *result.tokens[:-1]]])
        logits_TV = model.decoder.logits(model.decoder(text_BT))[0, start:]
        surprises = -logits_TV.log_softmax(-1)
        for i, (token, layer) in enumerate(zip(result.tokens, result.exit_layers or (), strict=True)):
            best = int(logits_TV[i].argmax())
            assert token == best if layer == 6 else token == best or surprises[i, token] <= limit
            kept += layer < 6 and token != best
        assert result.exits is not None
        assert result.exits.accepted == sum(layer == exit_layer(name) for layer in result.exit_layers or ())
    assert any(result.exits and result.exits.accepted < result.exits.drafted for result in results), "some are replaced"
    assert kept or limit == 0.5, "some are kept though the whole model would have chosen otherwise"


def test_drafts_are_counted_as_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalty at a draft knows the drafts before it, in the exit's distribution and in the whole model's."""
    model, seen = build("vanilla"), []
    real = parallel_decoding.ParallelDecoding._settle

    def spy(self: Any, seq: Any, logits_NV: torch.Tensor, verify: Any) -> None:
        first = seq.stack[0].chosen
        seen.extend(seq._seen(logits_NV[0], waiting.position)[0, first].item() for waiting in seq.stack[1:])
        real(self, seq, logits_NV, verify)

    monkeypatch.setattr(parallel_decoding.ParallelDecoding, "_settle", spy)
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=4)
    got = generate(model, PROMPTS, max_new_tokens=NEW, exiting=setting, **SAMPLED)
    assert seen
    assert all(seen)
    assert told(got) == told(generate(model, PROMPTS, max_new_tokens=NEW, exiting=setting, **SAMPLED))
