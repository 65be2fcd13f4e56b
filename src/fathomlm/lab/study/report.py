"""The page of results, with its tables and pictures: made from the ledger alone, so that it never says more than the runs
do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, mode
from typing import Any

from fathomlm.checkpoints.writing import whole_file
from fathomlm.cli.display import Rows
from fathomlm.errors import OutputError, writing
from fathomlm.lab.analyze.scaling import architecture_name
from fathomlm.lab.common import markdown, optional
from fathomlm.lab.drawing import DASHES, LINES, MARKERS, check_matplotlib, new_figure, plain_axes, save_figure
from fathomlm.lab.evaluate.tasks import TASKS
from fathomlm.lab.study.decoded import with_decoded
from fathomlm.lab.study.differences import gap
from fathomlm.lab.study.jobs import Job
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.results import METRICS, Judged, Results, Row, collect, overall, planned_jobs, remaining
from fathomlm.lab.study.scores import counted
from fathomlm.lab.study.spec import Claim, Study, read_study, shipped_studies
from fathomlm.lab.study.summary import by_claim, heading, summary
from fathomlm.train.schedule import row_length

MADE = "# Results\n\nMade by `fathomlm study report`"
HEAD = f"""\
{MADE} from the ledger; do not edit it by hand. How to run the studies: [study.md](study.md).

Losses are on held-out documents, in nats per token; those of routed models are causal, as at inference. Runs of one seed
share their data order and, where shapes agree, their initialisation, so differences are paired by seed. Intervals are 95 %,
from Student's t over the residual of variant and seed. That spread of single runs is taken over all runs that were made
alike, those of other studies with the same common settings and budget among them. A pair with one seed has the spread of the
others, and no interval where nothing was repeated. A difference is over the seeds that both variants have, a loss over all
seeds of its own. A claim is *confirmed* or *refuted* where the whole interval lies on one side, and *not resolved at this
scale* where it does not, where there is none, or where the spread has fewer than four degrees of freedom. Scale means these
sizes and budgets: the thesis trains models ten times as large on a hundred times as many tokens. The column tokens/s has the
training speed of runs that had the device to themselves, and "-" where all of them shared it with others.

Each comparison is tested by itself: of twenty differences that are none, one is called. The column "after correction" says
of how many decided settings the verdict remains where all comparisons of a study are tested together (Holm's method, 5 %).
Claims were stated before their runs, unless the column "stated" says "afterwards".
"""


def results_of(studies: Sequence[Study], ledger: Ledger) -> list[Results]:
    """Whichever studies are asked for, spreads are of all runs that were made alike, those of other shipped studies too."""
    records = ledger.all() if ledger.directory.is_dir() else []
    given = {study.name for study in studies}
    every = [*studies, *(read_study(name) for name in shipped_studies() if name not in given)]
    planned: dict[str, list[Job]] = {}

    def jobs(study: Study) -> list[Job]:
        """Once for each: a study is asked for by all that were made alike, and reading recipes takes a while."""
        if study.name not in planned:
            planned[study.name] = planned_jobs(study)
        return planned[study.name]

    found = (collect(study, records, [other for other in every if other.name != study.name], jobs) for study in studies)
    return [with_decoded(each, ledger) for each in found]


def write_report(results: Sequence[Results], out: Path) -> list[Path]:
    """The page, and a picture beside it for each study with finished runs; returns what was written. A page of somebody
    else's is not replaced, nor is a report by an empty one, as from a directory that has no ledger."""
    if out.exists():
        if not out.is_file() or not out.read_bytes().startswith(MADE.encode()):
            raise OutputError(f"{out} exists and is no page of `fathomlm study report`; choose another one with --out")
        if not any(each.records for each in results):
            raise OutputError(f"{out} exists, and the ledger has no finished runs to replace it with; is --ledger right?")
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    written = [out]
    for each in results:
        if each.records:
            written.append(picture_path(out, each.study))
            draw(each, written[-1])
    with whole_file(out) as temporary:
        temporary.write_text(page(results, out), encoding="utf-8")
    return written


def picture_path(out: Path, study: Study) -> Path:
    return out.with_name(f"{out.stem}-{study.name}.png")


def page(results: Sequence[Results], out: Path) -> str:
    """The whole page as Markdown."""
    distinct = {record["fingerprint"] for each in results for record in each.records}
    lines = [HEAD]
    if not distinct:
        lines.append("No runs are finished yet.\n")
    else:
        lines += [f"{len(distinct)} finished runs.\n", *summary(results), *_claims(results)]
    for each in results:
        lines += _section(each, out)
    return "\n".join(lines)


def _claims(results: Sequence[Results]) -> list[str]:
    """All claims with one word each."""
    rows = [["claim", "made in", "study", "stated", "verdict", "after correction"]]
    for each in results:
        for claim, judged in by_claim(each):
            stated = "afterwards" if claim.after else "before"
            rows.append([claim.text, _source(claim), each.study.name, stated, f"*{overall(judged)}*", remaining(judged)])
    return ["## Claims\n", *markdown(rows), ""]


def _section(results: Results, out: Path) -> list[str]:
    study = results.study
    lines = [f"## {heading(study)}\n", *([f"{study.note}\n"] if study.note else [])]
    answers = ", ".join(f"`{label}`" for label in study.thesis)
    lines.append(f"{f'Answers {answers} of the thesis' if answers else 'A question of ours'}. {_settings(results)}\n")
    if not results.records:
        failed = f" {len(results.failed)} failed." if results.failed else ""
        return [*lines, f"No runs yet: {results.planned} are planned.{failed}\n"]
    lines += [f"{len(results.records)} of {results.planned} runs are finished. {_where(results)}\n"]
    lines += [*markdown(main_table(results)), "", f"![{study.title}]({picture_path(out, study).name})\n"]
    if (metrics := metric_table(results)) is not None:
        lines += ["Routers on validation rows, means over seeds:\n", *markdown(metrics), ""]
    if (scores := score_table(results)) is not None:
        lines += ["Tasks in %, ± 95 % over their examples; texts in nats per token:\n", *markdown(scores), ""]
    if (exits := exit_table(results)) is not None:
        lines += ["Every token leaving at one exit, or at none; losses, and tasks in %:\n", *markdown(exits), ""]
    if (fits := fit_table(results)) is not None:
        lines += ["Quadratic fits over the logarithm of the size:\n", *markdown(fits), ""]
    if results.decoded:
        lines.append(f"How these models decode: {results.decoded}\n")
    for claim, judged in by_claim(results):
        stated = ", stated afterwards" if claim.after else ""
        lines += [f"**{claim.text}** ({_source(claim)}{stated}): *{overall(judged)}*\n", *markdown(claim_table(judged)), ""]
    if not results.judged:
        lines.append("No claim is made here, and no verdict drawn from this table.\n")
    for record in results.failed:
        lines.append(f"Failed: {record['variant']}/{record['budget']}/{record['seed']}: {record['reason']}\n")
    if results.left_out:
        lines.append(f"{results.left_out} finished runs on another corpus are left out.\n")
    return lines


def _source(claim: Claim) -> str:
    return "ours" if claim.thesis == "ours" else f"`{claim.thesis}`"


def _settings(results: Results) -> str:
    recipe = results.rows[0].job.shaped.recipe
    rate = mode(row.job.shaped.recipe.optimizer.lr for row in results.rows)
    step = results.rows[0].job.shaped.length.tokens_per_step
    return (
        f"Rows of {row_length(recipe)} tokens, {tokens(step) if step >= 1e6 else f'{step:,}'} tokens a step, "
        f"{recipe.optimizer.kind} with rate {rate:g} unless a variant says otherwise, {recipe.schedule.kind} "
        f"schedule, {recipe.precision}; at most {results.study.passes:g} passes over the corpus"
        f"{', padding counted' if recipe.data.pairs else ''}."
    )


def _where(results: Results) -> str:
    records = results.records
    devices = ", ".join(sorted({record["environment"]["device"] for record in records}))
    dates = sorted(str(record["date"])[:10] for record in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commits = ", ".join(sorted({str(r["commit"])[:9] for r in records if r["commit"]})) or "unknown"
    data = records[0]["data"]
    return f"{devices}, {span}; corpus of {tokens(data['tokens'])} tokens, vocabulary {data['vocab']:,}; commits: {commits}."


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
                optional(loss, ".4f"),
                "baseline" if row.is_baseline else gap(row.against),
                ", ".join(str(seed) for seed in sorted(row.records)) or "-",
                optional(rate, ",.0f"),
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
            label = _label(results, row)
            rows.append([label, *(optional(value, ".4f") for value in values)])
    return rows


def score_table(results: Results) -> Rows | None:
    """What finished models know, means over seeds; None where nothing was scored. An interval says how much the examples
    decide; two models answer the same ones."""
    scored = [row for row in results.rows if any(record.get("scores") for record in row.records.values())]
    if not scored:
        return None
    rows = [["variant", *results.study.scores]]
    for row in scored:
        label = _label(results, row)
        rows.append([label, *(_score(row, task) for task in results.study.scores)])
    return rows


def exit_table(results: Results) -> Rows | None:
    """Loss and task scores where all tokens leave at one exit, beside those at full depth (thesis 3: static exiting), means
    over seeds; None where no model has exits."""
    found = {name for record in results.records for name in record["final"] if re.fullmatch(r"exit_\d+", name)}
    exits = sorted(found, key=lambda name: int(name.removeprefix("exit_")))
    if not exits:
        return None
    places = {**{name: f"layer {name.removeprefix('exit_')}" for name in exits}, "": "full"}
    rows = [["variant", *(f"{what}, {place}" for what in ("loss", *results.study.scores) for place in places.values())]]
    for row in results.rows:
        if not row.records:
            continue
        losses = [row.mean(name or "loss") for name in places]
        scores = [row.mean(f"{name}.{task}" if name else task) for task in results.study.scores for name in places]
        texts = [task not in TASKS for task in results.study.scores for _ in places]
        label = _label(results, row)
        cells = [optional(value, ".4f") for value in losses]
        for value, text in zip(scores, texts, strict=True):
            cells.append("-" if value is None else f"{value:.4f}" if text else f"{100 * value:.1f}")
        rows.append([label, *cells])
    return rows


def _score(row: Row, task: str) -> str:
    found = [counted(record["scores"][task]) for record in row.records.values() if task in record.get("scores", {})]
    if not found:
        return "-"
    value, error = fmean(value for value, _ in found), found[0][1]
    return f"{value:.4f}" if error is None else f"{100 * value:.1f} ± {196 * error:.1f}"


def claim_table(judged: Sequence[Judged]) -> Rows:
    """A row for each place at which a claim was tried."""
    rows = [["difference", "budget or setting", "metric", "mean and 95 % interval", "seeds", "verdict", "p, corrected"]]
    for each in judged:
        seeds = "-" if each.found is None else str(each.found.seeds)
        pair = f"{each.one} - {each.other}"
        level = "-" if each.p is None else f"{each.p:.3f}" if each.p >= 0.001 else "< 0.001"
        rows.append([pair, each.budget, each.claim.metric, gap(each.found), seeds, each.verdict, level])
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
                optional(fit.best_loss, ".3f"),
                "-" if fit.best_tokens is None else tokens(fit.best_tokens),
            ]
        )
    return rows


def tokens(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,.0f}"


def draw(results: Results, out: Path) -> None:
    """Write a picture of what is finished; there must be something."""
    check_matplotlib()
    several = len(results.study.budgets) > 1
    count = sum(bool(row.records) for row in results.rows)
    figure = new_figure(13, max(6.0 if several else 4.8, 1.6 + (0.28 if several else 0.36) * count))
    left, right = figure.subplots(1, 2)
    if results.over_sizes:
        _sizes(left, results)
    else:
        _curves(left, results)
    _differences(right, results)
    save_figure(figure, results.study.title, out, dpi=120)


def _curves(axes: Any, results: Results) -> None:
    """Validation losses over tokens, means over seeds; of each variant the longest run."""
    finals = []
    longest = {row.variant.name: row for row in sorted(results.rows, key=lambda row: row.job.tokens) if row.records}
    for number, row in enumerate(longest.values()):
        at: dict[int, list[float]] = {}
        for record in row.records.values():
            for point in record["validation"]:
                at.setdefault(point["tokens"], []).append(point["loss"])
        shared = {x: fmean(losses) for x, losses in sorted(at.items()) if len(losses) == len(row.records)}
        loss = row.mean()
        assert loss is not None
        finals.append(loss)
        axes.plot(
            [x / 1e6 for x in shared], list(shared.values()), linestyle=DASHES[number // len(LINES) % len(DASHES)],
            color=LINES[number % len(LINES)], marker=MARKERS[number % len(MARKERS)], markersize=3, linewidth=1.2,
            label=f"{_label(results, row)}: {loss:.4f}",
        )  # fmt: skip
    axes.set_ylim(min(finals) - 0.05, max(finals) + max(0.6, 2 * (max(finals) - min(finals))))
    axes.legend(fontsize=7.5, ncols=2 if len(finals) > 7 else 1)
    title = "Validation loss, mean over seeds (routed models: causal)"
    plain_axes(axes, title, "tokens seen (millions)", "loss (nats per token)")


def _sizes(axes: Any, results: Results) -> None:
    """Losses over the logarithm of the size, with the fits; a color for each architecture, a style for each budget."""
    kinds: dict[str, list[Row]] = {}
    for row in (row for row in results.rows if row.records):
        kinds.setdefault(_kind(row), []).append(row)
    fits = {(fit.architecture, round(math.log(fit.flops), 1)): fit for fit in results.fits()}
    for number, (kind, rows) in enumerate(kinds.items()):
        for place, budget in enumerate(results.study.budgets):
            own = sorted((r for r in rows if r.budget == budget), key=_parameters)
            if not own:
                continue
            color, style = LINES[number % len(LINES)], DASHES[place % len(DASHES)]
            x, y = [_parameters(row) / 1e6 for row in own], [row.mean() or math.nan for row in own]
            axes.plot(x, y, MARKERS[place % len(MARKERS)], color=color, markersize=5)
            record = next(iter(own[0].records.values()))
            fit = fits.get((kind, round(math.log(float(record["flops"])), 1)))
            label = f"{kind}, {budget.name}: {min(y):.3f}"
            if fit is None:
                axes.plot(x, y, linestyle=style, color=color, linewidth=1.0, label=label)
            else:
                grid = [x[0] * (x[-1] / x[0]) ** (i / 60) for i in range(61)]
                axes.plot(
                    grid, [fit.at(1e6 * size) for size in grid], linestyle=style, color=color, linewidth=1.0, label=label
                )
    axes.set_xscale("log")
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({round(_parameters(row) / 1e6, 1) for row in results.rows if row.records}))
    axes.tick_params(axis="x", labelsize=7, rotation=45)
    axes.legend(fontsize=7.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    title = "Loss over size under equal budgets (lowest beside the name)"
    plain_axes(axes, title, "parameters without embedding (millions)", "validation loss (nats per token)")


def _differences(axes: Any, results: Results) -> None:
    """Each variant's loss less its baseline's, with the interval and the number beside it."""
    shown = [row for row in results.rows if row.against is not None]
    for place, row in enumerate(reversed(shown)):
        assert row.against is not None
        color = LINES[0] if row.against.half is not None and abs(row.against.mean) > row.against.half else "0.5"
        axes.errorbar(
            row.against.mean, place, xerr=row.against.half, fmt="o", color=color, capsize=3, markersize=4, linewidth=1.2
        )
        axes.annotate(
            gap(row.against), (row.against.mean, place), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_yticks(range(len(shown)), [_label(results, row) for row in reversed(shown)], fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.margins(x=0.15)  # the numbers beside the outermost points
    first = results.rows[0].job
    under = "" if len(results.study.budgets) > 1 else f", {tokens(first.tokens)} tokens"
    title = f"Loss less that of {results.study.baseline}{under}; 95 %, grey: inside the spread"
    plain_axes(axes, title, "difference (nats per token); left is better")


def _label(results: Results, row: Row) -> str:
    """A variant, with its budget where there are several."""
    return row.variant.name if len(results.study.budgets) == 1 else f"{row.variant.name}, {row.budget.name}"


def _kind(row: Row) -> str:
    plan = row.job.shaped.parts.plan
    return architecture_name(plan.recursions, plan.routing is not None)


def _parameters(row: Row) -> int:
    return row.job.shaped.cost.non_embedding_parameters
