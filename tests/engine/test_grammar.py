"""Constrained decoding: the engine's greedy tokens are those of the reference decoder with the mask applied at each step."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fathomlm.cache import build_cache
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate, next_logits
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.grammar import Grammars
from fathomlm.engine.request import Request
from fathomlm.errors import FathomError, OptionError
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import LLAMA, model_of, routed

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("one_thread")

NEW, FREE = 36, 12
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "deep": {"type": "boolean"},
        "kind": {"enum": ["sea", "lake"]},
    },
    "required": ["deep", "kind"],
    "additionalProperties": False,
}
PROMPTS = ["the depth of the water is", "fox", "a fathom is six feet; the water", "line"]
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 96}


def routed_model(tokenizer: Any) -> FathomForCausalLM:
    model = model_of(routed(), architecture=replace(LLAMA, vocab=len(tokenizer) + 5, context=128))
    model.tokenizer, model.config.eos_token_id = tokenizer, tokenizer.eos_token_id
    return model


@cache
@torch.inference_mode()
def twin(model: FathomForCausalLM, prompt: str) -> list[int]:
    """The reference decoder, one token at a time, with what the schema does not allow masked out."""
    matcher, kv_cache = Grammars(model).json(SCHEMA).begin(), build_cache(model.plan, 96)
    scores_BV = next_logits(model.decoder, torch.tensor([model.tokenizer.encode(prompt)]), kv_cache)
    tokens: list[int] = []
    while True:
        allowed_V = torch.tensor(list(matcher.allowed())).bool()
        tokens.append(int(scores_BV[0].masked_fill(~allowed_V, -torch.inf).argmax()))
        if tokens[-1] == model.config.eos_token_id or len(tokens) == NEW:
            return tokens
        matcher.advance(tokens[-1])
        scores_BV = next_logits(model.decoder, torch.tensor([tokens[-1:]]), kv_cache)


def requests_of(model: FathomForCausalLM, prompts: list[str] = PROMPTS, **options: Any) -> list[Request]:
    """Every other one constrained, and the others shorter."""
    grammar = Grammars(model).json(SCHEMA)
    return [
        Request(
            id=i, prompt=tuple(model.tokenizer.encode(prompt)), constraint=None if i % 2 else grammar,
            sampling=Sampling(max_new_tokens=FREE if i % 2 else NEW, **options),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("whole", {}), ("whole", {"burst": 3, "lag": 2}), ("routed", {"burst": 4, "lag": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes"), SIZES, ids=str)
def test_a_constrained_text_is_the_reference_decoders_and_others_are_as_ever(
    kind: str, sizes: dict[str, Any], tiny_model: Any, tiny_tokenizer: Any
) -> None:
    """Also where the device runs ahead of the host and several turns make a step."""
    model = tiny_model if kind == "whole" else routed_model(tiny_tokenizer)
    more = {"cores": 2} if kind == "routed" else {}
    engine = Engine(model, **(SMALL | sizes | more))
    for result, request in zip(engine.run(requests_of(model)), requests_of(model), strict=True):
        prompt = PROMPTS[request.id]
        if request.constraint is None:
            assert result.tokens == generate(model, [prompt], max_new_tokens=FREE)[0].tokens
        else:
            assert list(result.tokens) == twin(model, prompt)
            found = json.loads(result.text)
            assert set(found) == {"deep", "kind"}
            assert result.finish.reason == "eos"


def test_preempted_sequences_go_on_in_their_grammar(tiny_model: Any) -> None:
    engine = Engine(tiny_model, **SMALL, memory=32 * 1024)
    prompts = PROMPTS * 3
    results = engine.run(requests_of(tiny_model, prompts))
    assert sum(result.preemptions for result in results) > 0
    for result, prompt in zip(results, prompts, strict=True):
        if result.id % 2 == 0:
            assert list(result.tokens) == twin(tiny_model, prompt)


@pytest.mark.parametrize(
    ("mode", "threshold"), [("speculative", 0.0), ("speculative", 0.1), ("parallel", 0.1), ("parallel", 1.0)]
)
def test_constraints_where_tokens_exit(mode: Any, threshold: float, tiny_model: Any) -> None:
    """Drafts are verified and leave the full model's text; what exits for good still follows its grammar."""
    exiting = Exiting(mode=mode, exit_layers=(2,), threshold=threshold)
    engine = Engine(tiny_model, exiting=exiting, burst=2, lag=1, **SMALL, shallows=3)
    for result, request in zip(engine.run(requests_of(tiny_model)), requests_of(tiny_model), strict=True):
        if request.constraint is not None:
            assert set(json.loads(result.text)) == {"deep", "kind"}
            if mode == "speculative" or threshold == 1.0:
                assert list(result.tokens) == twin(tiny_model, PROMPTS[request.id])
        elif mode == "speculative":
            assert result.tokens == generate(tiny_model, [PROMPTS[request.id]], max_new_tokens=FREE)[0].tokens


def test_sampled_texts_follow_their_grammar_and_repeat_with_their_seed(tiny_model: Any) -> None:
    texts = []
    for _ in range(2):
        asked = requests_of(tiny_model, temperature=1.5, top_k=50, seed=3, repetition_penalty=1.1)
        texts.append([result.text for result in Engine(tiny_model, **SMALL).run(asked)])
    assert texts[0] == texts[1]
    for text in texts[0][::2]:
        assert json.loads(text)["kind"] in ("sea", "lake")


def test_every_end_token_may_end_a_text(tiny_model: Any) -> None:
    model = deepcopy(tiny_model)
    other = model.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.config.eos_token_id = [model.tokenizer.eos_token_id, other]
    matcher = Grammars(model).lark('start: "a" "b"?').begin()
    assert sum(matcher.allowed()) == 1
    matcher.advance(model.tokenizer.encode("a")[0])
    allowed = matcher.allowed()
    assert {at for at, one in enumerate(allowed) if one} == {
        other,
        model.tokenizer.eos_token_id,
        model.tokenizer.encode("b")[0],
    }
    with pytest.raises(OptionError, match="cannot go on in its grammar"):
        matcher.advance(model.tokenizer.encode("c")[0])


def test_a_grammar_that_fails_on_its_way_fails_its_request_alone(tiny_model: Any) -> None:
    class Failing:
        def begin(self) -> Any:
            self.left = 3
            return self

        def allowed(self) -> bytes:
            return bytes([1]) * tiny_model.architecture.vocab

        def advance(self, token: int) -> None:
            self.left -= 1
            if not self.left:
                raise FathomError("too many items")

    engine = Engine(tiny_model, **SMALL)
    sampling = Sampling(max_new_tokens=8)
    prompt = tuple(tiny_model.tokenizer.encode("fox"))
    results = engine.run(
        [Request(id=i, prompt=prompt, sampling=sampling, constraint=c) for i, c in ((1, Failing()), (2, None))]
    )
    assert [(len(result.tokens), result.finish.reason, result.finish.error) for result in results] == [
        (3, "error", "too many items"), (8, "length", None),
    ]  # fmt: skip
    assert not engine.busy


def test_what_cannot_be_followed_is_refused(tiny_model: Any) -> None:
    with pytest.raises(OptionError, match=r"the schema cannot be followed: .*wat"):
        Grammars(tiny_model).json({"type": "wat"})
    with pytest.raises(OptionError, match="ignore_eos must be False"):
        Request(id=1, prompt=(1,), constraint=Grammars(tiny_model).json({}), sampling=Sampling(ignore_eos=True))
    for change, why in (("tokenizer", "a fast tokenizer"), ("end", "an end token")):
        model = deepcopy(tiny_model)
        if change == "tokenizer":
            model.tokenizer = None
        else:
            model.config.eos_token_id = None
        with pytest.raises(OptionError, match=f"requires a model with {why}"):
            Grammars(model).json({})


def test_without_the_package_one_line_says_what_to_install(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=re.escape("requires llguidance: pip install -c constraints.txt -e '.[grammar]'")):
        Grammars(tiny_model).json({})
