"""The shipped model itself: its size, its plan, its tokenizer, its card, and that it predicts as well as its record says.

`record.json` holds losses in nats per token: `causal_loss` and `top_k_loss` on the validation split, routed as in use and as
in training, and `held_out_loss` on held_out.txt, which no model was trained on. The last is what this says:

    fathomlm eval ppl fathom-mor-23m --data tests/packaged/held_out.txt --json     # outputs[0].nats_per_token
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints.resolve import architecture_of, load
from fathomlm.decode.full import generate
from fathomlm.depth.cost import count
from fathomlm.engine.engine import Engine
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder, predict
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.packaged import packaged_path
from packaged.shipped import record_of

NAME = "fathom-mor-23m"
PATH = packaged_path(NAME)
HELD_OUT = Path(__file__).parent / "held_out.txt"
MB = 1_000_000
PROMPTS = ["The moon is", "In the middle of the nineteenth century,", '"I do not believe you," said the old man,']
TEXTS = [
    "The harbour lies open to the west; at 6.45 the tide turns.",
    "  two spaces, a\ttab,\r\nlines\n\n\nand 1,234,567.89 + x_2 = {y: [z]}",
    "naïve café, Ærø, 東京, Ελλάδα, 🙂 and \u200b a space of no width",
    "",
]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(PATH is None, reason=f"no model is packaged here: src/fathomlm/packaged/models/{NAME} is missing"),
]


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    found = load(NAME)
    assert isinstance(found, FathomForCausalLM)
    return found


def place() -> Path:
    assert PATH is not None
    return PATH


def record() -> dict[str, Any]:
    return record_of(PATH)


def test_it_is_small() -> None:
    sizes = {file.name: file.stat().st_size for file in place().rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 24 * MB, sizes
    assert max(sizes.values()) <= 12 * MB, sizes


def test_nothing_but_data_is_shipped() -> None:
    assert {file.suffix for file in place().rglob("*") if file.is_file()} == {".json", ".safetensors", ".md"}
    assert json.loads((place() / "config.json").read_text(encoding="utf-8"))["weight_format"] == "int8"


def test_the_plan_is_a_mixture_of_recursions(model: FathomForCausalLM) -> None:
    architecture, plan, relaxation = architecture_of(NAME)
    assert (architecture, plan, relaxation) == (model.architecture, model.plan, None)
    assert (model.plan.sharing, model.plan.recursions, model.plan.kv) == ("middle-cycle", 3, "cache")
    assert (model.plan.layout, model.plan.unrolled_layers, architecture.vocab) == ("1+4+1", 14, 12_288)
    routing = model.plan.routing
    assert routing is not None
    assert (routing.kind, routing.random) == ("expert", False)
    cost = count(architecture, model.plan)
    assert 23e6 < cost.non_embedding_parameters + cost.embedding_parameters < 24e6


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_text_back(text: str, model: FathomForCausalLM) -> None:
    tokens = model.tokenizer(text)["input_ids"]
    assert all(0 <= token < model.architecture.vocab for token in tokens)
    assert model.tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


def test_the_tokenizer_gives_the_held_out_text_back_in_few_tokens(model: FathomForCausalLM) -> None:
    text = HELD_OUT.read_text(encoding="utf-8")
    tokens = model.tokenizer(text)["input_ids"]
    assert model.tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert len(text) / len(tokens) > 3, "characters a token"


def test_the_card_names_licences_and_losses() -> None:
    card = (place() / "README.md").read_text(encoding="utf-8")
    assert "licen" in card.lower()
    loss = record()["causal_loss"]
    assert any(f"{loss:.{digits}f}" in card for digits in (2, 3, 4)), f"the loss is {loss}"


def test_what_is_routed_in_use_is_as_good_as_in_training() -> None:
    assert abs(record()["causal_loss"] - record()["top_k_loss"]) <= 0.02


def test_it_predicts_a_text_it_never_saw_as_well_as_its_record_says(model: FathomForCausalLM) -> None:
    (found,) = predict(Scorer(model), TextEncoder(model), [HELD_OUT.read_text(encoding="utf-8")])
    assert found.nats_per_token < record()["held_out_loss"] + 0.01
    assert found.nats_per_token > record()["held_out_loss"] - 0.05, "the record is of another, worse model"


def test_the_engine_says_what_the_reference_decoder_says(model: FathomForCausalLM) -> None:
    expected = generate(model, PROMPTS, max_new_tokens=24)
    found = Engine(model, batch_size=4, max_length=128).generate(PROMPTS, max_new_tokens=24)
    assert [(each.tokens, each.depths, each.text) for each in found] == [
        (each.tokens, each.depths, each.text) for each in expected
    ]
    assert len({depth for each in expected for depth in each.depths or ()}) > 1, "tokens go to different depths"
