"""A study's results as rows of text: a header, and rows whose first column is a name."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.lab.study.results import METRICS, Judged, Results, Row
from fathomlm.lab.study.stats import Difference
from fathomlm.lab.tables import Rows


def main_table(results: Results) -> Rows:
    """A row for each variant and budget: what it is, its loss, its difference to the baseline, its speed."""
    rows = [["variant", "parameters", "FLOPs/token", "budget", "tokens", "loss", "difference", "seeds", "tokens/s"]]
    for row in results.rows:
        cost = row.job.shaped.cost
        loss, rate = row.mean(), row.rate
        rows.append(
            [
                row.variant.name,
                f"{cost.non_embedding_parameters / 1e6:.1f}M",
                f"{row.job.shaped.flops_per_token / 1e6:.1f}M",
                row.budget.name,
                tokens(row.job.tokens),
                "-" if loss is None else f"{loss:.4f}",
                _against(row),
                ", ".join(str(seed) for seed in sorted(row.records)) or "-",
                "-" if rate is None else f"{rate:,.0f}",
            ]
        )
    return rows


def metric_table(results: Results) -> Rows | None:
    """What routers did, for variants that have them; None where none was run."""
    names = [name for name in METRICS if any(row.mean(name) is not None for row in results.rows)]
    if not names:
        return None
    rows = [["variant", *(METRICS[name] for name in names), "loss by top-k"]]
    for row in results.rows:
        values = [row.mean(name) for name in (*names, "next_token")]
        if any(value is not None for value in values[:-1]):
            label = row.variant.name if len(results.study.budgets) == 1 else f"{row.variant.name}, {row.budget.name}"
            rows.append([label, *("-" if value is None else f"{value:.4f}" for value in values)])
    return rows


def claim_table(judged: Sequence[Judged]) -> Rows:
    """A row for each place at which a claim was tried."""
    rows = [["difference", "budget", "metric", "mean and 95 % interval", "seeds", "verdict"]]
    for each in judged:
        seeds = "-" if each.found is None else str(each.found.seeds)
        pair = f"{each.one} - {each.other}"
        rows.append([pair, each.budget, each.claim.metric, gap(each.found), seeds, each.verdict])
    return rows


def fit_table(results: Results) -> Rows | None:
    """Where each architecture's curve is lowest under each budget."""
    fits = results.fits()
    if not fits:
        return None
    rows = [["architecture", "FLOPs", "sizes", "losses", "best size", "loss there", "tokens there"]]
    for fit in fits:
        inside = "" if fit.inside else " (outside the runs)"
        rows.append(
            [
                fit.architecture,
                f"{fit.flops:.2g}",
                ", ".join(f"{size / 1e6:.1f}M" for size in fit.sizes),
                ", ".join(f"{loss:.3f}" for loss in fit.losses),
                "-" if fit.best_parameters is None else f"{fit.best_parameters / 1e6:.1f}M{inside}",
                "-" if fit.best_loss is None else f"{fit.best_loss:.3f}",
                "-" if fit.best_tokens is None else tokens(fit.best_tokens),
            ]
        )
    return rows


def gap(found: Difference | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:+.4f}" + (", no interval" if found.half is None else f" ± {found.half:.4f}")


def tokens(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,.0f}"


def _against(row: Row) -> str:
    return "baseline" if row.is_baseline else gap(row.against)
