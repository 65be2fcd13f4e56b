"""The exit that comes for SmolLM2-135M: its size, its card, what it costs the full model (nothing), and what it foretells.

`record.json` holds `held_out_agreement`, how often the exit chooses the full model's token in its replies to
held_out_messages.txt, none of which the exit was trained on, and `held_out_loss`, the exit's loss there in nats a token
where the token is one of its words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.checkpoints.exit_pack import read_pack
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.threshold_samples import STEPS
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.packaged import packaged_exits
from packaged.shipped import MESSAGES, record_of

NAME = "smollm2-135m"
PATH = packaged_exits(NAME)
DRAFTED = 16
"""Of which drafting is compared with: a pass of the real model takes long."""

pytestmark = [
    pytest.mark.skipif(PATH is None, reason=f"no exit is packaged here: src/fathomlm/packaged/exits/{NAME} is missing"),
]


def place() -> Path:
    assert PATH is not None
    return PATH


def record() -> dict[str, Any]:
    return record_of(PATH)


@pytest.fixture(scope="module")
def exited(smollm2_path: Path) -> FathomForCausalLM:
    found = load(smollm2_path, dtype="float32", exits=place())
    assert isinstance(found, FathomForCausalLM)
    return found


def layer() -> int:
    (index,) = read_pack(place()).exits
    return index + 1


def test_it_is_small_and_holds_nothing_but_data() -> None:
    files = [file for file in place().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert {file.name for file in files} == {"exits.json", "exits.safetensors", "threshold.json", "record.json", "README.md"}


def test_its_threshold_is_for_its_exit() -> None:
    found = Calibration.load(place() / FILE)
    assert (found.exit_layer, found.confidence) == (layer(), "gap")
    assert 0.05 < found.estimator.threshold < 0.9
    assert found.estimator.sequences >= 16
    options, texts = found.estimator.options, found.estimator.texts
    assert (options.rule, options.risk, options.level) == ("risk", 0.01, 0.95)
    assert texts.share(round(found.estimator.threshold * STEPS)) < 0.01
    assert found.estimator.for_drafts().threshold < 0.5


def test_the_card_names_licences_and_what_it_agrees_with() -> None:
    card = (place() / "README.md").read_text(encoding="utf-8")
    assert "licen" in card.lower()
    assert f"{record()['held_out_agreement']:.1%}".replace("%", " %") in card


@pytest.mark.real
def test_the_full_model_is_what_it_was(smollm2: FathomForCausalLM, exited: FathomForCausalLM) -> None:
    own = smollm2.state_dict()
    shared = {name: value for name, value in exited.state_dict().items() if name in own}
    assert shared.keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in shared.items())
    tokens = torch.tensor([smollm2.tokenizer(MESSAGES[0]).input_ids])
    with torch.inference_mode():
        assert torch.equal(smollm2(tokens).logits, exited(tokens).logits)


@pytest.mark.real
def test_it_foretells_the_full_model_as_often_as_its_record_says(
    exited: FathomForCausalLM, prompts: list[list[int]], replies: list[tuple[int, ...]]
) -> None:
    decoder, index = exited.decoder, layer() - 1
    (own,) = decoder.plan.exit_steps((index,))
    agreed = count = known = 0
    nats = 0.0
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = torch.tensor([[*prompt, *reply]])
        with torch.inference_mode():
            state = decoder.states(tokens[:, :-1], at=(own.index,))[own.index]
            logits = decoder.exit_logits(state, index, layered=True)[0, len(prompt) - 1 :]
        target = torch.tensor(reply)
        agreed, count = agreed + int((logits.argmax(-1) == target).sum()), count + len(reply)
        inside = logits.gather(1, target[:, None])[:, 0].isfinite()
        nats += float(torch.nn.functional.cross_entropy(logits[inside], target[inside], reduction="sum"))
        known += int(inside.sum())
    assert agreed / count == pytest.approx(record()["held_out_agreement"], abs=0.02)
    assert nats / known == pytest.approx(record()["held_out_loss"], abs=0.02)


@pytest.mark.real
@pytest.mark.parametrize("engine", [False, True])
def test_speculative_text_is_the_full_models_with_fewer_passes(
    engine: bool, exited: FathomForCausalLM, prompts: list[list[int]], replies: list[tuple[int, ...]]
) -> None:
    threshold = Calibration.load(place() / FILE).estimator.for_drafts().threshold
    exiting = Exiting(mode="speculative", exit_layers=(layer(),), threshold=threshold, max_stack=6)
    if engine:
        session = fathomlm.EngineSession(exited, exiting=exiting)
        found = [session.generate(prompt, max_new_tokens=DRAFTED) for prompt in prompts]
    else:
        found = fathomlm.generate(exited, prompts, max_new_tokens=DRAFTED, exiting=exiting)
    assert [row.tokens for row in found] == [reply[:DRAFTED] for reply in replies]
    exits, made = [row.exits for row in found if row.exits is not None], sum(len(row.tokens) for row in found)
    assert sum(row.accepted for row in exits) > 0.15 * made, "drafts spare passes through the whole model"
    if not engine:
        assert sum(row.deep_passes or 0 for row in exits) < 0.85 * made


@pytest.mark.real
def test_the_command_finds_it_by_name(
    smollm2_path: Path, replies: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smollm2-135m` names the fetched file, and the exit comes with it where no draft layer does."""
    monkeypatch.setattr("fathomlm.cli.decoding.packaged_drafts", lambda name: None)
    words = ["generate", NAME, "--chat", "-p", MESSAGES[0], "--max-new-tokens", str(DRAFTED)]
    assert main([*words, "--decode", "speculative", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "using the exits that ship with FathomLM" in captured.err
    assert found["exit_pack"] == str(place())
    assert tuple(found["results"][0]["tokens"]) == replies[0][:DRAFTED]
    assert found["exits"]["threshold"] == pytest.approx(Calibration.load(place() / FILE).estimator.for_drafts().threshold)
    assert found["exits"]["exit_rate"] > 0.1
