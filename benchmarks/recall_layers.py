"""What each layer of a model is worth for two things: the next token, and a word that has to be recalled from the context.

    python benchmarks/recall_layers.py --corpus CORPUS --out benchmarks/results/recall_layers_cpu.json

Passages of novels whose last word occurs in them before are what LAMBADA is made of; these are taken from a file of a corpus
(lines with a `source` and a `text`), not from LAMBADA. Without each layer in turn, and nothing trained: the loss of the last
word, how often it is right, and the loss of the other tokens, with the mean difference from the whole model and its standard
error over the passages. `--drop N` leaves out N layers greedily, each time the one that costs least of both losses as a
share of the whole model's, and prints every round. Choosing layers by the loss of all tokens alone does not see what only
recall needs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from compress_corpus import NOVELS
from torch import Tensor

import fathomlm
from fathomlm.checkpoints.drop_order import ends_without
from fathomlm.depth import Step
from fathomlm.errors import writing
from fathomlm.lab.common import environment
from fathomlm.model.decoder import Decoder

WORDS, MOST_WORDS = 65, 110
LETTERS = 4
FROM_EACH = 6
"""Passages that are tried in a document."""
LEAST_SENTENCES, FRONT, BACK = 12, 2, 6
"""Of a document, and how many at its beginning and at its end no passage begins with."""
EVERY = 4
"""Of the other tokens each fourth is predicted: the head is a fifth of the work."""
WHAT = (
    "a model without each layer in turn, nothing trained, on passages of novels whose last word occurs in them before "
    "(benchmarks/recall_layers.py): losses in nats, `more` than the whole model's"
)
FIRST = 5
"""Tokens of a passage that nobody could predict."""


@dataclass(frozen=True)
class Passage:
    tokens: list[int]
    asked: int
    """Tokens of the last word."""


@dataclass(frozen=True)
class Measured:
    """Of each passage."""

    recalled: list[float]
    """The loss of the last word, all of its tokens."""
    right: list[bool]
    others: list[float]
    """The mean loss of the other tokens."""


def passages_of(path: Path, many: int) -> list[tuple[str, str]]:
    """Some 65 to 110 words of a novel and the word behind them, which is in them too."""
    draw, found = random.Random(0), list[tuple[str, str]]()
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document["source"] in NOVELS:
                found += _of_document(" ".join(document["text"].split()), draw)
            if len(found) >= 3 * many:
                break
    draw.shuffle(found)
    return found[:many]


def _of_document(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    sentences = re.split(r'(?<=[.!?])["\u201d\u2019]? ', text)
    for _ in range(FROM_EACH if len(sentences) >= LEAST_SENTENCES else 0):
        end = begin = draw.randrange(FRONT, len(sentences) - BACK)
        words = 0
        while end < len(sentences) and words < WORDS:
            words, end = words + len(sentences[end].split()), end + 1
        said = " ".join(sentences[begin:end])
        match = re.match(rf'^(.*) ([A-Za-z]{{{LETTERS},}})[.!?]["\u201d\u2019]?$', said)
        if match and words <= MOST_WORDS and re.search(rf"\b{match[2]}\b", match[1]):
            yield match[1], match[2]


def measure(decoder: Decoder, passages: Sequence[Passage], steps: Sequence[Step], batch: int) -> list[Measured]:
    """Without each step in turn, and with all."""
    found = [Measured([], [], []) for _ in range(len(steps) + 1)]
    for at in range(0, len(passages), batch):
        rows = passages[at : at + batch]
        longest = max(len(row.tokens) for row in rows)
        rows_NT = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows])
        for one, end_NTM in zip(found, ends_without(decoder, rows_NT, steps), strict=True):
            for x_TM, row in zip(end_NTM, rows, strict=True):
                _score(decoder, x_TM, row, one)
    return found


def _score(decoder: Decoder, x_TM: Tensor, row: Passage, found: Measured) -> None:
    first = len(row.tokens) - 1 - row.asked
    places = [*range(FIRST, first, EVERY), *range(first, len(row.tokens) - 1)]
    logits_PV = decoder.logits(x_TM[places]).float()
    targets_P = torch.tensor([row.tokens[place + 1] for place in places])
    losses_P = F.cross_entropy(logits_PV, targets_P, reduction="none")
    found.recalled.append(losses_P[-row.asked :].sum().item())
    found.others.append(losses_P[: -row.asked].mean().item())
    found.right.append(bool((logits_PV[-row.asked :].argmax(-1) == targets_P[-row.asked :]).all()))


def told(found: Measured, whole: Measured) -> dict[str, Any]:
    record: dict[str, Any] = {"right": round(fmean(found.right), 4)}
    for name in ("recalled", "others"):
        own, full = getattr(found, name), getattr(whole, name)
        more = [a - b for a, b in zip(own, full, strict=True)]
        error = stdev(more) / len(more) ** 0.5
        record[name] = {"loss": round(fmean(own), 4), "more": round(fmean(more), 4), "standard_error": round(error, 4)}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="a file or folder of .jsonl.xz; of a folder train-07.jsonl.xz")
    add("--model", default="smollm2-135m")
    add("--passages", type=int, default=96)
    add("--batch", type=int, default=16)
    add("--drop", type=int, default=0, metavar="N", help="go on and leave out so many layers greedily")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    model = fathomlm.load(args.model, "float32")
    decoder, tokenizer = model.decoder, model.tokenizer
    path = args.corpus / "train-07.jsonl.xz" if args.corpus.is_dir() else args.corpus
    passages = []
    for context, word in passages_of(path, args.passages):
        front, asked = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, f" {word}"))
        passages.append(Passage(front + asked, len(asked)))
    passages.sort(key=lambda passage: len(passage.tokens))
    record: dict[str, Any] = {
        "what": WHAT,
        "model": args.model,
        "environment": environment("cpu"),
        "passages": len(passages),
        "rounds": [],
    }
    steps, whole = list(decoder.plan.steps), None
    for number in range(max(1, args.drop)):
        begun = time.perf_counter()
        found = measure(decoder, passages, steps, args.batch)
        whole = whole or found[-1]
        gone = [step.layer for step in decoder.plan.steps if step not in steps]
        without = {step.layer: told(one, whole) for step, one in zip(steps, found, strict=False)}
        record["rounds"].append({"gone": gone, "now": told(found[-1], whole), "without": without})
        with writing(args.out):
            args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"round {number}, {time.perf_counter() - begun:.0f} s: without {gone} {told(found[-1], whole)}", flush=True)
        full = {name: fmean(getattr(whole, name)) for name in ("recalled", "others")}
        cost = {layer: sum(each[name]["loss"] / full[name] for name in full) for layer, each in without.items()}
        for layer in sorted(cost, key=lambda layer: cost[layer]):
            each = without[layer]
            losses = ", ".join(f"{name} {each[name]['more']:+.3f} ({each[name]['standard_error']:.3f})" for name in full)
            print(f"  without {layer:2}: {losses}, right {each['right']:.1%}", flush=True)
        steps = [step for step in steps if step.layer != min(cost, key=lambda layer: cost[layer])]
    print(f"{args.out}: {len(record['rounds'])} round(s)", file=sys.stderr)


if __name__ == "__main__":
    main()
