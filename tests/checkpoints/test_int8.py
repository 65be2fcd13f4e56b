"""Int8 on disk: no weight moves by more than half a step of its own row, everything else stays, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fathomlm.checkpoints.native import quantized_names, save
from fathomlm.checkpoints.resolve import load
from fathomlm.checkpoints.shards import INDEX
from fathomlm.depth import Architecture
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.kernels.quantized import dequantize_int8 as dequantize
from fathomlm.kernels.quantized import quantize_int8 as quantize
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import LOOPS, SHAPE, model_of, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TIED = Architecture(family="llama", **SHAPE | {"tied_embeddings": True})
TOKENS = some_tokens(2, 10)


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    return model_of(routed("expert, aux router"), architecture=TIED)


@pytest.fixture
def stored(model: FathomForCausalLM, tmp_path: Path) -> Path:
    return save(model, tmp_path / "small", quantize="int8")


def test_no_weight_moves_by_more_than_half_its_rows_step() -> None:
    """Rows of very different size: one scale for the whole matrix would lose the small ones."""
    sizes = torch.tensor([1e-6, 1e-3, 1.0, 1e3])
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * sizes[:, None]
    whole, scale = quantize(weight)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(dim=1).tolist() == [127] * 4
    error = (dequantize(whole, scale) - weight).abs().amax(dim=1)
    step = weight.abs().amax(dim=1) / 127
    assert (error <= 0.5001 * step).all()
    assert (error > 0.4 * step).all()


def test_rows_of_zeros_and_whole_steps_come_back_exactly() -> None:
    weight = torch.zeros(3, 127)
    weight[1] = torch.arange(1, 128) / 4
    weight[2] = -weight[1]
    assert torch.equal(dequantize(*quantize(weight)), weight)


def test_what_was_stored_is_what_is_loaded(model: FathomForCausalLM, stored: Path) -> None:
    loaded = load(stored)
    assert (loaded.architecture, loaded.plan) == (model.architecture, model.plan)
    chosen = quantized_names(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        got = loaded.state_dict()[name]
        assert got.dtype == torch.float32
        assert torch.equal(got, dequantize(*quantize(expected)) if name in chosen else expected), name
    assert torch.equal(load(stored, dtype="bfloat16").decoder.embed.weight, loaded.decoder.embed.weight.bfloat16())


def test_matrices_are_int8_and_norms_and_routers_are_not(model: FathomForCausalLM, stored: Path) -> None:
    held = load_file(stored / "model.safetensors")
    whole = {name for name, tensor in held.items() if tensor.dtype == torch.int8}
    assert {"decoder.embed.weight", "decoder.layers.0.attn.q.weight", "decoder.layers.3.mlp.down.weight"} <= whole
    assert not [name for name in whole if "norm" in name or "routers" in name]
    assert any("routers.aux" in name for name in held)
    assert {name for name in held if name.endswith(".scale")} == {f"{name}.scale" for name in whole}
    matrices = sum(held[name].numel() for name in whole)
    rows = sum(held[name].shape[0] for name in whole)
    rest = sum(p.numel() for p in model.parameters()) - matrices
    assert sum(t.numel() * t.element_size() for t in held.values()) == matrices + 4 * rows + 4 * rest


def test_ties_are_kept(stored: Path) -> None:
    """The head is the embedding and looped layers are stored once, before and after."""
    held = load_file(stored / "model.safetensors")
    loaded = load(stored)
    assert not [name for name in held if "head" in name]
    assert loaded.decoder.head is None
    assert len({name.split(".")[2] for name in held if name.startswith("decoder.layers.")}) == loaded.plan.unique_layers == 4
    layers = loaded.decoder.unrolled()
    assert layers[1] is layers[3] is layers[5]


def test_stored_again_it_does_not_move(stored: Path, tmp_path: Path) -> None:
    again = save(load(stored), tmp_path / "again", quantize="int8")
    one, other = (load_file(path / "model.safetensors") for path in (stored, again))
    assert all(torch.equal(one[name], other[name]) for name in one if one[name].dtype == torch.int8)


def test_a_loaded_model_saves_plain_weights(stored: Path, tmp_path: Path) -> None:
    plain = save(load(stored), tmp_path / "plain")
    assert json.loads((plain / "config.json").read_text())["weight_format"] is None
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(plain)(TOKENS).logits
        assert torch.equal(theirs, load(stored)(TOKENS).logits)


@pytest.mark.parametrize("quantized", ["int8", None])
def test_files_are_split_at_a_size(model: FathomForCausalLM, quantized: str | None, tmp_path: Path) -> None:
    whole = save(model, tmp_path / "whole", quantize=quantized)
    parts = save(model, tmp_path / "parts", quantize=quantized, shard_bytes=12_000)
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) > 1
    if quantized:
        assert max(file.stat().st_size for file in files) <= 12_000
    assert set(json.loads((parts / INDEX).read_text())["weight_map"].values()) == {file.name for file in files}
    one, other = load(whole).state_dict(), load(parts).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_relaxations_add_stays_as_it_is(tmp_path: Path) -> None:
    relaxed = model_of(LOOPS["cycle"], build_relaxation(TIED.linears(), "lora", rank="2"), architecture=TIED)
    loaded = load(save(relaxed, tmp_path / "m", quantize="int8")).state_dict()
    deltas = {name: value for name, value in relaxed.state_dict().items() if ".deltas." in name}
    assert deltas
    assert all(torch.equal(loaded[name], value) for name, value in deltas.items())


def damaged(stored: Path, name: str, value: torch.Tensor | None) -> Path:
    held = load_file(stored / "model.safetensors")
    del held[name]
    save_file(held if value is None else held | {name: value}, stored / "model.safetensors", metadata={"format": "pt"})
    return stored


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(60), r"is \(60,\); 'decoder.embed.weight' is \(61, 24\) and requires one scale for each of its rows"),
        (torch.ones(61, 1), r"is \(61, 1\)"),
        (torch.full((61,), float("nan")), r"NaN or infinite values in 'decoder\.embed\.weight\.scale'"),
        (torch.zeros(61), "must hold finite numbers above 0"),
        (torch.ones(61, dtype=torch.int32), "must hold finite numbers above 0"),
        (None, r"no tensor 'decoder\.embed\.weight\.scale'"),
    ],
)
def test_damaged_scales_are_named(stored: Path, value: torch.Tensor | None, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        load(damaged(stored, "decoder.embed.weight.scale", value))


def test_an_unknown_format_is_named(stored: Path) -> None:
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"weight_format": "int4"}))
    with pytest.raises(CheckpointError, match=r"unknown weight_format 'int4'.*known: int8"):
        load(stored)


def test_transformers_does_not_take_integers_for_weights(stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fathomlm\.load reads and transformers does not"):
        AutoModelForCausalLM.from_pretrained(stored)


def test_what_cannot_be_stored_is_refused(model: FathomForCausalLM, tmp_path: Path) -> None:
    broken = model_of(routed(), architecture=TIED)
    with torch.no_grad():
        broken.decoder.layers[0].attn.q.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.attn\.q\.weight' holds numbers that are not finite"):
        save(broken, tmp_path / "m", quantize="int8")
    with pytest.raises(OptionError, match="unknown quantize 'int4'"):
        save(model, tmp_path / "m", quantize="int4")
    with pytest.raises(OptionError, match=">= 1"):
        save(model, tmp_path / "m", shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
