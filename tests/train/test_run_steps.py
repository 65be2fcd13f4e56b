"""Steps of whole runs: equal however a batch is split, learning what they should and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from fathomlm.errors import DataError, OptionError, TrainingError
from fathomlm.train import run as run_module
from fathomlm.train.losses.divergence import DIVERGENCES
from fathomlm.train.objective import Objective
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import train

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = {
    "plain": {},
    **{kind: {"loss": {"distill": {"source": "TEACHER", "kind": kind, "weight": 0.5}}} for kind in DIVERGENCES},
    "weighted": {"loss": {"exits": {"weights": "weighted"}}},
    "unweighted": {"loss": {"exits": {"weights": "unweighted", "at": [1, 3]}}},
    "aggressive": {"loss": {"exits": {"coefficient": 0.3}}},
    "self-distilled": {"loss": {"exits": {"coefficient": 0.3, "distill": "forward_kl"}}},
    "exit heads": {"loss": {"exits": {"at": [2], "distill": "forward_kl", "head_rank": 2}}, "train": "exit_heads"},
    "exit parts": {
        "loss": {"exits": {"at": [2], "distill": "forward_kl", "adapter_rank": 2, "classifier": True}},
        "train": "exits",
    },
    **{
        mapping: {"loss": {"exits": {"at": [2], "weights": "weighted"}, "layerwise": {"shallow": 2, "mapping": mapping}}}
        for mapping in ("last", "unif", "dyna", "dyna_equation")
    },
    "pairs": {"data": {"path": "PAIRS", "pairs": ["ask", "say"], "source_length": 16, "target_length": 12}},
    "pairs and dyna": {
        "data": {"path": "PAIRS", "pairs": ["ask", "say"], "source_length": 16, "target_length": 12},
        "loss": {"layerwise": {"shallow": 2}},
    },
    "document mask": {"data": {"document_mask": True}},
    "lora": {"model": {"relax": "lora", "rank": 4}, "train": "relaxation"},
    "adafactor": {"optimizer": {"kind": "adafactor", "lr": 1e-3}},
}


def placed(values, places):
    """Values with the names of fixtures replaced by what they are."""
    if isinstance(values, dict):
        return {key: placed(value, places) for key, value in values.items()}
    return places.get(values, values) if isinstance(values, str) else values


def losses(directory):
    return [record["loss"] for record in read_records(directory / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_may_be_split_into_any_micro_batches(name, recipe, teacher, pair_corpus, tmp_path, weights_of):
    """A large eps keeps Adam's first steps from turning rounding into a sign. Rows one by one and by twos, in turn."""
    changes = placed(LOSSES[name], {"TEACHER": str(teacher), "PAIRS": str(pair_corpus)})
    changes = {"optimizer": {"eps": 0.01}, "budget": {"steps": 2}, **changes}
    found = {}
    split = 1 + list(LOSSES).index(name) % 2
    for micro in (split, 4):
        out = tmp_path / str(micro)
        train(recipe(**changes, out=str(out), batch={"micro": micro}))
        found[micro] = (losses(out), weights_of(out / "last"))
    assert found[split][0] == pytest.approx(found[4][0], rel=1e-5)
    for key, value in found[4][1].items():
        torch.testing.assert_close(found[split][1][key], value, rtol=1e-4, atol=1e-5)
    assert found[4][0][0] != found[4][0][1]


@pytest.mark.parametrize("rows", [1, 7, 0])
@pytest.mark.parametrize("name", ["aggressive", "pairs"])
def test_a_validation_reads_the_same_rows_in_any_micro_batches(name, rows, recipe, pair_corpus, tmp_path):
    changes = placed(LOSSES[name], {"PAIRS": str(pair_corpus)})
    found = []
    for micro in (1, 2, 4):
        made = recipe(**changes, out=str(tmp_path / f"{micro}"), batch={"micro": micro}, evaluate={"rows": rows})
        run = run_module.TrainingRun(made, run_module.World(0, 1, torch.device("cpu")), SilentWatcher())
        loader = run._data.validation
        found.append(run._stepper.validate(loader, rows))
    whole = loader.batch_at(0, min(rows or len(loader), len(loader)))
    with torch.no_grad():
        _, sums = run._objective(whole.tokens_BT, whole.targets_BT, whole.keep_BT)
    count = int((whole.targets_BT >= 0).sum())
    for parts, tokens in found:
        assert tokens == count
        assert list(parts.values()) == pytest.approx((sums / count).tolist(), rel=1e-5)


def test_micro_batches_fit_the_batch(recipe, tmp_path):
    train(recipe(batch={"sequences": 6, "micro": 4}, budget={"steps": 1}))
    assert math.isfinite(losses(tmp_path / "run")[0])


def test_a_tiny_model_memorises_a_small_corpus(recipe, tmp_path):
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    (tmp_path / "rhyme.txt").write_text("full fathom five thy father lies; of his bones are coral made")
    prepare(PrepareOptions(sources=(str(tmp_path / "rhyme.txt"),), out=tmp_path / "corpus", tokenizer="bytes"))
    changes = {"data": {"path": str(tmp_path / "corpus"), "context": 16}, "budget": {"steps": 150}}
    changes |= {"optimizer": {"lr": 0.01, "weight_decay": 0.0}, "log": {"every": 50}}
    summary = train(recipe(**changes))
    assert summary.loss < 0.1
    assert summary.validation is None
    assert losses(tmp_path / "run")[0] > 5


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_what_an_optimizer_learns_from_is_no_longer_than_the_limit(clip, recipe, tmp_path, monkeypatch):
    lengths, learn = [], torch.optim.AdamW.step

    def step(self, *args, **more):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        lengths.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))))
        return learn(self, *args, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(recipe(optimizer={"clip": clip}, budget={"steps": 3}))
    whole = [record["grad_norm"] for record in read_records(tmp_path / "run/metrics.jsonl") if record["kind"] == "train"]
    assert min(whole) > 0.5
    assert lengths == pytest.approx([0.5] * 3 if clip == 0.5 else whole, rel=1e-4)


def test_mfu_is_the_part_of_the_given_peak_that_training_needs(recipe, tmp_path):
    """6 floating-point operations for each weight of a matrix and use of it, the shared layers' twice, the tied embedding's
    once."""
    train(recipe(hardware={"peak_tflops": 1e-3}, budget={"steps": 3}))
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    seen = [record for record in read_records(tmp_path / "run/metrics.jsonl") if record["kind"] == "train"]
    for record in seen:
        assert record["mfu"] == pytest.approx(record["tokens_per_s"] * 6 * (4 * layer + 257 * 32) / 1e9, rel=0.03)
        assert record["memory_gb"] is None
        assert record["mfu_sustained"] is None
    assert len(seen) == 3


def test_a_known_device_is_told_both_utilisations(recipe, tmp_path):
    train(recipe(hardware={"gpu": "h200"}, budget={"steps": 2}))
    for record in read_records(tmp_path / "run/metrics.jsonl"):
        if record["kind"] == "train":
            assert {"mfu", "mfu_sustained"} <= set(record)
            assert record["mfu_sustained"] >= record["mfu"] >= 0


@pytest.mark.parametrize("recompute", ["recursion", "layer"])
def test_recomputing_activations_trains_the_same_weights(recompute, recipe, tmp_path, weights_of):
    made = []
    for kind in ("none", recompute):
        train(recipe(out=str(tmp_path / kind), recompute=kind, budget={"steps": 3}, loss={"exits": {}}))
        made.append((losses(tmp_path / kind), weights_of(tmp_path / kind / "last")))
    assert made[0][0] == made[1][0]
    assert all(torch.equal(value, made[1][1][key]) for key, value in made[0][1].items())


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({"model": {"relax": "lora", "rank": 2}, "train": "relaxation"}, "decoder.deltas."),
        ({"model": {"relax": "encoding"}, "train": "relaxation"}, "decoder.encodings."),
        ({"loss": {"exits": {"head_rank": 2}}, "train": "exit_heads"}, "decoder.exit_heads."),
    ],
)
def test_what_is_frozen_stays_bit_for_bit(changes, learns, recipe, tmp_path, weights_of):
    changes["checkpoint"] = {"every": 1, "keep": 0}
    train(recipe(**changes, budget={"steps": 4}))
    first, last = (weights_of(tmp_path / "run/checkpoints" / f"step-0000000{n}") for n in (1, 4))
    assert first.keys() == last.keys()
    changed = {key for key in first if not torch.equal(first[key], last[key])}
    assert changed
    assert changed == {key for key in first if key.startswith(learns)}
    fresh = run_module.TrainingRun(
        recipe(**changes, out=str(tmp_path / "other")), run_module.World(0, 1, torch.device("cpu")), SilentWatcher()
    )
    base = {key: value for key, value in fresh._student.state_dict().items() if not key.startswith(learns)}
    assert all(torch.equal(last[key], value) for key, value in base.items())


def test_a_source_trained_for_its_relaxation_only_keeps_its_weights(recipe, teacher, tmp_path, weights_of):
    model = {"architecture": None, "source": str(teacher), "init": "stepwise", "relax": "lora", "rank": 2}
    train(recipe(model=model, train="relaxation", budget={"steps": 2}))
    original, trained = weights_of(teacher), weights_of(tmp_path / "run/last")
    assert torch.equal(trained["decoder.embed.weight"], original["decoder.embed.weight"])
    assert torch.equal(trained["decoder.layers.0.mlp.up.weight"], original["decoder.layers.0.mlp.up.weight"])


def test_bfloat16_stays_near_float32_and_keeps_wide_weights(recipe, tmp_path, weights_of):
    for precision in ("float32", "bf16"):
        train(recipe(out=str(tmp_path / precision), precision=precision, budget={"steps": 8}, loss={"exits": {}}))
    wide, narrow = losses(tmp_path / "float32"), losses(tmp_path / "bf16")
    assert narrow == pytest.approx(wide, rel=0.01)
    assert narrow != wide
    assert {value.dtype for value in weights_of(tmp_path / "bf16/last").values()} == {torch.float32}


class Poison:
    """An objective whose losses are what they are, times NaN in some steps."""

    def __init__(self, monkeypatch, steps, value=math.nan):
        self.calls = 0
        plain = Objective.forward

        def forward(objective, **inputs):
            total, parts = plain(objective, **inputs)
            if objective.training:
                self.calls += 1
                total = total * (value if self.calls in steps else 1.0)
            return total, parts

        monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_a_step_that_is_not_finite_changes_nothing_but_is_counted(kind, value, recipe, monkeypatch, tmp_path, weights_of):
    Poison(monkeypatch, {3}, value)
    changes = {"batch": {"micro": 4}, "checkpoint": {"every": 1, "keep": 0}, "optimizer": {"kind": kind}}
    summary = train(recipe(**changes))
    assert (summary.finished, summary.skipped) == (True, 1)
    two, three, four = (weights_of(tmp_path / "run/checkpoints" / f"step-0000000{n}") for n in (2, 3, 4))
    assert all(torch.equal(two[key], three[key]) for key in two)
    assert any(not torch.equal(three[key], four[key]) for key in two)
    optimizers = [
        (tmp_path / f"run/checkpoints/step-0000000{n}/training/optimizer-00000-of-00001.safetensors").read_bytes()
        for n in (2, 3)
    ]
    assert optimizers[0] == optimizers[1]
    records = [r for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    assert [r["skipped"] for r in records] == [0, 0, 1, 1, 1, 1]
    assert records[2]["loss"] is None
    assert all(math.isfinite(r["loss"]) for r in records if r["step"] != 3)


def test_one_bad_micro_batch_skips_its_whole_step(recipe, monkeypatch, tmp_path):
    Poison(monkeypatch, {4})  # the second half of the second step
    assert train(recipe(log={"every": 3})).skipped == 1


@pytest.mark.parametrize("every", [1, 100])
def test_too_many_in_a_row_stop_the_run_with_its_last_checkpoint_whole(every, recipe, monkeypatch, tmp_path, weights_of):
    """Records every step and records now and then: results are read at once, or a step behind."""
    changes = {"checkpoint": {"every": 2}, "batch": {"micro": 4}, "budget": {"steps": 30}, "log": {"every": every}}
    Poison(monkeypatch, {5, 6, 8, *range(9, 99)})
    with pytest.raises(TrainingError, match=r"not finite in steps 8 to 10; stopped.*step-00000008") as caught:
        train(recipe(**changes, optimizer={"nonfinite_limit": 3}))
    assert "optimizer.lr" in str(caught.value)
    monkeypatch.undo()
    last = tmp_path / "run/last"
    assert all(torch.isfinite(value).all() for value in weights_of(last).values())
    summary = train(recipe(**changes, optimizer={"nonfinite_limit": 3}), resume=True)
    assert (summary.finished, summary.skipped) == (True, 3)


def test_a_run_that_never_was_finite_says_that_nothing_was_saved(recipe, monkeypatch, tmp_path):
    Poison(monkeypatch, range(99))
    with pytest.raises(TrainingError, match=r"not finite in steps 1 to 3; stopped.*none"):
        train(recipe())
    assert not (tmp_path / "run/last").exists()


def test_a_validation_that_is_not_finite_is_never_the_best(recipe, monkeypatch, tmp_path):
    from fathomlm.train.loop import Stepper

    found = iter([math.nan, 3.0, 2.0, math.nan])
    monkeypatch.setattr(Stepper, "validate", lambda self, loader, rows: ({"next_token": next(found)}, 1))
    summary = train(recipe(budget={"steps": 4}, checkpoint={"every": 1}))
    assert summary.best == 2.0
    assert (tmp_path / "run/best").resolve().name == "step-00000003"


def test_distillation_needs_the_same_words(recipe, tiny_model_dir):
    with pytest.raises((OptionError, DataError), match="was made with the tokenizer bytes"):
        train(recipe(loss={"distill": {"source": str(tiny_model_dir)}}))


def test_records_say_what_was_done(recipe, tmp_path):
    changes = {"log": {"every": 2}, "evaluate": {"every": 3}, "loss": {"exits": {}}, "schedule": {"warmup": 2}}
    summary = train(recipe(**changes))
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [
        *(("train", 1), ("train", 2), ("validation", 3), ("train", 4), ("train", 6), ("validation", 6))
    ]
    assert [r["tokens"] for r in records] == [128 * r["step"] for r in records]
    assert [r["flops"] / r["tokens"] for r in records] == [records[0]["flops"] / 128] * 6
    assert records[0]["lr"] == 1.5e-3
    assert records[0]["loss"] == pytest.approx(
        records[0]["parts"]["next_token"] + 0.1 * records[0]["parts"]["exit_2"], rel=1e-5
    )
    assert records[0]["grad_norm"] > 0
    assert records[-1]["exits"] == {"2": records[-1]["parts"]["exit_2"]} == summary.exits
    assert records[-1]["loss"] == summary.validation
    assert summary.tokens == 6 * 128
