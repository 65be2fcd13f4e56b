"""Broken and hostile checkpoints: one clear error of ours each, never a crash, never executed code."""

from __future__ import annotations

import dataclasses
import errno
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fathomlm
from fathomlm.checkpoints.families import family_for
from fathomlm.checkpoints.native import save
from fathomlm.depth import Architecture
from fathomlm.errors import CheckpointError, FathomError, ModelNotFound, OptionError, UnsupportedModel
from fathomlm.train.data.tokenizers import byte_tokenizer
from parity.families import tiny


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound")
    tiny("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def copy(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "model"))


def edit(directory: Path, **changes):
    config = json.loads((directory / "config.json").read_text())
    config.update(changes)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 1000, -1000, -1])
def test_truncated_safetensors(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fathomlm.load(copy)


def test_garbage_safetensors(copy):
    (copy / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(CheckpointError, match="corrupt or truncated"):
        fathomlm.load(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(copy, value):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][2, 1] = value
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"NaN or infinite values in 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        fathomlm.load(copy)


def test_missing_tensor(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        fathomlm.load(copy)


def test_wrong_shape(copy):
    edit(copy, intermediate_size=50)
    with pytest.raises(CheckpointError, match=r"'layers\.0\.mlp\.gate\.weight' is \(48, 32\).*requires \(50, 32\)"):
        fathomlm.load(copy)


def test_missing_shard(sound, tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        fathomlm.load(tmp_path)


def test_shards_without_an_index_entry_in_them(tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    first, *_, last = sorted(set(record["weight_map"].values()))
    name = next(n for n, f in record["weight_map"].items() if f == first)
    record["weight_map"][name] = last
    index.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="is missing tensor"):
        fathomlm.load(tmp_path)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_refused_and_never_run(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        fathomlm.load(copy)
    assert not (tmp_path / "exploded").exists()


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        fathomlm.load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": 3}', "\x00\x01"])
def test_broken_config(copy, text):
    (copy / "config.json").write_text(text)
    with pytest.raises(FathomError):
        fathomlm.load(copy)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_config_without_a_field(copy, key):
    edit(copy, **{key: ...})
    with pytest.raises(CheckpointError, match=f"config.json is missing {key}"):
        fathomlm.load(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1),
        ("vocab_size", [1]),
    ],
)
def test_config_with_an_impossible_value(copy, key, value):
    edit(copy, **{key: value})
    with pytest.raises(FathomError, match=str(copy)):
        fathomlm.load(copy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported; supported: llama, mistral"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "'dynamic' rotary scaling"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    ],
)
def test_unsupported_family_or_option(copy, changes, says):
    edit(copy, **changes)
    with pytest.raises(UnsupportedModel, match=says):
        fathomlm.load(copy)


@pytest.mark.parametrize("kind", ["int8", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_quantised_weights_whose_configuration_does_not_say_so(copy, kind, name):
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, name: tensors[name].to(getattr(torch, kind))}, copy / "model.safetensors")
    for read in (fathomlm.load, lambda source: fathomlm.convert(source, recursions=2)):
        with pytest.raises(UnsupportedModel, match=rf"'{name}' is quantised \({kind}\); give the unquantised"):
            read(copy)


def test_a_tensor_without_a_place(copy):
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, copy / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"are unexpected in a llama model, the first is 'model\.layers\.0\."):
        fathomlm.load(copy)


def test_buffers_of_old_checkpoints_are_ignored(copy):
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, copy / "model.safetensors")
    fathomlm.load(copy)


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fathomlm.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("./nowhere/at/all", "does not exist"),
        ("../there", "does not exist"),
        ("x.gguf", "does not exist"),
    ],
)
def test_unknown_sources(source, says):
    with pytest.raises(ModelNotFound, match=says):
        fathomlm.load(source)


def test_a_shape_without_weights():
    with pytest.raises(ModelNotFound, match="a shape without weights"):
        fathomlm.load("smollm-730m")


def test_unknown_dtype(sound):
    with pytest.raises(OptionError, match="did you mean 'float16'"):
        fathomlm.load(sound, dtype="flaot16")


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"sharing": "cycle", "recursions": 2, "base_layers": 6, "unrolled_layers": 7}},
        {"plan": {"sharing": "spiral", "recursions": 2, "base_layers": 6, "unrolled_layers": 6}},
        {"plan": {"sharing": "cycle"}},
        {"plan": "cycle"},
        {"relaxation": {"kind": "lora", "ranks": {}}},
        {"relaxation": {"kind": "lora", "ranks": {"q": 2}, "colour": "red"}},
        {"architecture": {"family": "llama"}},
        {"architecture": 5},
    ],
)
def test_a_native_directory_with_a_broken_configuration(sound, tmp_path, changes):
    save(fathomlm.convert(sound, recursions=2), tmp_path / "native")
    edit(tmp_path / "native", **changes)
    with pytest.raises(FathomError, match="native"):
        fathomlm.load(tmp_path / "native")


def test_a_corrupt_tokenizer(copy):
    (copy / "tokenizer.json").write_text("{broken")
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        fathomlm.load(copy)


def test_a_tokenizer_whose_configuration_cannot_be_used(copy):
    byte_tokenizer().save_pretrained(copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": "long"}))
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        fathomlm.load(copy)


def test_a_model_without_a_tokenizer_loads(sound):
    model = fathomlm.load(sound)
    assert model.tokenizer is None
    assert torch.isfinite(model(torch.tensor([[3, 4]])).logits).all()


def test_a_run_given_as_a_model_names_the_model_in_it(tmp_path):
    (tmp_path / "run" / "last").mkdir(parents=True)
    (tmp_path / "run" / "last" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"it is a training run, whose model is .*last"):
        fathomlm.load(tmp_path / "run")


def test_weights_that_may_not_be_read_are_not_called_corrupt(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: Permission denied"):
        fathomlm.load(copy)


def test_a_family_that_nobody_knows_is_an_error() -> None:
    architecture = dataclasses.replace(
        Architecture(
            family="llama", layers=1, hidden=8, intermediate=8, heads=1, kv_heads=1, head_dim=8, vocab=8, context=8
        ),
        family="foo",
    )
    with pytest.raises(UnsupportedModel, match="family 'foo'"):
        family_for(architecture)
