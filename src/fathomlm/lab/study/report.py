"""The page of results, with its tables and pictures: made from the ledger alone, so that it never says more than the runs
do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, mode

from fathomlm.checkpoints.writing import whole_file
from fathomlm.cli.display import Rows
from fathomlm.errors import OutputError, writing
from fathomlm.lab.common import markdown, optional
from fathomlm.lab.evaluate.tasks import TASKS
from fathomlm.lab.study.decoded import with_decoded
from fathomlm.lab.study.differences import gap
from fathomlm.lab.study.jobs import Job
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.pictures import draw, label_of, tokens
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
            label = label_of(results, row)
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
        label = label_of(results, row)
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
        label = label_of(results, row)
        cells = [optional(value, ".4f") for value in losses]
        for value, text in zip(scores, texts, strict=True):
            cells.append("-" if value is None else f"{value:.4f}" if text else f"{100 * value:.1f}")
        rows.append([label, *cells])
    return rows


def _score(row: Row, task: str) -> str:
    found = [counted(record["scores"][task]) for record in row.records.values() if task in record.get("scores", {})]
    if not found:
        return "-"
    value, errors = fmean(value for value, _ in found), [error for _, error in found if error is not None]
    if not errors:
        return f"{value:.4f}"
    return f"{100 * value:.1f} ± {196 * fmean(errors):.1f}"  # all seeds answer the same examples, so more are no more sure


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
