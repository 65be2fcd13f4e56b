"""Generation at full depth: the identities that must hold in float32, against transformers and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fathomlm
from decode import exit_models
from fathomlm.cache import DenseCache
from fathomlm.decode.full import Generation, Session, generate, left_pad, next_logits
from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA, GEMMA3, NEOX = (each.with_layers((0, 1, 3, 4)) for each in (exit_models.LLAMA, exit_models.GEMMA3, exit_models.NEOX))
WINDOWS = replace(LLAMA, family="mistral", windows=(4, None, 4, None))
LOOP = DepthPlan.build("cycle", 2, 4)
LORA = Relaxation(kind="lora", ranks={"q": 4, "v": 4, "down": 4})

MODELS: dict[str, tuple[Architecture, DepthPlan, Relaxation | None]] = {
    "llama": (LLAMA, DepthPlan.vanilla(4), None),
    "llama-loop": (LLAMA, LOOP, None),
    "llama-lora": (LLAMA, LOOP, LORA),
    "llama-dora": (LLAMA, LOOP, Relaxation(kind="dora", ranks={"k": 4, "up": 4})),
    "llama-prefix": (LLAMA, LOOP, Relaxation(kind="prefix", prefix_length=3)),
    "llama-encoding": (LLAMA, LOOP, Relaxation(kind="encoding")),
    "windows": (WINDOWS, LOOP, None),
    "windows-prefix": (WINDOWS, LOOP, Relaxation(kind="prefix", prefix_length=3)),
    "gemma3-lora": (GEMMA3, LOOP, LORA),
    "neox": (NEOX, DepthPlan.build("middle-cycle", 2, 4), None),
}
PROMPTS = [[5, 9, 33, 7, 81, 2, 64, 13, 50], [17], [3, 90, 11, 42], [60, 61, 62, 63]]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7}


def build(name: str) -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(*MODELS[name])).eval()
    neutral = 0.0 if model.architecture.norm == "rms_plus_one" else 1.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            offset = "offsets" in key or key.endswith("bias")
            centre = 1.0 if "encoding" in key or "magnitude" in key else neutral if "norm" in key and not offset else 0.0
            parameter.normal_(mean=centre, std=0.2, generator=generator)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> FathomForCausalLM:
    return build(request.param)


def new_cache(model: FathomForCausalLM) -> DenseCache:
    return DenseCache(model.plan, reserve=4)


def tokens(results: list[Generation]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("first", [1, 5, 11])
def test_prefill_and_decode_equal_one_forward(model: FathomForCausalLM, first: int) -> None:
    sequence_BT = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    expected_BTV = model.decoder.logits(model.decoder(sequence_BT))
    cache = new_cache(model)
    assert close(next_logits(model.decoder, sequence_BT[:, :first], cache), expected_BTV[:, first - 1])
    for t in range(first, 12):
        assert close(next_logits(model.decoder, sequence_BT[:, t : t + 1], cache), expected_BTV[:, t])
    assert cache.length == 12


@torch.inference_mode()
def test_a_prompt_in_two_parts_equals_one(model: FathomForCausalLM) -> None:
    prompt_BT = torch.tensor([PROMPTS[0]])
    cache = new_cache(model)
    next_logits(model.decoder, prompt_BT[:, :4], cache)
    expected = next_logits(model.decoder, prompt_BT, new_cache(model))
    assert close(next_logits(model.decoder, prompt_BT[:, 4:], cache), expected)


@torch.inference_mode()
def test_padding_changes_nothing(model: FathomForCausalLM) -> None:
    tokens_BT, padding = left_pad(PROMPTS, room=3, device=torch.device("cpu"))
    assert padding is not None
    cache = new_cache(model)
    together = [next_logits(model.decoder, tokens_BT, cache, padding)]
    follow = [torch.tensor([8, 9, 10, 11]), torch.tensor([20, 21, 22, 23])]
    together += [next_logits(model.decoder, next_B[:, None], cache, padding) for next_B in follow]
    for i, prompt in enumerate(PROMPTS):
        alone_cache = new_cache(model)
        alone = [next_logits(model.decoder, torch.tensor([prompt]), alone_cache)]
        alone += [next_logits(model.decoder, next_B[i : i + 1][:, None], alone_cache) for next_B in follow]
        for got, expected in zip(together, alone, strict=True):
            assert close(got[i], expected[0])


def test_rows_of_one_length_need_no_padding() -> None:
    tokens_BT, padding = left_pad([[1, 2], [3, 4]], room=5, device=torch.device("cpu"))
    assert padding is None
    assert tokens_BT.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.5}], ids=["greedy", "sampled", "penalty"])
def test_a_batch_equals_singles(model: FathomForCausalLM, options: dict[str, Any]) -> None:
    together = tokens(generate(model, PROMPTS, max_new_tokens=6, **options))
    alone = [generate(model, [prompt], max_new_tokens=6, **options)[0].tokens for prompt in PROMPTS]
    assert together == alone
    assert len(set(together)) > 1


def hub_generate(model: FathomForCausalLM, prompts: list[list[int]], new: int = 10, **options: Any) -> list[tuple[int, ...]]:
    """transformers' own loop over the same model, with left padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **options)
    return [tuple(row) for row in out[:, longest:].tolist()]


def test_greedy_equals_transformers(model: FathomForCausalLM) -> None:
    assert tokens(generate(model, PROMPTS, max_new_tokens=10)) == hub_generate(model, PROMPTS, do_sample=False)


def test_penalised_greedy_equals_transformers(model: FathomForCausalLM) -> None:
    expected = hub_generate(model, PROMPTS[:1], 20, do_sample=False, repetition_penalty=1.5)
    assert tokens(generate(model, PROMPTS[:1], max_new_tokens=20, repetition_penalty=1.5)) == expected
    assert expected != hub_generate(model, PROMPTS[:1], 20, do_sample=False)


def test_sampling_equals_transformers_from_the_same_seed(model: FathomForCausalLM) -> None:
    options = {key: value for key, value in SAMPLED.items() if key != "seed"}
    torch.manual_seed(SAMPLED["seed"])
    expected = hub_generate(model, PROMPTS[:1], do_sample=True, **options)
    assert tokens(generate(model, PROMPTS[:1], max_new_tokens=10, **SAMPLED)) == expected
    assert expected != hub_generate(model, PROMPTS[:1], do_sample=False)


def test_a_seed_repeats_and_another_differs() -> None:
    model = build("llama")
    first = tokens(generate(model, PROMPTS, max_new_tokens=20, **SAMPLED))
    assert first == tokens(generate(model, PROMPTS, max_new_tokens=20, **SAMPLED))
    assert first != tokens(generate(model, PROMPTS, max_new_tokens=20, **{**SAMPLED, "seed": 8}))
    unseeded = {**SAMPLED, "seed": None}
    assert tokens(generate(model, PROMPTS, max_new_tokens=20, **unseeded)) != first


@pytest.mark.parametrize("as_list", [False, True])
def test_rows_end_at_their_own_end_token(as_list: bool) -> None:
    model = build("llama")
    free = tokens(generate(model, PROMPTS, max_new_tokens=20))
    end = free[0][4]
    model.config.eos_token_id = [end, 95] if as_list else end
    results = generate(model, PROMPTS, max_new_tokens=20)
    for result, row in zip(results, free, strict=True):
        ends = [i for i, token in enumerate(row) if token in ({end, 95} if as_list else {end})]
        assert result.tokens == row[: ends[0] + 1] if ends else result.tokens == row
        assert result.finish == ("eos" if ends else "length")
    assert {result.finish for result in results} == {"eos", "length"}, "some rows must go on while others are over"
    assert tokens(generate(model, PROMPTS, max_new_tokens=20, ignore_eos=True)) == free


def test_a_generation_says_what_it_was() -> None:
    model = build("llama")
    (result,) = generate(model, [PROMPTS[0]], max_new_tokens=5)
    assert result.prompt_tokens == tuple(PROMPTS[0])
    assert (len(result.tokens), result.text, result.finish) == (5, "", "length")
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0
    assert result.tokens_per_second == pytest.approx(4 / result.decode_seconds)
    (one,) = generate(model, [PROMPTS[0]], max_new_tokens=1)
    assert one.tokens_per_second == 0


def test_the_package_offers_it_and_takes_tensors_as_ids() -> None:
    model = build("llama")
    rows = [torch.tensor(prompt) for prompt in PROMPTS]
    assert tokens(fathomlm.generate(model, rows, fathomlm.Sampling(max_new_tokens=4))) == tokens(
        generate(model, PROMPTS, max_new_tokens=4)
    )
    assert generate(model, []) == []


def test_only_the_last_position_is_scored() -> None:
    """A prompt's other positions would cost prompt-length times the vocabulary."""
    model = build("llama")
    widths: list[int] = []
    score = model.decoder.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(hidden.numel() // hidden.shape[-1])
        return score(hidden)

    model.decoder.logits = spy  # type: ignore[method-assign]
    generate(model, PROMPTS, max_new_tokens=3)
    assert widths == [len(PROMPTS)] * 3


BAD: list[tuple[Callable[[FathomForCausalLM], object], str]] = [
    (lambda m: generate(m, [[96]]), "token id 96 is outside the model's vocabulary of 96"),
    (lambda m: generate(m, [[-1]]), "token id -1 is outside"),
    (lambda m: generate(m, [[1] * 100], max_new_tokens=29), "100 prompt tokens and max_new_tokens=29 make 129"),
    (lambda m: generate(m, [[1] * 9], max_new_tokens=2, max_context=10), "more than the context of 10"),
    (lambda m: generate(m, [[]]), "the prompt is empty and this model has no BOS token"),
    (lambda m: generate(m, [1, 2]), "prompts must be a string, a list of strings or a list of token-id lists"),
    (lambda m: generate(m, [[1.5]]), "prompts must be a string"),
    (lambda m: generate(m, "text"), "no tokenizer, so it takes no text"),
    (lambda m: generate(m, [[1]], max_new_tokens=3, stop=("x",)), "stop strings require a tokenizer"),
    (lambda m: generate(m, [[1]], max_tokens=3), "unknown sampling option 'max_tokens'"),
    (lambda m: chat_prompt(m, [{"role": "user", "content": "hi"}]), "no tokenizer"),
    (lambda m: Session(m).generate([1] * 100, max_new_tokens=29), "make 129"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_what_cannot_be_done_is_said(call: Callable[[FathomForCausalLM], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(build("llama"))


def test_the_whole_context_can_be_used() -> None:
    (result,) = generate(build("llama"), [[1] * 100], max_new_tokens=28)
    assert len(result.tokens) == 28


def test_an_empty_prompt_starts_from_the_begin_token() -> None:
    model = build("llama")
    model.config.bos_token_id = 1
    assert generate(model, [[]], max_new_tokens=4)[0].prompt_tokens == (1,)


def test_text_prompts_and_streaming(tiny_model: FathomForCausalLM) -> None:
    prompts = ["the depth of the water", "a fathom", ""]
    shown = ["", "", ""]
    steps: list[int] = []

    def on_text(row: int, piece: str) -> None:
        assert piece
        shown[row] += piece

    watched = generate(tiny_model, prompts, max_new_tokens=30, on_text=on_text, on_step=steps.append)
    assert [result.text for result in watched] == shown
    assert shown[0]
    quiet = generate(tiny_model, prompts, max_new_tokens=30)
    assert [(r.tokens, r.text, r.finish) for r in quiet] == [(r.tokens, r.text, r.finish) for r in watched]
    assert watched[0].prompt_tokens == tuple(tiny_model.tokenizer("the depth of the water")["input_ids"])
    assert watched[2].prompt_tokens == (tiny_model.tokenizer.bos_token_id,)
    assert steps == list(range(1, max(len(r.tokens) for r in watched)))
    for result in watched:
        assert result.text == tiny_model.tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert generate(tiny_model, prompts[0], max_new_tokens=30)[0].text == shown[0]


def test_a_stop_string_ends_one_row_and_not_the_others(tiny_model: FathomForCausalLM) -> None:
    prompts = ["the depth of the water", "a fathom"]
    free = generate(tiny_model, prompts, max_new_tokens=40, ignore_eos=True)
    text = free[0].text
    stop = next(text[i : i + 3] for i in range(6, len(text)) if text[i : i + 3] not in free[1].text)
    for on_text in (None, lambda row, piece: None):
        first, second = generate(tiny_model, prompts, max_new_tokens=40, ignore_eos=True, stop=stop, on_text=on_text)
        assert first.text == text[: text.find(stop)]
        assert first.finish == "stop"
        assert first.tokens == free[0].tokens[: len(first.tokens)]
        assert len(first.tokens) < 40
        assert (second.tokens, second.finish) == (free[1].tokens, "length")


def test_the_end_token_is_counted_and_not_shown(tiny_model: FathomForCausalLM) -> None:
    free = generate(tiny_model, ["the depth"], max_new_tokens=12, ignore_eos=True)[0]
    at = next(i for i in range(3, 12) if free.tokens[i] not in free.tokens[:i])
    before = tiny_model.config.eos_token_id
    try:
        tiny_model.config.eos_token_id = free.tokens[at]
        shown: list[str] = []
        (result,) = generate(tiny_model, ["the depth"], max_new_tokens=12, on_text=lambda _, piece: shown.append(piece))
        (quiet,) = generate(tiny_model, ["the depth"], max_new_tokens=12)
    finally:
        tiny_model.config.eos_token_id = before
    assert (result.tokens, result.finish) == (free.tokens[: at + 1], "eos")
    assert (
        quiet.text
        == result.text
        == "".join(shown)
        == tiny_model.tokenizer.decode(free.tokens[:at], skip_special_tokens=True)
    )


def test_chat_prompt_is_the_template(tiny_model: FathomForCausalLM) -> None:
    ids = chat_prompt(tiny_model, [{"role": "system", "content": "be deep"}, {"role": "user", "content": "the water?"}])
    expected = "<|im_start|>system\nbe deep<|im_end|>\n<|im_start|>user\nthe water?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_model.tokenizer.decode(ids) == expected
    assert ids[0] == tiny_model.tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "no chat template"), ("{{ raise_exception('no system role') }}", "refused the conversation: no system role")],
)
def test_a_missing_or_failing_template_is_said(
    tiny_model: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch, template: str | None, message: str
) -> None:
    monkeypatch.setattr(tiny_model.tokenizer, "chat_template", template)
    with pytest.raises(OptionError, match=message):
        chat_prompt(tiny_model, [{"role": "user", "content": "hi"}])


def test_text_that_is_not_unicode_is_refused(tiny_model: FathomForCausalLM) -> None:
    with pytest.raises(OptionError, match="not valid Unicode"):
        generate(tiny_model, "caf\udce9")


class Turns:
    """A session and what it had to run: how many tokens each pass took."""

    def __init__(self, model: FathomForCausalLM) -> None:
        self.session = Session(model)
        self.widths: list[int] = []
        model.decoder.register_forward_pre_hook(lambda _, args: self.widths.append(args[0].shape[1]))

    def say(self, prompt: list[int], **options: Any) -> tuple[Generation, int]:
        """The reply, and how many prompt tokens ran for it."""
        self.widths.clear()
        reply = self.session.generate(prompt, max_new_tokens=8, **options)
        return reply, self.widths[0]


def test_a_session_runs_only_what_is_new(model: FathomForCausalLM, request: pytest.FixtureRequest) -> None:
    """Greedy and sampled, the models in turn."""
    options = ({}, SAMPLED)[list(MODELS).index(request.node.callspec.params["model"]) % 2]
    turns = Turns(model)
    one, ran = turns.say(PROMPTS[0], **options)
    assert ran == len(PROMPTS[0])
    longer = [*PROMPTS[0], *one.tokens, 30, 31, 32]
    edited = [*PROMPTS[0], 77, *one.tokens[1:], 30]
    shorter = longer[:6]
    cases = [(longer, 4), (longer, None), (edited, None), (shorter, 1), ([90, *longer], None), (shorter, None)]
    for prompt, expected_ran in cases:
        got, ran = turns.say(prompt, **options)
        assert got.tokens == generate(model, [prompt], max_new_tokens=8, **options)[0].tokens
        assert turns.session.held == (*prompt, *got.tokens[:-1])
        if expected_ran is not None:
            assert ran == expected_ran
    turns.session.reset()
    assert turns.say(shorter, **options)[1] == len(shorter)


@pytest.mark.parametrize("stop_at", range(1, 30, 3))
def test_an_interrupted_session_is_still_right(stop_at: int) -> None:
    """Ctrl-C may come inside a pass, when some steps have stored a token and others have not."""
    model = build("llama")
    turns = Turns(model)
    count = 0

    def interrupt(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == stop_at:
            raise KeyboardInterrupt

    hooks = [layer.mlp.register_forward_pre_hook(interrupt) for layer in model.decoder.layers]
    with pytest.raises(KeyboardInterrupt):
        turns.say(PROMPTS[0])
    for hook in hooks:
        hook.remove()
    prompt = [*PROMPTS[0], 30, 31]
    assert turns.say(prompt)[0].tokens == generate(model, [prompt], max_new_tokens=8)[0].tokens


def test_sampling_object_and_options_go_together() -> None:
    model = build("llama")
    base = Sampling(max_new_tokens=6, temperature=1.0, seed=1)
    assert tokens(generate(model, PROMPTS, base, max_new_tokens=3)) == [
        row[:3] for row in tokens(generate(model, PROMPTS, base))
    ]
