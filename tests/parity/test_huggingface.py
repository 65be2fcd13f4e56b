"""Every family against Hugging Face: logits, padding, greedy text, and the way back out (unrolled export)."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.families import FAMILIES
from fathomlm.checkpoints.huggingface import plan_from_config
from fathomlm.checkpoints.native import save
from parity.families import CONFIGS, tiny

TOKENS = torch.randint(3, 96, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """A tiny Hugging Face model, ours read from its directory, and the directory."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = tiny(request.param)
    theirs.save_pretrained(directory)
    return theirs, fathomlm.load(directory), directory


@torch.inference_mode()
def test_logits_equal(pair):
    theirs, ours, _ = pair
    expected = theirs(TOKENS).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(TOKENS).logits, expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_left_padding_equal(pair):
    theirs, ours, _ = pair
    mask = torch.ones_like(TOKENS)
    mask[0, :7] = 0
    mask[2, :1] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = theirs(TOKENS, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    torch.testing.assert_close(ours(TOKENS, attention_mask=mask).logits[mask.bool()], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_greedy_text_equal(pair):
    theirs, ours, _ = pair
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(TOKENS[:1], **options)
    assert torch.equal(ours.generate(TOKENS[:1], **options), expected)
    row = fathomlm.generate(ours, [TOKENS[0].tolist()], max_new_tokens=8, ignore_eos=True)[0]
    assert list(row.tokens) == expected[0, 24:].tolist()
    engine = fathomlm.Engine(ours, max_sequences=2, batch_size=2)
    row = engine.generate([TOKENS[0].tolist(), TOKENS[1, :5].tolist()], max_new_tokens=8, ignore_eos=True)[0]
    assert list(row.tokens) == expected[0, 24:].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "neox"])
@torch.inference_mode()
def test_a_scaling_that_was_added_by_hand_counts(name, tmp_path):
    """As the cards of some models say, to stretch the context: `rope_scaling` beside the newer `rope_parameters`."""
    plain = tiny(name)
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in config
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
    assert (plain(TOKENS).logits - expected).abs().max() > 0.01
    torch.testing.assert_close(fathomlm.load(tmp_path)(TOKENS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("older", [{}, {"rope_theta": 300.0}], ids=["nothing", "rope_theta"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gemma3", "neox", "smollm3", "olmo2", "granite"])
@torch.inference_mode()
def test_rotary_fields_that_are_missing_are_those_of_the_family(name, older, tmp_path):
    """SmolLM3 has a base of its own, and what others call rope_theta means nothing to GPT-NeoX."""
    tiny(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | older | {"rotary_pct": 1.0})
    )  # for GPT-NeoX, of which less is too small to tell
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
    torch.testing.assert_close(fathomlm.load(tmp_path)(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_configuration_survives_the_way_there_and_back(pair):
    _, ours, directory = pair
    architecture = ours.architecture
    written = FAMILIES[architecture.family].write(architecture)
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    assert plan_from_config({"model_type": model_type, **written}, "here")[0] == architecture


EXPORTED = {
    "tied": (
        {"sharing": "cycle", "recursions": 2, "init": "stepwise"},
        {"sharing": "middle-sequence", "recursions": 2, "init": "average"},
        {"sharing": "middle-cycle", "recursions": 3, "init": "upper", "resize": True},
    ),
    "relaxed": (
        {"sharing": "cycle-rev", "recursions": 3, "relax": "lora", "rank": 4},
        {"sharing": "cycle", "recursions": 2, "relax": "dora", "rank": "q=3,kv=5"},
    ),
}
"""Each family is tied in one way and relaxed in one, the families in turn."""


@pytest.mark.parametrize("kind", EXPORTED)
@torch.inference_mode()
def test_unrolled_export_equals_the_recursive_model_in_plain_transformers(pair, kind, tmp_path, request):
    ways = EXPORTED[kind]
    options = ways[list(CONFIGS).index(request.node.callspec.params["pair"]) % len(ways)]
    _, ours, _ = pair
    recursive = fathomlm.convert(ours, **options)
    fathomlm.export(recursive, tmp_path / "plain", shard_bytes=20_000)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(plain).__name__ == FAMILIES[ours.architecture.family].architecture_class
    assert plain.config.num_hidden_layers == recursive.plan.unrolled_layers
    torch.testing.assert_close(plain(TOKENS).logits, recursive(TOKENS).logits, rtol=0, atol=3e-5)


@torch.inference_mode()
def test_exported_model_reads_back_here(pair, tmp_path):
    _, ours, _ = pair
    recursive = fathomlm.convert(ours, sharing="cycle", recursions=2, init="stepwise")
    fathomlm.export(recursive, tmp_path / "plain")
    again = fathomlm.load(tmp_path / "plain")
    assert again.architecture.windows == recursive.architecture.windows
    assert torch.equal(again(TOKENS).logits, recursive(TOKENS).logits)


@torch.inference_mode()
def test_auto_classes_read_a_saved_model(pair, tmp_path):
    _, ours, _ = pair
    recursive = fathomlm.convert(ours, sharing="cycle", recursions=2, relax="dora", rank=3)
    save(recursive, tmp_path / "ours")
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(auto, fathomlm.FathomForCausalLM)
    assert auto.plan == recursive.plan
    assert auto.relaxation == recursive.relaxation
    assert torch.equal(auto(TOKENS).logits, recursive(TOKENS).logits)
