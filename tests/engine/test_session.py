"""A session on an engine says what the reference says."""

from __future__ import annotations

import pytest

from decode.exit_models import build, exiting, mixing_threshold
from engine.encoders import encoder_model
from engine.test_engine import NEW, many
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.engine import session as module
from fathomlm.engine.session import EngineSession, reference_only
from fathomlm.model.route import DepthControl
from model.route.small import model_of, routed


def test_plain_models_and_turns() -> None:
    model = build("vanilla")
    session, wanted = EngineSession(model), []
    for prompt in many(model):
        (one,) = generate(model, [prompt], max_new_tokens=NEW)
        wanted.append(one)
        reply = session.generate(prompt, max_new_tokens=NEW)
        assert (reply.tokens, reply.finish, reply.prompt_tokens) == (one.tokens, one.finish, one.prompt_tokens)
        assert reply.exits is None
    steps: list[int] = []
    together = EngineSession(model, sequences=3).generate_all(many(model), on_step=steps.append, max_new_tokens=NEW)
    assert [one.tokens for one in together] == [one.tokens for one in wanted]
    assert steps[-1] == NEW


def test_room_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_LENGTH", 8)
    model = build("vanilla")
    session, prompt = EngineSession(model), many(model)[0]
    for new in (2, 20):
        assert session.generate(prompt, max_new_tokens=new).tokens == generate(model, [prompt], max_new_tokens=new)[0].tokens


@pytest.mark.parametrize("control", [None, DepthControl(max_depth=2), DepthControl(bias=0.3)])
def test_routed_models(control: DepthControl | None) -> None:
    model = model_of(routed())
    for prompt in many(model)[:3]:
        (one,) = generate(model, [prompt], max_new_tokens=NEW, control=control)
        reply = EngineSession(model, control).generate(prompt, max_new_tokens=NEW)
        assert (reply.tokens, reply.depths) == (one.tokens, one.depths)


@pytest.mark.parametrize("mode", ["static", "parallel", "state-copy", "speculative"])
def test_early_exit(mode: str) -> None:
    name = "vanilla"
    threshold = {} if mode == "static" else {"threshold": mixing_threshold(name)}
    model, where = build(name), exiting(name, mode, **threshold)
    for prompt in many(model)[:3]:
        (one,) = generate(model, [prompt], max_new_tokens=NEW, exiting=where)
        reply = EngineSession(model, exiting=where).generate(prompt, max_new_tokens=NEW)
        assert reply.tokens == one.tokens
        assert reply.exits is not None
        assert one.exits is not None
        assert (reply.exits.mode, reply.exits.threshold, reply.exits.layers) == (mode, one.exits.threshold, one.exits.layers)
        if mode != "speculative":  # which drafts there are depends on when they are verified
            assert reply.exit_layers == one.exit_layers
            assert reply.exits.layers_run == one.exits.layers_run
            assert reply.confidences == (one.confidences and pytest.approx(one.confidences, abs=1e-5))
    assert reply.exits.deep_passes is None


def test_text_comes_as_it_is_made_and_an_interruption_leaves_the_session_whole() -> None:
    model = load("fathom-mor-23m")
    session, shown = EngineSession(model), list[str]()
    wanted = generate(model, ["The old harbour"], max_new_tokens=12)[0].text
    reply = session.generate("The old harbour", max_new_tokens=12, on_text=shown.append)
    assert "".join(shown) == reply.text == wanted
    assert len(shown) > 2

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate("The old harbour", max_new_tokens=12, on_text=stop)
    assert session.generate("The old harbour", max_new_tokens=12).text == wanted


def test_what_only_the_reference_does() -> None:
    plain, mixture = build("vanilla"), model_of(routed())
    assert reference_only(plain, None, None) is None
    assert reference_only(plain, None, Exiting(mode="full")) is None
    assert reference_only(plain, None, Exiting(mode="select", exit_layers=(2,))) == "--decode select"
    assert reference_only(plain, None, Exiting(mode="parallel", exit_layers=(2,), refine=1.0)) == "--refine"
    assert reference_only(mixture, DepthControl(max_depth=1), None) is None
    assert reference_only(plain, DepthControl(max_depth=1), None) == "--max-depth without a router"
    assert reference_only(plain, DepthControl(kv_loops=1), None) == "--kv-loops"
    assert reference_only(build("prefix"), None, None) is None
    loops = DepthPlan.build("cycle", 2, 4)
    assert reference_only(encoder_model(loops), None, Exiting(mode="parallel", exit_layers=(2,))) is None
    assert reference_only(encoder_model(loops.with_routing(build_routing("token", 2))), None, None) is None
