"""FREE on two real tasks: quality, speed and threshold of full, CALM and FREE decoding (thesis 2.6, its main table, small).

    python benchmarks/free_tasks.py prepare --tasks TASKS --weights smollm2-135m --out data/free      # no GPU
    python benchmarks/free_tasks.py train   --data data/free --work runs/free
    python benchmarks/free_tasks.py decode  --data data/free --work runs/free --out free_tasks.json
    python benchmarks/free_tasks_report.py  free_tasks.json data/free benchmarks/results/free_tasks_h200   # no GPU

    translation   German to English (Multi30k, Flickr 2016 test set), a T5-style model trained from scratch
    summary       one sentence for a scientific abstract (SciTLDR), SmolLM2-135M fine-tuned

Two models a task: FREE's shallow-deep module with KD-dyna, its exit after about a quarter of the layers; and for CALM one
with exits after many layers, trained by their weighted losses. Texts are decoded one at a time on captured steps, greedily.
`TASKS` holds the .jsonl.gz files named below.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    files: dict[str, str]
    """train, validation and test, without .jsonl.gz"""
    recipe: Record
    exit_layer: int
    calm_layers: tuple[int, ...]
    new_tokens: int
    metric: str


TRANSLATION = Task(
    files={"train": "multi30k_de_en_train", "validation": "multi30k_de_en_val", "test": "multi30k_de_en_test_2016_flickr"},
    recipe={
        "model": {
            "architecture": {
                "family": "t5", "layers": 12, "hidden": 512, "intermediate": 1024, "heads": 8, "gated": True,
                "tied_embeddings": True, "vocab": 8192,
            },
            "encoder": {"layers": 6, "dropout": 0.2},
        },
        "data": {"source_length": 64, "target_length": 64},
        "budget": {"epochs": 10},
        "checkpoint": {"every": 227},
        "batch": {"sequences": 256, "micro": 256},
        "optimizer": {"lr": 3e-4, "weight_decay": 0.01},
        "schedule": {"warmup": 0.1},
    },
    exit_layer=3,
    calm_layers=tuple(range(3, 12)),
    new_tokens=64,
    metric="BLEU",
)  # fmt: skip
SUMMARY = Task(
    files={"train": "scitldr_train", "validation": "scitldr_dev", "test": "scitldr_test"},
    recipe={
        "model": {},
        "data": {"source_length": 448, "target_length": 64},
        "budget": {"epochs": 6},
        "batch": {"sequences": 32, "micro": 32},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.01},
        "schedule": {"warmup": 0.1},
    },
    exit_layer=8,
    calm_layers=tuple(range(3, 30, 3)),
    new_tokens=64,
    metric="ROUGE-L",
)  # fmt: skip
TASKS = {"translation": TRANSLATION, "summary": SUMMARY}
KINDS = ("free", "calm")
CALM_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""The smallest that keeps 99 % of the quality is its row. No exits in the first two layers, and a threshold that decays, as
in its paper."""
CALM_DECAY = 4.0
FREE_THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


# Preparing: nothing of this needs a GPU.


def rows(path: Path) -> Iterator[Record]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def pair(task: str, row: Record) -> Record:
    """Source, target and references of a sample. A decoder reads the source and goes on with the target."""
    if task == "translation":
        return {"source": row["de"], "target": row["en"], "references": [row["en"]]}
    summary = " ".join(row["summaries"][0].split())
    document = " ".join(row["document"].split())
    return {"source": f"{document}\n\nIn one sentence:", "target": f" {summary}", "references": row["summaries"]}


def prepare(args: argparse.Namespace) -> None:
    from fathomlm.train.data.prepare import PrepareOptions
    from fathomlm.train.data.prepare import prepare as prepare_corpus

    for name, task in TASKS.items():
        place = args.out / name
        place.mkdir(parents=True, exist_ok=True)
        for split, file in task.files.items():
            samples = (pair(name, row) for row in rows(args.tasks / f"{file}.jsonl.gz"))
            text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
            (place / f"{split}.jsonl").write_text(text, encoding="utf-8")
        tokenizer = make_tokenizer(place) if name == "translation" else args.weights
        options = PrepareOptions(
            sources=(str(place / "train.jsonl"),),
            validation_from=(str(place / "validation.jsonl"),),
            out=place / "corpus",
            tokenizer=str(tokenizer),
            pairs=("source", "target"),
            force=True,
        )
        splits = prepare_corpus(options).manifest.splits
        print(f"{name}: {', '.join(f'{split.documents:,} pairs, {split.tokens:,} tokens' for split in splits.values())}")


def make_tokenizer(place: Path) -> Path:
    """8,192 pieces of bytes, from the training pairs."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    samples = [json.loads(line) for line in (place / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    bpe = ByteLevelBPETokenizer()
    texts = (sample[side] for sample in samples for side in ("source", "target"))
    bpe.train_from_iterator(texts, vocab_size=8192, special_tokens=["<pad>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(place / "tokenizer")
    return place / "tokenizer"


# Training, by the recipes' own loop.


def recipe_of(args: argparse.Namespace, name: str, kind: str) -> Record:
    task = TASKS[name]
    losses: dict[str, Record] = {
        "free": {"exits": {"at": [task.exit_layer], "weights": "weighted"}, "layerwise": {"shallow": task.exit_layer}},
        "calm": {"exits": {"at": list(task.calm_layers), "weights": "weighted"}},
    }
    cuda = args.device != "cpu"
    recipe = json.loads(json.dumps(task.recipe))
    if name == "summary":
        recipe["model"]["source"] = args.weights
    if args.steps is not None:
        recipe["budget"] = {"steps": args.steps}
    recipe["data"] |= {"path": str(Path(args.data) / name / "corpus"), "pairs": ["source", "target"]}
    return recipe | {
        "name": f"{name}-{kind}",
        "out": str(Path(args.work) / f"{name}-{kind}"),
        "loss": losses[kind],
        "precision": "bf16" if cuda else "float32",
        "compile": cuda,
        "device": args.device,
        "evaluate": {"every": 0, "rows": 256},
        "checkpoint": {"every": 10**6, "keep": 1, "best": True} | recipe.get("checkpoint", {}),
        "log": {"every": 20, "tensorboard": False},
    }


def train(args: argparse.Namespace) -> None:
    import gc

    import torch

    from fathomlm.train.reading import build_recipe
    from fathomlm.train.run import train as train_recipe

    for name in args.only or TASKS:
        for kind in args.kinds or KINDS:
            summary = train_recipe(build_recipe(recipe_of(args, name, kind)))
            print(f"{name}, {kind}: validation {summary.validation}", flush=True)
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# Decoding.


class Decoding:
    """One trained model over the test texts of its task."""

    def __init__(self, args: argparse.Namespace, name: str, kind: str) -> None:
        import torch

        import fathomlm
        from fathomlm.decode.captured import CapturedDecoder
        from fathomlm.decode.prompts import encode_prompt, end_tokens, start_token
        from fathomlm.model.seq2seq import FathomForSeq2SeqLM
        from fathomlm.train.data.tokenizers import separator_id

        task = self.task = TASKS[name]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "bfloat16" if device == "cuda" else "float32"
        self.model = fathomlm.load(Path(args.work) / f"{name}-{kind}" / "best", dtype, device)
        tokenizer = self.model.tokenizer
        self.seq2seq = isinstance(self.model, FathomForSeq2SeqLM)
        self.ends = {*end_tokens(self.model), separator_id(tokenizer, None)}
        lines = (Path(args.data) / name / "test.jsonl").read_text(encoding="utf-8").splitlines()[: args.texts]
        most = task.recipe["data"]["source_length"]
        self.sources = []
        for line in lines:
            tokens = encode_prompt(self.model, json.loads(line)["source"])
            tokens = [token for token in tokens if token not in self.ends]
            self.sources.append([*tokens[: most - 1], separator_id(tokenizer, None)] if self.seq2seq else tokens[-most:])
        self.start = start_token(self.model) if isinstance(self.model, FathomForSeq2SeqLM) else None
        self.exits = (task.exit_layer,) if kind == "free" else task.calm_layers
        length = task.new_tokens + (2 if self.seq2seq else most + 1)
        source = {"source": most} if self.seq2seq else {}
        self.captured = CapturedDecoder(
            self.model.decoder, length=length, exit_layers=self.exits, compile=device == "cuda", **source
        )

    def run(self, mode: str, threshold: Any = None) -> Record:
        """Every text once, after a few to warm up."""
        from fathomlm.decode.exiting import Exiting
        from fathomlm.decode.prompts import read_sources

        layers = {} if mode == "full" else {"exit_layers": self.exits}
        decay = CALM_DECAY if mode == "state-copy" else None
        exiting = Exiting(mode=mode, threshold=threshold, decay=decay, **layers)  # type: ignore[arg-type]
        plain = Exiting(mode=mode, threshold=0.5 if threshold is not None else None, **layers)  # type: ignore[arg-type]
        found = []
        warming = self.sources[:3]
        for number, source in enumerate([*warming, *self.sources]):
            memory = read_sources(self.model, [source]) if self.seq2seq else None
            prompt = [self.start] if self.start is not None else source
            chosen = plain if number < len(warming) else exiting  # warming up teaches an estimator nothing
            found.append(self.captured.generate(prompt, chosen, self.task.new_tokens, self.ends, memory))
        texts = found[len(warming) :]
        tokens, total = sum(len(text.tokens) for text in texts), len(self.model.plan.steps)
        seconds = sum(text.decode_seconds for text in texts)
        left = sum(layer < total for text in texts for layer in text.exit_layers)
        tokenizer = self.model.tokenizer
        record: Record = {
            "mode": mode,
            "threshold": exiting.threshold_now(),
            "adaptive": exiting.estimator is not None,
            "seconds": round(seconds, 3),
            "ms_per_token": round(1e3 * seconds / tokens, 4),
            "tokens": tokens,
            "exit_rate": round(left / tokens, 4),
            "mean_exit_layer": round(sum(layer for text in texts for layer in text.exit_layers) / tokens, 3),
            "deep_passes": sum(text.deep_passes for text in texts),
            "texts": [tokenizer.decode(text.tokens, skip_special_tokens=True).strip() for text in texts],
        }
        drafted = sum(text.drafted for text in texts)
        return record | ({"accepted": round(sum(t.accepted for t in texts) / drafted, 4)} if drafted else {})


def decode(args: argparse.Namespace) -> None:
    from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
    from fathomlm.lab.environment import environment

    record: Record = json.loads(args.out.read_text()) if args.out.exists() else {"environment": environment()}
    for name in args.only or TASKS:
        runs: list[tuple[str, str, str, Any]] = [("full", "free", "full", None), ("static", "free", "static", None)]
        runs += [(f"FREE, {t:g}", "free", "parallel", t) for t in FREE_THRESHOLDS]
        learning = ThresholdOptions(rule="thesis", expected_sequences=args.texts)
        runs += [("FREE, adaptive", "free", "parallel", ThresholdEstimator(learning))]
        runs += [("speculative", "free", "speculative", 0.5), ("full, CALM's model", "calm", "full", None)]
        runs += [(f"CALM, {t:g}", "calm", "state-copy", t) for t in CALM_THRESHOLDS]
        decoding: dict[str, Decoding] = {}
        for label, kind, mode, threshold in runs:
            if kind not in decoding:
                decoding = {kind: Decoding(args, name, kind)}
            found = decoding[kind].run(mode, threshold)
            record.setdefault(name, {})[label] = found
            shown = {key: value for key, value in found.items() if key != "texts"}
            print(name, label, shown, found["texts"][:1], flush=True)
            args.out.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    preparing, training, decoding = (verbs.add_parser(verb) for verb in ("prepare", "train", "decode"))
    preparing.add_argument("--tasks", type=Path, required=True)
    preparing.add_argument("--out", type=Path, required=True)
    for each in (preparing, training):
        each.add_argument("--weights", default="smollm2-135m", help="what the summaries' model starts from")
    for each in (training, decoding):
        each.add_argument("--data", required=True)
        each.add_argument("--work", required=True)
        each.add_argument("--only", nargs="*", choices=list(TASKS))
    training.add_argument("--kinds", nargs="*", choices=list(KINDS))
    training.add_argument("--steps", type=int, help="fewer steps, to try it out")
    training.add_argument("--device", default="auto")
    decoding.add_argument("--out", type=Path, required=True)
    decoding.add_argument("--texts", type=int, default=400)
    for each, verb in ((preparing, prepare), (training, train), (decoding, decode)):
        each.set_defaults(verb=verb)
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
