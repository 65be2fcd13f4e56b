"""Bursts taken in by numpy are bursts taken in token by token: the same arrays, results, events and totals."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.test_engine_machine import PLANS, SHORT, STEMS, VOCAB, leaving, model, nothing_is_left
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.engine import slot_records
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import page_bytes
from fathomlm.engine.layout import Layout, build_layout
from fathomlm.engine.programs.base import BAD, DRAFTED, ENDED, VALID
from fathomlm.engine.request import Event, Finished, Request, TokenEvent
from fathomlm.engine.slot_records import NEVER, SlotRecords
from model.route.small import LLAMA

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = {
    "whole": 2, "routed": 2, "routed, shared": 2, "exits": 5, "exits, looped": 2, "drafts": 8, "drafts, looped": 2,
}  # fmt: skip
"""With the seed of a life in which texts are stopped and cancelled."""
SLOTS, LENGTH = 5, 40
ROUTED = DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3)).with_kv("cache")


def layout(kind: str) -> Layout:
    if kind == "routed":
        return build_layout(replace(LLAMA, layers=5), ROUTED, None)
    return build_layout(replace(LLAMA, layers=4), DepthPlan.vanilla(4), None, (2,) if kind == "exits" else ())


class Device:
    """Random tokens in random slots, as a device might report them."""

    def __init__(self, random: Random, records: tuple[SlotRecords, ...], kind: str) -> None:
        self.random, self.records, self.deepest = random, records, 3 if kind == "routed" else 4
        self.tables = len(records[0].entries_TS)
        self.epochs, self.made, self.epoch = [-1] * SLOTS, [0] * SLOTS, 0

    def place(self, slot: int) -> None:
        self.epoch += 1
        self.epochs[slot], self.made[slot] = self.epoch, self.random.choice((0, 0, 3))
        entries = [self.made[slot]] * self.tables
        rooms = {(slot, table): self.random.choice((4, 8, 40)) for table in range(self.tables)}
        due = self.random.choice((NEVER, NEVER, self.made[slot] + 1, self.made[slot] + 3))
        for one in self.records:
            one.place(slot, self.epoch, self.made[slot], entries, due)
            one.grant(rooms, [20] * self.tables, 3)

    def burst(self) -> tuple[Any, Any]:
        rows: list[tuple[int, ...]] = []
        for _ in range(self.random.randint(1, 25)):
            slot = self.random.randint(0, SLOTS)
            if slot == SLOTS or self.made[slot] >= LENGTH or self.random.random() < 0.1:
                rows.append((SLOTS, 0, 0, 0, 0, 0))
            elif self.epochs[slot] < 0 or self.random.random() < 0.1:
                rows.append((slot, self.epoch + 7, 1, 1, VALID, 0))  # of a sequence that is gone
            else:
                flags = VALID | self.random.choice((0, DRAFTED)) | self.random.choice((0,) * 9 + (ENDED, ENDED | BAD))
                depth = self.random.randint(1, self.deepest)
                rows.append((slot, self.epochs[slot], self.random.randrange(99), depth, flags, self.made[slot]))
                self.made[slot] += not flags & BAD
                self.epochs[slot] = -1 if flags & ENDED else self.epochs[slot]
        return np.array(rows, np.int64), np.array([[0.5, self.random.random()] for _ in rows], np.float32)


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
@pytest.mark.parametrize("seed", range(4))
def test_any_bursts(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_records, "FEW", 0)
    random = Random(f"{kind} {seed}")
    fast, slow = (SlotRecords(layout(kind), SLOTS, LENGTH, 3, 4, VOCAB) for _ in range(2))
    device = Device(random, (fast, slow), kind)
    seen = {"visited": 0, "tokens": 0}
    for time in range(60):
        for slot in range(SLOTS):
            if device.epochs[slot] < 0 and random.random() < 0.5:
                device.place(slot)
        if random.random() < 0.1:
            device.epochs[slot] = -1
            fast.clear(slot)
            slow.clear(slot)
        burst = device.burst()
        found = fast.take(*burst, now=float(time))
        assert found == slow.take_one_by_one(*burst, now=float(time))
        for name, array in vars(fast).items():
            if isinstance(array, np.ndarray):
                np.testing.assert_array_equal(array, getattr(slow, name), err_msg=name)
        seen["visited"] += len(found.visits)
        seen["tokens"] += found.tokens
    assert min(seen.values()) > 50


def test_a_slot_is_visited_when_its_pages_run_out() -> None:
    records = SlotRecords(layout("whole"), SLOTS, LENGTH, 1, 4, VOCAB)
    records.place(2, 9, 0, [3])
    records.grant({(2, 0): 8}, [100], lookahead=4)
    rows = [np.array([[2, 9, 5, 1, VALID, index]]) for index in range(3)]
    visits = [records.take_one_by_one(row, np.zeros((1, 2), np.float32), 0.0).visits for row in rows]
    assert visits == [[], [2], [2]]  # with 4 entries there is room for four more, with 5 not
    records.grant({(2, 0): 104}, [100], lookahead=4)
    assert records.alarm_TS[0, 2] == NEVER


def test_a_token_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for few, message in ((0, "missing"), (99, "token 1, 0 are known")):
        monkeypatch.setattr(slot_records, "FEW", few)
        records = SlotRecords(layout("whole"), SLOTS, LENGTH, 1, 4, VOCAB)
        records.place(0, 1, 0, [0])
        with pytest.raises(AssertionError, match=message):
            records.take(np.array([[0, 1, 5, 1, VALID, 1]]), np.zeros((1, 2), np.float32), 0.0)


# The same through whole engines.


def letters() -> Any:
    """A token is a letter."""
    vocab = {chr(ord("a") + number): number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def asked(random: Random, id: int, kind: str) -> Request:
    drawn = random.choice(({}, {"temperature": 0.9, "seed": id}))
    stop = random.choice(((), (), (), (), ("ab", "x"), ("e",), ("h", "kk")))
    sampling = Sampling(max_new_tokens=random.randint(6, SHORT - 4), stop=stop, ignore_eos=random.random() < 0.2, **drawn)
    prompt = (*random.choice(STEMS)[:3], *random.choices(range(VOCAB), k=random.randint(0, 1)))
    threshold = random.choice((None, 0.0)) if kind.startswith("exits") else None
    return Request(
        id=id, prompt=prompt, sampling=sampling, logprobs=random.choice((None, None, 0, 2)), exit_threshold=threshold
    )


def lived(kind: str, seed: int, one_by_one: bool) -> tuple[Any, ...]:
    """An engine's life: what each request came to, what its listener heard, and the totals."""
    random = Random(f"{kind} {seed}")
    sizes = {
        "batch_size": 4, "max_sequences": 4 if kind == "whole" else 6, "page_size": random.choice((1, 2)),
        "max_length": SHORT, "prefill_chunk": random.choice((2, 8)), "lag": random.randint(0, 2),
        "burst": random.choice((1, 3, 5)),
    }  # fmt: skip
    sizes |= {"always_draft": True} if kind.startswith("drafts") else {}
    sizes["stream_interval"] = 1 + 2 * (len(kind) % 2)
    engine = Engine(model(kind), exiting=leaving(kind), **sizes)
    if one_by_one:
        engine._records.take = engine._records.take_one_by_one  # type: ignore[method-assign]
        engine._records.completion = lambda sequence: sequence.tokens  # type: ignore[method-assign]
    heard: dict[int, list[Event]] = {}
    sequences = []

    def listener(id: int, victim: int | None, after: int) -> Any:
        def hear(events: list[Event]) -> None:
            assert events
            heard.setdefault(id, []).extend(events)
            if victim is not None and len(heard[id]) >= after and not isinstance(events[-1], Finished):
                engine.cancel(victim)

        return hear

    waiting = [asked(random, id, kind) for id in range(14)]
    plans = [
        (random.random() < 0.7, random.choice((None, None, None, None, id, random.randrange(14))), random.randint(1, 6))
        for id in range(14)
    ]
    while waiting or engine.busy:
        for request in waiting[:4]:
            listens, victim, after = plans[request.id]
            sequences.append(engine.submit(request, listener(request.id, victim, after) if listens else None))
        del waiting[:4]
        engine.step()
    nothing_is_left(engine)
    results = [sequence.result for sequence in sequences]
    for result in results:
        assert result is not None
        if result.id in heard:
            *said, last = heard[result.id]
            assert all(isinstance(event, TokenEvent) for event in said)
            assert last == result.finish
            assert [event.index for event in said] == list(range(len(result.tokens)))
            assert tuple(event.token for event in said) == result.tokens
            assert result.text.startswith("".join(event.text for event in said))
    told = [replace(result, first_token_time=None, last_token_time=None, arrival=0.0) for result in results if result]
    return told, heard, asdict(engine.totals), engine.counters()


@pytest.mark.parametrize("kind", KINDS)
def test_engines_live_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_records, "FEW", 0)
    monkeypatch.setattr(slot_records, "MANY", 3)
    monkeypatch.setattr(model(kind), "tokenizer", letters())
    fast, slow = (lived(kind, KINDS[kind], one_by_one) for one_by_one in (False, True))
    assert fast == slow
    assert {"stop", "cancelled"} <= {result.finish.reason for result in fast[0]}


@pytest.mark.parametrize(("burst", "sizes"), [(1, [1, 4, 4, 3]), (3, [3, 6, 3])])
def test_listeners_are_told_the_first_token_at_once_and_then_by_intervals(
    burst: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model("whole"), "tokenizer", letters())

    def heard(interval: int, **sampling: Any) -> list[list[Event]]:
        engine = Engine(model("whole"), batch_size=2, page_size=4, max_length=SHORT, burst=burst, stream_interval=interval)
        calls: list[list[Event]] = []
        request = Request(id=0, prompt=(5, 7), sampling=Sampling(max_new_tokens=12, ignore_eos=True, **sampling))
        engine.submit(request, calls.append)
        while engine.busy:
            engine.step()
        nothing_is_left(engine)
        return calls

    def flat(calls: list[list[Event]]) -> list[Event]:
        return [event for call in calls for event in call]

    *told, last = heard(4)
    assert [len(call) for call in told] == sizes
    assert last == [Finished(reason="length")]
    assert flat([*told, last]) == flat(heard(1))
    whole = "".join(event.text for event in flat(told) if isinstance(event, TokenEvent))
    stopped = heard(4, stop=(whole[5:7],))
    assert flat(stopped) == flat(heard(1, stop=(whole[5:7],))), "a stop string is heeded at every token"
    assert len(stopped[0]) == burst
    assert max(map(len, stopped)) <= burst


def test_a_sequence_that_is_preempted_tells_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model("whole"), "tokenizer", letters())
    memory = 11 * page_bytes(model("whole").architecture, PLANS["whole"].unrolled_layers, 2, torch.float32)
    found: list[list[list[int]]] = []
    for interval in (1, 5):
        engine = Engine(
            model("whole"), batch_size=3, page_size=2, max_length=SHORT, memory=memory, stream_interval=interval, burst=2
        )
        heard: list[list[int]] = [[] for _ in range(3)]
        for id in range(3):
            sampling = Sampling(max_new_tokens=12, ignore_eos=True)
            engine.submit(
                Request(id=id, prompt=(5 + id, 7), sampling=sampling),
                lambda events, own=heard[id]: own.extend(e.index for e in events if isinstance(e, TokenEvent)),
            )
        while engine.busy:
            engine.step()
        assert engine.counters().preemptions > 0
        found.append(heard)
    assert found == [[list(range(12))] * 3] * 2


def test_a_sequence_that_is_cancelled_while_it_waits_again_tells_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model("whole"), "tokenizer", letters())
    memory = 11 * page_bytes(model("whole").architecture, PLANS["whole"].unrolled_layers, 2, torch.float32)
    engine = Engine(model("whole"), batch_size=3, page_size=2, max_length=SHORT, memory=memory, stream_interval=5, burst=2)
    heard: list[list[Event]] = [[] for _ in range(3)]
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    sequences = [
        engine.submit(Request(id=id, prompt=(5 + id, 7), sampling=sampling), heard[id].extend) for id in range(3)
    ]  # fmt: skip
    while not (victims := [one for one in sequences if one.state == "waiting" and len(one.tokens) > one.told > 0]):
        engine.step()
    (victim,) = victims
    engine.cancel(victim.id)
    *said, last = heard[victim.id]
    assert victim.result is not None
    assert tuple(event.token for event in said if isinstance(event, TokenEvent)) == victim.result.tokens
    assert last == Finished(reason="cancelled")
    while engine.busy:
        engine.step()
    nothing_is_left(engine)
