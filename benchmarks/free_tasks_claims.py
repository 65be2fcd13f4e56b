"""What chapter 2 of the thesis claims of decoding, as differences between decoded texts, for the page of results.

    python benchmarks/free_tasks_claims.py data/free benchmarks/results/study/decoded lines.jsonl.xz ...

The lines are those of `free_tasks.py decode`. A file for each study has differences with their intervals, 95 % over 1,000
draws of the test texts; the verdicts are `fathomlm study report`'s. Of two settings of one model that interval is what there
is to know; two models were trained once each, and how much another run would differ is not in it, so their differences have
none. All of them were written down when most of the texts had been decoded, so all are marked as stated afterwards.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from free_tasks import CALM, MAIN, REFINES, SAMPLED, SAMPLINGS, TASKS, TENTHS, THRESHOLDS
from free_tasks_report import KEPT, TaskResults, bounds, read_results

Key = tuple[str, str]
"""A variant and how it was decoded."""


@dataclass(frozen=True)
class Claim:
    """That the first of each pair scores less than the second, or, with `same`, that they differ by less than a hundredth of
    full decoding's score."""

    text: str
    thesis: str
    pairs: tuple[tuple[str, Key, Key], ...]
    """What is told apart, such as a threshold, and the two settings."""
    same: bool = False


def claims_of(task: TaskResults) -> Iterator[Claim]:
    def at(t: float) -> str:
        return f"threshold {t:g}"

    levels = sorted(THRESHOLDS, reverse=True)
    yield Claim(
        "Copied states lower the quality of an oracle's exits", "tab_free:obs1",
        (("oracle", (CALM, "oracle-copy"), (CALM, "oracle")),),
    )  # fmt: skip
    yield Claim(
        "An oracle's exits keep the quality of full decoding within 1 %", "tab_free:obs1",
        (("oracle", (CALM, "oracle"), (CALM, "full")),), same=True,
    )  # fmt: skip
    yield Claim(
        "Exits with copied states lower the quality at low thresholds", "fig_free:obs2_obs3",
        tuple((at(t), (CALM, f"state-copy {t:g}"), (CALM, "full")) for t in TENTHS[:4]),
    )  # fmt: skip
    yield Claim(
        "State copying is below parallel decoding", "tab_free:copying",
        tuple((at(t), (MAIN, f"state-copy {t:g}"), (MAIN, f"parallel {t:g}")) for t in levels),
    )  # fmt: skip
    yield Claim(
        "Parallel decoding keeps the quality of full decoding within 1 %", "fig_free:main_result",
        tuple((at(t), (MAIN, f"parallel {t:g}"), (MAIN, "full")) for t in levels), same=True,
    )  # fmt: skip
    found = (task.calibration or {"found": {}})["found"]
    chosen = {name: (MAIN, f"parallel {one['threshold']:g}") for name, one in found.items()}
    rules = [(rule, f"{rule} 0.03", f"{rule} 1") for rule in ("thesis", "risk") if f"{rule} 1" in chosen]
    yield Claim(
        "3 % of the calibration texts give the quality that all of them give, within 1 %", "tab_free:calibration",
        tuple((f"rule {rule}", chosen[few], chosen[every]) for rule, few, every in rules if few in chosen),
        same=True,
    )  # fmt: skip
    yield Claim(
        "Refining what the exit chose changes the quality by less than 1 %", "tab_free:rollback",
        tuple(
            (f"{at(t)}, refine {r:g}", (MAIN, f"refine {r:g}, {t:g}"), (MAIN, f"parallel {t:g}"))
            for t in (0.7, 0.3) for r in REFINES
        ),
        same=True,
    )  # fmt: skip
    yield Claim(
        "Parallel decoding keeps the quality of sampled texts within 1 %", "tab_free:sampling",
        tuple(
            (f"{at(t)}, {name}", (MAIN, f"parallel {t:g}, {name}"), (MAIN, f"full, {name}"))
            for t in SAMPLED for name in SAMPLINGS
        ),
        same=True,
    )  # fmt: skip
    exit_of = task.exit_of(MAIN)
    for other, name in (("none", "no layerwise distillation"), ("last", "KD-last"), ("unif", "KD-unif")):
        yield Claim(
            f"At the exit alone KD-dyna is above {name}", "fig_free:distill_loss",
            (("every token exits", (other, f"static {exit_of}"), (MAIN, f"static {exit_of}")),),
        )  # fmt: skip
    small = [variant for variant in task.variants if variant.startswith("small")]
    yield Claim(
        "FREE is above a small model without exits", "tab_free:small_sized",
        tuple((at(0.5), (variant, "full"), (MAIN, "parallel 0.5")) for variant in small),
    )  # fmt: skip


def place(task: TaskResults, about: str, one: Key, other: Key) -> dict[str, Any]:
    """A difference of two settings, with its interval where one model wrote both."""
    first, second = task.texts[one], task.texts[other]
    low, high = bounds(first.draws - second.draws)
    return {
        "setting": about,
        "one": ", ".join(one),
        "other": ", ".join(other),
        "mean": round(first.score - second.score, 2),
        "interval": [low, high] if one[0] == other[0] else None,
    }


def record_of(task: TaskResults, where: dict[str, Any]) -> dict[str, Any]:
    metric = TASKS[task.name].metric
    told = []
    for claim in claims_of(task):
        places = [place(task, *pair) for pair in claim.pairs if pair[1] in task.texts and pair[2] in task.texts]
        if places:
            full = task.texts[claim.pairs[0][2][0], "full"].score
            within = round((1 - KEPT) * full, 2) if claim.same else None
            told.append({"text": claim.text, "thesis": claim.thesis, "within": within, "after": True, "places": places})
    many = len(next(iter(task.texts.values())).record["texts"])
    keys = ("device", "torch", "date")
    return {
        "study": TASKS[task.name].study,
        "metric": metric,
        "texts": many,
        "environment": {key: where[key] for key in keys},
        "claims": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="the ledger's folder decoded/")
    parser.add_argument("lines", type=Path, nargs="+")
    args = parser.parse_args()
    results, where = read_results(args.data, args.lines)
    args.out.mkdir(parents=True, exist_ok=True)
    for task in results.values():
        record = record_of(task, where)
        path = args.out / f"{record['study']}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {len(record['claims'])} claims over {record['texts']} texts")


if __name__ == "__main__":
    main()
