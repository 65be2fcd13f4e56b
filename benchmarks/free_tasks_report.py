"""Scores, table and picture from the texts of `free_tasks.py decode`.

    python benchmarks/free_tasks_report.py free_tasks.json data/free benchmarks/results/free_tasks_h200

BLEU by sacrebleu; ROUGE-L by rouge-score, the best of a text's references (the `eval` extra has both). The record that is
kept has no texts but the first three of each run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from free_tasks import TASKS

Record = dict[str, Any]
MARKS = {
    "full": ("*", "black"),
    "static": ("v", "gray"),
    "speculative": ("D", "tab:green"),
    "FREE, adaptive": ("P", "tab:red"),
}


def score(metric: str, texts: list[str], references: list[list[str]]) -> float:
    if metric == "BLEU":
        import sacrebleu

        return float(sacrebleu.corpus_bleu(texts, [[each[0] for each in references]]).score)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    best = [
        max(scorer.score(reference, text)["rougeL"].fmeasure for reference in each)
        for text, each in zip(texts, references, strict=True)
    ]
    return 100 * sum(best) / len(best)


def add_scores(record: Record, data: Path) -> None:
    for name, task in TASKS.items():
        if name not in record:
            continue
        lines = (data / name / "test.jsonl").read_text(encoding="utf-8").splitlines()
        references = [json.loads(line)["references"] for line in lines]
        for found in record[name].values():
            texts = found.pop("texts")
            found["score"] = round(score(task.metric, texts, references[: len(texts)]), 2)
            found["speedup"] = round(record[name]["full"]["seconds"] / found["seconds"], 3)
            found["examples"] = texts[:3]
            found["text_count"] = len(texts)


def table(record: Record) -> str:
    where = record["environment"]
    lines = [
        "# Leaving early on two tasks",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. Texts one at a time, greedy, on compiled layers and",
        "captured graphs.",
        "Speed is full decoding's time over this one's for all texts, encoder and prompt left out; it counts texts that end",
        "earlier or later as they do. FREE keeps what its exit chose: its keys and values are exact, its texts are not full",
        "depth's. Speculative texts are. CALM has a model of its own, trained with exits after many layers.",
    ]
    for name, task in TASKS.items():
        if name not in record:
            continue
        runs = record[name]
        many, layers = next(iter(runs.values()))["text_count"], runs["full"]["mean_exit_layer"]
        lines += [
            "",
            f"## {name}: {many} texts, {layers:.0f} layers, exit after {task.exit_layer}",
            "",
            f"| decoding | threshold | {task.metric} | speed | ms a token | tokens | left early | mean exit layer |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for label, found in runs.items():
            threshold = "-" if found["threshold"] is None else f"{found['threshold']:.3f}"
            drafts = f" ({found['accepted']:.0%} of drafts kept)" if "accepted" in found else ""
            depth = f"{found['exit_rate']:.1%} | {found['mean_exit_layer']:.2f}"
            lines.append(
                f"| {label}{drafts} | {threshold} | {found['score']:.2f} | {found['speedup']:.2f} | "
                f"{found['ms_per_token']:.3f} | {found['tokens']:,} | {depth} |"
            )
    return "\n".join(lines) + "\n"


def picture(record: Record, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in TASKS if name in record]
    figure = Figure(figsize=(6.4 * len(names), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        runs, task = record[name], TASKS[name]
        kinds = {"FREE, 0": ("o-", "tab:blue", "FREE, fixed thresholds"), "CALM": ("s--", "tab:orange", "CALM")}
        for start, (style, colour, label) in kinds.items():
            points = sorted((r["speedup"], r["score"], r["threshold"]) for n, r in runs.items() if n.startswith(start))
            axes.plot([p[0] for p in points], [p[1] for p in points], style, color=colour, label=label)
            for x, y, threshold in points:
                axes.annotate(f"{threshold:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        for label, (marker, colour) in MARKS.items():
            found = runs[label]
            shown = f"{label} ({found['threshold']:.2f})" if label == "FREE, adaptive" else label
            axes.plot(found["speedup"], found["score"], marker, color=colour, markersize=10, label=shown)
        axes.set_title(f"{name}: quality against speed ({runs['full']['text_count']} texts)")
        axes.set_xlabel("speed against full decoding (times; numbers beside points are thresholds)")
        axes.set_ylabel(f"{task.metric} (points)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"Leaving early, one text at a time ({record['environment']['device']})")
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    record: Record = json.loads(args.record.read_text(encoding="utf-8"))
    add_scores(record, args.data)
    args.out.with_suffix(".json").write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(table(record), encoding="utf-8")
    picture(record, args.out.with_suffix(".png"))
    print(table(record))


if __name__ == "__main__":
    main()
