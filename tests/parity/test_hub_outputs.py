"""What a call returns, in transformers' words: hidden states, tuples, caches; and a vocabulary of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import fathomlm
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import save
from fathomlm.errors import UnsupportedModel
from parity.families import tiny
from parity.t5_models import write_tiny_t5

TOKENS = torch.arange(3, 19).view(2, 8)


def pair(name: str, directory: Path) -> tuple[Any, Any]:
    theirs = tiny(name)
    theirs.save_pretrained(directory / name)
    return theirs, fathomlm.load(directory / name)


@pytest.mark.parametrize("name", ["llama", "gemma", "neox"])
@torch.inference_mode()
def test_hidden_states_and_tuples_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name, tmp_path)
    for options in ({"use_cache": False}, {"use_cache": False, "labels": TOKENS}):
        expected, found = (model(TOKENS, output_hidden_states=True, **options) for model in (theirs, ours))
        assert len(found.hidden_states) == len(expected.hidden_states) == 7
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        assert list(found.keys()) == list(expected.keys())
        plain = ours(TOKENS, output_hidden_states=True, return_dict=False, **options)
        assert isinstance(plain, tuple)
        assert len(plain) == len(theirs(TOKENS, output_hidden_states=True, return_dict=False, **options))
        assert torch.equal(plain[-2], found.logits)
    assert ours(TOKENS).hidden_states is None
    ours.config.output_hidden_states, ours.config.return_dict = True, False
    assert isinstance(ours(TOKENS, use_cache=False), tuple)
    assert len(ours(TOKENS, use_cache=False)[-1]) == 7


@torch.inference_mode()
def test_a_looped_model_has_a_state_for_each_step(tmp_path: Path) -> None:
    _, base = pair("llama", tmp_path)
    ours = fathomlm.convert(base, recursions=3, relax="encoding")
    states = ours(TOKENS, output_hidden_states=True).hidden_states
    assert len(states) == 1 + ours.plan.unrolled_layers
    expected = ours.decoder.states(TOKENS, at=range(6))
    for index in range(5):
        torch.testing.assert_close(states[index + 1], expected[index], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.decoder.logits(states[-1]), ours(TOKENS).logits, rtol=0, atol=1e-6)
    generated = ours.generate(TOKENS, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True)
    assert len(generated.hidden_states[0]) == 7


@torch.inference_mode()
def test_what_cannot_be_given_is_refused(tmp_path: Path) -> None:
    _, base = pair("llama", tmp_path)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        base(TOKENS, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states must be True or False"):
        base(TOKENS, output_hidden_states=[1])
    with pytest.raises(ValueError, match="cu_seq_lens_q is not supported"):
        base(TOKENS, cu_seq_lens_q=torch.tensor([0, 8]))
    with pytest.raises(UnsupportedModel, match="no hidden states step by step"):
        fathomlm.convert(base, recursions=2, router="expert")(TOKENS, output_hidden_states=True)


@torch.inference_mode()
def test_a_call_gives_the_cache_that_the_next_one_goes_on_from(tmp_path: Path) -> None:
    """As transformers' models do where nothing is said; a None in its place would lose the context without a word."""
    theirs, base = pair("llama", tmp_path)
    for ours in (base, fathomlm.convert(base, recursions=2, kv="share")):
        whole = ours(TOKENS).logits
        first = ours(TOKENS[:, :5])
        again = ours(TOKENS[:, 5:], past_key_values=first.past_key_values)
        torch.testing.assert_close(again.logits, whole[:, 5:], rtol=0, atol=1e-5)
        assert ours(TOKENS, use_cache=False).past_key_values is None
        assert len(ours(TOKENS, return_dict=False)) == len(theirs(TOKENS, return_dict=False)) == 2
    routed = fathomlm.convert(base, recursions=2, router="expert")
    assert routed(TOKENS).past_key_values is None


@torch.inference_mode()
def test_hidden_states_of_an_encoder_decoder(tmp_path: Path) -> None:
    theirs = write_tiny_t5("t5", tmp_path / "t5")
    ours = fathomlm.load(tmp_path / "t5").eval()
    given = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :4], "output_hidden_states": True}
    expected, found = (model(**given, use_cache=False) for model in (theirs, ours))
    for name in ("decoder_hidden_states", "encoder_hidden_states"):
        assert len(found[name]) == len(expected[name])
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert list(found.keys()) == list(expected.keys())
    plain = ours(**given, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], found.logits)
    for name in ("past_key_values", "encoder_outputs", "inputs_embeds", "decoder_inputs_embeds", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            ours(**given, **{name: TOKENS if name != "output_attentions" else True})


@pytest.mark.parametrize("size", [101, 64])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@torch.inference_mode()
def test_a_resized_vocabulary_is_saved_and_read_back(name: str, size: int, tmp_path: Path) -> None:
    _, base = pair(name, tmp_path)
    looped = fathomlm.convert(base, recursions=2)
    ours = replan(looped, looped.plan.with_exits([2]), exit_rank=3)
    ours.decoder.exit_heads["2"].b.normal_()
    ours.limit_exits(torch.tensor([4, 9, 70]))
    tokens = TOKENS
    before, hidden = ours(tokens).logits, torch.randn(1, 2, 32)
    at_exit = ours.decoder.exit_logits(hidden, 2)
    ours.resize_token_embeddings(size)
    kept = min(size, 96)
    assert (ours.config.vocab_size, ours.architecture.vocab, ours.get_input_embeddings().num_embeddings) == (size,) * 3
    assert ours.config.exit_vocab == [word for word in (4, 9, 70) if word < size]
    assert torch.equal(ours(tokens).logits[..., :kept], before[..., :kept])
    after = ours.decoder.exit_logits(hidden, 2)
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., [4, 9]], at_exit[..., [4, 9]], rtol=0, atol=1e-5)
    if size > 96:
        tokens = torch.cat([tokens, torch.full((2, 1), size - 1)], dim=1)
    expected = ours(tokens).logits
    ours.save_pretrained(tmp_path / "transformers")
    save(ours, tmp_path / "ours")
    for directory in ("transformers", "ours"):
        for again in (fathomlm.load(tmp_path / directory), AutoModelForCausalLM.from_pretrained(tmp_path / directory)):
            assert again.architecture == ours.architecture
            assert torch.equal(again(tokens).logits, expected)
            assert torch.equal(again.decoder.exit_logits(hidden, 2), after)
    assert fathomlm.generate(ours, [[3, 4]], max_new_tokens=2, ignore_eos=True)[0].tokens


def test_padding_to_a_multiple_and_no_size_at_all(tmp_path: Path) -> None:
    _, ours = pair("llama", tmp_path)
    assert ours.resize_token_embeddings().num_embeddings == 96
    ours.resize_token_embeddings(97, pad_to_multiple_of=16)
    assert ours.architecture.vocab == ours.config.vocab_size == ours.get_output_embeddings().out_features == 112
    loss = ours(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert ours.get_output_embeddings().weight.grad.shape == (112, 32)


@pytest.mark.parametrize("name", ["t5", "flan-t5"])
@torch.inference_mode()
def test_an_encoder_decoder_is_resized_too(name: str, tmp_path: Path) -> None:
    write_tiny_t5(name, tmp_path / name)
    ours = fathomlm.load(tmp_path / name).eval()
    ours.resize_token_embeddings(104)
    given = {"input_ids": TOKENS + 85, "decoder_input_ids": TOKENS[:, :4] + 85}
    expected = ours(**given).logits
    assert expected.shape[-1] == 104
    ours.save_pretrained(tmp_path / "again")
    for again in (fathomlm.load(tmp_path / "again"), AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")):
        torch.testing.assert_close(again.eval()(**given).logits, expected, rtol=0, atol=0)
