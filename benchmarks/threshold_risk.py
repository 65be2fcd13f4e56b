"""Whether a calibrated threshold keeps its promise: the exit that ships with SmolLM2-135M, real texts, many splits.

    python benchmarks/threshold_risk.py --data DIR [--samples samples.jsonl] [--out benchmarks/results/threshold_risk.json]

DIR holds `corpus/val.jsonl.xz` (documents, of which the first tokens are continued) and `tasks/gsm8k_test.jsonl.gz` and
`tasks/squad_v1.1_dev.jsonl.gz` (messages, which are answered). Every text is generated once, and the confidence at the exit
and whether it agreed with the full model are kept of each of its tokens in --samples, where an interrupted run goes on.

A threshold is learnt from some of the texts, drawn at random, and the tokens that exit and are not the full model's choice
are counted in the rest, over many such splits. These texts are the full model's: at last some more are generated with tokens
that exit at the threshold, and counted too.

    python benchmarks/threshold_risk.py --simulate [--out benchmarks/results/threshold_risk.json]

needs no texts: how often the promise is broken where a few texts hold nearly all wrong tokens, by the number of texts. It is
written into the record that is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fathomlm
from fathomlm.decode.calibration import Calibration
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.decode.threshold_samples import Texts
from fathomlm.lab.common import environment
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.packaged import packaged_exits

NAME = "smollm2-135m"
PROMPT_TOKENS = 32
"""Of a document, as `fathomlm calibrate` takes."""
LONGEST_MESSAGE = 1000
"""Characters: longer passages cost time and say nothing more of the threshold."""

WAYS = {
    "risk": ("risk", "equal"),
    "thesis": ("thesis", "equal"),
    "thesis, measured priors": ("thesis", "measured"),
    "public": ("public", "equal"),
}
"""Rules, each with its priors."""

CLUSTERS = {"1 in 7": (0.15, 6.0), "1 in 20": (0.05, 12.0)}
"""Texts that err often: their part of all texts, and how often, as a multiple of 0.05 at confidence 0; the others 0.1."""


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    opened = lzma.open if path.suffix == ".xz" else gzip.open
    with opened(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def read_prompts(model: FathomForCausalLM, data: Path, many: int) -> list[tuple[str, list[int]]]:
    """Prompts of two kinds in turn, `many` of each."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    documents = [row["text"] for row in rows_of(data / "corpus/val.jsonl.xz")]
    beginnings = [tokenizer(text[:LONGEST_MESSAGE]).input_ids[:PROMPT_TOKENS] for text in documents]
    problems = [row["question"] for row in rows_of(data / "tasks/gsm8k_test.jsonl.gz")]
    passages: dict[str, str] = {}  # one question about each
    for row in rows_of(data / "tasks/squad_v1.1_dev.jsonl.gz"):
        if len(row["context"]) <= LONGEST_MESSAGE:
            passages.setdefault(row["context"], f"{row['context']}\n\n{row['question']}")
    said = [each for both in zip(problems, list(passages.values())[::3], strict=False) for each in both]
    chats = [chat_prompt(model, [{"role": "user", "content": message}]) for message in said[:many]]
    beginnings = [tokens for tokens in beginnings if len(tokens) == PROMPT_TOKENS][:many]
    if min(len(chats), len(beginnings)) < many:
        raise SystemExit(f"{data} has {len(beginnings)} documents and {len(chats)} messages, and {many} of each are needed")
    pairs = zip(beginnings, chats, strict=True)
    return [each for document, chat in pairs for each in (("document", document), ("chat", chat))]


def collect(
    model: FathomForCausalLM, prompts: Sequence[tuple[str, list[int]]], path: Path, batch: int, new: int, threshold: float
) -> list[dict[str, Any]]:
    """Confidences and agreements of every text, generated in batches; those that the file has already are not made again."""
    done = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    exiting = Exiting(mode="parallel", threshold=threshold)
    with path.open("a", encoding="utf-8") as file:
        for at in range(len(done), len(prompts), batch):
            part = prompts[at : at + batch]
            made = fathomlm.generate(model, [tokens for _, tokens in part], max_new_tokens=new, exiting=exiting)
            for (kind, _), text in zip(part, made, strict=True):
                assert text.confidences is not None
                assert text.agreements is not None
                sure = [round(value, 6) for value in text.confidences]
                done.append({"kind": kind, "confidences": sure, "agreements": [int(bool(a)) for a in text.agreements]})
                file.write(json.dumps(done[-1]) + "\n")
            file.flush()
            print(f"{len(done)} of {len(prompts)} texts", flush=True)
    arrays = [{"sure": np.array(each["confidences"]), "agreed": np.array(each["agreements"], bool)} for each in done]
    return [each | both for each, both in zip(done, arrays, strict=True)][: len(prompts)]


def learnt(texts: Sequence[dict[str, Any]], **options: Any) -> ThresholdEstimator:
    """From whole texts, as `calibrate` learns, but for the refit after each."""
    estimator = ThresholdEstimator(ThresholdOptions(**options))
    for text in texts:
        estimator.observe(text["confidences"], text["agreements"])
        estimator.texts.end()
    return estimator


def came_of(texts: Sequence[dict[str, Any]], threshold: float) -> tuple[float, float]:
    """The share of tokens that exit at a threshold, and of all tokens that exit and are wrong."""
    sure = np.concatenate([text["sure"] for text in texts])
    agreed = np.concatenate([text["agreed"] for text in texts])
    exits = sure > threshold if threshold > 0 else np.ones_like(agreed)
    return float(exits.mean()), float((exits & ~agreed).mean())


def split(texts: list[dict[str, Any]], many: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What each rule gives on the rest, having learnt from `many` texts, over random splits."""
    generator = random.Random(seed)
    found: dict[str, list[tuple[float, float, float]]] = {rule: [] for rule in WAYS}
    for _ in range(args.splits):
        order = generator.sample(texts, len(texts))
        estimator = learnt(order[:many], risk=args.risk, level=args.level)
        for rule, (name, priors) in WAYS.items():
            estimator.options = replace(estimator.options, priors=priors)
            threshold = estimator.by(name)
            found[rule].append((threshold, *came_of(order[many:], threshold)))
    return {rule: _figures(several, args.risk) for rule, several in found.items()}


def _figures(several: Sequence[tuple[float, float, float]], risk: float) -> dict[str, float]:
    thresholds, exiting, wrong = (np.array(values) for values in zip(*several, strict=True))
    return {
        "threshold_median": round(float(np.median(thresholds)), 4),
        "exiting_mean": round(float(exiting.mean()), 4),
        "wrong_mean": round(float(wrong.mean()), 5),
        "wrong_p95": round(float(np.quantile(wrong, 0.95)), 5),
        "wrong_max": round(float(wrong.max()), 5),
        "splits_above_target": round(float((wrong > risk).mean()), 4),
    }


def simulated(risk: float, level: float, trials: int, sizes: Sequence[int], tokens: int = 100) -> dict[str, Any]:
    """The part of calibrations whose threshold lets more than `risk` of the tokens be wrong in truth. Confidences are
    uniform, and a token is wrong the less often the higher its confidence."""
    generator = np.random.default_rng(0)

    def drawn(many: int, part: float, often: float) -> tuple[np.ndarray, np.ndarray]:
        rates = 0.05 * np.where(generator.random((many, 1)) < part, often, 0.1)
        sure = generator.random((many, tokens))
        return sure, generator.random((many, tokens)) < rates * np.sqrt(1 - sure)

    found: dict[str, dict[str, float]] = {}
    for name, (part, often) in CLUSTERS.items():
        mean = 0.05 * (part * often + (1 - part) * 0.1)
        found[name] = {}
        for size in sizes:
            above = 0
            for _ in range(trials):
                texts = Texts()
                for sure, wrong in zip(*drawn(size, part, often), strict=True):
                    for confidence, is_wrong in zip(sure.tolist(), wrong.tolist(), strict=True):
                        texts.add(confidence, not is_wrong)
                    texts.end()
                above += mean * (1 - texts.threshold(risk, level)) ** 1.5 / 1.5 > risk
            found[name][str(size)] = above / trials
            print(f"{name} texts err often, {size} texts: above the target in {above / trials:.1%}", flush=True)
    return {"trials": trials, "tokens_of_a_text": tokens, "above_target": found}


def table(record: dict[str, Any]) -> Table:
    shown = Table(title=f"held-out texts, target {record['risk']:.1%}, {record['splits']} splits of {record['texts']} texts")
    for column in ("texts", "learnt from", "rule", "threshold", "exit", "wrong", "95th percentile", "splits above"):
        shown.add_column(column)
    for kind, sizes in record["held_out"].items():
        for size, rules in sizes.items():
            for rule, each in rules.items():
                shares = (each["exiting_mean"], each["wrong_mean"], each["wrong_p95"], each["splits_above_target"])
                shown.add_row(kind, size, rule, f"{each['threshold_median']:.3f}", *(f"{share:.2%}" for share in shares))
    return shown


def keep(path: Path | None, found: dict[str, Any]) -> None:
    """In a record that may be there: the other way of measuring has its own part of it."""
    if path is None:
        return
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | found, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="required without --simulate")
    parser.add_argument("--simulate", action="store_true", help="only say how often few texts break the promise")
    parser.add_argument("--trials", type=int, default=1000, help="--simulate: of each number of texts")
    parser.add_argument("--samples", type=Path, default=Path("threshold_risk_samples.jsonl"))
    parser.add_argument("--texts", type=int, default=400, help="of each kind")
    parser.add_argument(
        "--more", type=int, default=100, help="of each kind, generated at the threshold that all others gave"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--learn-from", type=int, nargs="+", default=[32, 100, 200, 400], help="texts of a calibration")
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--risk", type=float, default=0.01)
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--calibration", type=Path, help="write what all texts together give, as a threshold.json")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.simulate:
        keep(args.out, {"simulated": simulated(args.risk, args.level, args.trials, (10, 15, 20, 30, 50, 100))})
        return
    if args.data is None:
        parser.error("--data is required")
    torch.set_num_threads(1)
    model = fathomlm.load(NAME, dtype="float32", exits=packaged_exits(NAME))
    prompts = read_prompts(model, args.data, args.texts + args.more)
    texts = collect(model, prompts[: 2 * args.texts], args.samples, args.batch, args.new_tokens, 1.0)
    kinds = {"both": texts} | {kind: [each for each in texts if each["kind"] == kind] for kind in ("document", "chat")}
    found: dict[str, dict[str, Any]] = {}
    for kind, several in kinds.items():
        sizes = [size for size in args.learn_from if size <= len(several) // 2]
        found[kind] = {str(size): split(several, size, args, seed) for seed, size in enumerate(sizes)}
    everything = learnt(texts, risk=args.risk, level=args.level, calibrating_sequences=len(texts))
    threshold = everything.by("risk")
    if args.calibration is not None:
        everything.sequences = len(texts) - 1
        everything.end_sequence()  # the one refit, with nothing new
        (index,) = model.plan.exits
        Calibration(exit_layer=index + 1, confidence="gap", estimator=everything).save(args.calibration)
    second = args.samples.with_name(f"{args.samples.stem}_at_{threshold:g}.jsonl")
    made = collect(model, prompts[2 * args.texts :], second, args.batch, args.new_tokens, threshold)
    exiting, wrong = came_of(made, threshold)
    record = {
        "benchmark": "threshold_risk",
        "environment": environment(),
        "model": NAME,
        "risk": args.risk,
        "level": args.level,
        "splits": args.splits,
        "texts": len(texts),
        "tokens": sum(len(each["agreed"]) for each in texts),
        "wrong_p95": max(rules["risk"]["wrong_p95"] for rules in found["both"].values()),
        "held_out": found,
        "generated_at_the_threshold": {
            "texts": len(made),
            "tokens": sum(len(each["agreed"]) for each in made),
            "threshold": threshold,
            "exiting": round(exiting, 4),
            "wrong": round(wrong, 5),
        },
    }
    Console().print(table(record))
    print(json.dumps(record))
    keep(args.out, record)


if __name__ == "__main__":
    main()
