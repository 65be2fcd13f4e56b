"""What the host costs is measured over a device that does nothing: its tokens are a text's, and nobody waits for ever."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.lab.bench import host
from fathomlm.lab.bench.host import LISTENERS, PARTS, PLANS, TEXT, _requests, measure_host, null_engine, python_speed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("plan", PLANS)
def test_a_device_that_does_nothing_says_the_text(plan: Any, tiny_tokenizer: Any) -> None:
    engine = null_engine(plan, 4, tiny_tokenizer)
    tokens = tiny_tokenizer(TEXT)["input_ids"]
    results = engine.generate([[5, 6, 7]] * 20, max_new_tokens=40, ignore_eos=True)
    circle = [*tokens, *tokens, *tokens]
    for result in results:
        assert len(result.tokens) == 40
        assert list(result.tokens) in [circle[at : at + 40] for at in range(len(tokens))]
        assert result.text == tiny_tokenizer.decode(result.tokens)
    depths = {depth for result in results for depth in result.depths or ()}
    assert depths == (set() if plan == "plain" else {1, 2, 3})
    while engine.busy:
        engine.step()
    assert engine.counters().pages_used == engine.counters().pages_cached


@pytest.mark.parametrize("listeners", LISTENERS)
def test_a_figure_and_its_parts(listeners: Any, tiny_tokenizer: Any) -> None:
    found = measure_host("routed", 4, listeners, tiny_tokenizer, tokens=1000)
    assert (found.plan, found.batch_size, found.sequences, found.listeners) == ("routed", 4, 8, listeners)
    assert found.us_per_token > 0
    if listeners in ("async", "http"):
        assert found.parts_us_per_token is None
        assert 0 < found.event_loop_us_per_token < found.us_per_token
    else:
        assert set(found.parts_us_per_token or ()) == set(PARTS)
        assert min((found.parts_us_per_token or {}).values()) > 0


@pytest.mark.parametrize("plan", PLANS)
def test_prompts(plan: Any, tiny_tokenizer: Any) -> None:
    """They are prefilled whole, since none begins like another, and each has one new token."""
    engine = null_engine(plan, 4, tiny_tokenizer, prompt=50)
    given = list(itertools.islice(_requests(engine, 50), 12))
    assert {(len(one.prompt), one.sampling.max_new_tokens) for one in given} == {(50, 1)}
    engine.run(given)
    assert (engine.totals.prefill_tokens, engine.totals.tokens) == (12 * 49, 12)
    found = measure_host(plan, 4, "none", tiny_tokenizer, tokens=2000, prompt=200)
    assert found.us_per_token > 0
    assert set(found.parts_us_per_token or ()) == set(PARTS)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host, "TURNS", 1000)
    words = ["bench", "host", "--tokenizer", "bytes", "--batch-size", "2,3", "--plan", "plain", "--listeners", "none,async"]
    assert main([*words, "--tokens", "1000", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["kind"], record["tokenizer"]) == ("host", "bytes")
    assert record["environment"]["empty_loop_ns"] > 0
    cases = [(one["plan"], one["batch_size"], one["listeners"]) for one in record["costs"]]
    assert cases == [("plain", size, listeners) for size in (2, 3) for listeners in ("none", "async")]
    assert main([*words, "--tokens", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "plain, 3, async" in shown
    assert "collect" in shown
    assert main([*words, "--tokens", "1000", "--prompt", "9"]) == 2
    assert "--listeners async" in capsys.readouterr().err
    words[-1] = "none"
    assert main([*words, "--tokens", "1000", "--prompt", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == 9
    assert main(["bench", "host", "--listeners", "some"]) == 2
    assert "invalid --listeners 'some'" in capsys.readouterr().err


def test_a_turn_of_a_loop_takes_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TURNS", 20_000)
    assert 1 < python_speed() < 10_000
