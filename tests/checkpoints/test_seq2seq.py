"""Checkpoints of encoder-decoder models: what is read, what is refused, and what the command says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fathomlm
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import architecture_of, encoder_of
from fathomlm.cli.main import main
from fathomlm.errors import CheckpointError, OptionError, UnsupportedModel
from fathomlm.model.encoder import ENCODERS, build_encoder
from parity.t5_models import write_tiny_t5

SOURCE = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(2))
CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t5")
    write_tiny_t5("t5", directory)
    return directory


@pytest.fixture
def copy(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def native(sound, tmp_path):
    return save(fathomlm.load(sound), tmp_path / "native")


def edit(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config.update(changes)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(directory: Path, **changes: Any) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: t for name, t in tensors.items() if t is not None}, file, metadata={"format": "pt"})


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(SOURCE, decoder_input_ids=TARGET).logits


def test_copies_of_the_embedding_are_the_embedding(copy, sound):
    shared = load_file(copy / "model.safetensors")["shared.weight"]
    copies = dict.fromkeys(("encoder__embed_tokens__weight", "decoder__embed_tokens__weight", "lm_head__weight"), shared)
    edit_tensors(copy, **{name: tensor.clone() for name, tensor in copies.items()})
    model = fathomlm.load(copy)
    assert model.decoder.head is None
    assert torch.equal(logits(model), logits(fathomlm.load(sound)))
    edit_tensors(copy, shared__weight=None, decoder__embed_tokens__weight=None)
    assert torch.equal(logits(fathomlm.load(copy)), logits(model))


def test_two_embeddings_are_refused(copy):
    edit_tensors(copy, decoder__embed_tokens__weight=torch.zeros(96, 32))
    with pytest.raises(UnsupportedModel, match=r"decoder\.embed_tokens\.weight.*one matrix"):
        fathomlm.load(copy)


def test_a_bias_that_nothing_reads_is_left_alone(copy, sound):
    edit_tensors(copy, **{CROSS_BIAS: torch.zeros(8, 4)})
    assert torch.equal(logits(fathomlm.load(copy)), logits(fathomlm.load(sound)))


@pytest.mark.parametrize("name", ["decoder.block.0.layer.3.adapter.weight", "encoder.extra.weight", "classifier.weight"])
def test_tensors_without_a_place_are_refused(copy, name):
    edit_tensors(copy, **{name: torch.zeros(2)})
    with pytest.raises(UnsupportedModel, match="are unexpected in a t5 model"):
        fathomlm.load(copy)


@pytest.mark.parametrize(
    "name",
    ["encoder.block.1.layer.0.SelfAttention.q.weight", "decoder.block.3.layer.1.EncDecAttention.v.weight", "shared.weight"],
)
def test_missing_tensors_are_named(copy, name):
    edit_tensors(copy, **{name: None})
    with pytest.raises(CheckpointError, match=f"no tensor '{name}'"):
        fathomlm.load(copy)


def test_wrong_shapes_are_named(copy):
    edit_tensors(copy, **{"encoder.final_layer_norm.weight": torch.ones(31)})
    with pytest.raises(CheckpointError, match=r"'final_layer_norm\.weight' is \(31,\)"):
        fathomlm.load(copy)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"d_ff": ...}, CheckpointError, "is missing d_ff"),
        ({"d_model": "wide"}, CheckpointError, "d_model must be an integer"),
        ({"dropout_rate": "much"}, CheckpointError, "encoder's dropout_rate must be"),
        ({"feed_forward_proj": "gated-swish2", "dense_act_fn": ...}, UnsupportedModel, "activation 'swish2'"),
        ({"model_type": "umt5"}, UnsupportedModel, "'umt5' is not supported; supported: .*t5, mt5, longt5"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised"),
    ],
)
def test_configurations_that_cannot_be_carried_out(copy, changes, error, said):
    edit(copy, **changes)
    with pytest.raises(error, match=said):
        fathomlm.load(copy)


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        ({"model_type": "bert"}, "unknown encoder 'bert'"),
        ({"auto_map": "evil.Encoder"}, "unknown encoder field"),
        ({"d_model": 16}, "d_model is 16"),
        ({"num_heads": "four"}, "encoder's num_heads must be an integer"),
        ({"dense_act_fn": "nonsense"}, "encoder cannot be built"),
    ],
)
def test_only_known_encoders_are_ever_built(native, encoder, said):
    config = json.loads((native / "config.json").read_text())
    edit(native, encoder_config={**config["encoder_config"], **encoder})
    with pytest.raises(CheckpointError, match=said):
        fathomlm.load(native)


def test_a_decoder_is_not_loaded_without_its_encoder(native):
    edit(native, model_type="fathomlm")
    with pytest.raises(CheckpointError, match="model type 'fathomlm-seq2seq'"):
        fathomlm.load(native)


def test_the_known_encoders_are_the_t5_family():
    assert set(ENCODERS) == {"t5", "mt5", "longt5"}
    with pytest.raises(OptionError, match="unknown encoder"):
        build_encoder({"model_type": "llama"})


def test_the_decoder_starts_with_padding_where_nothing_else_is_said(copy):
    for file in ("config.json", "generation_config.json"):
        found = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({k: v for k, v in found.items() if k != "decoder_start_token_id"}))
    assert fathomlm.load(copy).config.decoder_start_token_id == 0
    edit(copy, decoder_start_token_id=7)
    assert fathomlm.load(copy).config.decoder_start_token_id == 7


@pytest.mark.parametrize("tied", [True, False])
def test_a_configuration_alone_tells_the_architecture(copy, tied):
    """Of a hub model only config.json is read: as transformers wrote it then, and as it writes it now."""
    whole = architecture_of(copy)[0]
    (copy / "model.safetensors").unlink()
    edit(copy, tie_word_embeddings=tied, scale_decoder_outputs=...)
    alone = architecture_of(copy)[0]
    assert alone.tied_embeddings is tied
    assert alone.head_scale == (32**-0.5 if tied else 1.0)
    assert (alone == whole) is tied
    edit(copy, tie_word_embeddings=True, scale_decoder_outputs=tied)
    assert architecture_of(copy)[0] == alone
    assert encoder_of(copy) is not None


def test_tokenizers_travel(copy, tiny_tokenizer, tmp_path):
    tiny_tokenizer.save_pretrained(copy)
    model = fathomlm.load(copy)
    again = fathomlm.load(save(model, tmp_path / "again"))
    assert again.tokenizer("the depth").input_ids == tiny_tokenizer("the depth").input_ids


def test_numbers_keep_their_format_or_take_the_one_asked_for(sound, tmp_path):
    half = fathomlm.load(sound, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    again = fathomlm.load(save(half, tmp_path / "half"))
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(again), logits(half))


def test_inspect_counts_both_halves(sound, native, capsys):
    for source in (sound, native):
        assert main(["inspect", str(source), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        model = fathomlm.load(source)
        assert record["family"] == "t5"
        assert record["encoder_parameters"] == sum(p.numel() for p in model.encoder.parameters())
        decoder = sum(p.numel() for p in model.decoder.parameters())
        assert record["non_embedding_parameters"] + record["embedding_parameters"] == decoder
        assert main(["inspect", str(source), "--recursions", "2", "--relax", "lora", "--rank", "cross=4"]) == 0
        assert "parameters of the encoder" in capsys.readouterr().out


def test_convert_and_export_from_the_command(sound, tmp_path, capsys):
    looped, plain = tmp_path / "looped", tmp_path / "plain"
    assert main(["convert", str(sound), str(looped), "--recursions", "2", "--relax", "lora", "--rank", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["non_embedding_parameters"] < record["base_non_embedding_parameters"]
    assert fathomlm.load(looped).plan.recursions == 2
    assert main(["export", str(looped), str(plain), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "T5ForConditionalGeneration"
    torch.testing.assert_close(logits(fathomlm.load(plain)), logits(fathomlm.load(looped)), rtol=0, atol=1e-5)


def test_a_decoder_of_another_shape_is_not_exported(sound, tmp_path):
    model = fathomlm.load(sound)
    model.config.encoder_config["d_ff"] = 50
    with pytest.raises(OptionError, match="one d_ff; the decoder has 48, the encoder 50"):
        fathomlm.export(model, tmp_path / "plain")
