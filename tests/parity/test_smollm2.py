"""The real SmolLM2-135M against transformers: logits, greedy text, and the identities that random weights cannot show."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.decode.prompts import chat_prompt
from fathomlm.depth.cost import parameter_shapes
from gguf_reading import read_once

pytestmark = pytest.mark.real
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "In 1969, the first"]


@pytest.fixture(scope="module")
def ours(smollm2):
    return smollm2


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    """As transformers reads it."""
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF files")
    where = {"gguf_file": smollm2_path.name, "dtype": torch.float32}
    with read_once():
        return AutoModelForCausalLM.from_pretrained(smollm2_path.parent, **where).eval()


def test_tensors_of_the_file_are_those_of_transformers(smollm2_path, theirs):
    read, expected = GGUFCheckpoint(smollm2_path), theirs.state_dict()
    names = {"embed": "embed_tokens", "norm_attn": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    for key in parameter_shapes(read.architecture):
        renamed = re.sub(r"\b(attn|mlp)\.(\w+)", r"\1.\2_proj", key).replace(".attn.", ".self_attn.")
        renamed = ".".join(names.get(part, part) for part in renamed.split("."))
        assert torch.equal(read.tensor(key), expected[f"model.{renamed}"]), key


@torch.inference_mode()
def test_logits_equal_transformers(ours, theirs):
    for prompt in PROMPTS:
        tokens = torch.tensor([ours.tokenizer(prompt).input_ids])
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_greedy_text_is_identical_batched_and_alone(ours, theirs):
    batch = fathomlm.generate(ours, PROMPTS, max_new_tokens=8)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        tokens = torch.tensor([ours.tokenizer(prompt).input_ids])
        expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        assert list(row.tokens) == expected[0, tokens.shape[1] :].tolist()


def test_it_knows_the_capital_of_france(ours):
    prompt = chat_prompt(ours, [{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in fathomlm.generate(ours, [prompt], max_new_tokens=24)[0].text


@torch.inference_mode()
def test_full_rank_svd_restores_the_real_model(ours):
    """Four of its layers, so that the test is quick; real norms differ from layer to layer, random ones hardly do."""
    state = ours.state_dict()
    chosen = (0, 11, 17, 29)
    architecture = ours.architecture.with_layers(chosen)
    few = fathomlm.FathomForCausalLM(fathomlm.FathomConfig.of(architecture, fathomlm.DepthPlan.vanilla(len(chosen)))).eval()
    renamed = {n.replace(f"layers.{i}.", f"layers.{j}."): t for j, i in enumerate(chosen)
               for n, t in state.items() if f"layers.{i}." in n}  # fmt: skip
    few.load_state_dict({**{n: t for n, t in state.items() if "layers" not in n}, **renamed})
    tokens = torch.tensor([ours.tokenizer(PROMPTS[0]).input_ids])
    restored = fathomlm.convert(few, recursions=2, init="average", relax="lora", rank=10_000)
    expected = few(tokens).logits
    torch.testing.assert_close(restored(tokens).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
@torch.inference_mode()
def test_full_rank_svd_restores_the_whole_real_model(ours):
    restored = fathomlm.convert(ours, recursions=2, init="average", relax="lora", rank=10_000)
    for prompt in PROMPTS:
        tokens = torch.tensor([ours.tokenizer(prompt).input_ids])
        expected = ours(tokens).logits
        error = (restored(tokens).logits - expected).abs().max()
        print(f"largest difference {error:.1e} of scores up to {expected.abs().max():.1f}")
        assert error < 1e-4 * expected.abs().max()


def test_tokenizer_and_chat_template_travel_with_the_model(ours, tmp_path):
    fathomlm.convert(ours, recursions=2).save_pretrained(tmp_path)
    again = fathomlm.load(tmp_path)
    messages = [{"role": "user", "content": "Hello, 42 times!"}]
    assert again.tokenizer.chat_template == ours.tokenizer.chat_template
    assert chat_prompt(again, messages) == chat_prompt(ours, messages)
    assert again.tokenizer.decode(again.tokenizer("naïve 2026").input_ids) == "naïve 2026"
