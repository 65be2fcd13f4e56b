from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import OptionError
from fathomlm.lab.study.jobs import Place, jobs_of, recipe_of
from fathomlm.lab.study.ledger import fingerprint
from fathomlm.lab.study.spec import build_study, read_study, shipped_studies

Values = Callable[..., dict[str, Any]]


def test_all_variants_of_the_first_seed_come_first(values: Values) -> None:
    runs = build_study(values(), "test").runs()
    assert [run.key for run in runs] == [f"{v}/short/{seed}" for seed in (0, 1) for v in ("plain", "recursive", "mor")]


def test_budgets_of_a_chain_follow_each_other(values: Values) -> None:
    study = build_study(values(budgets={"short": {"steps": 8}, "long": {"steps": 16}}, chain=True, seeds=[3]), "test")
    assert [run.key for run in study.runs()][:3] == ["plain/short/3", "plain/long/3", "recursive/short/3"]


def test_axes_make_all_combinations_but_those_left_out(values: Values) -> None:
    axes = {"width": {"w8": {}, "w16": {}}, "kind": {"a": {"optimizer": {"lr": 1.0}}, "b": {}}}
    study = build_study(values(variants=None, axes=axes, without=["w16-b"], baseline="a", claims=[]), "test")
    assert [variant.name for variant in study.variants] == ["w8-a", "w8-b", "w16-a"]
    assert study.baseline_of(study.variant("w8-b")).name == "w8-a"
    assert study.runs()[0].values["optimizer"] == {"lr": 1.0}
    assert study.runs()[1].values["optimizer"] == {"lr": 3e-3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "unknown field 'titel'"),
        ({"baseline": "plian"}, "unknown variant 'plian' (did you mean 'plain'?)"),
        ({"claims": [{"text": "x", "lower": "plain", "higher": "none"}]}, "unknown variant 'none'"),
        ({"claims": [{"text": "x", "lower": "plain"}]}, "a claim requires a text, and either"),
        ({"claims": [{"text": "x", "same": ["plain", "mor"]}]}, "within > 0"),
        ({"seeds": [0, 0]}, "seeds must be a list of different integers"),
        ({"kind": "measure"}, "unknown kind 'measure'"),
        ({"axes": {"a": {"b": {}}}}, "either variants or axes"),
        ({"seeds": None}, "seeds is required"),
        ({"chain": True, "common": {"schedule": {"kind": "cosine"}}}, "chain requires schedule.kind: trapezoid"),
    ],
)
def test_mistakes_are_named(values: Values, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        build_study(values(**changes), "small.yaml")
    assert message in str(error.value)
    assert "small.yaml" in str(error.value)


def test_jobs_of_all_seeds_are_what_their_recipes_say(values: Values, tmp_path: Path) -> None:
    place = Place(None, tmp_path)
    study = build_study(values(), "test")
    for job in jobs_of(study, place):
        assert job.shaped.recipe == recipe_of(job.run, place)
        assert job.fingerprint == fingerprint(recipe_of(job.run, place))


def test_a_variant_with_a_wrong_field_is_named(values: Values, tmp_path: Path) -> None:
    study = build_study(values(variants={"plain": {"modle": {}}}, claims=[]), "test")
    with pytest.raises(OptionError, match="study small, variant plain: recipe: unknown field 'modle'"):
        jobs_of(study, Place(None, tmp_path))


@pytest.mark.parametrize("name", sorted(shipped_studies()))
def test_every_run_of_a_shipped_study_has_a_recipe(name: str, tmp_path: Path) -> None:
    study = read_study(name)
    assert study.name == name
    jobs = jobs_of(study, Place(None, tmp_path))
    assert len({job.fingerprint for job in jobs}) == len(jobs), "two variants are one"
    if name != "tiny":
        assert all(job.tokens <= 4 * 191_000_000 for job in jobs), "more than four passes"


def test_runs_that_studies_have_in_common_are_known_as_one(tmp_path: Path) -> None:
    found = {
        name: {job.run.key: job.fingerprint for job in jobs_of(read_study(name), Place(None, tmp_path))}
        for name in ("routers", "kv", "sharing", "controls")
    }
    assert found["routers"]["default/100M/0"] == found["kv"]["expert-cache/100M/0"]
    assert found["routers"]["default/100M/0"] == found["controls"]["lr-1.5e-3-mor/100M/0"]
    assert found["routers"]["token-loss/100M/1"] == found["kv"]["token-cache/100M/1"]
    assert found["sharing"]["middle-cycle/100M/0"] == found["routers"]["recursive/100M/0"]
    assert found["sharing"]["plain/100M/0"] == found["controls"]["lr-1.5e-3-plain/100M/0"]
