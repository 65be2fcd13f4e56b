"""GGUF files against the transformers models that they were made from, and every way a file can be wrong."""

from __future__ import annotations

import dataclasses
import random

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

import fathomlm
from checkpoints.gguf_files import byte_level_metadata, write_gguf
from fathomlm.checkpoints.assemble import TokenIds
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.checkpoints.huggingface import HuggingFaceCheckpoint
from fathomlm.depth import Rope
from fathomlm.depth.cost import parameter_shapes
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import CheckpointError, FathomError, ModelNotFound, UnsupportedModel
from parity import families
from parity.families import GROUPED, LLAMA3_ROPE, tiny

MADE_LIKE = {
    "llama": "llama",
    "llama-tied": "llama-tied",
    "llama-biased": "llama-biased",
    "llama-linear-rope": "llama-linear-rope",
    "llama-wide-head": "llama-wide-head",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "neox": "neox",
    "neox-sequential": "neox-sequential",
    "llama3-rope": lambda: LlamaConfig(
        **GROUPED, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
    ),
    "gemma3": lambda: Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
}
Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny transformers model by name, as a model and as a Hugging Face directory; each is made once."""
    made = {}

    def make(name: str):
        if name not in made:
            config = MADE_LIKE[name]
            with pytest.MonkeyPatch.context() as patch:
                if callable(config):
                    patch.setitem(families.CONFIGS, name, config)
                model = tiny(name)
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return make


@pytest.fixture
def llama(models, tmp_path):
    """Write the tiny llama with some things changed, and give back the file."""

    def make(**changes):
        return write_gguf(tmp_path / "llama.gguf", models("llama")[0], **changes)

    return make


@pytest.mark.parametrize("name", MADE_LIKE)
def test_architecture_tensors_and_logits_are_the_original_models(models, name, tmp_path):
    model, directory = models(name)
    path = write_gguf(tmp_path / "model.gguf", model)
    ours, theirs = GGUFCheckpoint(path), HuggingFaceCheckpoint(directory)
    assert dataclasses.replace(ours.architecture, attention_scale=ours.architecture.scale) == dataclasses.replace(
        theirs.architecture, attention_scale=theirs.architecture.scale
    )
    for key in parameter_shapes(ours.architecture):
        tensor = ours.tensor(key)
        assert tensor.dtype == torch.float32
        # Adding 1 to a norm and taking it away again rounds the last bits off.
        slack = 1e-6 if name.startswith("gemma") and "norm" in key else 0
        torch.testing.assert_close(
            tensor, theirs.tensor(key), rtol=0, atol=slack, msg=lambda text, key=key: f"{key}: {text}"
        )
    tokens = torch.tensor([[1, 17, 30, 5, 88, 41, 9, 2]])
    with torch.inference_mode():
        torch.testing.assert_close(fathomlm.load(path)(tokens).logits, model(tokens).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.F16, Kind.BF16])
def test_packed_matrices_come_back_as_they_were_packed(models, kind, tmp_path):
    model, directory = models("llama-tied")
    ours, theirs = GGUFCheckpoint(write_gguf(tmp_path / "q.gguf", model, kind=kind)), HuggingFaceCheckpoint(directory)
    for key in ("embed.weight", "layers.2.mlp.gate.weight", "layers.5.attn.v.weight"):
        packed = gguf.quants.dequantize(gguf.quants.quantize(theirs.tensor(key).numpy(), kind), kind)
        assert torch.equal(ours.tensor(key), torch.from_numpy(packed))
    close = 0.02 if kind in (Kind.Q8_0, Kind.F16, Kind.BF16) else 0.2
    torch.testing.assert_close(
        ours.tensor("layers.1.attn.q.weight"), theirs.tensor("layers.1.attn.q.weight"), rtol=0, atol=close
    )
    assert ours.tensor("layers.0.norm_attn.weight").equal(theirs.tensor("layers.0.norm_attn.weight"))


def test_dtype_is_that_of_the_matrices(models, tmp_path):
    model, _ = models("qwen2")
    model_32 = write_gguf(tmp_path / "32.gguf", model)
    assert GGUFCheckpoint(model_32).dtype == torch.float32
    assert GGUFCheckpoint(write_gguf(tmp_path / "16.gguf", model, kind=Kind.F16)).dtype == torch.float16
    assert GGUFCheckpoint(write_gguf(tmp_path / "b16.gguf", model, kind=Kind.BF16)).dtype == torch.bfloat16
    assert GGUFCheckpoint(write_gguf(tmp_path / "q8.gguf", model, kind=Kind.Q8_0)).dtype == torch.float32


def test_a_window_makes_it_a_mistral(llama):
    architecture = GGUFCheckpoint(llama(metadata={"llama.attention.sliding_window": 5})).architecture
    assert (architecture.family, architecture.windows) == ("mistral", (5,) * 6)


def test_gemma3_windows_rope_and_scale(models, tmp_path):
    model, _ = models("gemma3")
    architecture = GGUFCheckpoint(write_gguf(tmp_path / "g.gguf", model)).architecture
    assert architecture.windows == (5, 5, 5, 5, 5, None)
    assert architecture.local_rope == Rope(theta=10_000.0)
    assert (architecture.scale, architecture.embedding_scale) == (16**-0.5, 32**0.5)


def test_special_tokens(llama):
    ids = {"bos": 1, "eos": 2, "eot": 7, "eom": 2, "padding": 0}
    path = llama(metadata={f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()})
    assert GGUFCheckpoint(path).tokens == TokenIds(bos=1, eos=(2, 7), pad=0)
    assert GGUFCheckpoint(llama()).tokens == TokenIds()


def test_no_tokenizer_is_none(llama):
    assert GGUFCheckpoint(llama()).tokenizer() is None


WRONG = {
    "unknown architecture": (
        UnsupportedModel,
        "'mamba' is not supported; supported: gemma",
        {"general.architecture": "mamba"},
    ),
    "adapter": (UnsupportedModel, "holds a GGUF 'adapter'", {"general.type": "adapter"}),
    "one part of several": (UnsupportedModel, "one of 3 parts", {"split.count": 3}),
    "experts": (UnsupportedModel, "llama.expert_count is set", {"llama.expert_count": 8}),
    "yarn": (UnsupportedModel, "unknown rotary scaling 'yarn'", {"llama.rope.scaling.type": "yarn"}),
    "layers differ": (UnsupportedModel, "differs from layer to layer", {"llama.attention.head_count": [4, 4, 2, 4, 4, 4]}),
    "narrow rotation": (UnsupportedModel, "rope.dimension_count is 4", {"llama.rope.dimension_count": 4}),
    "values of another width": (UnsupportedModel, "differ in width", {"llama.attention.value_length": 16}),
    "no layers": (CheckpointError, "is missing llama.block_count, which must be an integer", {"llama.block_count": None}),
    "too many layers": (CheckpointError, "block_count is 4,000,000,000, but", {"llama.block_count": 4_000_000_000}),
    "text for a number": (CheckpointError, "must be an integer, got 'six'", {"llama.block_count": "six"}),
    "no heads": (CheckpointError, "head_count must be > 0", {"llama.attention.head_count": 0}),
    "heads that do not divide": (CheckpointError, "kv_heads must divide heads", {"llama.attention.head_count_kv": 3}),
    "wrong width": (
        CheckpointError,
        r"has shape \[48, 32\]; the metadata require \[64, 32\]",
        {"llama.feed_forward_length": 64},
    ),
    "endless epsilon": (
        CheckpointError,
        "must be a number above 0",
        {"llama.attention.layer_norm_rms_epsilon": float("inf")},
    ),
    "token out of range": (CheckpointError, "bos_token_id is 96, but there are 96", {"tokenizer.ggml.bos_token_id": 96}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_metadata(llama, case):
    kind, message, metadata = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        GGUFCheckpoint(llama(metadata=metadata))
    assert "\n" not in str(caught.value)


def test_wrong_tensors(llama):
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are missing, such as blk\.3\.ffn_up\.weight"):
        GGUFCheckpoint(llama(tensors={"blk.3.ffn_up.weight": None}))
    with pytest.raises(CheckpointError, match="no table of token embeddings"):
        GGUFCheckpoint(llama(tensors={"token_embd.weight": None}))
    with pytest.raises(UnsupportedModel, match=r"are unexpected in a llama model, such as 'blk\.0\.attn_sinks\.weight'"):
        GGUFCheckpoint(llama(tensors={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}))
    with pytest.raises(UnsupportedModel, match="not Llama 3's rotary scaling"):
        GGUFCheckpoint(llama(tensors={"rope_freqs.weight": np.array([1, 2, 3, 9], dtype=np.float32)}))
    damaged = GGUFCheckpoint(llama(tensors={"output_norm.weight": np.full(32, np.nan, dtype=np.float32)}))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight holds values that are not finite"):
        damaged.tensor("norm.weight")


def test_files_that_are_no_gguf(tmp_path):
    file = tmp_path / "file.gguf"
    with pytest.raises(ModelNotFound, match="no file at"):
        GGUFCheckpoint(file)
    for content, message in (
        (b"", "is empty"),
        (b"PK\x03\x04" * 99, "not a GGUF file"),
        (b"GGUF" + b"\0\0\0\3" * 9, "version"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            GGUFCheckpoint(file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFCheckpoint(tmp_path)


def test_truncated_anywhere_it_is_one_clear_line(llama):
    path = llama()
    whole = path.read_bytes()
    lengths = [*range(0, 1200, 7), *range(1200, len(whole), 997), len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF|empty") as caught:
            GGUFCheckpoint(path)
        assert "\n" not in str(caught.value)


def test_damage_in_the_header_never_crashes_hangs_or_fills_the_memory(models, tiny_tokenizer, tmp_path):
    """A damaged length makes gguf's own reader loop for ever: this test would not end."""
    small = LlamaConfig(**GROUPED | {"num_hidden_layers": 1, "vocab_size": len(tiny_tokenizer)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.CONFIGS, "small", lambda: small)
        path = write_gguf(tmp_path / "small.gguf", tiny("small"), metadata=byte_level_metadata(tiny_tokenizer))
    whole = path.read_bytes()
    header = min(entry.offset for entry in GGUFFile(path).tensors.values())
    chance = random.Random(0)
    outcomes, messages = set(), []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(header)
            damaged[at] = chance.choice((0, 255, damaged[at] ^ (1 << chance.randrange(8))))
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            checkpoint.tokenizer()
            outcomes.add("read")
        except FathomError as error:
            outcomes.add(type(error).__name__)
            messages.append(str(error))
    assert outcomes == {"read", "CheckpointError", "UnsupportedModel"}
    assert not [message for message in messages if "\n" in message or len(message) > 500]


@pytest.mark.real
def test_smollm2_is_its_preset(smollm2_path):
    checkpoint = GGUFCheckpoint(smollm2_path)
    assert checkpoint.architecture == PRESETS["smollm2-135m"].architecture
    assert checkpoint.tokens == TokenIds(bos=1, eos=(2,), pad=2)
    assert checkpoint.dtype == torch.float32
