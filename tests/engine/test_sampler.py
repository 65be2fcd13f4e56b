"""Rows of many requests at once: each as if it were alone, greedy and penalties as the reference, bad rows apart."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fathomlm.decode.logits import likeliest, sampling_probabilities, seen_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Request
from fathomlm.engine.sampler import MODES, Mode, Sampled, SamplerState, mode_of, note, sample
from fathomlm.errors import OptionError

VOCAB, SLOTS, TOP = 97, 24, 5
CPU = torch.device("cpu")
PROMPT = (3, 4, 4, 90)


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def state_of(requests: list[Request], penalties: bool = True) -> SamplerState:
    state = SamplerState(SLOTS, VOCAB, CPU, TOP, penalties=penalties)
    for slot, request in enumerate(requests):
        state.place(slot, request)
    return state


def asked(index: int, **options: Any) -> Request:
    names = ("presence_penalty", "frequency_penalty", "logprobs", "logit_bias")
    beside = {name: options.pop(name) for name in names if name in options}
    return Request(id=index, prompt=PROMPT, sampling=Sampling(**options), **beside)


KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.7},
]
MIXED = [asked(i, seed=100 + i, **kind) for i, kind in enumerate(KINDS * 3)]
ALL = torch.arange(len(MIXED))


def fields(sampled: Sampled) -> list[Tensor]:
    return [getattr(sampled, name) for name in Sampled.__dataclass_fields__]


def said_something(state: SamplerState) -> SamplerState:
    for seed in range(4):
        note(torch.randint(0, VOCAB, (len(MIXED),), generator=torch.Generator().manual_seed(seed)), ALL, state)
    return state


# A row alone.


def test_a_batch_is_its_rows_one_by_one() -> None:
    state = said_something(state_of(MIXED))
    logits_NV, steps_N = logits_of(len(MIXED)), ALL * 3
    together = fields(sample(logits_NV, ALL, steps_N, state))
    for n in range(len(MIXED)):
        alone = fields(sample(logits_NV[n : n + 1], ALL[n : n + 1], steps_N[n : n + 1], state))
        assert all(torch.equal(one[0], batch[n]) for one, batch in zip(alone, together, strict=True)), MIXED[n]


def test_neither_order_nor_slot_matters() -> None:
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1))
    logits_NV, steps_N = logits_of(len(MIXED)), ALL + 5
    plain = fields(sample(logits_NV, ALL, steps_N, state_of(MIXED)))
    moved = state_of([MIXED[i] for i in order])  # request order[s] sits in slot s
    shuffled = fields(sample(logits_NV[order], ALL, steps_N[order], moved))
    for before, after in zip(plain, shuffled, strict=True):
        assert torch.equal(before[order], after)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_in_every_mode_that_serves_it(mode: Mode) -> None:
    state, times = said_something(state_of(MIXED)), 20
    slots_N, steps_N = ALL.repeat(times), torch.arange(len(MIXED) * times)
    served = torch.tensor([MODES.index(mode_of(request)) <= MODES.index(mode) for request in MIXED]).repeat(times)
    logits_NV = logits_of(len(slots_N))
    most, this = (sample(logits_NV, slots_N, steps_N, state, mode=m) for m in ("filtered", mode))
    for a, b in zip(fields(most), fields(this), strict=True):
        assert torch.equal(a[served], b[served])
    if mode != "filtered":
        assert bool((most.tokens_N != this.tokens_N)[~served].any()), "the other rows must need more"


def test_rows_without_penalties_are_the_same_with_the_work_left_out() -> None:
    state = said_something(state_of(MIXED))
    free = torch.tensor([not request.penalised for request in MIXED])
    logits_NV = logits_of(len(MIXED))
    heeded, left_out = (sample(logits_NV, ALL, ALL, state, penalise=penalise) for penalise in (True, False))
    assert torch.equal(heeded.tokens_N[free], left_out.tokens_N[free])
    assert not torch.equal(heeded.tokens_N, left_out.tokens_N)


def test_the_state_names_the_least_work() -> None:
    state = SamplerState(4, VOCAB, CPU, TOP, penalties=True)
    seen = [(state.mode, state.penalised, state.alternatives)]
    for slot, options in enumerate([{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}]):
        state.place(slot, asked(slot, **options))
        seen.append((state.mode, state.penalised, state.alternatives))
    state.place(2, asked(3, repetition_penalty=2.0, logprobs=0))
    seen.append((state.mode, state.penalised, state.alternatives))
    state.place(2, asked(4, logprobs=1))
    state.clear([1])
    state.clear([1])
    seen.append((state.mode, state.penalised, state.alternatives))
    assert seen == [
        ("greedy", False, False),
        ("greedy", False, False),
        ("plain", False, False),
        ("filtered", False, False),
        ("plain", True, False),
        ("greedy", False, True),
    ]
    assert mode_of(asked(0, top_k=3, top_p=0.5)) == "greedy", "filters mean nothing at temperature 0"


# What is drawn.


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_frequencies_follow_the_references_chances(options: dict[str, Any]) -> None:
    """4,096 places of one text, over the same scores."""
    options = {name: value for name, value in options.items() if not name.startswith(("presence", "frequency"))}
    request = asked(0, seed=11, **options)
    state, rows = state_of([request]), 4096
    logits_1V = logits_of(1)
    tokens_N = sample(logits_1V.expand(rows, -1), torch.zeros(rows).long(), torch.arange(rows), state).tokens_N
    seen_1V = seen_tokens(request.sampling, [list(PROMPT)], VOCAB, CPU)
    if request.sampling.greedy:
        assert torch.equal(tokens_N, likeliest(logits_1V, request.sampling, seen_1V).expand(rows))
        return
    expected_V = sampling_probabilities(logits_1V, request.sampling, seen_1V)[0]
    counts_V = torch.bincount(tokens_N, minlength=VOCAB)
    assert not counts_V[expected_V == 0].any()
    spread_V = (rows * expected_V * (1 - expected_V)).sqrt()
    assert bool(((counts_V - rows * expected_V).abs() <= 5 * spread_V + 1).all())


def test_seeds_and_places_decide_draws() -> None:
    flat_NV = torch.zeros(6, VOCAB)
    requests = [asked(i, temperature=1.0, seed=seed) for i, seed in enumerate([1, 1, 2])]
    requests += [asked(i, temperature=1.0) for i in (3, 4)]
    state = state_of([*requests, requests[3]])
    texts = torch.stack([sample(flat_NV, torch.arange(6), torch.full((6,), i), state).tokens_N for i in range(30)], 1)
    assert torch.equal(texts[0], texts[1]), "equal seeds"
    assert len({tuple(text) for text in texts.tolist()}) == 4
    assert torch.equal(texts[3], texts[5]), "a request without a seed keeps the one that it was given"
    assert all(len(set(text)) > 15 for text in texts.tolist()), "places differ"


def test_more_candidates_than_tokens_are_no_limit() -> None:
    requests = [asked(i, temperature=1.0, seed=5, top_k=top_k) for i, top_k in enumerate([0, VOCAB, 10**9])]
    tokens_N = sample(torch.zeros(3, VOCAB), torch.arange(3), torch.zeros(3).long(), state_of(requests)).tokens_N
    assert len(set(tokens_N.tolist())) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e300])
def test_extreme_temperatures_still_give_tokens(temperature: float) -> None:
    logits_NV = 1e34 * logits_of(8)
    logits_NV[:, ::2] = -math.inf
    state = state_of([asked(i, temperature=temperature, seed=i, top_p=0.9, min_p=0.1) for i in range(8)])
    got = sample(logits_NV, torch.arange(8), torch.zeros(8).long(), state)
    assert bool((got.tokens_N % 2 == 1).all())
    if temperature < 1:
        assert torch.equal(got.tokens_N, logits_NV.argmax(-1))
    else:
        assert len(set(got.tokens_N.tolist())) > 4


def test_greedy_takes_the_lowest_of_equal_scores() -> None:
    for dtype, at in itertools.product((torch.float32, torch.bfloat16), ([5, 6], [0, 96], [17, 40, 41, 95])):
        logits_NV = logits_of(1).to(dtype)
        logits_NV[0, at] = logits_NV.max() + 1
        for mode in MODES:
            assert sample(logits_NV, ALL[:1], ALL[:1], state_of([asked(0)]), mode=mode).tokens_N.tolist() == at[:1]


# Penalties.


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.7])
def test_repetition_penalty_is_the_references_over_a_whole_text(penalty: float) -> None:
    sampling = Sampling(repetition_penalty=penalty)
    state = state_of([asked(0), asked(1, repetition_penalty=penalty)])
    said = list(PROMPT)
    for step in range(25):
        logits_1V = logits_of(1, seed=step % 3)
        logits_1V[0, [3, 90]] = logits_1V.max() + 0.5  # tokens of the prompt
        got = sample(logits_1V, torch.tensor([1]), torch.tensor([step]), state).tokens_N
        note(got, torch.tensor([1]), state)
        seen_1V = seen_tokens(sampling, [said], VOCAB, CPU)
        assert torch.equal(got, likeliest(logits_1V, sampling, seen_1V))
        said.append(int(got))
    assert (len(set(said)) > 12) == (penalty > 1)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.9), (1.1, 0.3), (-0.4, -0.2)])
def test_presence_and_frequency_count_the_text_and_not_the_prompt(presence: float, frequency: float) -> None:
    state = state_of([asked(0, presence_penalty=presence, frequency_penalty=frequency)])
    logits_1V, said = 0.3 * logits_of(1), []
    logits_1V[0, 4] = logits_1V.max() + 0.01  # a token of the prompt
    for step in range(40):
        got = int(sample(logits_1V, ALL[:1], torch.tensor([step]), state).tokens_N)
        scores = [float(x) - frequency * said.count(v) - presence * (v in said) for v, x in enumerate(logits_1V[0])]
        assert got == max(range(VOCAB), key=lambda v, scores=scores: scores[v])
        note(torch.tensor([got]), ALL[:1], state)
        said.append(got)
    assert said[0] == 4
    assert (len(set(said)) > 3) == (presence + frequency > 0)


def test_a_text_that_was_put_aside_goes_on_as_it_would_have() -> None:
    """Into another slot, in which something else was said before."""
    request = asked(0, temperature=1.2, seed=9, repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=0.5)
    other = asked(1, frequency_penalty=2.0)

    def text(aside_at: int | None) -> list[int]:
        state, slot, tokens = state_of([request, other]), 0, []
        for step in range(30):
            if step == aside_at:
                state.clear([0])
                slot = 1
                state.place(slot, request, tokens)
            both = torch.tensor([slot, 1 - slot])
            got = sample(logits_of(2, seed=step), both, torch.tensor([step, 0]), state).tokens_N
            note(got, both, state)
            tokens.append(int(got[0]))
        return tokens

    assert text(None) == text(0) == text(1) == text(17)


def test_biases_are_added_behind_penalties_and_leave_with_their_request() -> None:
    """The slow twin: the same request without a bias over logits to which it was added."""
    biases = {5: 4.0, 90: -100.0, 96: 2.5}
    kinds = [kind for kind in KINDS if "repetition_penalty" not in kind]
    plain = [asked(i, seed=i, logprobs=2, **kind) for i, kind in enumerate(kinds)]
    biased = [asked(i, seed=i, logprobs=2, logit_bias=biases, **kind) for i, kind in enumerate(kinds)]
    rows_N, logits_NV = torch.arange(len(kinds)), logits_of(len(kinds))
    added_V = torch.zeros(VOCAB).index_put_((torch.tensor(list(biases)),), torch.tensor(list(biases.values())))
    state, other = state_of(biased), state_of(plain)
    assert (state.biased, other.biased) == (True, False)
    found = sample(logits_NV, rows_N, rows_N, state, bias=True)
    assert torch.equal(found.tokens_N, sample(logits_NV + added_V, rows_N, rows_N, other).tokens_N)
    assert not torch.equal(found.tokens_N, sample(logits_NV, rows_N, rows_N, state).tokens_N)
    own_N = logits_NV.log_softmax(-1).gather(-1, found.tokens_N[:, None])[:, 0]
    assert torch.allclose(found.logprobs_N, own_N), "log probabilities are the model's own"
    for slot, request in enumerate(plain):
        state.place(slot, request)
    assert not state.biased
    again = [fields(sample(logits_NV, rows_N, rows_N, one, bias=bias)) for one, bias in ((state, True), (other, False))]
    assert all(torch.equal(one, two) for one, two in zip(*again, strict=True))


def test_rows_of_the_scratch_slot_change_nothing() -> None:
    state, twin = state_of(MIXED), state_of(MIXED)
    note(torch.tensor([5, 5, 6]), torch.tensor([state.scratch] * 3), state)
    logits_NV = logits_of(len(MIXED) + 2)
    with_scratch = sample(logits_NV, torch.tensor([*range(SLOTS), SLOTS, SLOTS]), torch.zeros(SLOTS + 2).long(), state)
    without = sample(logits_NV[:SLOTS], ALL, torch.zeros(SLOTS).long(), twin)
    for a, b in zip(fields(with_scratch), fields(without), strict=True):
        assert torch.equal(a[:SLOTS], b)
    assert torch.equal(with_scratch.tokens_N[SLOTS:], logits_NV[SLOTS:].argmax(-1)), "greedy, without penalties"


def test_a_slot_that_was_cleared_is_as_new() -> None:
    state = state_of(MIXED)
    for slot in range(SLOTS):
        state.clear([slot])
    logits_NV = logits_of(SLOTS)
    assert torch.equal(sample(logits_NV, ALL, ALL, state).tokens_N, logits_NV.argmax(-1))


def test_slots_change_hands_and_the_device_is_told_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are those of whoever is there, whoever was there before; requests that are alike are not told again."""
    draw, state, there = random.Random(0), SamplerState(SLOTS, VOCAB, CPU, TOP, penalties=True), dict[int, Request]()
    for _ in range(200):
        slots = draw.sample(range(SLOTS), draw.randint(1, 5))
        if draw.random() < 0.3:
            state.clear(slots)
            there = {slot: request for slot, request in there.items() if slot not in slots}
        else:
            placed = {slot: draw.choice(MIXED) for slot in slots}
            state.place_all([(slot, request, PROMPT, (), None) for slot, request in placed.items()])
            there |= placed
    new = SamplerState(SLOTS, VOCAB, CPU, TOP, penalties=True)
    for slot, request in there.items():
        new.place(slot, request)
    assert torch.equal(state._floats_SF, new._floats_SF)
    assert torch.equal(state._ints_SW, new._ints_SW)
    state.clear(range(SLOTS))
    monkeypatch.setattr(state, "_upload", None)  # nothing is told from here on
    state.place(0, asked(1, seed=5))
    state.clear([0])


# Bad rows and log probabilities.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", ["one nan", "all nan", "inf", "nothing"])
def test_a_bad_row_fails_alone(broken: str, mode: Mode) -> None:
    state, logits_NV = state_of(MIXED), logits_of(len(MIXED))
    clean = sample(logits_NV, ALL, ALL, state, mode=mode)
    bad = torch.arange(len(MIXED)) % 3 == 1
    spoilt_NV = logits_NV.clone()
    if broken == "one nan":
        spoilt_NV[bad, 60] = math.nan
    elif broken == "inf":
        spoilt_NV[bad, 60] = math.inf
    else:
        spoilt_NV[bad] = math.nan if broken == "all nan" else -math.inf
    got = sample(spoilt_NV, ALL, ALL, state, mode=mode)
    assert torch.equal(got.bad_N, bad)
    assert not clean.bad_N.any()
    for after, before in zip(fields(got)[:2] + fields(got)[3:], fields(clean)[:2] + fields(clean)[3:], strict=True):
        assert torch.equal(after[~bad], before[~bad])
        assert not after[bad].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_the_models_own(dtype: torch.dtype) -> None:
    logits_NV = logits_of(len(MIXED)).to(dtype)
    got = sample(logits_NV, ALL, ALL, said_something(state_of(MIXED)))
    expected_NV = logits_NV.double().log_softmax(-1)
    assert torch.allclose(got.logprobs_N.double(), expected_NV.gather(-1, got.tokens_N[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(got.top_logprobs_NK.double(), expected_NV.sort(descending=True).values[:, :TOP], atol=1e-5)
    assert torch.equal(got.top_tokens_NK[:, 0], logits_NV.argmax(-1))
    assert got.logprobs_N.dtype == got.top_logprobs_NK.dtype == torch.float32


def test_alternatives_are_left_out_where_nobody_asks() -> None:
    logits_NV = logits_of(len(MIXED))
    assert sample(logits_NV, ALL, ALL, state_of(MIXED), alternatives=False).top_tokens_NK.shape == (SLOTS, 0)
    none = SamplerState(SLOTS, VOCAB, CPU)
    assert sample(logits_NV, ALL, ALL, none).top_logprobs_NK.shape == (SLOTS, 0)


# Recording.


class Recordable(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values read by the host, shapes that depend on values, tensors from lists."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.REFUSED), name
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                "a boolean index has a shape of its own"
            )
        assert name != "cumsum" or not args[0].is_floating_point(), "on a GPU its result depends on the number of rows"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_values(mode: Mode) -> None:
    state, logits_NV = state_of(MIXED), logits_of(len(MIXED))
    with Recordable():
        out = sample(logits_NV, ALL, ALL, state, mode=mode)
        note(out.tokens_N, ALL, state)
    with pytest.raises(AssertionError), Recordable():
        logits_NV[0, 0].item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_a_recorded_call_is_the_call(mode: Mode) -> None:
    """Replayed with other scores and other requests; and a row alone gives the bits that it gives in the batch."""
    device = torch.device("cuda")
    rows, vocab = 48, 49152
    state = SamplerState(rows, vocab, device, 20, penalties=True)
    logits_NV = torch.zeros(rows, vocab, device=device, dtype=torch.bfloat16)
    slots_N, steps_N = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = sample(logits_NV, slots_N, steps_N, state, mode=mode)
        note(out.tokens_N, slots_N, state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits_NV, slots_N, steps_N, state, mode=mode)
        note(out.tokens_N, slots_N, state)
    for slot in range(rows):
        state.place(slot, asked(slot, seed=slot, **KINDS[slot % len(KINDS)]))
    for step in range(3):
        logits_NV.copy_(3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(step)))
        steps_N.fill_(step)
        expected = fields(sample(logits_NV, slots_N, steps_N, state, mode=mode))
        singles = [
            fields(sample(logits_NV[n : n + 1], slots_N[n : n + 1], steps_N[n : n + 1], state, mode=mode))
            for n in range(rows)
        ]
        graph.replay()
        for recorded, plain, alone in zip(fields(out), expected, zip(*singles, strict=True), strict=True):
            assert torch.equal(recorded, plain)
            assert torch.equal(recorded, torch.cat(alone))


# Refusals.


def test_a_bias_of_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionError, match=f"^logit_bias: token id {VOCAB} is outside"):
        state_of([asked(0, logit_bias={VOCAB: 1.0})])


def test_what_the_engine_has_no_room_for_is_refused() -> None:
    state = SamplerState(2, VOCAB, CPU, 3)
    with pytest.raises(OptionError, match="started without penalties"):
        state.place(0, asked(0, presence_penalty=0.1))
    with pytest.raises(OptionError, match="logprobs must be <= 3 in this engine, got 4"):
        state.place(0, asked(0, logprobs=4))
    with pytest.raises(OptionError, match="token id 97 is outside the model's vocabulary of 97"):
        state.place(0, Request(id=0, prompt=(1, 97)))
    with pytest.raises(AssertionError, match="slot 2 of 2"):
        state.place(2, asked(0))
    assert state.mode == "greedy"
    note(torch.tensor([1]), torch.tensor([0]), state)
