"""Scores, tables and a picture from the lines of `free_tasks.py decode` and `free_tasks.py speed`.

    python benchmarks/free_tasks_report.py data/free benchmarks/results/free_tasks_h200 texts.jsonl speed.jsonl ...

BLEU by sacrebleu's counts; ROUGE-L by rouge-score, the best of a text's references (the `eval` extra has both). Intervals
are 95 %, from 1,000 draws of the test texts with replacement; differences are between two sets of texts of the same sources
under the same draws. The fastest setting that keeps 99 % is chosen among many by the texts that it is judged by, so it is
also chosen by every other text and judged by the rest, and, where validation texts were decoded, by those; beside it stands
the fastest whose whole interval is above 99 %. It is one of the first seed's models; what other seeds' keep is beside it. A
model's full decoding is timed once, and a stall of the machine may be in it. Models of equal depth do the same work, so
what counts is the speed against the fastest of theirs that was timed on the same day (`speedup_at_99`); that against the
model's own stands beside it, unless its own was slower than that by more than STALLED. The record that is kept has no texts
but two of each setting; the lines of its models are in free_tasks_h200_lines.jsonl.xz, for variants that are measured later
to stand beside. A variant that was trained again replaces itself: of the lines of its models only the last one's count, so
name the kept lines first. `--keep-lines` writes those that count.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from free_tasks import (
    ALONE,
    CALM,
    FINER,
    MAIN,
    REFINES,
    SAMPLED,
    SAMPLINGS,
    TASKS,
    TENTHS,
    THRESHOLDS,
    VALIDATION,
    Record,
    read_lines,
    trained_as,
)

DRAWS = 1000
ORDERS = 4
KEPT = 0.99
"""The part of full decoding's quality that a setting is to keep."""
STALLED = 1.25
"""Times the fastest full decoding of its depth and day: slower ones were disturbed."""
DECODINGS = ("full", "static", "parallel", "state-copy", "speculative")
"""Whose speed is of interest, as far as it was measured."""
PLAIN = "plain"
"""The variant without exits that models are compared with where MAIN was not trained."""
Table = list[list[str]]


def statistics(metric: str, texts: list[str], references: list[list[str]]) -> np.ndarray:
    """What a score is the function of, summed over texts: a row for each text."""
    if metric == "BLEU":
        from sacrebleu.metrics import BLEU

        rows = BLEU()._extract_corpus_statistics(texts, [[each[0] for each in references]])
        return np.array(rows, dtype=float)  # lengths of text and reference, matches and n-grams of each order
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    best = [
        max(scorer.score(reference, text)["rougeL"].fmeasure for reference in each)
        for text, each in zip(texts, references, strict=True)
    ]
    return np.stack([np.array(best), np.ones(len(best))], axis=1)


def scores(metric: str, sums: np.ndarray) -> np.ndarray:
    """The score of each row of sums, in points."""
    if metric != "BLEU":
        return 100 * sums[:, 0] / sums[:, 1]
    own, reference = sums[:, 0], sums[:, 1]
    matches, grams = sums[:, 2 : 2 + ORDERS], sums[:, 2 + ORDERS : 2 + 2 * ORDERS]
    precision = np.log(np.maximum(matches, 1e-9) / np.maximum(grams, 1)).mean(axis=1)
    return 100 * np.exp(precision + np.minimum(0, 1 - reference / np.maximum(own, 1)))


@dataclass
class Scored:
    """One setting's texts, scored as they are and in every draw."""

    record: Record
    score: float
    draws: np.ndarray
    halves: np.ndarray
    """Scores of every other text, from the first on and from the second on."""

    @property
    def interval(self) -> tuple[float, float]:
        return bounds(self.draws)


def bounds(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return round(float(low), 2), round(float(high), 2)


@dataclass(frozen=True)
class Best:
    """A setting that was chosen by its speed per token."""

    speedup: float
    """Against the fastest full decoding of its depth and day."""
    against_own: float | None
    setting: str

    def __str__(self) -> str:
        rest = "" if self.against_own is None else f" ({self.against_own:.2f} against its own model's full decoding)"
        return f"{self.setting}, {self.speedup:.2f} times per token{rest}"


@dataclass
class TaskResults:
    """All that was measured on one task."""

    name: str
    texts: dict[tuple[str, str], Scored] = field(default_factory=dict)
    validation: dict[tuple[str, str], Scored] = field(default_factory=dict)
    speeds: dict[tuple[str, str], Record] = field(default_factory=dict)
    calibration: Record | None = None

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(variant for variant, _ in self.texts))

    def exit_of(self, variant: str) -> int | None:
        """The layer of the one exit of a variant."""
        found = [label for own, label in self.texts if own == variant and label.startswith("static")]
        return int(found[0].split()[1]) if len(found) == 1 else None

    @property
    def reference(self) -> str:
        """The model whose full decoding models without exits are compared with."""
        return MAIN if (MAIN, "full") in self.texts else PLAIN

    def depth_of(self, variant: str) -> float | None:
        """Layers of a model: those that every token of its full decoding ran through."""
        found = self.texts.get((variant, "full"))
        return None if found is None else float(found.record["mean_exit_layer"])

    def fastest_full(self, variant: str, day: str) -> Record | None:
        """The fastest full decoding that was timed on a day, among models as deep as this one."""
        depth = self.depth_of(variant)
        fulls = [(own, r) for (own, label), r in self.speeds.items() if label == "full" and day_of(r) == day]
        found = [record for own, record in fulls if own == variant or (depth is not None and self.depth_of(own) == depth)]
        return min(found, key=lambda record: record["ms_per_token"], default=None)

    def score(self, variant: str, label: str) -> str:
        found = self.texts.get((variant, label))
        return "-" if found is None else f"{found.score:.2f}"

    def against(self, one: tuple[str, str], other: tuple[str, str]) -> str:
        """The score of one setting, with its difference from another's."""
        if one not in self.texts or other not in self.texts:
            return self.score(*one)
        a, b = self.texts[one], self.texts[other]
        low, high = bounds(a.draws - b.draws)
        return f"{a.score:.2f} ({a.score - b.score:+.2f}; {low:+.2f} to {high:+.2f})"

    def kept(self, variant: str, label: str, *, validation: bool = False) -> tuple[float, float, float] | None:
        """The part of its own full decoding's score that a setting keeps, with its interval; of the test texts, or of those
        that are chosen by."""
        texts = self.validation if validation else self.texts
        sampled = f", {label.split(', ', 1)[1]}" if ", " in label and not label.startswith("refine") else ""
        full, own = texts.get((variant, f"full{sampled}")), texts.get((variant, label))
        if full is None or own is None:
            return None
        low, high = np.percentile(own.draws / np.maximum(full.draws, 1e-9), [2.5, 97.5])
        return own.score / max(full.score, 1e-9), float(low), float(high)

    def _model_beside(self, variant: str, label: str) -> str:
        """Whose full decoding a setting is timed against: its own model's, and of full decoding the reference's."""
        return variant if label != "full" else self.reference

    def speedup(self, variant: str, label: str, per: str) -> float | None:
        """Against the same model's full decoding, per token or per text, if that was not disturbed; full decoding against
        the reference's of the same day."""
        own, model = self.speeds.get((variant, label)), self._model_beside(variant, label)
        full = self.speeds.get((model, "full"))
        if own is None or full is None or day_of(full) != day_of(own):
            return None
        fastest = self.fastest_full(model, day_of(full))
        if fastest is not None and full["ms_per_token"] > STALLED * fastest["ms_per_token"]:
            return None
        return round(full[f"ms_per_{per}"] / own[f"ms_per_{per}"], 3)

    def against_fastest(self, variant: str, label: str) -> float | None:
        """Speedup per token against the fastest full decoding of its depth and day; of full decoding, of the reference's
        depth."""
        own = self.speeds.get((variant, label))
        full = None if own is None else self.fastest_full(self._model_beside(variant, label), day_of(own))
        return None if own is None or full is None else round(full["ms_per_token"] / own["ms_per_token"], 3)

    def best_at_99(self, *, surely: bool = False) -> Best | None:
        """The fastest setting, per token, that keeps KEPT of its own full decoding's quality; `surely`: by its interval."""
        found = self._fastest(lambda variant, label: (self.kept(variant, label) or (0.0, 0.0))[1 if surely else 0])
        return None if found is None else Best(found[0], self.speedup(*found[1], "token"), ", ".join(found[1]))

    def best_of_halves(self) -> list[Record]:
        """The same, chosen by half of the texts, with what it keeps of the other half."""
        chosen = []
        for half in (0, 1):
            found = self._fastest(lambda variant, label, half=half: self._kept_of(variant, label)[half])
            if found is not None:
                faster, (variant, label) = found
                kept = 1.0 if label.startswith("speculative") else float(self._kept_of(variant, label)[1 - half])
                chosen.append({"setting": f"{variant}, {label}", "speedup": faster, "kept_of_the_rest": round(kept, 4)})
        return chosen

    def best_of_validation(self) -> Record | None:
        """The same, chosen by validation texts among those that decoded them, with what it keeps of the test texts."""

        def chosen_by(variant: str, label: str) -> float:
            return (self.kept(variant, label, validation=True) or (0.0,))[0]

        found = self._fastest(chosen_by, verifies=False)
        if found is None:
            return None
        faster, (variant, label) = found
        kept = self.kept(variant, label)
        return {
            "setting": f"{variant}, {label}",
            "speedup": faster,
            "kept_of_validation": round(chosen_by(variant, label), 4),
            "kept": None if kept is None else [round(each, 4) for each in kept],
            "validation_texts": len(self.validation[variant, label].record["texts"]),
        }

    def seeds_of(self, variant: str) -> list[str]:
        """All trainings of a variant, by name."""
        return sorted(name for name in self.variants if trained_as(name) == trained_as(variant))

    def kept_by_seed(self, variant: str, label: str) -> list[float]:
        """What a setting keeps of each training."""
        found = [self.kept(name, label) for name in self.seeds_of(variant)]
        return [round(each[0], 4) for each in found if each is not None]

    def _kept_of(self, variant: str, label: str) -> np.ndarray:
        own, full = self.texts.get((variant, label)), self.texts.get((variant, "full"))
        return np.zeros(2) if own is None or full is None else own.halves / np.maximum(full.halves, 1e-9)

    def _fastest(self, kept: Callable[[str, str], float], *, verifies: bool = True) -> tuple[float, tuple[str, str]] | None:
        """Of the first seed's models; `verifies`: what checks its drafts keeps everything, and is not asked."""
        found = []
        for variant, label in self.speeds:
            faster = self.against_fastest(variant, label)
            if label == "full" or trained_as(variant) != variant or faster is None:
                continue
            if (verifies and label.startswith("speculative")) or kept(variant, label) >= KEPT:
                found.append((faster, (variant, label)))
        return max(found, default=None)


def day_of(line: Record) -> str:
    """When it was timed. What was timed on another day, perhaps on another machine by another engine, is not compared."""
    return str(line["environment"]["date"])


def read_results(data: Path, files: list[Path]) -> tuple[dict[str, TaskResults], Record]:
    lines = standing(read_lines(files))
    results: dict[str, TaskResults] = {}
    for line in lines:
        task = results.setdefault(line["task"], TaskResults(line["task"]))
        key = line["variant"], line["label"]
        if line["kind"] == "texts":
            task.texts[key] = scored(data, line)
        elif line["kind"] == VALIDATION:
            task.validation[key] = scored(data, line, "validation")
        elif line["kind"] == "speed":
            task.speeds[key] = line
        else:
            task.calibration = line
    order = {name: at for at, name in enumerate(TASKS)}
    dates = " and ".join(sorted({line["environment"]["date"] for line in lines}))
    return {n: results[n] for n in sorted(results, key=lambda n: order[n])}, lines[0]["environment"] | {"date": dates}


def standing(lines: list[Record]) -> list[Record]:
    """The lines that count: those of each variant's last training, and of a setting that was measured again the last."""
    models = {(line["task"], line["variant"]): line.get("model") for line in lines}
    found = {}
    for line in lines:
        if line.get("model") == models[line["task"], line["variant"]]:
            found[line["kind"], line["task"], line["variant"], line["label"]] = line
    return list(found.values())


def scored(data: Path, line: Record, split: str = "test") -> Scored:
    metric, texts = TASKS[line["task"]].metric, line["texts"]
    path = data / line["task"] / f"{split}.jsonl"
    references = [json.loads(each)["references"] for each in path.read_text(encoding="utf-8").splitlines()[: len(texts)]]
    rows = statistics(metric, texts, references)
    drawn = np.random.default_rng(0).multinomial(len(texts), [1 / len(texts)] * len(texts), size=DRAWS)
    halves = scores(metric, np.stack([rows[half::2].sum(axis=0) for half in (0, 1)]))
    return Scored(line, float(scores(metric, rows.sum(axis=0)[None])[0]), scores(metric, drawn @ rows), halves)


# Tables, each for one of the thesis'.


def oracles(task: TaskResults) -> Table:
    rows = [["decoding", TASKS[task.name].metric, "mean exit layer", "tokens"]]
    for label in ("full", "oracle", "oracle-copy"):
        if (CALM, label) in task.texts:
            found = task.texts[CALM, label].record
            score = task.against((CALM, label), (CALM, "full"))
            rows.append([label, score, f"{found['mean_exit_layer']:.2f}", f"{found['tokens']:,}"])
    return rows


def thresholds(task: TaskResults) -> Table:
    rows = [["threshold", TASKS[task.name].metric, "kept", "left early", "mean exit layer", "tokens"]]
    for label in ["full", *(f"state-copy {t:g}" for t in reversed(TENTHS))]:
        if (CALM, label) in task.texts:
            found = task.texts[CALM, label].record
            rows.append([label, task.against((CALM, label), (CALM, "full")), share(task.kept(CALM, label)), *exits(found)])
    return rows


def optimal(task: TaskResults) -> str:
    """The smallest threshold from which on a part of the quality is kept (tab_free:obs4)."""
    found = []
    for drop in (0.01, 0.05, 0.1):
        least = "1"
        for t in reversed(TENTHS):
            kept = task.kept(CALM, f"state-copy {t:g}")
            if kept is None or kept[0] < 1 - drop:
                break
            least = f"{t:g}"
        found.append(f"{drop:.0%}: {least}")
    return "Smallest threshold that loses at most " + ", ".join(found) + "."


def exits(found: Record) -> list[str]:
    return [f"{found['exit_rate']:.1%}", f"{found['mean_exit_layer']:.2f}", f"{found['tokens']:,}"]


def share(kept: tuple[float, float, float] | None) -> str:
    if kept is None:
        return "-"
    return f"{100 * kept[0]:.1f} % ({100 * kept[1]:.1f} to {100 * kept[2]:.1f})"


def statics(task: TaskResults) -> Table:
    rows = [["layers", TASKS[task.name].metric, "kept", "tokens", "cut off"]]
    labels = sorted((label for v, label in task.texts if v == CALM and "static" in label), key=lambda x: int(x.split()[1]))
    for label in [*labels, "full"]:
        if (CALM, label) in task.texts:
            found = task.texts[CALM, label].record
            cells = [share(task.kept(CALM, label)), f"{found['tokens']:,}", str(found["unfinished"])]
            rows.append([label.removeprefix("static "), task.score(CALM, label), *cells])
    return rows


def trainings(task: TaskResults) -> Table:
    """What settings of models with many exits keep, of each training."""
    rows = [["variant", "decoding", "kept by each training", "mean", "of validation texts", "per token, each"]]
    for variant in (name for name in task.variants if trained_as(name) == name and name.startswith(CALM)):
        names = task.seeds_of(variant)
        for label in (label for own, label in task.speeds if own == variant):
            kept = task.kept_by_seed(variant, label)
            if len(kept) < 2:
                continue
            if label == "full":
                own = ", ".join(task.score(name, label) for name in names)
                rows.append([variant, label, f"{own} {TASKS[task.name].metric}", "-", "-", "-"])
                continue
            checked = [found[0] for name in names if (found := task.kept(name, label, validation=True)) is not None]
            faster = [found for name in names if (found := task.against_fastest(name, label)) is not None]
            speeds = ", ".join(f"{each:.2f}" for each in faster)
            rows.append([variant, label, percents(kept), percents([fmean(kept)]), percents(checked), speeds])
    return rows


def percents(parts: list[float]) -> str:
    return f"{', '.join(f'{100 * part:.1f}' for part in parts)} %" if parts else "-"


def distilled(task: TaskResults, names: Iterable[str], *, own_full: bool = False) -> Table:
    """Variants beside each other, at every threshold, with the difference from those without distillation, or from their
    own full decoding."""
    swept = sorted((*THRESHOLDS, *FINER))
    rows = [["variant", "full", "exit alone", *(f"FREE {t:g}" for t in swept), "left early at 0.5"]]
    for name in names:
        if (name, "full") not in task.texts:
            continue
        labels = ["full", f"static {task.exit_of(name)}", *(f"parallel {t:g}" for t in swept)]
        other = "none" if name != "none" and task.exit_of(name) == task.exit_of("none") else name
        others = [(name, "full") if own_full else (other, label) for label in labels]
        cells = [
            task.against((name, label), base) if base != (name, label) else task.score(name, label)
            for label, base in zip(labels, others, strict=True)
        ]
        half = task.texts.get((name, "parallel 0.5"))
        rows.append([name, *cells, "-" if half is None else f"{half.record['exit_rate']:.1%}"])
    return rows


def speeds(task: TaskResults) -> Table:
    measured = ["kept", "99 %", "left early", "timed on", "ms a token", "per token", "per text", "against the fastest full"]
    rows = [["variant", "decoding", TASKS[task.name].metric, *measured]]
    decoded = [key for key in task.texts if key not in task.speeds and key[1].split()[0] in DECODINGS and "," not in key[1]]
    for variant, label in [*task.speeds, *decoded]:
        found = task.speeds.get((variant, label))
        lossless = label.startswith("speculative") and (variant, label) not in task.texts  # and so was not decoded apart
        kept = (1.0, 1.0, 1.0) if lossless else task.kept(variant, label)
        whole = task.score(variant, "full" if lossless else label)
        faster = [*(task.speedup(variant, label, per) for per in ("token", "text")), task.against_fastest(variant, label)]
        cells = [
            whole,
            share(kept),
            "-" if kept is None else "yes" if kept[0] >= KEPT else "no",
            f"{(found or task.texts[variant, label].record)['exit_rate']:.1%}",
        ]
        times = [*((None, None) if found is None else (day_of(found), f"{found['ms_per_token']:.3f}")), *faster]
        shown = ["-" if each is None else each if isinstance(each, str) else f"{each:.2f}" for each in times]
        rows.append([variant, label, *cells, *shown])
    return rows


def untimed(task: TaskResults) -> list[str]:
    """When the speeds were taken, and of which variants there are none: `fastest` is among the others."""
    without = [variant for variant in task.variants if (variant, "full") not in task.speeds]
    if not without or not task.speeds:
        return []
    dates = " and ".join(sorted({found["environment"]["date"] for found in task.speeds.values()}))
    return ["", f"Speeds are of {dates}; not timed, and so not among the fastest below: {', '.join(without)}."]


def copying(task: TaskResults) -> Table:
    rows = [["threshold", "state copying", "parallel decoding (difference)"]]
    for t in sorted(THRESHOLDS, reverse=True):
        if (MAIN, f"state-copy {t:g}") in task.texts:
            one, other = (MAIN, f"parallel {t:g}"), (MAIN, f"state-copy {t:g}")
            rows.append([f"{t:g}", task.score(*other), task.against(one, other)])
    return rows


def calibrations(task: TaskResults) -> Table:
    rows = [["rule, part of 500 texts", "texts", "threshold", TASKS[task.name].metric, "left early"]]
    for name, found in (task.calibration or {"found": {}})["found"].items():
        label = f"parallel {found['threshold']:g}"
        there = task.texts.get((MAIN, label))
        left = "-" if there is None else f"{there.record['exit_rate']:.1%}"
        rows.append(
            [name, str(found["texts"]), f"{found['threshold']:.3f}", task.against((MAIN, label), (MAIN, "full")), left]
        )
    return rows


def refined(task: TaskResults) -> Table:
    rows = [
        [
            "threshold",
            "refine",
            f"{TASKS[task.name].metric} (against none)",
            "deep passes a token",
            "layers a token",
            "replaced",
        ]
    ]
    for t in (0.7, 0.3):
        for label in [f"parallel {t:g}", *(f"refine {r:g}, {t:g}" for r in REFINES)]:
            if (MAIN, label) in task.texts:
                found = task.texts[MAIN, label].record
                counts = [found[key] for key in ("deep_passes", "layers_run")]
                a_token = ["-" if many is None else f"{many / found['tokens']:.2f}" for many in counts]
                replaced = "-" if found["replaced"] is None else f"{found['replaced']:.1%}"
                refine = "none" if label.startswith("parallel") else label.split(",")[0].removeprefix("refine ")
                score = task.against((MAIN, label), (MAIN, f"parallel {t:g}"))
                rows.append([f"{t:g}", refine, score, *a_token, replaced])
    return rows


def sampled(task: TaskResults) -> Table:
    rows = [["decoding", *SAMPLINGS, "left early"]]
    for variant, mode in ((MAIN, "parallel"), (CALM, "state-copy")):
        for label in ["full", *(f"{mode} {t:g}" for t in SAMPLED)]:
            keys = [(variant, f"{label}, {name}") for name in SAMPLINGS]
            if keys[0] in task.texts:
                cells = [task.against(key, (variant, f"full, {key[1].split(', ', 1)[1]}")) for key in keys]
                early = [f"{task.texts[key].record['exit_rate']:.0%}" for key in keys if key in task.texts]
                rows.append([f"{variant}, {label}", *cells, " / ".join(early)])
    return rows


def small(task: TaskResults) -> Table:
    plain = [v for v in task.variants if not any(own == v and label != "full" for own, label in task.texts)]
    base = (task.reference, "full")
    rows = [[v, task.against((v, "full"), base) if v != base[0] else task.score(v, "full")] for v in plain]
    return [["variant", TASKS[task.name].metric], *rows]


def page(results: dict[str, TaskResults], where: Record) -> str:
    from fathomlm.lab.common import markdown

    lines = [
        "# Leaving early on two tasks",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. Made by `benchmarks/free_tasks_report.py`; the models",
        "are those of the studies `free-translation` and `free-summary` (recipes/studies), of one seed, or more where",
        "there is a NAME-seed1. Behind a score stands its difference from the setting it is compared with, and the 95 %",
        "interval of that difference over draws of the test texts. It says how much the texts decide, not how much",
        "another training run would. *Kept* is the part of the same model's full decoding's score. Full decoding is timed",
        "once a model, and models of equal depth do the same work: where theirs differ, that is noise. So the last column,",
        "which is the one that counts, has all speeds against the fastest of them on the same day; where a model's own was",
        f"{STALLED} times slower than that, it was disturbed, and nothing is compared with it. CALM's threshold T is",
        "0.9 T + 0.1 exp(-4 i / N) at token i of at most N, so that 0 does not let every token leave. `parallel 0.1 at 5`",
        "has layer 5 as the one exit of a model with many.",
    ]
    for name, task in results.items():
        many = len(next(iter(task.texts.values())).record["texts"]) if task.texts else 0
        lines += ["", f"## {name}: {many} texts"]
        free = [variant for variant in task.variants if task.exit_of(variant) is not None]
        depths = sorted((v for v in free if v == MAIN or v.startswith("depth")), key=lambda v: task.exit_of(v) or 0)
        one_depth = [variant for variant in free if not variant.startswith("depth")]
        parts = [
            ("Oracle exits and copied states, CALM's model (`tab_free:obs1`)", oracles(task)),
            ("CALM's threshold, which decays over a text (`tab_free:obs4`)", thresholds(task)),
            ("All tokens leave after the same layer, CALM's model (`fig_free:obs2_obs3`)", statics(task)),
            ("Models with many exits, trained several times; what is kept of each one's own full decoding", trainings(task)),
            ("Layerwise distillation, differences from none (`fig_free:distill_loss`)", distilled(task, one_depth)),
            ("Depth of the shallow model, differences from the same model's full decoding (`tab_free:depth`)",
             distilled(task, depths, own_full=True)),
            ("Parallel decoding against state copying, one model (`tab_free:copying`)", copying(task)),
            ("Size of the calibration set (`tab_free:calibration`)", calibrations(task)),
            ("Refining what the exit chose (`tab_free:rollback`)", refined(task)),
            ("Sampling, temperature 1 (`tab_free:sampling`)", sampled(task)),
            (f"Models without exits, differences from {task.reference}'s full decoding (`tab_free:small_sized`)",
             small(task)),
            ("Quality kept and speed, one text at a time; times against full decoding (`tab_free:main_exp`)", speeds(task)),
        ]  # fmt: skip
        for title, rows in parts:
            if len(rows) > 1:
                lines += ["", f"### {title}", "", *markdown(rows)]
                if rows[0][0] == "threshold" and rows[0][-1] == "tokens":
                    lines += ["", optimal(task)]
        lines += untimed(task)
        best, sure = task.best_at_99(), task.best_at_99(surely=True)
        if best is not None:
            lines += ["", f"Fastest that keeps 99 % of its full decoding's score: {best}."]
            if len(seeds := task.kept_by_seed(*best.setting.split(", ", 1))) > 1:
                lines += [f"Of the same setting each training keeps {percents(seeds)}."]
            lines += [f"Fastest whose whole interval is above 99 %: {sure or 'none'}."]
            for half in task.best_of_halves():
                rest = f"keeps {100 * half['kept_of_the_rest']:.1f} % of the rest's"
                lines += [f"Chosen by half of the texts: {half['setting']}, {half['speedup']:.2f} times, {rest}."]
            lines += by_validation(task)
    return "\n".join(lines) + "\n"


def by_validation(task: TaskResults) -> list[str]:
    chosen = task.best_of_validation()
    if chosen is None:
        return []
    many, decoded = chosen["validation_texts"], list(dict.fromkeys(variant for variant, _ in task.validation))
    kept = None if chosen["kept"] is None else (chosen["kept"][0], chosen["kept"][1], chosen["kept"][2])
    return [
        f"Chosen by {many:,} validation texts, of {', '.join(decoded)}: {chosen['setting']}, {chosen['speedup']:.2f} times, "
        f"keeps {100 * chosen['kept_of_validation']:.1f} % of theirs and {share(kept)} of the test texts' score."
    ]


def kept_record(results: dict[str, TaskResults], where: Record) -> Record:
    """What is kept of all lines: scores and counts, hardly any texts."""
    record: Record = {"environment": where}
    for name, task in results.items():
        best, sure = task.best_at_99(), task.best_at_99(surely=True)
        own: Record = {
            "speedup_at_99": None if best is None else best.speedup,
            "best_at_99": None if best is None else best.setting,
            "speedup_at_99_against_its_own_full": None if best is None else best.against_own,
            "with_the_interval_above_99": None if sure is None else asdict(sure),
            "chosen_by_half_of_the_texts": task.best_of_halves(),
            "chosen_by_validation": task.best_of_validation(),
            "settings": {},
            "speed": {},
        }
        if best is not None and len(seeds := task.kept_by_seed(*best.setting.split(", ", 1))) > 1:
            own["best_at_99_kept_by_each_training"] = seeds
        for (variant, label), found in task.texts.items():
            counts = {
                k: v for k, v in found.record.items() if k not in ("texts", "tokens_by_text", "environment", "kind", "task")
            }
            kept = task.kept(variant, label)
            scores = {"score": round(found.score, 2), "interval": found.interval, "many": len(found.record["texts"])}
            scores["kept"] = None if kept is None else [round(each, 4) for each in kept]
            if (checked := task.kept(variant, label, validation=True)) is not None:
                scores["kept_of_validation"] = [round(each, 4) for each in checked]
            own["settings"][f"{variant}, {label}"] = counts | scores | {"examples": found.record["texts"][:2]}
        for (variant, label), found in task.speeds.items():
            counts = {k: v for k, v in found.items() if k not in ("environment", "kind", "task")}
            faster = {f"speedup_per_{per}": task.speedup(variant, label, per) for per in ("token", "text")}
            faster |= {"speedup_against_fastest_full": task.against_fastest(variant, label), "day": day_of(found)}
            own["speed"][f"{variant}, {label}"] = counts | faster
        if task.calibration is not None:
            own["calibration"] = {k: v for k, v in task.calibration.items() if k not in ("environment", "kind", "task")}
        record[name] = own
    return record


def earlier(before: Record, results: dict[str, TaskResults]) -> tuple[Record, list[str]]:
    """What another record has: tasks that were not measured again, in their place, and what was measured before of those
    that were, under `earlier`; with a table of each."""
    from fathomlm.lab.common import markdown

    record: Record = {"earlier": dict(before.get("earlier", {}))}
    for name in (name for name in before if name in TASKS):
        part = {"environment": before[name].get("environment", before["environment"])} | before[name]
        if name not in results:
            record[name] = part
        elif "settings" not in part:  # a record of today's form would be this report, made again
            record["earlier"][name] = part
    lines = []
    for name, part in [*record["earlier"].items(), *((name, part) for name, part in record.items() if name != "earlier")]:
        where, found = part["environment"], {key: row for key, row in part.items() if "speedup" in (row or {})}
        rows = [["decoding", TASKS[name].metric, "ms a token", "per text", "left early"]]
        for label, row in found.items():
            times = [f"{row['ms_per_token']:.3f}", f"{row['speedup']:.2f}"]
            rows.append([label, f"{row['score']:.2f}", *times, f"{row['exit_rate']:.1%}"])
        if len(rows) > 1:
            many = next(iter(found.values())).get("text_count")
            title = f"{name}, before" if name in results else f"{name}, not measured again"
            about = f"{where['device']}, {where['date']}: {many} texts, a model trained with the settings of that day."
            lines += ["", f"## {title}", "", about, "", *markdown(rows)]
    return {name: part for name, part in record.items() if part}, lines


def picture(results: dict[str, TaskResults], where: Record, out: Path) -> None:
    """Left of each task: quality over the threshold of each variant; right: quality over the layers that all tokens run, of
    exits alone and of whole models, with intervals, and of models with many exits as lines, other seeds' thin. Ten colours;
    the variants behind the tenth are dashed and hollow."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(14, 5 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (name, task) in zip(figure.subplots(len(results), 2, squeeze=False), results.items(), strict=True):
        looks = {
            variant: {"color": f"C{at % 10}", "linestyle": "--" if at >= 10 else "-"}
            | ({"markerfacecolor": "white"} if at >= 10 else {})
            for at, variant in enumerate(name for name in task.variants if trained_as(name) == name)
        }
        for variant, look in looks.items():
            mode = "state-copy" if variant == CALM else "parallel"
            points = sorted(
                (float(k[1].split()[1]), s)
                for k, s in task.texts.items()
                if k[0] == variant and k[1].split()[0] == mode and "," not in k[1] and ALONE not in k[1]
            )
            row[0].plot([t for t, _ in points], [found.score for _, found in points], marker="o", **look)
        row[0].set_xlabel("threshold (1 never leaves)")
        for variant in task.variants:
            points = sorted(
                (int(k[1].split()[1]), s) for k, s in task.texts.items() if k[0] == variant and k[1].startswith("static")
            )
            if len(points) < 2:
                continue
            x, look = [layer for layer, _ in points], looks[trained_as(variant)]
            if variant == CALM:
                low, high = zip(*(found.interval for _, found in points), strict=True)
                row[1].fill_between(x, low, high, alpha=0.15, color=look["color"])
            width = 1.5 if variant in looks else 0.5
            row[1].plot(x, [found.score for _, found in points], marker=".", linewidth=width, **look)
        beside: dict[float, list[tuple[str, str, str]]] = {}
        for variant in looks:
            layer, depth = task.exit_of(variant), task.depth_of(variant)
            if depth is not None:
                beside.setdefault(depth, []).append((variant, "full", "s"))
            if layer is not None:
                beside.setdefault(float(layer), []).append((variant, f"static {layer}", "*"))
        for layers, shown in beside.items():
            for at, (variant, label, mark) in enumerate(shown):
                found = task.texts[variant, label]
                low, high = found.interval
                spread = [[max(0.0, found.score - low)], [max(0.0, high - found.score)]]
                moved = layers + 0.1 * (at - (len(shown) - 1) / 2)  # intervals beside each other
                size = 10 if mark == "*" else 6
                row[1].errorbar(moved, [found.score], spread, marker=mark, markersize=size, capsize=2, **looks[variant])
        row[1].set_xlabel("layers that every token runs")
        for axes in row:
            axes.set_ylabel(f"{name}: {TASKS[name].metric} (points)")
            axes.grid(alpha=0.3)
        marks = {"s": "full depth", "*": "its exit alone", ".": "all leave here; thin: other seeds"}
        keys = [Line2D([], [], marker="o", label=variant, **look) for variant, look in looks.items()]
        keys += [Line2D([], [], marker=mark, label=label, color="grey", linestyle="") for mark, label in marks.items()]
        row[1].legend(handles=keys, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(f"Leaving early: thresholds, and layers, with 95 % intervals over the texts ({where['device']})")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("lines", type=Path, nargs="+")
    parser.add_argument("--keep-lines", type=Path, metavar="FILE", help="write the lines that count, compressed (.jsonl.xz)")
    parser.add_argument("--before", type=Path, help="a record whose other tasks are kept")
    args = parser.parse_args()
    results, where = read_results(args.data, args.lines)
    before = {} if args.before is None else json.loads(args.before.read_text(encoding="utf-8"))
    others, tables = earlier(before, results)
    record, text = kept_record(results, where) | others, page(results, where) + "".join(f"{line}\n" for line in tables)
    args.out.with_suffix(".json").write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    picture(results, where, args.out.with_suffix(".png"))
    if args.keep_lines is not None:
        args.keep_lines.write_bytes(lzma.compress(packed(standing(read_lines(args.lines))), preset=9 | lzma.PRESET_EXTREME))
    print(text)


def packed(lines: list[Record]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


if __name__ == "__main__":
    main()
