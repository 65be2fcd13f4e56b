"""Presets: the shapes against published totals, and architectures as records."""

from __future__ import annotations

import json
import re

import pytest

from fathomlm.checkpoints.resolve import encoder_of
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import count
from fathomlm.depth.presets import PRESETS, preset
from fathomlm.errors import ModelNotFound, OptionError
from fathomlm.model.encoder import encoder_parameters

# Every parameter of the published checkpoints, a tied head counted once (Hugging Face `model.num_parameters()`).
PUBLISHED = {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "mt5-large": 1_229_581_312,
    "long-t5-tglobal-base": 247_587_456,
    "smollm3-3b": 3_075_098_624,
    "granite-3.1-2b": 2_533_531_648,
    "phi-4-mini": 3_836_021_760,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "huginn-3.5b": 3_564_976_800,  # from its published shape, as those below; the card says 3.5B
    "recurrent-tinyllama": 844_171_264,
    "recurrent-llama-3.2": 1_385_228_288,
    "recurrent-olmo2": 1_359_071_232,
    "qwen3-30b-a3b": 30_532_122_624,
    "ouro-1.4b": 1_434_652_673,
    "ouro-2.6b": 2_667_974_657,
    "nanbeige4.2-3b": 4_169_800_704,  # from its published shape; the card says 3B without embeddings, 4B in all
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_in_all_are_the_published_ones(name):
    architecture, plan = PRESETS[name].architecture, PRESETS[name].plan
    counted = count(architecture, plan or DepthPlan.vanilla(architecture.layers))
    encoder = encoder_of(name)
    beside = 0 if encoder is None else encoder_parameters(encoder)
    assert counted.non_embedding_parameters + counted.embedding_parameters + beside == PUBLISHED[name]
    assert (encoder is not None) == architecture.cross


def test_only_the_thesis_own_730m_has_no_weights_anywhere():
    assert sorted(set(PRESETS) - set(PUBLISHED)) == ["smollm-730m"]
    assert [name for name, entry in PRESETS.items() if entry.hub is None] == ["smollm-730m"]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_an_architecture_survives_json(name):
    architecture = PRESETS[name].architecture
    assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture


def test_a_mistyped_preset_names_the_nearest():
    with pytest.raises(ModelNotFound, match=re.escape("unknown preset 'gema-2b' (did you mean 'gemma-2b'?)")):
        preset("gema-2b")
    assert preset("gemma-2b") is PRESETS["gemma-2b"]


def test_every_sixth_layer_of_gemma3_sees_the_whole_context():
    architecture = PRESETS["gemma3-270m"].architecture
    assert [i for i in range(architecture.layers) if architecture.window(i) is None] == [5, 11, 17]
    assert architecture.with_layers((0, 5, 5)).windows == (512, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be between 1 and 1024, got 0"),
        ({"hidden": 1.5}, "the architecture: hidden must be an integer, got 1.5"),
        ({"kv_heads": 4}, "kv_heads must divide heads, got 4 and 15"),
        ({"windows": [128]}, "windows must name every layer: got 1 for 32 layers"),
        ({"rotary_fraction": 0.36}, "must be even, got 23 of 64"),
        ({"depth": 3}, "the architecture: unknown field 'depth'"),
        ({"rope": {"base": 1e4}}, "the architecture: unknown field in rope 'base'"),
    ],
)
def test_architectures_that_make_no_sense(change, message):
    record = PRESETS["smollm-360m"].architecture.to_dict() | change
    with pytest.raises(OptionError, match=re.escape(message)):
        Architecture.from_dict(record)


def test_a_record_with_fields_missing():
    record = PRESETS["smollm-360m"].architecture.to_dict()
    del record["hidden"], record["heads"], record["norm"]
    with pytest.raises(OptionError, match="the architecture is missing hidden, heads"):
        Architecture.from_dict(record)
