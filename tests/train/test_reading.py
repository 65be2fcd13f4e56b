"""Reading recipes: every name and type is checked, with the nearest right one named, and what is printed reads back."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from fathomlm.errors import OptionError
from fathomlm.train.reading import build_recipe, find_recipe, read_recipe, shipped_recipes, to_yaml
from fathomlm.train.recipe import DistillRecipe, ExitRecipe, Recipe

BASE = {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 3}, "batch": {"sequences": 2}}


def merged(values):
    return {**BASE, **{k: {**BASE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in values.items()}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bugdet": 1}, "recipe: unknown field 'bugdet' (did you mean 'budget'?)"),
        ({"optimizer": {"learning_rate": 1}}, "recipe: unknown field in optimizer 'learning_rate'; known: betas, clip,"),
        (
            {"optimizer": {"weight_decy": 1}},
            "recipe: unknown field in optimizer 'weight_decy' (did you mean 'weight_decay'?)",
        ),
        ({"loss": {"exit": {}}}, "recipe: unknown field in loss 'exit' (did you mean 'exits'?)"),
        ({"loss": {"exits": {"weight": "x"}}}, "recipe: unknown field in loss.exits 'weight' (did you mean 'weights'?)"),
        ({"loss": {"distill": {"sorce": "x"}}}, "recipe: unknown field in loss.distill 'sorce' (did you mean 'source'?)"),
        ({"loss": {"layerwise": {"shalow": 3}}}, "unknown field in loss.layerwise 'shalow' (did you mean 'shallow'?)"),
        ({"data": {"contxt": 3}}, "recipe: unknown field in data 'contxt' (did you mean 'context'?)"),
        ({3: 4}, "recipe: unknown field '3'"),
    ],
)
def test_unknown_names_are_refused_at_every_level(values, message):
    with pytest.raises(OptionError) as caught:
        build_recipe(merged(values))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr must be a number, got 'fast'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"compile": "maybe"}, "compile must be true or false, got 'maybe'"),
        ({"data": {"sources": "README.md"}}, "data.sources must be a list such as [a, b], got 'README.md'"),
        ({"data": {"path": 3}}, "data.path must be a string, got 3"),
        ({"precision": "fp16"}, "precision must be one of 'bf16', 'float32', got 'fp16'"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas[1] must be a number, got 'x'"),
        ({"loss": {"exits": {"at": 6}}}, "loss.exits.at must be one of 'recursions', 'all' or a list such as [a, b], got 6"),
        ({"loss": {"exits": {"coefficient": "x"}}}, "loss.exits.coefficient must be a number, got 'x'"),
        ({"model": {"architecture": 3}}, "model.architecture must be a section of fields or null, got 3"),
        ({"log": {"wandb": 5}}, "log.wandb must be a string or null, got 5"),
        ({"loss": {"exits": True}}, "loss.exits must be a section of fields or null, got true"),
        ({"budget": 5}, "budget must be a section of fields, got 5"),
        ({"optimizer": None}, "optimizer must be a section of fields, got null"),
        ({"data": {"context": None}}, "data.context must be an integer, got null"),
        ({"optimizer": {"lr": None}}, "optimizer.lr must be a number, got null"),
        ({"optimizer": {"betas": None}}, "optimizer.betas must be a list such as [a, b], got null"),
        ({"name": None}, "name must be a string, got null"),
        ({"precision": None}, "precision must be one of 'bf16', 'float32', got null"),
    ],
)
def test_wrong_types_are_refused_in_one_line(values, message):
    with pytest.raises(OptionError) as caught:
        build_recipe(merged(values))
    assert str(caught.value).startswith(f"recipe: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"source": "x"}}, "model requires one of source, shape and architecture, got source and shape"),
        ({"model": {"shape": None}}, "model requires one of source, shape and architecture, got none"),
        (
            {"budget": {"tokens": "2B"}},
            "budget requires one of tokens, steps, epochs and flops, got tokens and steps; "
            "null takes one out, such as --budget.steps null",
        ),
        (
            {"batch": {"tokens": 5}},
            "batch requires one of tokens and sequences, got tokens and sequences; null takes",
        ),
        ({"budget": {"steps": 50.5}}, "budget.steps must be an integer, got 50.5"),
        ({"budget": {"steps": "ten"}}, "cannot read budget.steps 'ten'; write a number such as 500, 2e6 or 15B"),
        ({"data": {"max_tokens": "some"}}, "cannot read data.max_tokens 'some'"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas requires two numbers, got [0.9]"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas must be >= 0 and < 1, got 1.0"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr must be > 0, got 0"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr must be a number > 0, got inf"),
        ({"optimizer": {"clip": -1}}, "optimizer.clip must be >= 0, got -1"),
        ({"optimizer": {"weight_decay": -1}}, "optimizer.weight_decay must be >= 0, got -1"),
        ({"optimizer": {"nonfinite_limit": 0}}, "optimizer.nonfinite_limit must be >= 1, got 0"),
        ({"schedule": {"warmup": float("nan")}}, "schedule.warmup must be a number >= 0, got nan"),
        ({"model": {"recursions": 0}}, "model.recursions must be >= 1, got 0"),
        ({"data": {"context": 0}}, "data.context must be >= 1, got 0"),
        ({"data": {"pairs": ["a"]}}, "data.pairs names two fields, source and target, got ['a']"),
        ({"batch": {"micro": 0}}, "batch.micro must be >= 1, got 0"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every must be >= 1, got 0"),
        ({"checkpoint": {"keep": -1}}, "checkpoint.keep must be >= 0, got -1"),
        ({"log": {"every": 0}}, "log.every must be >= 1, got 0"),
        ({"loss": {"distill": {"weight": 2}}}, "loss.distill requires a source, the teacher"),
        ({"loss": {"distill": {"source": "x", "weight": -1}}}, "loss.distill.weight must be >= 0, got -1"),
        ({"loss": {"layerwise": {}}}, "loss.layerwise.shallow must be >= 1, got 0"),
        ({"loss": {"chunk": 0}}, "loss.chunk must be >= 1, got 0"),
        ({"loss": {"distill": {"kind": "kl"}}}, "invalid loss.distill.kind 'kl'; choose from forward_kl, reverse_kl, "),
        ({"loss": {"exits": {"distill": "kl"}}}, "invalid loss.exits.distill 'kl'; choose from forward_kl, "),
        ({"train": "relaxation"}, "train: relaxation requires model.relax"),
        ({"train": "exit_heads", "loss": {"exits": {}}}, "train: exit_heads requires loss.exits.head_rank >= 1"),
    ],
)
def test_values_that_no_run_could_mean(values, message):
    with pytest.raises(OptionError) as caught:
        build_recipe(merged(values))
    assert str(caught.value).startswith(message)


def test_fields_are_changed_from_the_command_line():
    words = [
        "--optimizer.lr",
        "1e-4",
        "--budget.steps=null",
        "--budget.tokens",
        "15B",
        "--data.max-tokens",
        "2M",
        "--seed=3",
    ]
    words += ["--checkpoint.milestones", "[20, 30]", "--data.sources", "[a.txt, 'b c.txt']", "--compile", "true"]
    recipe = build_recipe(BASE, words)
    assert recipe.optimizer.lr == 1e-4
    assert (recipe.budget.steps, recipe.budget.tokens, recipe.data.max_tokens) == (None, "15B", "2M")
    assert (recipe.seed, recipe.compile, recipe.checkpoint.milestones) == (3, True, [20, 30])
    assert recipe.data.sources == ["a.txt", "b c.txt"]
    assert BASE == {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 3}, "batch": {"sequences": 2}}


def test_optional_sections_appear_and_vanish_from_the_command_line():
    recipe = build_recipe(BASE, ["--loss.exits.coefficient", "0.3", "--loss.distill.source", "gemma"])
    assert recipe.loss.exits == ExitRecipe(coefficient=0.3)
    assert recipe.loss.distill == DistillRecipe(source="gemma")
    assert recipe.loss.layerwise is None
    values = merged({"loss": {"exits": {"at": [2], "coefficient": 0.3}}})
    assert build_recipe(values, ["--loss.exits.at", "[1, 3]"]).loss.exits == ExitRecipe(at=[1, 3], coefficient=0.3)
    assert build_recipe(values, ["--loss.exits", "null"]).loss.exits is None


def test_a_shape_of_ones_own_is_free_in_its_fields():
    recipe = build_recipe(BASE, ["--model.shape", "null", "--model.architecture.hidden", "64"])
    assert recipe.model.architecture == {"hidden": 64}


def test_a_name_may_look_like_a_number():
    assert build_recipe(BASE, ["--name", "12"]).name == "12"
    assert build_recipe(BASE, ["--name=2024-01-01"]).name == "2024-01-01"
    assert build_recipe(BASE, ["--out", "7"]).directory == "7"
    assert build_recipe(BASE, ["--name", "12"]).directory == "runs/12"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimiser.lr", "1"], "unknown option or field '--optimiser' (did you mean '--optimizer'?)"),
        (["--optimizer.lrr", "1"], "unknown field in optimizer 'lrr' (did you mean 'lr'?)"),
        (["--loss.exits.att", "1"], "unknown field in loss.exits 'att' (did you mean 'at'?)"),
        (["--seed.x", "1"], "seed has no fields of its own"),
        (["--seed"], "--seed requires a value"),
        (["--seed", "--name", "x"], "--seed requires a value"),
        (["lr", "1"], "cannot read 'lr'; fields of the recipe are changed with --section.field value"),
        (["--data.sources", "[a"], "--data.sources: cannot read '[a'"),
        (["--budget.steps", "many"], "cannot read budget.steps 'many'"),
    ],
)
def test_mistyped_fields_on_the_command_line(words, message):
    with pytest.raises(OptionError) as caught:
        build_recipe(BASE, words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_reads_and_reads_back(name, tmp_path):
    recipe = read_recipe(name)
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert read_recipe(tmp_path / "again.yaml") == recipe
    assert find_recipe(name).read_text().startswith("# ")


def test_what_is_printed_names_every_field():
    printed = yaml.safe_load(to_yaml(build_recipe(BASE, ["--loss.exits.at", "[2]", "--optimizer.lr", "1e-5"])))
    assert list(printed) == [field.name for field in dataclasses.fields(Recipe)]
    assert printed["loss"]["exits"]["at"] == [2]
    assert printed["optimizer"]["lr"] == 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1: not valid YAML"),
        ("model:\n  source: x\n bad", "line 3: not valid YAML"),
        ("- 1", "a recipe is fields with values (name: tiny), this is a list"),
        ("", "a recipe is fields with values (name: tiny), this is an empty file"),
        ("\x00", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipes(text, message, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_recipe(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_in_a_file_names_it_and_what_is_typed_does_not(tmp_path):
    path = tmp_path / "x.yaml"

    def refusal(fields, *words):
        path.write_text(yaml.safe_dump(BASE | fields))
        with pytest.raises(OptionError) as caught:
            read_recipe(path, words)
        return str(caught.value)

    assert refusal({"modle": 1}) == f"{path}: unknown field 'modle' (did you mean 'model'?)"
    assert refusal({"batch": {"sequences": 0}}, "--name", "x") == f"{path}: batch.sequences must be >= 1, got 0"
    assert refusal({"batch": {"sequences": "much"}}).startswith(f"{path}: batch.sequences must be an integer")
    assert refusal({}, "--batch.sequences", "0") == "batch.sequences must be >= 1, got 0"
    assert refusal({}, "--batch.sequences", "much").startswith("recipe: batch.sequences must be an integer")


def test_recipes_that_are_not_there(tmp_path):
    with pytest.raises(OptionError, match=r"unknown recipe 'tinny' \(did you mean 'tiny'\?\)"):
        read_recipe("tinny")
    with pytest.raises(OptionError, match=r"there is no recipe file .*gone\.yaml"):
        read_recipe(tmp_path / "gone.yaml")
    with pytest.raises(OptionError, match="is a directory; a recipe is a YAML file"):
        read_recipe(tmp_path)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("name: one\nbudget: {steps: 5}\nname: two\n")
    with pytest.raises(OptionError, match=r"line 3: not valid YAML \(duplicate key 'name'\)"):
        read_recipe(path)
