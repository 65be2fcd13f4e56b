"""The dry run: hand-computed small cases, autograd's own count of activations, and every recipe that is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.presets import PRESETS
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import ModelNotFound, OptionError, TrainingError
from fathomlm.model.decoder import Decoder
from fathomlm.train.activations import activation_bytes
from fathomlm.train.estimate import estimate, format_estimate
from fathomlm.train.flops import ACCELERATORS, Rates, accelerator_name, flops_per_token_6n, memory_bytes
from fathomlm.train.memory import count_memory
from fathomlm.train.reading import build_recipe, read_recipe, shipped_recipes
from fathomlm.train.recipe import HardwareRecipe, Recipe
from fathomlm.train.run import train
from fathomlm.train.schedule import LearningRate
from fathomlm.train.student import read_student

SHAPE = {"layers": 4, "hidden": 96, "intermediate": 160, "heads": 3, "kv_heads": 1, "head_dim": 32, "vocab": 64}
LAYER = 2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 160
VECTORS = 2 * 96


def small(**changes: object) -> Recipe:
    values: dict = {
        "model": {"architecture": {"family": "llama", **SHAPE}},
        "data": {"context": 32},
        "budget": {"steps": 10},
        "batch": {"sequences": 8, "micro": 4},
    }
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return build_recipe(values)


def test_a_small_run_by_hand():
    found = estimate(small())
    base = 4 * (LAYER + VECTORS) + 96
    assert (found.layout, found.unique_layers, found.unrolled_layers) == ("4", 4, 4)
    assert (found.non_embedding_parameters, found.embedding_parameters) == (base, 64 * 96)
    assert found.total_parameters == found.trainable_parameters == base + 64 * 96
    assert (found.steps, found.rows, found.tokens, found.tokens_per_step) == (10, 80, 2560, 256)
    assert found.micro_batches == 2
    assert found.forward_flops_per_token == 4 * (2 * LAYER + 4 * 96 * 16)
    assert found.training_flops == 3 * found.forward_flops == 3 * 2560 * found.forward_flops_per_token
    assert found.flops_per_token_6n == 6 * (4 * LAYER + 64 * 96)
    assert found.work_flops == found.model_flops == 2560 * found.flops_per_token_6n
    memory, total = found.memory, found.total_parameters
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * total, 4 * total, 8 * total)
    assert (memory.copies, memory.teacher) == (0, 0)
    assert memory.activations == 4 * 32 * 4 * (24 * 96 + 8 * 96 + 8 * 32 + 16 * 160 + 4 * 3 + 8)
    assert memory.head == 128 * 64 * 4 + 4 * 64 * 96 + 4 * 128 * 96
    assert memory.total == sum(v for k, v in memory.to_dict().items() if k != "total")
    assert found.fits is None
    assert found.seconds is None


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("relax", [None, "lora"])
def test_activations_are_what_autograd_keeps(one_thread, precision, relax):
    changes = {} if relax is None else {"relax": relax, "rank": 8, "linears_only": True}
    recipe = small(model={"recursions": 2, **changes}, precision=precision)
    parts = read_student(recipe)
    decoder = Decoder(parts.architecture, parts.plan, parts.relaxation)
    decoder.reset_parameters(std=0.02, generator=torch.Generator().manual_seed(0))
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept.setdefault(place, tensor)
        return tensor

    tokens_BT = torch.zeros(2, 128, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        decoder.states(tokens_BT)
    counted = tokens_BT.numel() * activation_bytes(recipe, parts)
    if precision == "bf16":
        head = 64 * 96
        counted += count_memory(recipe, parts, 0, "none").copies - 2 * head
    tokens_cos_sin = tokens_BT.numel() * (8 + 2 * 32 * (2 if precision == "bf16" else 4))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert measured == counted + tokens_cos_sin


@pytest.mark.parametrize(
    ("recipe", "micro", "recompute", "measured"),
    [
        ("pretrain-vanilla-360m", 64, "none", 113.5),
        ("pretrain-vanilla-360m", 16, "inner", 27.77),
        ("pretrain-vanilla-360m", 64, "inner", 90.49),
        ("pretrain-mor2-360m", 16, "inner", 20.54),
        ("pretrain-mor2-360m", 64, "inner", 69.57),
        ("pretrain-mor3-360m", 16, "inner", 18.14),
    ],
)
def test_a_compiled_gpu_run_takes_what_was_measured(recipe: str, micro: int, recompute: str, measured: float):
    """SmolLM-360M's shape, bf16, compiled, 2048 context: gigabytes at the peak on an H200 (`benchmarks/train_step.py`)."""
    asked = read_recipe(recipe, ["--batch.micro", str(micro), "--recompute", recompute])
    found = count_memory(asked, read_student(asked), 0, "none").total
    assert found / 1e9 == pytest.approx(measured, rel=0.06)


def test_recomputing_keeps_less_and_computes_more():
    plain, recursion, layer = (
        estimate(small(model={"recursions": 2}, recompute=how)) for how in ("none", "recursion", "layer")
    )
    step = plain.memory.activations // 4
    assert recursion.memory.activations == 2 * step + 2 * 4 * 96 * 128
    assert layer.memory.activations == step + 4 * 4 * 96 * 128
    assert layer.work_flops == recursion.work_flops == plain.work_flops + 2560 * 2 * 4 * LAYER
    assert layer.model_flops == plain.model_flops


def test_adafactor_keeps_a_row_and_a_column():
    found = estimate(small(optimizer={"kind": "adafactor"}))
    layer = 4 * 96 + 2 * (96 + 32) + 3 * (96 + 160) + VECTORS
    assert found.memory.optimizer == 4 * (4 * layer + 96 + 64 + 96)


def test_muon_keeps_one_moment_of_the_matrices_of_layers():
    plain, muon = (estimate(small(optimizer={"kind": kind})).memory.optimizer for kind in ("adamw", "muon"))
    assert plain - muon == 4 * 4 * LAYER


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_a_dry_run_refuses_what_cannot_be_sharded_as_a_run_does(kind):
    hardware = {"gpu": "H200", "count": 2}
    estimate(small(optimizer={"kind": kind}, hardware=hardware, parallel="ddp"))
    with pytest.raises(TrainingError, match=f"{kind} does not support sharded weights"):
        estimate(small(optimizer={"kind": kind}, hardware=hardware, parallel="fsdp"))


def test_muon_is_refused_where_layers_are_frozen():
    with pytest.raises(OptionError, match="muon moves layers, which train: relaxation freezes"):
        small(model={"recursions": 2, "relax": "lora", "rank": 8}, train="relaxation", optimizer={"kind": "muon"})


def test_what_is_frozen_needs_no_gradient():
    relaxed = estimate(small(model={"recursions": 2, "relax": "lora", "rank": 8, "linears_only": True}, train="relaxation"))
    added = 4 * 8 * (4 * 96 + 2 * (96 + 32) + 3 * (96 + 160))
    assert relaxed.trainable_parameters == relaxed.relaxation_parameters == added
    assert (relaxed.memory.gradients, relaxed.memory.optimizer) == (4 * added, 8 * added)
    assert relaxed.work_flops == 2560 * (4 * (4 * LAYER + added + 64 * 96) + 2 * added)
    heads = estimate(small(model={"recursions": 2}, loss={"exits": {"head_rank": 4}}, train="exit_heads"))
    assert heads.exits == (2,)
    assert heads.trainable_parameters == heads.exit_parameters == 4 * (96 + 64)
    assert heads.work_flops == 2560 * (2 * (4 * LAYER + 64 * 96) + 6 * (64 * 100 + 4 * 96))


def test_a_teacher_costs_memory_and_a_forward_pass():
    recipe = build_recipe(
        {
            "model": {"source": "smollm2-135m", "recursions": 2},
            "budget": {"steps": 1},
            "batch": {"sequences": 8},
            "loss": {"distill": {"source": "smollm2-135m"}},
            "precision": "bf16",
        }
    )
    found = estimate(recipe)
    assert found.memory.teacher == 2 * 134_515_008
    assert found.work_flops == found.model_flops * 4 / 3


def test_devices_split_a_sharded_model_and_copy_a_small_one():
    hardware = {"gpu": "h100", "count": 4}
    copies = estimate(small(hardware=hardware))
    assert (copies.parallel, copies.micro_batches) == ("ddp", 1)
    assert copies.memory.weights == 4 * copies.total_parameters
    assert copies.memory.gradients == 4 * copies.total_parameters
    shards = estimate(small(hardware=hardware, parallel="fsdp"))
    assert shards.memory.weights == copies.memory.weights // 4
    assert shards.memory.optimizer == copies.memory.optimizer // 4
    assert shards.memory.gradients == copies.total_parameters
    assert estimate(read_recipe("thesis-rrt-gemma-2b-lora-512")).parallel == "fsdp"


def test_time_follows_from_the_peak_and_the_assumed_part_of_it():
    found = estimate(small(hardware={"peak_tflops": 2.0, "count": 2}), assumed=0.5)
    assert found.seconds == pytest.approx(found.work_flops / 2e12)
    assert (found.mfu, found.mfu_sustained, found.sustained_tflops) == (0.5, None, None)
    assert "assuming 50% of 2 TFLOP/s each\n" in format_estimate(found) + "\n"
    with pytest.raises(OptionError, match="must be > 0"):
        estimate(small(), assumed=0)


def test_the_assumed_rate_is_said_of_the_data_sheet_and_of_what_is_sustained():
    found = estimate(small(hardware={"gpu": "h200"}), assumed=0.4)
    assert (found.peak_tflops, found.sustained_tflops, found.mfu_sustained) == (989, 790, 0.4)
    assert found.mfu == pytest.approx(0.4 * 790 / 989)
    assert found.seconds == pytest.approx(found.work_flops / (0.4 * 790e12))
    assert "assuming 32% of 989 TFLOP/s each (40% of the 790 that large products sustain)" in format_estimate(found)
    assert {"mfu", "mfu_sustained", "peak_tflops", "sustained_tflops"} <= set(found.to_dict())
    unmeasured = estimate(small(hardware={"gpu": "a100"}), assumed=0.4)
    assert (unmeasured.peak_tflops, unmeasured.mfu, unmeasured.mfu_sustained) == (312, 0.4, None)


def test_a_rate_is_stated_against_the_data_sheet_and_against_what_is_sustained():
    assert Rates.of(HardwareRecipe(gpu="h200")).parts(395e12) == {"mfu": 0.3994, "mfu_sustained": 0.5}
    assert Rates.of(HardwareRecipe(gpu="a100")).parts(156e12) == {"mfu": 0.5, "mfu_sustained": None}
    assert Rates.of(HardwareRecipe()).parts(1e12) == {"mfu": None, "mfu_sustained": None}


def test_the_recorded_training_benchmark_states_both():
    """Its rates are what was measured; both utilisations follow from them."""
    record = json.loads((Path(__file__).parents[2] / "benchmarks/results/train_step_h200.json").read_text())
    assert "computed from it later" in record["note"]
    found = [one for setting in record["settings"].values() for one in setting.values()]
    for one in [*found, record["vanilla"], record["vanilla_main"]]:
        rates = Rates(one["peak_tflops"], one["sustained_tflops"])
        assert (rates.peak, rates.sustained) == (989, 790)
        wanted = rates.parts(one["tokens_per_s"] * one["flops_per_token_6n"])
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


def test_a_model_that_does_not_fit_is_said_not_to():
    found = estimate(read_recipe("thesis-mor-vanilla-1b7", ["--hardware.gpu", "rtx3090", "--hardware.count", "1"]))
    assert found.fits is False
    assert "no: lower batch.micro" in format_estimate(found)


def test_a_converted_directory_brings_its_own_plan(tiny_model_dir):
    length = {"budget": {"steps": 1}, "batch": {"sequences": 1}, "data": {"context": 256}}
    found = estimate(build_recipe({"model": {"source": str(tiny_model_dir)}, **length}))
    assert (found.recursions, found.unrolled_layers) == (2, 4)
    with pytest.raises(OptionError, match="recursive already"):
        estimate(build_recipe({"model": {"source": str(tiny_model_dir), "recursions": 2}, **length}))


def test_6n_is_six_times_smollms_parameters():
    smollm = PRESETS["smollm-360m"].architecture
    vanilla = flops_per_token_6n(smollm, DepthPlan.vanilla(32), None)
    assert vanilla == 6 * (314_572_800 + 47_185_920)
    assert round(vanilla / 6e6, 1) == 361.8
    assert flops_per_token_6n(smollm, DepthPlan.build("middle-cycle", 3, 32), None) == vanilla
    untied = Architecture(family="llama", **SHAPE, tied_embeddings=False)
    lora = build_relaxation(untied.linears(), "lora", 8)
    assert flops_per_token_6n(untied, DepthPlan.vanilla(4), None) == 6 * (4 * LAYER + 64 * 96)
    added = 8 * (4 * 96 + 2 * (96 + 32) + 3 * (96 + 160))
    assert flops_per_token_6n(untied, DepthPlan.build("cycle", 2, 4), lora) == 6 * (4 * (LAYER + added) + 64 * 96)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", "l40s"),
        (None, None),
    ],
)
def test_devices_are_known_by_what_the_driver_calls_them(device, name):
    assert accelerator_name(HardwareRecipe(), device) == name


def test_the_peak_is_the_recipes_or_the_data_sheets():
    assert Rates.of(HardwareRecipe(gpu="h200", peak_tflops=500.0)).peak == 500
    assert Rates.of(HardwareRecipe(gpu="h200")).peak == 989
    assert Rates.of(HardwareRecipe(gpu="h200")).sustained == 790
    assert Rates.of(HardwareRecipe(gpu="h200", peak_tflops=500.0)).sustained is None
    assert Rates.of(HardwareRecipe(gpu="A100")).peak == 312
    assert Rates.of(HardwareRecipe(), "NVIDIA H100 80GB HBM3").peak == 989
    assert Rates.of(HardwareRecipe(), "some new thing").peak is None
    assert memory_bytes(HardwareRecipe(gpu="h200")) == 141 * 10**9
    with pytest.raises(OptionError, match="did you mean 'h200'"):
        Rates.of(HardwareRecipe(gpu="h201"))
    with pytest.raises(OptionError, match=r"hardware\.count"):
        small(hardware={"count": 0})
    with pytest.raises(OptionError, match=r"hardware\.peak_tflops"):
        small(hardware={"peak_tflops": -1.0})
    assert all(device.peak > (device.sustained or 0) for device in ACCELERATORS.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_can_be_dry_run(name, tmp_path, monkeypatch):
    """On a machine that has no data, and no model of another run."""
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(name)
    assert recipe.name == name
    before = estimate(recipe)
    assert (before.steps is None) == (recipe.budget.epochs is not None)
    assert ("not prepared yet" in format_estimate(before)) == (before.steps is None)
    assert (before.source_from is not None) == str(recipe.model.source).startswith("runs/")
    found = estimate(recipe, rows_in_epoch=14_732) if name == "free-samsum" else before
    assert found.memory == before.memory
    assert found.fits is not False
    assert found.micro_batches * recipe.batch.micro * found.devices >= found.rows_per_step
    assert json.loads(json.dumps(found.to_dict()))["memory"]["total"] == found.memory.total
    assert found.layout in format_estimate(found)


@pytest.mark.parametrize(
    ("name", "billions", "steps", "warmup"),
    [
        ("thesis-rrt-gemma-2b-15b", 0.99, 7153, 200),
        ("thesis-rrt-gemma-2b-60b-distill", 0.99, 28_610, 800),
        ("thesis-rrt-gemma-2b-lora-512", 1.60, 7153, 200),
        ("thesis-rrt-tinyllama-15b", 0.48, 7153, 200),
        ("thesis-rrt-pythia-1b-60b-distill", 0.40, 28_610, 800),
    ],
)
def test_the_thesis_uptraining_runs(name, billions, steps, warmup):
    found = estimate(read_recipe(name))
    assert round(found.non_embedding_parameters / 1e9, 2) == billions
    assert (found.steps, found.warmup_steps, found.devices) == (steps, warmup, 8)
    assert found.tokens == pytest.approx(15e9 if warmup == 200 else 60e9, rel=1e-3)
    assert found.tokens_per_step == 2**21


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("thesis-mor")])
def test_smaller_budgets_cool_down_from_the_milestones(name):
    """Warm-up: 5 % of the 2EB run's steps. Milestones: where the 2EB and 5EB runs would begin to cool down."""
    whole = read_recipe(name)
    assert estimate(whole).forward_flops == pytest.approx(16.5e18, rel=1e-4)
    for flops, milestone in zip(("2e18", "5e18"), whole.checkpoint.milestones, strict=True):
        part = read_recipe(name, ["--budget.flops", flops])
        found = estimate(part)
        rate = LearningRate.of(part.schedule, found.steps)
        assert rate.plateau_end == milestone
        if flops == "2e18":
            assert rate.warmup == round(0.05 * found.steps)


def test_the_length_of_a_budget_in_epochs_is_open_without_the_data():
    found = estimate(read_recipe("shallow-deep"))
    assert (found.steps, found.warmup_steps, found.rows, found.tokens, found.work_flops, found.seconds) == (None,) * 6
    assert json.loads(json.dumps(found.to_dict()))["steps"] is None
    assert estimate(read_recipe("shallow-deep"), rows_in_epoch=14_732).steps == 36_830


@pytest.mark.parametrize("name", ["exits-post-training", "thesis-exits-gemma-2b"])
def test_a_model_that_another_recipe_has_yet_to_make_is_what_that_recipe_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = str(read_recipe(name).model.source).split("/")[1]
    found, made = estimate(read_recipe(name)), estimate(read_recipe(first))
    assert found.source_from == first
    assert f"taken as what fathomlm train {first} leaves" in format_estimate(found)
    assert found.non_embedding_parameters == made.non_embedding_parameters
    assert (found.layout, found.recursions) == (made.layout, made.recursions)
    with pytest.raises(OptionError, match=rf"model\.source: runs/{first}/last does not exist; .* fathomlm train {first}"):
        train(read_recipe(name))
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_nowhere_is_refused_before_data_are_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a fathom is six feet")
    data = ["--data.sources", "[text.txt]", "--data.path", "corpus", "--data.tokenizer", "bytes"]
    with pytest.raises(ModelNotFound, match=r"no/such/model does not exist"):
        train(read_recipe("uptrain-smollm2-135m", ["--model.source", "no/such/model", *data]))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
