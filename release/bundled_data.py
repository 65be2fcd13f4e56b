"""The bundled model's text: which sources it may learn from, its tokenizer, and its tokens in pieces that travel.

The shipped weights see only CC0, CC BY and public-domain text, so sources under other terms are left out by name. The
tokenizer is learnt from the start of every training file; documents are shuffled, so that is a sample of the whole mix.
"""

from __future__ import annotations

import json
import lzma
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

LEFT_OUT = ("mdn", "d2l-en", "novels-100en")
"""Share-alike texts, and a compilation that states no licence."""
VOCAB = 12288
SAMPLE = 64_000_000
"""Characters that the tokenizer is learnt from."""
PIECE = 60_000_000
"""Bytes that a piece of the packed tokens may have."""
PART = 15_000_000
"""Bytes of one part of a run that travels."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]
"""LZMA set for two-byte units: lower by a few per cent than its settings for text."""


def documents(file: Path, left_out: tuple[str, ...] = LEFT_OUT) -> Iterator[dict[str, str]]:
    """The records of a .jsonl.xz file whose `source` is not left out."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            record: dict[str, str] = json.loads(line)
            if record["source"] not in left_out:
                yield record


def filter_text(corpus: Path, out: Path) -> dict[str, dict[str, int]]:
    """What may be learnt from, as JSON lines in `out`; returns documents and characters by source. Files are made once."""
    out.mkdir(parents=True, exist_ok=True)
    tally = out / "sources.json"
    if tally.exists():
        found: dict[str, dict[str, int]] = json.loads(tally.read_text())
        return found
    texts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    files = [*sorted(corpus.glob("train-*.jsonl.xz")), corpus / "val.jsonl.xz"]
    if len(files) == 1:
        raise SystemExit(f"{corpus} has no train-*.jsonl.xz")
    for file in files:
        with (out / file.name.removesuffix(".xz")).open("w", encoding="utf-8") as kept:
            for record in documents(file):
                kept.write(json.dumps({"text": record["text"]}, ensure_ascii=False) + "\n")
                if file.name.startswith("train"):
                    texts[record["source"]] += 1
                    characters[record["source"]] += len(record["text"])
    counts = {name: {"documents": texts[name], "characters": n} for name, n in characters.most_common()}
    tally.write_text(json.dumps(counts, indent=1) + "\n")
    return counts


def learn_tokenizer(files: list[Path], vocab: int = VOCAB, characters: int = SAMPLE) -> Any:
    """A byte-level BPE with one special token. Digits stand alone, so that numbers are spelled one way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from fathomlm.train.data.tokenizers import END

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(files, characters), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def _sample(files: list[Path], characters: int) -> Iterator[str]:
    for file in files:
        left = characters // len(files)
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                yield text
                left -= len(text)
                if left <= 0:
                    break


def prepare_tokens(text: Path, tokenizer: Path, out: Path, workers: int = 1) -> Any:
    """The corpus that training reads, made as `fathomlm data prepare` makes it. Shards of 24M tokens make even pieces."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    return prepare(
        PrepareOptions(
            sources=(str(text / "train-*.jsonl"),),
            validation_from=(str(text / "val.jsonl"),),
            out=out,
            tokenizer=str(tokenizer),
            shard_tokens=24_000_000,
            workers=workers,
        )
    )


def pack(corpus: Path, out: Path, workers: int = 1) -> list[Path]:
    """Every file of a corpus into .tar.xz pieces of at most `PIECE` bytes, a shard or more in each.

    One machine's upload may not hold all of it; pieces go one after another, and `unpack` sets them beside each other.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        shards = sorted(corpus.glob("*.bin"))
        packed = list(pool.map(_compressed, shards, [out / f"{shard.name}.xz" for shard in shards]))
    groups: list[list[Path]] = [[]]
    room = PIECE
    for file in sorted(packed, key=lambda path: path.stat().st_size):
        if file.stat().st_size > room and groups[-1]:
            groups.append([])
            room = PIECE
        groups[-1].append(file)
        room -= file.stat().st_size
    small = sorted(file for file in corpus.rglob("*") if file.is_file() and file.suffix != ".bin")
    pieces = []
    for number, group in enumerate(groups):
        piece = out / f"tokens-{number}.tar"
        with tarfile.open(piece, "w") as archive:
            for file in group:
                archive.add(file, arcname=file.name)
            for file in small if number == 0 else []:
                archive.add(file, arcname=str(file.relative_to(corpus)))
        pieces.append(piece)
    for file in packed:
        file.unlink()
    return pieces


def _compressed(shard: Path, out: Path) -> Path:
    out.write_bytes(lzma.compress(shard.read_bytes(), format=lzma.FORMAT_XZ, filters=FILTERS))
    return out


def unpack(pieces: list[Path], out: Path) -> None:
    """Pieces back into a corpus; what is there already is kept. Training checks sizes, `fathomlm data check` all bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        with tarfile.open(piece) as archive:
            archive.extractall(out, filter="data")
        for file in sorted(out.glob("*.bin.xz")):
            file.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
            file.unlink()


def split(run: Path, out: Path, size: int = PART) -> list[Path]:
    """A run's last checkpoint, records and recipe as parts of `size` bytes, bit for bit: weights and moments do not
    compress, and another session may have to fetch and send them a few at a time."""
    out.mkdir(parents=True, exist_ok=True)
    whole = out / f"{run.name}.tar"
    last = (run / "last").resolve()
    with tarfile.open(whole, "w") as archive:
        for file in (run / "metrics.jsonl", run / "recipe.yaml"):
            archive.add(file, arcname=f"{run.name}/{file.name}")
        archive.add(last, arcname=f"{run.name}/checkpoints/{last.name}")
    parts = []
    with whole.open("rb") as file:
        while chunk := file.read(size):
            parts.append(out / f"{whole.name}.{len(parts):03d}")
            parts[-1].write_bytes(chunk)
    whole.unlink()
    return parts


def join(parts: list[Path], work: Path) -> None:
    """What `split` took apart, back under `work`: all parts of one run, in any order."""
    work.mkdir(parents=True, exist_ok=True)
    whole = work / ".joined.tar"
    with whole.open("wb") as file:
        for part in sorted(parts):
            file.write(part.read_bytes())
    with tarfile.open(whole) as archive:
        archive.extractall(work, filter="data")
    whole.unlink()
