"""One sequence, whose passes the host chooses: what is under way when something else happens disturbs nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from decode.exit_models import PROMPTS, build, exiting, mixing_threshold
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.base import FLAGS, SLOT
from fathomlm.engine.request import Request
from fathomlm.engine.runner import UNTOLD

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES: dict[str, Any] = {"max_sequences": 1, "batch_size": 4, "page_size": 4, "max_length": 64, "burst": 2, "lag": 1}
TOKENS = 16


@cache
def reference(setting: Exiting) -> list[tuple[int, ...]]:
    """What is said to each prompt: computed once, read only."""
    wanted = generate(build("vanilla"), PROMPTS, max_new_tokens=TOKENS, ignore_eos=True, exiting=setting)
    return [one.tokens for one in wanted]


def engine_for(mode: str, **options: Any) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine, and what the reference says to each prompt."""
    setting = exiting("vanilla", mode, threshold=mixing_threshold("vanilla"), max_stack=4)
    return Engine(build("vanilla"), exiting=setting, always_draft=True, **SIZES | options), reference(setting)


def request(engine: Engine, number: int, **fields: Any) -> Request:
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True)
    return Request(id=engine.new_id(), prompt=tuple(PROMPTS[number]), sampling=sampling, **fields)


@pytest.mark.parametrize("mode", ["parallel", "speculative"])
def test_a_pass_is_under_way_while_the_host_does_other_work(mode: str) -> None:
    engine, wanted = engine_for(mode)
    sequence = engine.submit(request(engine, 0))
    ahead = []
    while sequence.result is None:
        engine.step()
        assert engine._launches.chosen is not None
        ahead.append(len(engine._launches.chosen.under_way))
    assert max(ahead) > 0, "a pass was started before results were taken in"
    assert ahead[-1] == 0, "none is started behind the end"
    assert sequence.result.tokens == wanted[0]


@pytest.mark.parametrize("mode", ["parallel", "speculative"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_cancelled_text_leaves_nothing_to_the_next(mode: str, steps: int) -> None:
    engine, wanted = engine_for(mode)
    for number in range(len(PROMPTS)):
        other = engine.submit(request(engine, (number + 1) % len(PROMPTS)))
        for _ in range(steps):
            engine.step()
        engine.cancel(other.id)
        (found,) = engine.run([request(engine, number)])
        assert found.tokens == wanted[number]
    while engine.busy:
        engine.step()
    counters = engine.counters()
    assert counters.pages_used == counters.pages_cached
    assert engine.totals.tokens >= TOKENS * len(PROMPTS)


def test_a_queue_of_texts_in_a_pool_for_one() -> None:
    engine, wanted = engine_for("parallel", prefix_caching=False)
    found = engine.run([request(engine, number) for number in range(len(PROMPTS))])
    assert [result.tokens for result in found] == wanted
    assert engine.totals.tokens == TOKENS * len(PROMPTS)


def test_no_pass_runs_behind_the_last_token() -> None:
    """Where a text ends by its length the host knows that nothing follows a deep pass."""
    engine, _ = engine_for("parallel")
    started: list[str] = []
    launch = engine.runner.launch

    def counted(**given: Any) -> int:
        started.append(given["only"][0])
        return launch(**given)

    engine.runner.launch = counted  # type: ignore[method-assign]
    engine.run([request(engine, 0, exit_threshold=1.0)])
    assert started == ["shallow", "deep"] * TOKENS


def test_what_a_pass_tells_is_awaited_word_by_word() -> None:
    """Words that have not arrived say so; a row of nobody tells nothing."""
    engine, _ = engine_for("parallel")
    runner = engine.runner
    words = runner._words[0]
    seen: list[tuple[int, int]] = []

    class Event:
        def query(self) -> bool:
            seen.append((words[SLOT], words[FLAGS]))
            words[SLOT] = 0
            if len(seen) > 1:
                words[FLAGS] = 257
            return False

    words[SLOT] = words[FLAGS] = UNTOLD
    runner._events[0] = Event()  # type: ignore[call-overload]
    assert runner.outcome(0) == 257
    assert seen == [(UNTOLD, UNTOLD), (0, UNTOLD)]
    words[SLOT] = runner.state.spare
    assert runner.outcome(0) is None
