"""FREE on two real tasks: quality, exits and speed of full, CALM and FREE decoding, and its ablations (thesis 2.4, 2.6).

    python benchmarks/free_tasks.py prepare --tasks TASKS --out data/free                                  # no GPU
    fathomlm study run free-translation --corpus data/free/translation/corpus --work runs/study --keep
    fathomlm study run free-summary     --corpus data/free/summary/corpus     --work runs/study --keep
    python benchmarks/free_tasks.py drafts summary     --data data/free --work runs/study
    python benchmarks/free_tasks.py decode translation --data data/free --work runs/study --out texts.jsonl
    python benchmarks/free_tasks.py speed  translation --data data/free --work runs/study --out speed.jsonl
    python benchmarks/free_tasks_report.py data/free benchmarks/results/free_tasks_h200 texts.jsonl speed.jsonl  # no GPU

    translation   German to English (Multi30k, Flickr 2016 test set), a T5-style model trained from scratch
    summary       one sentence for a scientific abstract (SciTLDR), SmolLM2-135M fine-tuned

The models are those of the studies `free-translation` and `free-summary`. `drafts` puts the draft layer that ships for
SmolLM2-135M behind the summariser without exits and trains it on the same pairs, the rest frozen: the variant `drafts`,
which decodes what its full model does, several tokens a pass. `decode` asks for quality: many texts at once on the engine,
by the reference where the engine cannot, or all of them with `--reference`. `speed` asks for time: one text at a time, what
its tokens behind the first took (`lab.bench.play`), on a device that does nothing else; processes that have captured
their steps wait for their `--turn`. Both add a line a setting to their file and go on where it ends; several processes
may share the variants (`--only`) and the settings of one (`--part`), each with its own file. With `--validation` settings
that are timed decode so many validation texts too, to be chosen by. A variant that was trained with several seeds is known
as NAME-seed1 and so on behind its first. `free_tasks_run.py` trains, decodes and times within a time limit. `TASKS` holds
the .jsonl.gz files named below.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import lzma
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathomlm.lab.bench.play import TimedText

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    files: dict[str, str]
    """train, validation and test, without .jsonl.gz"""
    study: str
    """Which trained its models (recipes/studies)."""
    source_length: int
    new_tokens: int
    metric: str
    timed_statics: tuple[int, ...] = ()
    """Layers of a model with many exits, all tokens leaving behind one of them, that are timed."""
    lone_exits: tuple[int, ...] = ()
    """Those of them that are also the one exit of its decoding."""


TASKS = {
    "translation": Task(
        files={
            "train": "multi30k_de_en_train",
            "validation": "multi30k_de_en_val",
            "test": "multi30k_de_en_test_2016_flickr",
        },
        study="free-translation",
        source_length=32,
        new_tokens=40,
        metric="BLEU",
        timed_statics=(5, 6, 4, 7, 3, 8),
        lone_exits=(4, 5),
    ),
    "summary": Task(
        files={"train": "scitldr_train", "validation": "scitldr_dev", "test": "scitldr_test"},
        study="free-summary",
        source_length=320,
        new_tokens=64,
        metric="ROUGE-L",
    ),
}
CALM = "calm"
"""The variant with many exits; the first layer has none, and its threshold decays, as in its paper."""
CALM_DECAY = 4.0
SEED = "-seed"
"""In a variant's name, before the seed it was trained with, unless that is the study's first."""
PLAIN, DRAFTS = "plain", "drafts"
"""The variant without exits, and it with a draft layer."""
ALONE = " at "
"""In a label, before the one exit of a model with many."""
MAIN = "dyna"
"""The variant that the ablations of decoding are made with."""
THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)
"""The thesis' (tab_free:copying), the most telling first."""
FINER = (0.2, 0.05)
"""Where the fastest that keeps the quality may be."""
LONE = (0.1, 0.05, 0.02, 0.2, 0.3)
"""Of one exit of a model with many; lower, as an exit in the middle is surer."""
TENTHS = tuple(n / 10 for n in range(10))
REFINES = (1.0, 0.1)
SAMPLINGS: dict[str, Record] = {"top-k 50": {"top_k": 50}, "nucleus 0.92": {"top_p": 0.92}}
SAMPLED = (0.5, 0.9)
WARM_UPS = 2
"""Texts that are decoded first and not timed."""
TURNS = 4
"""In which settings are timed one after the other, each with some of the texts."""
VALIDATION = "validation"
"""The kind of lines that a setting is chosen by and not judged by."""
CALIBRATED = (0.03, 0.1, 1.0)
"""Parts of the validation texts that the threshold is estimated from (tab_free:calibration)."""


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
        if name not in (args.only or TASKS):
            continue
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


def drafts(args: argparse.Namespace) -> None:
    """A draft layer behind the plain model, which goes on from one that was trained over the model's source."""
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.resolve import load
    from fathomlm.packaged import packaged_drafts
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.run import train

    task = TASKS[args.task]
    args.only = [PLAIN]
    found = places(args)
    if PLAIN not in found:
        raise SystemExit(f"{args.work} holds no trained '{PLAIN}': fathomlm study run {task.study} --only {PLAIN} --keep")
    place = found[PLAIN].parent
    out = place.with_name(place.name.replace(PLAIN, DRAFTS, 1))
    pack = args.pack or packaged_drafts("smollm2-135m")
    start = out.with_name(f"{out.name}-start")
    save(load(found[PLAIN], "float32", exits=pack, any_base=True), start, force=True)
    words = {
        "model.source": start, "out": out, "data.path": Path(args.data) / args.task / "corpus", "data.sources": "[]",
        "data.pairs": "[source, target]", "data.source_length": task.source_length, "data.target_length": task.new_tokens,
        "budget": f"{{steps: {args.steps}}}", "optimizer.lr": args.lr, "log.tensorboard": "false", "evaluate.every": 0,
    }  # fmt: skip
    fields = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    summary = train(read_recipe("draft-smollm2-135m", [*fields, *(f"--{field}" for field in args.fields)]))
    print(f"{out}: {summary.step} steps, drafts {summary.exits}", flush=True)


# Decoding.


@dataclass(frozen=True)
class Setting:
    """One way to decode with one model; `label` is what the report knows it by."""

    label: str
    mode: str
    threshold: float | None = None
    exits: tuple[int, ...] | None = None
    refine: float | None = None
    sampling: str | None = None

    @property
    def exiting(self) -> Any:
        from fathomlm.decode.exiting import Exiting

        if self.mode == "full":
            return None
        decay = CALM_DECAY if self.mode == "state-copy" and len(self.exits or ()) > 1 else None
        chosen = {"threshold": self.threshold, "exit_layers": self.exits, "refine": self.refine, "decay": decay}
        return Exiting(mode=self.mode, **chosen)  # type: ignore[arg-type]


def lone(task: Task, exits: tuple[int, ...]) -> list[Setting]:
    """A model with many exits, of which decoding has one."""
    chosen = [layer for layer in task.lone_exits if layer in exits]
    modes = ("parallel", "state-copy")
    return [Setting(f"{mode} {t:g}{ALONE}{layer}", mode, t, (layer,)) for layer in chosen for mode in modes for t in LONE]


def settings_of(task: Task, variant: str, exits: tuple[int, ...], estimated: tuple[float, ...] = ()) -> list[Setting]:
    """What is decoded with a variant, the most telling first."""
    found = [Setting("full", "full")]
    if variant == DRAFTS:
        found += [Setting("speculative", "speculative")]
    elif len(exits) > 1:
        found += [Setting(f"static {layer}", "static", None, (layer,)) for layer in exits]
        found += lone(task, exits)
        if variant == CALM:
            found += [Setting(f"state-copy {t:g}", "state-copy", t, exits) for t in reversed(TENTHS)]
            found += [Setting(mode, mode, None, exits) for mode in ("oracle-copy", "oracle")]
    elif exits:
        found += [Setting(f"static {exits[0]}", "static", None, exits)]
        found += [Setting(f"parallel {t:g}", "parallel", t, exits) for t in (*THRESHOLDS, *FINER)]
    if variant == MAIN:
        found += [Setting(f"refine {r:g}, {t:g}", "parallel", t, exits, refine=r) for t in (0.7, 0.3) for r in REFINES]
        found += [Setting(f"parallel {t:g}", "parallel", t, exits) for t in estimated]
        found += [Setting(f"state-copy {t:g}", "state-copy", t, exits) for t in THRESHOLDS]
    if variant in (CALM, MAIN):
        mode = "state-copy" if variant == CALM else "parallel"
        for name in SAMPLINGS:
            found += [Setting(f"full, {name}", "full", sampling=name)]
            found += [Setting(f"{mode} {t:g}, {name}", mode, t, exits, sampling=name) for t in SAMPLED]
    return list({setting.label: setting for setting in found}.values())


class Trained:
    """One trained model, and the sources of its task as it reads them."""

    def __init__(self, args: argparse.Namespace, variant: str, place: Path) -> None:
        import torch

        import fathomlm
        from fathomlm.decode.prompts import end_tokens
        from fathomlm.model.seq2seq import FathomForSeq2SeqLM
        from fathomlm.train.data.tokenizers import separator_id

        self.name, self.task = args.task, TASKS[args.task]
        self.variant, self.mark = variant, mark_of(place)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = fathomlm.load(place, "bfloat16" if self.device == "cuda" else "float32", self.device)
        self.exits = tuple(index + 1 for index in self.model.plan.exits)
        self.seq2seq = isinstance(self.model, FathomForSeq2SeqLM)
        self._separator = separator_id(self.model.tokenizer, None)
        self.ends = {*end_tokens(self.model), self._separator}
        self.model.config.eos_token_id = sorted(self.ends)
        self._folder = Path(args.data) / args.task
        self._sessions: dict[Any, Any] = {}

    def sources(self, split: str, most: int) -> list[list[int]]:
        """As in training: a decoder reads the end of a long source, an encoder its beginning and a separator."""
        from fathomlm.decode.prompts import encode_prompt

        lines = (self._folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:most]
        found, length = [], self.task.source_length
        for line in lines:
            tokens = [t for t in encode_prompt(self.model, json.loads(line)["source"]) if t not in self.ends]
            found.append([*tokens[: length - 1], self._separator] if self.seq2seq else tokens[-length:])
        return found

    def decode(self, sources: list[list[int]], setting: Setting, batch: int, reference: bool = True) -> list[Any]:
        """A text for each source, the sources of a batch in one pass."""
        from fathomlm.decode.sampling import Sampling

        drawn = {"temperature": 1.0} | SAMPLINGS[setting.sampling] if setting.sampling else {}
        sampling = Sampling(max_new_tokens=self.task.new_tokens, **drawn)
        decode = self._decoder(setting, batch, reference)
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))  # rows of a batch are padded to its longest
        found = {}
        for at in range(0, len(order), batch):
            rows = order[at : at + batch]
            found |= dict(zip(rows, decode([sources[i] for i in rows], sampling), strict=True))
        return [found[i] for i in range(len(sources))]

    def _decoder(self, setting: Setting, batch: int, reference: bool) -> Callable[..., list[Any]]:
        """Settings that differ in their threshold alone share an engine; the one before makes room for it."""
        from fathomlm.decode.exiting import SERVED_MODES
        from fathomlm.decode.full import generate
        from fathomlm.engine.session import EngineSession

        if reference or setting.refine is not None or setting.mode not in ("full", *SERVED_MODES):
            return partial(generate, self.model, exiting=setting.exiting)
        key = dataclasses.replace(setting, label="", threshold=None, sampling=None)
        if key not in self._sessions:
            self._sessions = {key: EngineSession(self.model, None, setting.exiting, sequences=batch)}
        return partial(self._sessions[key].generate_all, threshold=setting.threshold)

    def calibrated(self, args: argparse.Namespace) -> Record:
        """What the two rules make of more and more validation texts."""
        from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions

        sources = self.sources("validation", args.texts)
        texts = self.decode(sources, Setting("never", "parallel", 1.0, self.exits), args.batch)
        found: Record = {}
        for rule in ("thesis", "risk"):
            for part in CALIBRATED:
                many = max(1, round(part * len(texts)))
                estimator = ThresholdEstimator(ThresholdOptions(rule=rule, calibrating_sequences=many))
                for text in texts[:many]:
                    estimator.observe(text.confidences, text.agreements)
                    estimator.end_sequence()
                found[f"{rule} {part:g}"] = {"texts": many, "threshold": round(estimator.threshold, 3)}
        tokens = [(c, a) for text in texts for c, a in zip(text.confidences, text.agreements, strict=True)]
        return {"found": found, "tokens": len(tokens), "agreed": round(sum(a for _, a in tokens) / len(tokens), 4)}


def mark_of(place: Path) -> str:
    """What a trained model is known by: another training of the same variant has other weights."""
    digest = hashlib.sha256()
    for path in sorted(place.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def named(variant: str, seed: int, first: int = 0) -> str:
    """What a variant trained with one of several seeds is known by."""
    return variant if seed == first else f"{variant}{SEED}{seed}"


def trained_as(variant: str) -> str:
    """The study's variant, whatever the seed."""
    return variant.split(SEED)[0]


def places(args: argparse.Namespace) -> dict[str, Path]:
    """The models that `fathomlm study run --keep` has left, by variant in the study's order; of those the named ones."""
    from fathomlm.lab.study.spec import read_study

    study = read_study(args.study or TASKS[args.task].study)
    names = [*(each.name for each in study.variants), DRAFTS]
    found = {
        named(name, seed, study.seeds[0]): Path(args.work, study.name, f"{name}-{study.budgets[0].name}-seed{seed}")
        for seed in study.seeds
        for name in names
    }
    wanted = args.only or list(found)
    return {name: place / "last" for name, place in found.items() if name in wanted and (place / "last").exists()}


class Lines:
    """A file that gets a line for each finished setting, and what it has already."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        records = read_lines([path]) if path.exists() else []
        self._known = {self._key(record): record.get("many", 0) for record in records}

    def has(self, kind: str, trained: Trained, label: str, many: int = 0) -> bool:
        """Whether a setting has its line, of so many timed texts, by this model: one that was trained again has none."""
        return self._known.get((kind, trained.name, trained.variant, trained.mark, label), -1) >= many

    def add(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._known[self._key(record)] = record.get("many", 0)
        shown = {key: value for key, value in record.items() if key not in ("texts", "environment", "tokens_by_text")}
        print(shown, flush=True)

    def _key(self, record: Record) -> tuple[str | None, ...]:
        return record["kind"], record["task"], record["variant"], record.get("model"), record["label"]


def read_lines(paths: list[Path]) -> list[Record]:
    """The records of such files, compressed (.xz) or not; a last line that was cut off is left out."""
    texts = [(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode() for path in paths]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def decode(args: argparse.Namespace) -> None:
    import time

    lines, ends = Lines(args.out), float("inf") if args.seconds is None else time.perf_counter() + args.seconds
    for variant, place in places(args).items():
        decode_variant(args, Trained(args, variant, place), lines, lambda: time.perf_counter() > ends)


def decode_variant(args: argparse.Namespace, trained: Trained, lines: Lines, over: Callable[[], bool]) -> None:
    """The settings of this process, and where a threshold is estimated, those that follow from it."""
    import time

    from fathomlm.lab.common import environment

    head = {"task": args.task, "variant": trained.variant, "model": trained.mark, "environment": environment()}
    sources = {"texts": trained.sources("test", args.texts)}
    if args.validation:
        sources[VALIDATION] = trained.sources("validation", args.validation)
    timed = {setting.label for setting in speed_settings(trained.task, trained.variant, trained.exits)}

    def decode_all(settings: list[Setting]) -> None:
        for setting, kind in ((setting, kind) for setting in settings for kind in sources):
            unasked = kind == VALIDATION and setting.label not in timed
            if unasked or over() or lines.has(kind, trained, setting.label):
                continue
            begin = time.perf_counter()
            texts = trained.decode(sources[kind], setting, args.batch, args.reference)
            counts = counted(trained, texts) | {"seconds": round(time.perf_counter() - begin, 2)}
            words = [text.text.strip() for text in texts]
            lines.add({"kind": kind, "label": setting.label, **head, **counts, "texts": words})

    part, parts = args.part
    fixed = settings_of(trained.task, trained.variant, trained.exits)
    decode_all(fixed[part::parts])
    if trained.variant == MAIN and part == 0 and not over():
        found = trained.calibrated(args)
        if not lines.has("calibration", trained, "calibration"):
            lines.add({"kind": "calibration", "label": "calibration", **head, **found})
        estimated = tuple(each["threshold"] for each in found["found"].values())
        found_now = settings_of(trained.task, trained.variant, trained.exits, estimated)
        decode_all([each for each in found_now if each not in fixed])


def counted(trained: Trained, texts: list[Any]) -> Record:
    """How deep the tokens of some texts went, and what that took: passes through the layers behind the exit, layers run."""
    total = len(trained.model.plan.steps)
    tokens = sum(len(text.tokens) for text in texts)
    layers = [layer for text in texts for layer in text.exit_layers or [total] * len(text.tokens)]
    exits = [text.exits for text in texts if text.exits is not None]
    drafted = sum(each.drafted for each in exits)
    return {
        "tokens": tokens,
        "tokens_by_text": [len(text.tokens) for text in texts],
        "exit_rate": round(sum(layer < total for layer in layers) / tokens, 4),
        "mean_exit_layer": round(sum(layers) / tokens, 3),
        "deep_passes": _sum_known([each.deep_passes for each in exits]) if exits else tokens,
        "layers_run": sum(each.layers_run for each in exits) if exits else total * tokens,
        "replaced": round(1 - sum(each.accepted for each in exits) / drafted, 4) if drafted else None,
        "unfinished": sum(text.finish == "length" for text in texts),
    }


def _sum_known(numbers: list[int | None]) -> int | None:
    """None where the engine does not count them: its passes are those of all texts."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


# Speed.


def speed_settings(task: Task, variant: str, exits: tuple[int, ...]) -> list[Setting]:
    """What is timed: each model's full decoding, so that all are beside one, and its exits."""
    found = [Setting("full", "full")]
    if variant == DRAFTS:
        return [*found, Setting("speculative", "speculative")]
    if len(exits) > 1:
        found += [Setting(f"static {layer}", "static", None, (layer,)) for layer in task.timed_statics if layer in exits]
        found += lone(task, exits)
        copied = (0.9, 0.7, 0.5, 0.3, 0.2) if variant == CALM else ()
        return found + [Setting(f"state-copy {t:g}", "state-copy", t, exits) for t in copied]
    if exits:
        found += [Setting(f"static {exits[0]}", "static", None, exits)]
        found += [Setting(f"parallel {t:g}", "parallel", t, exits) for t in (*sorted(THRESHOLDS), *FINER)]
    if variant == MAIN:
        found += [Setting("speculative 0.3", "speculative", 0.3, exits)]
        found += [Setting(f"state-copy {t:g}", "state-copy", t, exits) for t in (0.5, 0.9)]
    return found


def wait_for(turn: Path | None) -> None:
    """Until nobody else holds the file's lock."""
    import fcntl

    if turn is not None:
        with turn.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def speed(args: argparse.Namespace) -> None:
    lines = Lines(args.out)
    for variant, place in places(args).items():
        speed_variant(args, Trained(args, variant, place), lines)


def speed_variant(args: argparse.Namespace, trained: Trained, lines: Lines) -> None:
    """All engines are built and have captured their steps first; then the settings are timed, turn about. Each turn ends
    with a line for every setting, of all texts so far: the last line stands."""
    from fathomlm.lab.bench.play import OneSequence

    task, model, variant = trained.task, trained.model, trained.variant
    sources = trained.sources("test", args.texts)
    room: Record = {"length": 1 + task.new_tokens + (0 if trained.seq2seq else task.source_length), "compile": args.compile}
    room |= {"source": task.source_length} if trained.seq2seq else {}
    engines: dict[tuple[str, tuple[int, ...] | None], OneSequence] = {}

    def text(setting: Setting, source: list[int], new: int = task.new_tokens) -> TimedText:
        key = setting.mode, setting.exits  # thresholds share an engine
        if key not in engines:
            engines[key] = OneSequence(model, setting.exiting, **room)
        return engines[key].text(source, new, threshold=setting.threshold)

    timed = speed_settings(task, variant, trained.exits)
    left = [each for each in timed if not lines.has("speed", trained, each.label, many=len(sources))]
    begun = time.perf_counter()
    for setting in left:
        for source in sources[:WARM_UPS]:
            text(setting, source)
        print(f"{variant}, {setting.label}: ready after {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    wait_for(args.turn)
    found: dict[str, list[tuple[TimedText, TimedText]]] = {setting.label: [] for setting in left}
    for turn in range(min(TURNS, len(sources))):
        for setting in left:
            text(setting, sources[turn])
            found[setting.label] += [(text(setting, source), text(setting, source, 1)) for source in sources[turn::TURNS]]
        for label, pairs in found.items():
            lines.add(timed_line(trained, label, args.compile, pairs))


def timed_line(trained: Trained, label: str, compiled: bool, found: list[tuple[TimedText, TimedText]]) -> Record:
    """What some texts took, each timed whole and with one token."""
    from fathomlm.lab.common import environment

    many = len(found)
    tokens = sum(len(whole.result.tokens) for whole, _ in found)
    seconds = sum(whole.decode_seconds(single) for whole, single in found)
    depths = [depth for whole, _ in found for depth in whole.result.depths or ()]
    return {
        "kind": "speed",
        "task": trained.name,
        "variant": trained.variant,
        "label": label,
        "model": trained.mark,
        "compiled": compiled,
        "many": many,
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "whole_seconds": round(sum(whole.seconds for whole, _ in found), 4),
        "ms_per_token": round(1e3 * seconds / max(1, tokens - many), 4),
        "ms_per_text": round(1e3 * seconds / many, 3),
        "exit_rate": round(sum(depth < len(trained.model.plan.steps) for depth in depths) / tokens, 4),
        "environment": environment(),
    }


def part_of(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError
    return part, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    preparing, drafting, decoding, timing = (verbs.add_parser(verb) for verb in ("prepare", "drafts", "decode", "speed"))
    preparing.add_argument("--tasks", type=Path, required=True)
    preparing.add_argument("--out", type=Path, required=True)
    preparing.add_argument("--only", nargs="*", choices=list(TASKS), help="in place of all tasks")
    preparing.add_argument("--weights", default="smollm2-135m", help="whose tokenizer the summaries have")
    drafting.add_argument("task", choices=["summary"])
    drafting.add_argument("--data", required=True)
    drafting.add_argument("--work", required=True, help="where the study left its models")
    drafting.add_argument("--study", metavar="FILE", help="YAML in place of the shipped study")
    drafting.add_argument("--pack", type=Path, help="a draft layer to go on from, in place of the one that ships")
    drafting.add_argument("--steps", type=int, default=370)
    drafting.add_argument("--lr", type=float, default=5e-4)
    drafting.add_argument("--fields", nargs="*", default=[], metavar="NAME=VALUE", help="of the recipe")
    for each, texts in ((decoding, 500), (timing, 100)):
        each.add_argument("task", choices=list(TASKS))
        each.add_argument("--data", required=True)
        each.add_argument("--work", required=True, help="where the studies left their models")
        each.add_argument("--study", metavar="FILE", help="YAML in place of the shipped study")
        each.add_argument("--only", nargs="*", metavar="VARIANT", help="in place of all that are trained")
        each.add_argument("--texts", type=int, default=texts)
        each.add_argument("--out", type=Path, required=True)
    decoding.add_argument("--validation", type=int, default=0, help="validation texts, for settings that are timed")
    decoding.add_argument("--batch", type=int, default=250)
    decoding.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="I/N", help="every N-th setting from the I-th on, counted from 0"
    )
    decoding.add_argument("--seconds", type=float, help="begin no setting after so many")
    decoding.add_argument("--reference", action="store_true", help="decode all without the engine")
    timing.add_argument("--turn", type=Path, metavar="FILE", help="capture all steps, then wait until FILE is not locked")
    timing.add_argument("--compile", action="store_true", help="compile the work between layers: slower to start, faster")
    for each, verb in ((preparing, prepare), (drafting, drafts), (decoding, decode), (timing, speed)):
        each.set_defaults(verb=verb)
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
