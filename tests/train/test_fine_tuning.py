"""LoRA and DoRA on every layer of a plain model: fine-tuning, with one recursion and nothing tied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fathomlm
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count, relaxation_parameters
from fathomlm.depth.relaxation import build_relaxation, check_fits
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.activations import activation_bytes
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.estimate import estimate
from fathomlm.train.reading import read_recipe
from fathomlm.train.recipe import Recipe
from fathomlm.train.report import read_records
from fathomlm.train.run import train
from fathomlm.train.setup import build_student
from fathomlm.train.student import read_student
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN = Architecture(
    family="qwen2", qkv_bias=True, layers=4, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=37
)
TOKENS = torch.arange(40)[None] * 5 % 256
Make = Callable[..., Recipe]


def everywhere(kind: str = "lora", ranks: int | str = 3) -> Relaxation:
    made = build_relaxation(QWEN.linears(), kind, ranks, linears_only=True, everywhere=True)
    assert made is not None
    return made


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


def tuned(recipe: Make, source: Path, **changes: Any) -> Recipe:
    """A recipe that fine-tunes a directory."""
    model = {"architecture": None, "source": str(source), "recursions": 1, "relax": "lora", "rank": 4}
    values: dict[str, Any] = {"train": "relaxation", "budget": {"steps": 12}, **changes}
    return recipe(**{**values, "model": {**model, **changes.get("model", {})}})


# The relaxation.


def test_it_sits_on_every_step_and_says_so_only_then() -> None:
    tied = Relaxation(kind="lora", ranks={"q": 2})
    assert "everywhere" not in tied.to_dict()
    for relaxation in (tied, everywhere(), everywhere("dora")):
        assert Relaxation.from_dict(json.loads(json.dumps(relaxation.to_dict()))) == relaxation
    plain, middle = DepthPlan.vanilla(4), DepthPlan.build("middle-cycle", 2, 4)
    assert [tied.sits_on(middle, step) for step in middle] == [False, True, True, False]
    assert all(everywhere().sits_on(plan, step) for plan in (plain, middle) for step in plan)
    assert not any(tied.sits_on(plain, step) for step in plain)
    check_fits(everywhere(), plain)
    with pytest.raises(OptionError, match="lora relaxes a tie, but with one recursion nothing is tied"):
        check_fits(tied, plain)
    with pytest.raises(OptionError, match="everywhere requires lora or dora, and cannot be combined with encoding"):
        Relaxation(kind="encoding", everywhere=True)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("ranks", [3, 10_000, "q=2,ffn=4"])
@pytest.mark.parametrize("plan", [DepthPlan.vanilla(4), DepthPlan.build("middle-cycle", 2, 4)], ids=["plain", "middle"])
def test_counted_is_what_a_decoder_has(kind: str, ranks: int | str, plan: DepthPlan) -> None:
    relaxation = everywhere(kind, ranks)
    decoder = Decoder(QWEN, plan, relaxation)
    cost = count(QWEN, plan, relaxation=relaxation)
    assert cost.relaxation_parameters == relaxation_parameters(QWEN, plan, relaxation)
    assert cost.relaxation_parameters == sum(p.numel() for p in decoder.deltas.parameters())
    assert cost.non_embedding_parameters + cost.embedding_parameters == sum(p.numel() for p in decoder.parameters())
    without = count(QWEN, plan)
    added = sum(relaxation.rank(linear) * (linear.inputs + linear.outputs) for linear in QWEN.linears())
    assert cost.forward_flops_per_token - without.forward_flops_per_token == 2 * 4 * added


# Runs.


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_student_starts_as_its_source(kind: str, recipe: Make, teacher: Path, token_corpus: Path) -> None:
    student = build_student(tuned(recipe, teacher, model={"relax": kind}), Corpus.open(token_corpus))
    assert student.relaxation is not None
    assert student.relaxation.everywhere
    assert len(student.decoder.deltas) == 4
    assert not any(name.split(".")[2] == "offsets" for name, _ in student.decoder.named_parameters() if "deltas" in name)
    torch.testing.assert_close(logits(student), logits(load(teacher)), rtol=0, atol=0 if kind == "lora" else 1e-5)
    again, other = (
        build_student(tuned(recipe, teacher, model={"relax": kind}, seed=seed), Corpus.open(token_corpus)) for seed in (0, 1)
    )
    name = "deltas.2.linears.up.a"
    first = student.decoder.get_parameter(name)
    assert float(first.detach().std()) == pytest.approx(32**-0.5, rel=0.3)
    assert torch.equal(again.decoder.get_parameter(name), first)
    assert not torch.equal(other.decoder.get_parameter(name), first)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_only_what_is_added_learns_and_it_merges(
    kind: str, recipe: Make, teacher: Path, tmp_path: Path, weights_of: Callable[[Path], dict[str, Any]]
) -> None:
    summary = train(tuned(recipe, teacher, model={"relax": kind}, optimizer={"lr": 0.02}))
    losses = [r["loss"] for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    before, after = weights_of(teacher), weights_of(tmp_path / "run/last")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    added = {name: value for name, value in after.items() if name not in before}
    assert {name.split(".")[1] for name in added} == {"deltas"}
    assert all(value.any() for value in added.values())

    model = load(tmp_path / "run/last")
    assert summary.checkpoint is not None
    assert not torch.allclose(logits(model), logits(load(teacher)), atol=0.1)
    fathomlm.export(model, tmp_path / "plain")
    merged = load(tmp_path / "plain")
    assert merged.relaxation is None
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    texts = [fathomlm.generate(each, "7: the line", max_new_tokens=12)[0].tokens for each in (model, merged)]
    assert texts[0] == texts[1]
    save(model, tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_counts_agree_in_the_dry_run_in_inspect_and_in_the_model(
    recipe: Make, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tuned(recipe, teacher, model={"rank": 10_000}, budget={"steps": 1})
    found = estimate(asked)
    layer = 2 * 32 * 64 + 2 * 16 * 48 + 3 * 32 * 80  # q and o, k and v, gate, up and down at full rank
    assert found.trainable_parameters == found.relaxation_parameters == 4 * layer
    train(asked)
    model = load(tmp_path / "run/last")
    assert sum(p.numel() for p in model.decoder.deltas.parameters()) == 4 * layer
    assert sum(p.numel() for p in model.parameters()) == found.total_parameters
    assert main(["inspect", str(tmp_path / "run/last"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["relaxation_parameters"] == 4 * layer
    assert record["relaxation"]["everywhere"] is True
    assert (
        record["forward_flops_per_token"]
        == count(model.architecture, model.plan, relaxation=model.relaxation).forward_flops_per_token
    )
    assert main(["inspect", str(tmp_path / "run/last")]) == 0
    assert "no shared layers, lora rank 10000" in capsys.readouterr().out


def test_work_and_memory_count_every_layer(recipe: Make, teacher: Path) -> None:
    asked = tuned(recipe, teacher)
    frozen, plain = estimate(asked), estimate(tuned(recipe, teacher, model={"relax": None, "rank": None}, train="all"))
    added = 4 * 4 * (2 * 64 + 2 * 48 + 3 * 80)
    layers, head = plain.flops_per_token_6n // 6 - 257 * 32, 257 * 32
    assert frozen.flops_per_token_6n - plain.flops_per_token_6n == 6 * added
    assert frozen.work_flops == frozen.tokens * (4 * (layers + added + head) + 2 * added)
    parts = read_student(asked)
    without = read_student(tuned(recipe, teacher, model={"relax": None, "rank": None}, train="all"))
    assert activation_bytes(asked, parts) - activation_bytes(asked, without) == 4 * 7 * 4 * 4


def test_it_is_trained_on_as_it_is(
    recipe: Make, teacher: Path, tmp_path: Path, weights_of: Callable[[Path], dict[str, Any]]
) -> None:
    train(tuned(recipe, teacher, out=str(tmp_path / "first")))
    source = tmp_path / "first/last"
    train(tuned(recipe, source, model={"relax": None, "rank": None}, out=str(tmp_path / "second")))
    first, second = weights_of(source), weights_of(tmp_path / "second/last")
    assert first.keys() == second.keys()
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed == {name for name in first if ".deltas." in name}


# An encoder-decoder's decoder has cross attention too.


@pytest.mark.parametrize("name", ["t5", "mt5-untied"])
@torch.inference_mode()
def test_a_t5_decoder_is_relaxed_everywhere_and_merges(name: str, tmp_path: Path) -> None:
    write_tiny_t5(name, tmp_path / "hf")
    plain = load(tmp_path / "hf")
    linears = plain.architecture.linears()
    relaxation = build_relaxation(linears, "lora", 2, linears_only=True, everywhere=True)
    tuned = replan(plain, plain.plan, relaxation=relaxation, seed=3)
    assert tuned.encoder is plain.encoder
    assert {"cross_q", "cross_v"} < set(tuned.decoder.deltas["0"].linears)
    source, target = torch.arange(2, 12)[None], torch.arange(5, 12)[None]

    def scores(model: Any) -> Tensor:
        found: Tensor = model(input_ids=source, decoder_input_ids=target).logits
        return found

    assert torch.equal(scores(tuned), scores(plain))
    for delta in tuned.decoder.deltas.parameters():
        delta.normal_(std=0.1, generator=torch.Generator().manual_seed(delta.numel()))
    assert not torch.allclose(scores(tuned), scores(plain), atol=0.01)
    save(tuned, tmp_path / "tuned")
    assert torch.equal(scores(load(tmp_path / "tuned")), scores(tuned))
    fathomlm.export(tuned, tmp_path / "merged")
    torch.testing.assert_close(scores(load(tmp_path / "merged")), scores(tuned), rtol=0, atol=1e-5)


def test_runs_over_a_frozen_encoder_decoder_leave_it_as_it_is(
    recipe: Make, pair_corpus: Path, tmp_path: Path, weights_of: Callable[[Path], dict[str, Any]]
) -> None:
    shape = {"family": "t5", "layers": 3, "hidden": 32, "intermediate": 48, "heads": 4, "context": 64}
    data = {"path": str(pair_corpus), "pairs": ["ask", "say"], "source_length": 16, "target_length": 12}
    shared: dict[str, Any] = {"data": data, "budget": {"steps": 3}, "optimizer": {"lr": 1e-2}}
    train(recipe(**shared, model={"architecture": shape, "recursions": 1}, out=str(tmp_path / "plain")))
    source = {"architecture": None, "source": str(tmp_path / "plain/last"), "recursions": 1}
    changes: dict[str, dict[str, Any]] = {
        "deltas": {"model": {**source, "relax": "lora", "rank": "attn=4,cross=2,ffn=4"}, "train": "relaxation"},
        "exit_adapters": {"model": source, "loss": {"exits": {"at": [1], "adapter_rank": 2}}, "train": "exits"},
    }
    before = weights_of(tmp_path / "plain/last")
    for group, change in changes.items():
        asked = recipe(**shared, **change, out=str(tmp_path / group))
        train(asked)
        after = weights_of(tmp_path / group / "last")
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        added = {name: value for name, value in after.items() if name not in before}
        assert {name.split(".")[1] for name in added} == {group}
        assert all(value.any() for value in added.values())
        assert sum(value.numel() for value in added.values()) == estimate(asked).trainable_parameters


# Mistakes.


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"sharing": "cycle"}, "model.sharing says how {source} is tied; it requires model.recursions >= 2"),
        ({"relax_init": "svd"}, "model.relax_init says how {source} is tied"),
        ({"init": "average"}, "model.init says how {source} is tied"),
        ({"prefix_length": 4}, "model.prefix_length says how {source} is tied"),
        ({"relax": "prefix", "rank": None}, "model.relax: prefix relaxes a tie, so it requires model.recursions >= 2"),
        ({"relax": "encoding", "rank": None}, "model.relax: encoding relaxes a tie"),
        ({"relax": None}, "model.rank requires model.relax: lora or dora"),
        ({"rank": "sixty"}, "cannot read 'sixty' as a rank"),
    ],
)
def test_fields_that_do_not_fine_tune(model: dict[str, Any], message: str, recipe: Make, teacher: Path) -> None:
    with pytest.raises(OptionError) as caught:
        read_student(tuned(recipe, teacher, model=model))
    assert str(caught.value).startswith(message.format(source=teacher))


def test_sources_that_are_not_plain_are_refused(
    recipe: Make, teacher: Path, tiny_model_dir: Path, token_corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"fine-tunes a plain model; .* is recursive already"):
        read_student(tuned(recipe, tiny_model_dir))
    save(build_student(tuned(recipe, teacher), Corpus.open(token_corpus)), tmp_path / "tuned")
    for ask in (read_student, lambda asked: build_student(asked, Corpus.open(token_corpus))):
        with pytest.raises(OptionError, match=r"has its own lora; leave out model\.relax to train it as it is"):
            ask(tuned(recipe, tmp_path / "tuned"))
    with pytest.raises(OptionError, match="was converted already"):
        convert(tmp_path / "tuned", recursions=2)


def test_convert_and_fresh_models_have_no_place_for_it(recipe: Make, teacher: Path) -> None:
    with pytest.raises(OptionError, match="lora relaxes a tie, but with one recursion nothing is tied; give 2 or more"):
        convert(teacher, recursions=1, relax="lora", rank=2)
    fresh = recipe(model={"architecture": None, "shape": "smollm2-135m", "recursions": 1, "relax": "lora", "rank": 2})
    with pytest.raises(OptionError, match="lora relaxes a tie"):
        read_student(fresh)


def test_the_recipe_fine_tunes_every_linear() -> None:
    found = estimate(read_recipe("lora-finetune-smollm2-135m"), rows_in_epoch=14_732)
    a, rank = 576, 64
    added = rank * (2 * (a + a) + 2 * (a + 192) + 3 * (a + 1536))
    assert found.trainable_parameters == found.relaxation_parameters == 30 * added
    exits = estimate(read_recipe("exit-adapter-smollm2-135m"))
    assert exits.trainable_parameters == exits.exit_parameters == 576 + 2 * 64 * 576 + 577
    assert exits.memory.activations < 2e9 < found.memory.activations
