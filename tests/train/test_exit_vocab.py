"""Exits that learn over a vocabulary of their own: their losses, and runs that keep it with the model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.exit_pack import read_pack
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import CheckpointError, OptionError, TrainingError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.frequent import frequent_in_corpus
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.directory import check_same
from fathomlm.train.estimate import estimate
from fathomlm.train.losses.divergence import DIVERGENCES
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe, read_recipe
from fathomlm.train.recipe import ExitRecipe, LossRecipe
from fathomlm.train.report import read_records
from fathomlm.train.run import train
from fathomlm.train.setup import build_student, describe_student
from fathomlm.train.student import read_student
from train.exit_runs import SHAPE, Trained, batch, check_refused, check_same_logits, train_exit

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(family="llama", **SHAPE | {"vocab": 137})
PLAIN = DepthPlan.vanilla(4)
OWN = ("exit_heads.", "exit_adapters.", "exit_blocks.", "exit_classifiers.")
VOCAB = torch.tensor([0, 3, *range(20, 80), 136])
EVERY = {"head": 2, "classifier": True, "distill": "forward_kl"}


def decoder(words: Tensor | None, head: int = 0, layer: bool = False, classifier: bool = False, **unused: Any) -> Decoder:
    """Random weights, also where exits would start as nothing; as many tokens as `IGNORE` is below nothing, and more."""
    made = Decoder(ARCHITECTURE, PLAIN.with_exits((1,), layer=layer), None, head, 3, classifier).double()
    generator = torch.Generator().manual_seed(0)
    made.reset_parameters(std=0.3, generator=generator)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith(OWN) and not name.startswith("exit_blocks."):
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    made.limit_exits(words)
    choose_trained(made, "exits")
    return made


def objective(model: Decoder, head: int = 0, layer: bool = False, classifier: bool = False, **more: Any) -> Objective:
    exits = ExitRecipe(
        at=[2], coefficient=0.4, head_rank=head, adapter_rank=3, layer=layer, classifier=classifier, exit_vocab=1, **more
    )
    return Objective(model, LossRecipe(exits=exits, chunk=7))


def slopes(total: Tensor, model: Decoder) -> dict[str, Tensor]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = torch.autograd.grad(total, [model.get_parameter(name) for name in names], retain_graph=True, allow_unused=True)
    return {name: slope for name, slope in zip(names, found, strict=True) if slope is not None}


# The objective.


def by_hand(model: Decoder, kind: str | None) -> tuple[Tensor, list[Tensor]]:
    """Cross entropy and divergence of the exit token by token, from scores of the words and nothing else, in float64."""
    tokens, targets, keep = batch(vocab=137)
    own = model.plan.exit_steps((1,))
    at = own[0].index if own else 1
    states = model.states(tokens, at=(at,), keep_BS=keep)
    hidden, last = model.exit_hidden(states[at], 1, layered=True), model.norm(states[3]).detach()
    head = model.embed.weight.detach() if model.head is None else model.head.weight.detach()
    delta = model.exit_delta(1)
    places = {word: place for place, word in enumerate(VOCAB.tolist())}
    ce = divergence = torch.zeros((), dtype=torch.float64)
    for row, column in (targets != IGNORE).nonzero().tolist():
        if (target := int(targets[row, column])) not in places:
            continue
        scores = torch.stack([head[word] @ hidden[row, column] for word in VOCAB])
        if delta is not None:
            scores = scores + torch.stack([delta.b[word] @ (delta.a @ hidden[row, column]) for word in VOCAB])
        log_q = scores - scores.exp().sum().log()
        ce = ce - log_q[places[target]]
        if kind is not None:
            shown = torch.stack([head[word] @ last[row, column] for word in VOCAB])
            value, _ = DIVERGENCES[kind](log_q[None], (shown - shown.exp().sum().log())[None])
            divergence = divergence + value[0]
    full = torch.nn.functional.cross_entropy(
        model.logits(last).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return full + 0.4 * (ce + divergence), [full, ce, *([] if kind is None else [divergence])]


@pytest.mark.parametrize("kind", [None, *DIVERGENCES])
@pytest.mark.parametrize("form", [{}, {"head": 2}, {"layer": True}])
def test_the_loss_is_the_formula_over_the_words(form: dict[str, Any], kind: str | None) -> None:
    model, (tokens, targets, keep) = decoder(VOCAB, **form), batch(vocab=137)
    total, parts = objective(model, distill=kind, **form)(tokens, targets, keep)
    wanted, values = by_hand(model, kind)
    torch.testing.assert_close(parts.double(), torch.stack(values).detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0)
    found, expected = slopes(total, model), slopes(wanted, model)
    assert found.keys() == expected.keys()
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-5, atol=1e-7)
    counted = torch.isin(targets, VOCAB) & (targets != IGNORE)
    assert 0 < counted.sum() < (targets != IGNORE).sum()


@pytest.mark.parametrize("form", [{}, {"layer": True, "classifier": True}, EVERY])
def test_all_words_give_the_losses_of_no_choice(form: dict[str, Any]) -> None:
    tokens, targets, keep = batch(vocab=137)
    results = []
    for words in (None, torch.arange(137)):
        model = decoder(words, **form)
        total, parts = objective(model, **form)(tokens, targets, keep)
        results.append((total, parts, slopes(total, model)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2].keys() == results[1][2].keys()
    assert all(torch.equal(slope, results[1][2][name]) for name, slope in results[0][2].items())


@pytest.mark.parametrize("distill", [None, "forward_kl"])
def test_only_the_exit_gets_a_gradient_and_of_its_delta_the_words_rows(distill: Any) -> None:
    model, (tokens, targets, keep) = decoder(VOCAB, head=2, layer=True, classifier=True), batch(vocab=137)
    objective(model, head=2, layer=True, classifier=True, distill=distill)(tokens, targets, keep)[0].backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if name.startswith(OWN)}
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)
    delta = model.exit_delta(1)
    assert delta is not None
    assert delta.b.grad is not None
    assert delta.b.grad.any(dim=1).nonzero().flatten().tolist() == VOCAB.tolist()


def test_the_last_output_learns_over_every_word() -> None:
    tokens, targets, keep = batch(vocab=137)
    few, whole = (objective(decoder(words))(tokens, targets, keep)[1] for words in (VOCAB, None))
    assert few[0] == whole[0]
    assert few[1] < whole[1]


def test_a_token_of_another_word_asks_nothing_of_the_exit() -> None:
    model, (tokens, targets, keep) = decoder(VOCAB), batch(vocab=137)
    made = objective(model, distill="forward_kl")
    others = targets.masked_fill(torch.isin(targets, VOCAB), 100)
    total, parts = made(tokens, others, keep)
    assert parts[0] > 0
    assert not parts[1:].any()
    assert not any(slope.any() for slope in slopes(total, model).values())
    within = targets.masked_fill(~torch.isin(targets, VOCAB), IGNORE)
    torch.testing.assert_close(made(tokens, within, keep)[1][1:], made(tokens, targets, keep)[1][1:])


def test_the_classifier_compares_tokens_and_not_places() -> None:
    """Of all tokens: where the last output says another word, leaving is wrong."""
    model, (tokens, targets, keep) = decoder(VOCAB, classifier=True), batch(vocab=137)
    with torch.no_grad():
        model.exit_adapters["1"].b.zero_()  # type: ignore[operator,union-attr]
        for layer in model.layers[2:]:
            for parameter in layer.parameters():
                parameter *= 0.3
    made = objective(model, classifier=True)
    parts = dict(zip(made.names, made(tokens, targets, keep)[1], strict=True))
    with torch.no_grad():
        states = model.states(tokens, at=(1,), keep_BS=keep)
        early, last = model.exit_logits(states[1], 1).argmax(-1), model.exit_logits(states[3], 3).argmax(-1)
        p = model.exit_score(states[1], 1).sigmoid()
        wanted = -torch.where(early == last, p.log(), (1 - p).log())[targets != IGNORE].sum()
    assert 3 < (early == last)[targets != IGNORE].sum() < (targets != IGNORE).sum() - 3
    assert not torch.isin(last, VOCAB).all()
    torch.testing.assert_close(parts["exit_2_classifier"].double(), wanted, rtol=1e-6, atol=0)


def test_compiled_parts_give_the_same() -> None:
    model, (tokens, targets, keep) = decoder(VOCAB, **EVERY), batch(vocab=137)
    made = objective(model, **EVERY)
    slow = made(tokens, targets, keep)
    made.compile_parts("aot_eager")
    fast = made(tokens, targets, keep)
    torch._dynamo.reset()
    torch.testing.assert_close(fast[1], slow[1])
    before, after = slopes(slow[0], model), slopes(fast[0], model)
    for name, slope in before.items():
        torch.testing.assert_close(after[name], slope)


def test_nothing_waits_for_a_value() -> None:
    """A pass can be recorded as a graph: of tensors without numbers, asking for one, or for as many as are so, is an
    error."""
    model = decoder(VOCAB, **EVERY)
    made = objective(model, **EVERY)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens = torch.zeros(2, 10, dtype=torch.long)
        total, parts = made(tokens, tokens)
        found = slopes(total, model)
    assert parts.shape == (4,)
    assert found.keys() == {name for name, _ in model.named_parameters() if name.startswith(OWN)}


# The model.


def hub(exits: tuple[int, ...] = (0, 1)) -> FathomForCausalLM:
    plan = PLAIN.with_exits(exits)
    model = FathomForCausalLM(FathomConfig.of(ARCHITECTURE, plan, dtype=torch.float32, exit_adapter=3)).eval()
    model.decoder.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def vocab_of(model: Any) -> list[int] | None:
    """What the decoder and the configuration both say; the rows are the head's."""
    limited = model.decoder.exit_vocab
    words = None if limited is None else limited.vocab_W.tolist()
    assert model.config.exit_vocab == words
    if limited is not None:
        assert torch.equal(limited.rows_WM, model.decoder.head_weight[limited.vocab_W])
    return words


def test_the_choice_is_kept_in_order_and_given_up() -> None:
    model = hub()
    assert vocab_of(model) is None
    model.limit_exits(VOCAB.flip(0).to(torch.int32))
    assert vocab_of(model) == VOCAB.tolist()
    for wrong in (torch.tensor([3, 3]), torch.tensor([137])):
        with pytest.raises(OptionError, match="the exit vocabulary must be"):
            model.limit_exits(wrong)
        assert vocab_of(model) == VOCAB.tolist(), "what is refused changes nothing"
    model.limit_exits(None)
    assert vocab_of(model) is None
    with pytest.raises(OptionError, match="requires a model with exits"):
        hub(()).limit_exits(VOCAB)
    assert FathomForCausalLM(FathomConfig.of(ARCHITECTURE, PLAIN.with_exits((1,)), exit_vocab=[3, 5])).decoder.exit_vocab


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_words_are_saved_and_older_models_have_none(quantize: str | None, tmp_path: Path) -> None:
    model = hub()
    model.limit_exits(VOCAB)
    save(model, tmp_path / "model", quantize=quantize)
    assert vocab_of(load(tmp_path / "model")) == VOCAB.tolist()
    assert vocab_of(load(tmp_path / "model", dtype="bfloat16").to(torch.bfloat16)) == VOCAB.tolist()
    place = tmp_path / "model/config.json"
    config = json.loads(place.read_text())
    assert config["exit_vocab"] == VOCAB.tolist()
    assert not any("exit_vocab" in name for name in load_file(tmp_path / "model/model.safetensors"))
    if quantize is None:
        assert vocab_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model")) == VOCAB.tolist()
    del config["exit_vocab"]
    place.write_text(json.dumps(config))
    assert vocab_of(load(tmp_path / "model")) is None


@pytest.mark.parametrize(
    "damage",
    [[], [3, 3], [5, 3], [-1, 3], [3, 137], [3, 10**30], [3, 4.0], [3, True], ["3"], [[3]], "3", 3, {"3": 4}, False],
    ids=str,
)
def test_damaged_words_are_named(damage: Any, tmp_path: Path) -> None:
    save(hub(), tmp_path / "model")
    place = tmp_path / "model/config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps({**config, "exit_vocab": damage}))
    with pytest.raises(CheckpointError, match=r"model: exit_vocab must be (different tokens in rising|a list of tokens)"):
        load(tmp_path / "model")


def test_words_without_exits_are_named(tmp_path: Path) -> None:
    save(hub(()), tmp_path / "model")
    place = tmp_path / "model/config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "exit_vocab": [3]}))
    with pytest.raises(CheckpointError, match="exit_vocab requires a plan with exits"):
        load(tmp_path / "model")


def test_another_plan_keeps_words_while_there_are_exits() -> None:
    model = hub()
    model.limit_exits(VOCAB)
    assert vocab_of(replan(model, PLAIN.with_exits((2,)), exit_adapter=3)) == VOCAB.tolist()
    assert vocab_of(replan(model, PLAIN)) is None
    assert vocab_of(model) == VOCAB.tolist()


# Whole runs.

MANY = 8


@pytest.fixture(scope="module")
def trained(token_corpus: Path, plain_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("exits") / "run"
    return train_exit(token_corpus, plain_source, out, {"adapter_rank": 4, "exit_vocab": MANY}, steps=60, lr=1e-2)


@pytest.fixture(scope="module")
def trained_vocab(token_corpus: Path) -> list[int]:
    """What the run must have counted."""
    corpus = Corpus.open(token_corpus)
    return frequent_in_corpus(corpus, corpus.load_tokenizer(), MANY, vocab=257).tolist()


def test_a_run_keeps_its_words_and_lowers_its_loss(trained: Trained, trained_vocab: list[int]) -> None:
    assert vocab_of(load(trained.run / "last")) == trained_vocab
    assert len(trained_vocab) == MANY
    assert 256 in trained_vocab, "what ends a text"
    records = [r for r in read_records(trained.run / "metrics.jsonl") if r["kind"] == "validation"]
    first, last = records[0], records[-1]
    assert first["loss"] == last["loss"], "the last output's"
    assert last["exits"]["1"] < first["exits"]["1"] - 0.05
    assert last["parts"]["exit_1_distill"] < 0.9 * first["parts"]["exit_1_distill"]


def test_exits_choose_among_them_and_full_text_is_the_sources(
    trained: Trained, trained_vocab: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ("-p", "7: the line is", "--max-new-tokens", "24", "--json")

    def told(model: Path, *words: str) -> list[int]:
        assert main(["generate", str(model), *prompt, *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)["results"]
        tokens: list[int] = row["tokens"]
        return tokens

    full = told(trained.source)
    assert not set(full) <= set(trained_vocab), "or it would not show that other words are said"
    assert told(trained.run / "last") == full
    for threshold in ("0", "0.3"):
        assert told(trained.run / "last", "--decode", "speculative", "--threshold", threshold) == full
    assert set(told(trained.run / "last", "--decode", "static")) <= set(trained_vocab)
    assert set(told(trained.run / "last", "--decode", "parallel", "--threshold", "0")) <= set(trained_vocab)
    check_same_logits(trained.source, trained.run / "last")


def test_an_exit_pack_brings_them(
    trained: Trained, trained_vocab: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained.run / "last"), str(tmp_path / "pack"), "--format", "exits"]) == 0
    assert f"among {MANY} tokens" in capsys.readouterr().out
    words = read_pack(tmp_path / "pack").exit_vocab
    assert words is not None
    assert words.tolist() == trained_vocab
    packed, own = load(trained.source, exits=tmp_path / "pack"), load(trained.run / "last")
    assert vocab_of(packed) == trained_vocab
    assert vocab_of(load(save(packed, tmp_path / "saved"))) == trained_vocab, "saving keeps a pack's words"
    static = Exiting(mode="static")
    texts = [generate(model, "7: the line", max_new_tokens=12, exiting=static)[0].tokens for model in (packed, own)]
    assert texts[0] == texts[1]


def continued(trained: Trained, recipe: Callable[..., Any], **changes: Any) -> Any:
    """A recipe over the source, with words at an exit."""
    exits = {
        "at": [2],
        "coefficient": 1.0,
        "distill": "forward_kl",
        "adapter_rank": 4,
        "classifier": True,
        "exit_vocab": MANY,
    }
    model = {"architecture": None, "source": str(trained.source), "recursions": 1}
    return recipe(**{"model": model, "train": "exits", "loss": {"exits": exits}, **changes})


def test_a_run_is_resumed_exactly(
    trained: Trained,
    trained_vocab: list[int],
    recipe: Callable[..., Any],
    tmp_path: Path,
    weights_of: Callable[[Path], dict[str, Any]],
) -> None:
    """Also where its source has become another model meanwhile: the rows are those of the checkpoint's head."""
    source = shutil.copytree(trained.source, tmp_path / "source", symlinks=False)
    model = {"architecture": None, "source": str(source), "recursions": 1}
    both = {"model": model, "checkpoint": {"every": 3, "keep": 0}}
    whole, halves = (continued(trained, recipe, **both, out=str(tmp_path / name)) for name in "ab")
    train(whole)
    train(halves)
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000006")
    other = {name: torch.randn_like(value) for name, value in weights_of(source).items()}
    save_file(other, source / "model.safetensors", metadata={"format": "pt"})
    assert train(halves, resume=True).finished
    first, second = (weights_of(tmp_path / name / "last") for name in "ab")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    losses = [
        [(r["step"], r["parts"]) for r in read_records(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"][-3:]
        for name in "ab"
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [4, 5, 6]
    assert vocab_of(load(tmp_path / "b/last")) == trained_vocab


def test_the_recipe_says_which_words_a_run_over_a_checkpoint_has(
    trained: Trained, trained_vocab: list[int], recipe: Callable[..., Any], token_corpus: Path
) -> None:
    corpus, model = Corpus.open(token_corpus), {"source": str(trained.run / "last"), "architecture": None, "recursions": 1}
    exits = {"at": [1], "adapter_rank": 4, "classifier": True}

    def student(words: int, **changes: Any) -> Any:
        return build_student(recipe(model=model, **{"loss": {"exits": {**exits, "exit_vocab": words}}, **changes}), corpus)

    same = student(MANY, train="exits")
    assert vocab_of(same) == trained_vocab
    assert f"exits after 1 among {MANY} tokens" in describe_student(same)
    more = vocab_of(student(MANY + 5, train="exits"))
    assert more is not None
    assert set(more) > set(trained_vocab)
    assert vocab_of(student(0, train="exits")) is None
    assert vocab_of(student(0)) is None, "the head learns, and copies of its rows would go stale"
    assert vocab_of(student(0, loss={})) is None


def test_a_resumed_run_has_the_same_number(trained: Trained, recipe: Callable[..., Any]) -> None:
    ours = continued(trained, recipe)
    older = dataclasses.asdict(ours)
    del older["loss"]["exits"]["exit_vocab"]
    with pytest.raises(TrainingError, match=rf"loss\.exits\.exit_vocab \(was None, is {MANY}\)"):
        check_same(ours, older, "run")
    none = dataclasses.replace(ours.loss.exits, exit_vocab=0)
    check_same(dataclasses.replace(ours, loss=dataclasses.replace(ours.loss, exits=none)), older, "run")


# Recipes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"exits": {"at": [2], "exit_vocab": 9}}}, "loss.exits.exit_vocab requires train: exits, got train: all"),
        (
            {"loss": {"exits": {"at": [2], "exit_vocab": 9}}, "train": "relaxation", "model": {"source": "smollm2-135m"}},
            "loss.exits.exit_vocab requires train: exits, got train: relaxation",
        ),
        (
            {"loss": {"exits": {"at": [2], "adapter_rank": 2, "exit_vocab": -1}}, "train": "exits"},
            "loss.exits.exit_vocab must be >= 0, got -1",
        ),
        ({"loss": {"exits": {"exit_vocab": "many"}}, "train": "exits"}, "recipe: loss.exits.exit_vocab must be"),
    ],
)
def test_recipes_that_no_run_could_mean(changes: dict[str, Any], message: str) -> None:
    check_refused(changes, message)


def test_more_words_than_there_are_or_fewer_than_special_ones(
    recipe: Callable[..., Any], token_corpus: Path, trained: Trained
) -> None:
    def asked(words: int) -> Any:
        return continued(trained, recipe, loss={"exits": {"at": [2], "adapter_rank": 2, "exit_vocab": words}})

    corpus = Corpus.open(token_corpus)
    with pytest.raises(OptionError, match=r"loss\.exits\.exit_vocab must be <= the model's vocabulary of 257, got 258"):
        read_student(asked(258))
    with pytest.raises(
        OptionError, match=r"loss\.exits\.exit_vocab must be from 1 \(the special tokens\) to 257 \(all\), got 258"
    ):
        build_student(asked(258), corpus)
    config = trained.source / "config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(before), "eos_token_id": [7, 8, 256]}))
        with pytest.raises(OptionError, match=r"loss\.exits\.exit_vocab must be from 3 "):
            build_student(asked(2), corpus)
        assert vocab_of(build_student(asked(3), corpus)) == [7, 8, 256], "what ends this model's texts"
    finally:
        config.write_text(before)


def test_the_dry_run_counts_the_words_only() -> None:
    values: dict[str, Any] = {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 1}, "batch": {"sequences": 4}}
    few, whole = (
        estimate(build_recipe({**values, "loss": {"exits": {**exits, "exit_vocab": words}}, "train": "exits"}))
        for exits in [{"at": [8], "layer": True, "head_rank": 2, "distill": "forward_kl"}]
        for words in (8192, 0)
    )
    saved = (49_152 - 8192) * (6 * 576 + 6 * 2)
    assert whole.work_flops - few.work_flops == few.tokens * saved
    assert few.exit_parameters == whole.exit_parameters
    assert few.memory.head < whole.memory.head
    assert {read_recipe(f"exit-{kind}-smollm2-135m").loss.exits.exit_vocab for kind in ("layer", "adapter")} == {8192}  # type: ignore[union-attr]
