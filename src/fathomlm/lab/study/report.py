"""The page of results: made from the ledger alone, so that it never says more than the runs do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import OutputError
from fathomlm.lab.study import pictures
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.results import Judged, Results, collect, overall
from fathomlm.lab.study.spec import Claim, Study
from fathomlm.lab.study.tables import claim_table, fit_table, main_table, metric_table, tokens
from fathomlm.lab.tables import markdown

HEAD = """\
# Results

Made by `fathomlm study report` from the ledger; do not edit it by hand. How to run the studies: [study.md](study.md).

Losses are on held-out documents, in nats per token; those of routed models are causal, as at inference. Runs of one seed
share their data order and, where shapes agree, their initialisation, so differences are paired by seed. Intervals are 95 %,
from Student's t over the residual of variant and seed, which is taken over all variants of a study that share the seeds.
A claim is *confirmed* or *refuted* where the whole interval lies on one side, and *not resolved at this scale* where it does
not, or where there is one seed only. Scale means these sizes and budgets: the thesis trains models ten times as large on a
hundred times as many tokens.
"""


def results_of(studies: Sequence[Study], ledger: Ledger) -> list[Results]:
    records = ledger.all() if ledger.directory.is_dir() else []
    return [collect(study, records) for study in studies]


def write_report(results: Sequence[Results], out: Path) -> list[Path]:
    """The page, and a picture beside it for each study with finished runs; returns what was written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {out.parent}: {error.strerror or error}") from error
    written = [out]
    for each in results:
        if each.records:
            written.append(picture_path(out, each.study))
            pictures.draw(each, written[-1])
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
        lines += [f"{len(distinct)} finished runs.\n", *_claims(results)]
    for each in results:
        lines += _section(each, out)
    return "\n".join(lines)


def _claims(results: Sequence[Results]) -> list[str]:
    """All claims with one word each."""
    rows = [["claim", "made in", "study", "verdict"]]
    for each in results:
        for claim, judged in _by_claim(each):
            rows.append([claim.text, _source(claim), each.study.name, f"*{overall(judged)}*"])
    return ["## Claims\n", *markdown(rows), ""]


def _section(results: Results, out: Path) -> list[str]:
    study = results.study
    lines = [f"## {study.name}: {study.title}\n"]
    answers = ", ".join(f"`{label}`" for label in study.thesis)
    lines.append(f"{f'Answers {answers} of the thesis' if answers else 'A question of ours'}. {_settings(results)}\n")
    if not results.records:
        failed = f" {len(results.failed)} failed." if results.failed else ""
        return [*lines, f"No runs yet: {results.planned} are planned.{failed}\n"]
    lines += [f"{len(results.records)} of {results.planned} runs are finished. {_where(results)}\n"]
    lines += [*markdown(main_table(results)), "", f"![{study.title}]({picture_path(out, study).name})\n"]
    if (metrics := metric_table(results)) is not None:
        lines += ["Routers on validation rows, means over seeds:\n", *markdown(metrics), ""]
    if (fits := fit_table(results)) is not None:
        lines += ["Quadratic fits over the logarithm of the size:\n", *markdown(fits), ""]
    for claim, judged in _by_claim(results):
        lines += [f"**{claim.text}** ({_source(claim)}): *{overall(judged)}*\n", *markdown(claim_table(judged)), ""]
    for record in results.failed:
        lines.append(f"Failed: {record['variant']}/{record['budget']}/{record['seed']}: {record['reason']}\n")
    if results.left_out:
        lines.append(f"{results.left_out} finished runs on another corpus are left out.\n")
    return lines


def _by_claim(results: Results) -> list[tuple[Claim, list[Judged]]]:
    return [(claim, [each for each in results.judged if each.claim is claim]) for claim in results.study.claims]


def _source(claim: Claim) -> str:
    return "ours" if claim.thesis == "ours" else f"`{claim.thesis}`"


def _settings(results: Results) -> str:
    recipe = results.rows[0].job.shaped.recipe
    step = results.rows[0].job.shaped.length.tokens_per_step
    return (
        f"Rows of {recipe.data.context} tokens, {tokens(step) if step >= 1e6 else f'{step:,}'} tokens a step, "
        f"{recipe.optimizer.kind} with rate {recipe.optimizer.lr:g} unless a variant says otherwise, {recipe.schedule.kind} "
        f"schedule, {recipe.precision}; at most {results.study.passes:g} passes over the corpus."
    )


def _where(results: Results) -> str:
    records = results.records
    devices = ", ".join(sorted({record["environment"]["device"] for record in records}))
    dates = sorted(str(record["date"])[:10] for record in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commits = ", ".join(sorted({str(r["commit"])[:9] for r in records if r["commit"]})) or "unknown"
    data = records[0]["data"]
    return f"{devices}, {span}; corpus of {tokens(data['tokens'])} tokens, vocabulary {data['vocab']:,}; commits: {commits}."
