"""Whether a calibrated threshold keeps its promise: the exit that ships with SmolLM2-135M, real texts, many splits.

    python benchmarks/threshold_risk.py --data DIR [--samples samples.jsonl] [--out benchmarks/results/threshold_risk.json]

DIR holds `corpus/val.jsonl.xz` (documents, of which the first tokens are continued) and `tasks/gsm8k_test.jsonl.gz` and
`tasks/squad_v1.1_dev.jsonl.gz` (messages, which are answered). Every text is generated once, and the confidence at the exit
and whether it agreed with the full model are kept of each of its tokens in --samples, where an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fathomlm
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import chat_prompt
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.packaged import packaged_exits

NAME = "smollm2-135m"
PROMPT_TOKENS = 32
"""Of a document, as `fathomlm calibrate` takes."""
LONGEST_MESSAGE = 1000
"""Characters: longer passages cost time and say nothing more of the threshold."""


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
    return done[: len(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=Path, default=Path("threshold_risk_samples.jsonl"))
    parser.add_argument("--texts", type=int, default=400, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = fathomlm.load(NAME, dtype="float32", exits=packaged_exits(NAME))
    prompts = read_prompts(model, args.data, args.texts)
    collect(model, prompts, args.samples, args.batch, args.new_tokens, 1.0)


if __name__ == "__main__":
    main()
