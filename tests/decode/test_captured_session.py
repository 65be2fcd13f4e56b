"""A conversation on captured steps says what `Session` says, its slow twin."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from decode.exit_models import build, exiting, mixing_threshold
from fathomlm.decode import captured_session
from fathomlm.decode.captured_session import CapturedSession
from fathomlm.decode.exiting import DEFAULT_STACK, Exiting
from fathomlm.decode.full import Generation, Session
from fathomlm.decode.recorded import RecordedSteps
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.errors import OptionError
from model.route.small import model_of, routed

TURNS = [[5, 9, 33, 7], [5, 9, 33, 7, 81, 2, 64], [1]]
MODES = ("static", "state-copy", "parallel", "speculative")


def setting(name: str, mode: str) -> Exiting:
    return exiting(name, mode) if mode == "static" else exiting(name, mode, threshold=mixing_threshold(name, 0.4))


def plain(found: Generation) -> dict[str, Any]:
    """Without times, and without what captured steps do not note for each token."""
    record = dataclasses.asdict(found)
    for name in ("prefill_seconds", "decode_seconds", "confidences", "agreements"):
        del record[name]
    return record


def without_the_end(found: Generation) -> dict[str, Any]:
    """The slow session passes what waits at the end of a turn through the layers behind the exit, for the next turn."""
    record = plain(found)
    exits, layers = record["exits"], found.exit_layers
    assert layers is not None
    waiting = next((at for at, layer in enumerate(reversed(layers)) if layer == exits["layers"]), len(layers))
    assert waiting < DEFAULT_STACK
    exits["deep_passes"] -= waiting > 0
    exits["layers_run"] -= waiting * (exits["layers"] - min(layers))
    return record


@pytest.mark.parametrize("name", ["vanilla", "own-layer"])
@pytest.mark.parametrize("mode", MODES)
def test_turn_by_turn_it_is_the_slow_session(name: str, mode: str) -> None:
    model = build(name)
    fast, slow = CapturedSession(model, setting(name, mode)), Session(model, exiting=setting(name, mode))
    for prompt in TURNS:
        ours, theirs = (each.generate(prompt, max_new_tokens=12) for each in (fast, slow))
        assert plain(ours) == (plain(theirs) if mode != "parallel" else without_the_end(theirs))
        assert ours.decode_seconds > 0
        fast.reset()


def test_without_exits_it_is_full_decoding() -> None:
    model = build("vanilla")
    fast, slow = CapturedSession(model), Session(model)
    for prompt in TURNS:
        assert plain(fast.generate(prompt, max_new_tokens=12)) == plain(slow.generate(prompt, max_new_tokens=12))


def test_room_grows_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_session, "FIRST_LENGTH", 16)
    model = build("vanilla")
    fast, slow = (kind(model, exiting=setting("vanilla", "speculative")) for kind in (CapturedSession, Session))
    rooms = []
    for prompt in ([3, 4], [3, 4] * 10, [3, 4], [7] * 100):
        assert plain(fast.generate(prompt, max_new_tokens=12)) == plain(slow.generate(prompt, max_new_tokens=12))
        assert fast._decoder is not None
        rooms.append(fast._decoder.steps.length)
    assert rooms == [16, 32, 32, 128]
    with pytest.raises(OptionError, match="more than the context of 128"):
        fast.generate([7] * 120, max_new_tokens=12)


def test_an_interrupted_reply_leaves_a_usable_session(tiny_model: Any) -> None:
    class Stopped(Exception):
        pass

    def stop(piece: str) -> None:
        raise Stopped

    fast, slow = CapturedSession(tiny_model), Session(tiny_model)
    prompt = "A test of what"
    with pytest.raises(Stopped):
        fast.generate(prompt, on_text=stop, max_new_tokens=8)
    pieces: list[str] = []
    found = fast.generate(prompt, on_text=pieces.append, max_new_tokens=8)
    assert plain(found) == plain(slow.generate(prompt, max_new_tokens=8))
    assert "".join(pieces) == found.text


def test_stop_strings_end_a_text(tiny_model: Any) -> None:
    whole = Session(tiny_model).generate("A test", max_new_tokens=12).text
    stop = whole[len(whole) // 2 :][:3]
    fast, slow = (kind(tiny_model).generate("A test", max_new_tokens=12, stop=stop) for kind in (CapturedSession, Session))
    assert (fast.finish, plain(fast)) == ("stop", plain(slow))


def test_an_adaptive_threshold_learns_from_turn_to_turn() -> None:
    model = build("vanilla")
    states = []
    for kind in (CapturedSession, Session):
        estimator = ThresholdEstimator(ThresholdOptions(rule="thesis", calibrating_sequences=2))
        session = kind(model, exiting=exiting("vanilla", "parallel", threshold=estimator))
        said = [session.generate(prompt, max_new_tokens=12).exits for prompt in TURNS]
        states.append([one.threshold for one in said if one is not None] + [estimator.threshold])
    assert states[0] == pytest.approx(states[1])
    assert len(set(states[0])) > 1, "it learnt something"


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"repetition_penalty": 1.2}])
def test_it_takes_the_likeliest_token_only(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        CapturedSession(build("vanilla")).generate([1, 2], max_new_tokens=4, **options)


def test_what_it_cannot_capture_is_refused() -> None:
    with pytest.raises(OptionError, match="models with a router"):
        CapturedSession(model_of(routed()))
    with pytest.raises(OptionError, match="not oracle"):
        CapturedSession(build("vanilla"), exiting("vanilla", "oracle"))
    with pytest.raises(OptionError, match="only confidence='gap'"):
        CapturedSession(build("vanilla"), exiting("vanilla", "parallel", threshold=0.5, confidence="max"))


def test_recording_is_not_reading_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on only while steps are recorded."""
    record, now = RecordedSteps.record, 0.0
    again: list[str] = []

    def slowly(steps: RecordedSteps, mode: str) -> None:
        nonlocal now
        now += 0.0 if again else 1.0  # what was recorded once is not recorded again
        again.append(mode)
        record(steps, mode)

    monkeypatch.setattr(RecordedSteps, "record", slowly)
    monkeypatch.setattr(captured_session, "time", SimpleNamespace(perf_counter=lambda: now))
    found = CapturedSession(build("vanilla")).generate([1, 2], max_new_tokens=4)
    assert again[0] == "full"
    assert found.prefill_seconds == 0.0
