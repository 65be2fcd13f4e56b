"""The summary at the top of the results: counts and lists by the verdicts, chapter by chapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import page, results_of
from fathomlm.lab.study.spec import build_study, read_study, shipped_studies
from fathomlm.lab.study.summary import anchor, heading, summary
from lab.study.synthetic import fill
from lab.study.test_results import LEVELS, SEEDS, noise

Values = Callable[..., dict[str, Any]]
MOR = "tab_mor:main_results"


def test_claims_are_counted_and_listed_by_chapter(values: Values, tmp_path: Path) -> None:
    claims = [
        {"text": "Looping costs", "lower": "plain", "higher": "recursive", "thesis": MOR},
        {"text": "Looping pays", "lower": "recursive", "higher": "plain", "thesis": "fig_rrt:main_figures"},
        {"text": "Routing costs", "lower": "plain", "higher": "mor"},
    ]
    budgets = {"short": {"steps": 8}, "long": {"steps": 16}}
    study = build_study(values(claims=claims, seeds=[*range(5)], budgets=budgets), "test")

    def loss(job: Any) -> float | None:
        if job.run.variant.name == "mor":
            return None if job.run.budget.name == "long" else LEVELS["mor"] + noise(job)
        return LEVELS[job.run.variant.name] + noise(job)

    fill(study, Ledger(tmp_path), loss)
    results = results_of([study], Ledger(tmp_path))
    text = "\n".join(summary(results))
    link = "[small](#small-a-small-study)"
    assert "3 claims: 1 confirmed, 1 refuted, 1 not resolved at this scale, and 0 not run yet." in text
    chapters = text.split("**Chapter 3")[1].split("**Chapter 4")
    assert f"- Refuted, {link}: Looping pays (long: +0.0986 ± " in chapters[0]
    assert f"- Confirmed, {link}: Looping costs (long: -0.0986 ± " in chapters[1]
    ours = text.split("**Questions of ours.** ")[1]
    assert ours.startswith("1 claim: 0 confirmed, 0 refuted, 1 not resolved")
    assert f"- Not resolved in any setting: 1 of {link}." in ours
    whole = page(results, Path("results.md"))
    assert whole.index("## Summary") < whole.index("## Claims") < whole.index("## small: A small study")


def test_what_some_settings_decide_is_said_with_its_verdict(values: Values, tmp_path: Path) -> None:
    claims = [{"text": "Looping costs", "lower": "plain", "higher": "recursive"}]
    budgets = {"short": {"steps": 8}, "long": {"steps": 16}}
    study = build_study(values(claims=claims, seeds=SEEDS, budgets=budgets, thesis=[MOR]), "test")
    sign = {"short": 1.0, "long": -1.0}
    fill(
        study,
        Ledger(tmp_path),
        lambda job: 3.0 + (LEVELS[job.run.variant.name] - 3.0) * sign[job.run.budget.name] + noise(job),
    )
    text = "\n".join(summary(results_of([study], Ledger(tmp_path))))
    assert "**Chapter 4" in text, "a question of ours is in the chapter of its study"
    line = next(line for line in text.splitlines() if line.startswith("- Decided in some settings only"))
    assert "Looping costs (short confirmed: -0.0985 ± " in line
    assert "; long refuted: +0.1015 ± " in line
    assert line.endswith("; in all 1 confirmed, 1 refuted).")


@pytest.mark.parametrize("name", shipped_studies())
def test_headings_have_one_anchor(name: str) -> None:
    """GitHub keeps the two hyphens of ` - ` and ` + `, the site makes one of them: a title has neither."""
    assert "--" not in anchor(heading(read_study(name)))
