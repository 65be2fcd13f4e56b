"""Chats that SmolLM2 holds with itself as the assistant: what its exits learn from beside documents, and are measured on.

    python release/smollm2_chats.py make --documents data/smollm2/corpus --out data/chats.jsonl --count 20000
    python release/smollm2_chats.py prepare --chats data/chats.jsonl --out data/smollm2-chats

Users of `fathomlm chat` see the text that the model writes behind its own chat template, so that is what an exit should
foretell. Messages are made from openly licensed documents (a prepared corpus, or JSON lines) and a list of everyday requests
(smollm2_prompts.py); the engine writes the replies, every other one sampled, the rest greedy.

A chat is kept as text as far as reading that text gives the same tokens again: a model may spell a word in pieces that no
tokenizer would, and what is learnt from must be what was said. A part is held out by a hash of the message, for validation
and as prompts to measure with. `make` goes on where it was stopped, and one seed gives one list of chats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from bundled_data import LEFT_OUT
from bundled_measure import chosen
from smollm2_prompts import messages, passage_of, shuffled

from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request, Result
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.encoding import LOTS, lot
from fathomlm.train.data.sources import open_lines

WAVES = 8
"""Chats that the engine is given at once, as a multiple of its rows."""
PASSAGE_TOKENS, LONG_TOKENS = 60, 300
STRIDE = 512
"""Tokens of a document for each passage that is taken from it: long documents have more to ask about than how they begin."""
SENTENCE = 40
"""Tokens more for a passage from inside a document, which begins with its first whole sentence."""
LONGEST_PROMPT = 512
"""Tokens of a message with its template above which it is left out."""
LEAST = 8
"""Tokens of a reply below which a chat that had to be cut is not kept."""
TEMPERATURE, MIN_P = 0.8, 0.05
"""How replies are sampled. Unlike top-p, min-p needs no sort of all tokens, which would take as long as the model itself."""


def held_out_file(chats: Path) -> Path:
    return chats.with_name(f"{chats.stem}-held-out{chats.suffix}")


def passages(documents: Sequence[Path], tokenizer: Any, seed: int, long: float = 0.0) -> Iterator[str]:
    """Passages of documents, in an order of the seed; a part `long` of them is five times as long. Of a prepared corpus one
    for every STRIDE tokens, of JSON lines the beginnings."""
    lengths = _lengths(seed, long)
    if len(documents) == 1 and (documents[0] / "corpus.json").is_file():
        stream = Corpus.open(documents[0]).stream("train")
        places = [(n, first) for n in range(stream.documents) for first in range(0, len(stream.document(n)), STRIDE)]
        spots = (places[number] for number in shuffled(len(places), seed))
        begins = (
            (first > 0, stream.document(n)[first : first + next(lengths) + SENTENCE * (first > 0)].tolist())
            for n, first in spots
        )
    else:
        texts = [text[: 16 * LONG_TOKENS] for path in documents for text in _texts(path)]
        picked = (texts[number] for number in shuffled(len(texts), seed))
        begins = ((False, tokenizer(text, add_special_tokens=False)["input_ids"][: next(lengths)]) for text in picked)
    found = (passage_of(tokenizer.decode(tokens, skip_special_tokens=True), inside=inside) for inside, tokens in begins)
    return (passage for passage in found if passage is not None)


def _lengths(seed: int, long: float) -> Iterator[int]:
    draw = random.Random(f"lengths {seed}")
    while True:
        yield LONG_TOKENS if long and draw.random() < long else PASSAGE_TOKENS


def _texts(path: Path) -> Iterator[str]:
    """JSON lines with `text`, compressed or not; where they name a `source` it must be one to learn from."""
    for line, _ in open_lines(path):
        record = json.loads(line)
        if record.get("source") not in LEFT_OUT:
            yield record["text"]


@dataclass(frozen=True)
class Chat:
    """One message on its way to the model."""

    number: int
    message: str
    prompt: tuple[int, ...]

    @property
    def greedy(self) -> bool:
        return self.number % 2 == 0

    def request(self, new: int, seed: int) -> Request:
        how = Sampling(max_new_tokens=new)
        if not self.greedy:
            how = Sampling(max_new_tokens=new, temperature=TEMPERATURE, min_p=MIN_P, seed=lot(f"{seed} {self.number}") >> 1)
        return Request(id=self.number + 1, prompt=self.prompt, sampling=how)


@dataclass
class Writer:
    """The two files of chats, in the order of their numbers."""

    tokenizer: Any
    out: Path
    fraction: float
    held_out: int = 0
    written: int = 0
    shortened: int = 0
    left_out: int = 0
    files: dict[bool, IO[str]] = field(default_factory=dict)

    @property
    def begun(self) -> int:
        """The first number that no earlier call has written. A line that was cut short is taken away."""
        numbers = [-1]
        for path in (self.out, held_out_file(self.out)):
            if path.exists():
                whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
                path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
                numbers += [json.loads(line)["number"] for line in whole.split("\n")[-1:] if line]
        return max(numbers) + 1

    def __enter__(self) -> Writer:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        names = {False: self.out, True: held_out_file(self.out)}
        self.files = {held: path.open("a", encoding="utf-8") for held, path in names.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    def write(self, chats: Sequence[Chat], results: Sequence[Result]) -> None:
        backend = self.tokenizer.backend_tokenizer
        wholes = [[*result.prompt_tokens, *result.tokens] for result in results]
        texts = backend.decode_batch(wholes, skip_special_tokens=False)
        again = backend.encode_batch_fast(texts, add_special_tokens=False)
        for chat, result, tokens, text, read in zip(chats, results, wholes, texts, again, strict=True):
            assert result.finish.reason in ("eos", "length"), f"chat {chat.number}: {result.finish}"
            if read.ids != tokens:
                shorter = as_read(tokens, len(result.prompt_tokens) + LEAST, backend)
                self.shortened += shorter is not None
                self.left_out += shorter is None
                if shorter is None:
                    continue
                tokens, text = shorter
            held = lot(chat.message) < self.fraction * LOTS
            record = {"number": chat.number, "text": text, "tokens": len(tokens), "greedy": chat.greedy}
            self.files[held].write(json.dumps(record, ensure_ascii=False) + "\n")
            self.held_out += held
            self.written += 1
        for file in self.files.values():
            file.flush()


def as_read(tokens: list[int], least: int, backend: Any) -> tuple[list[int], str] | None:
    """The beginning of a chat whose text is read as just these tokens, and that text; None where it has fewer than `least`.
    Most often only the last tokens go: two line breaks at the end of a text are one token, and in front of a word two."""
    while len(tokens) >= least:
        text: str = backend.decode(tokens, skip_special_tokens=False)
        read = backend.encode(text, add_special_tokens=False).ids
        if read == tokens:
            return tokens, text
        same = next((i for i, (a, b) in enumerate(zip(tokens, read, strict=False)) if a != b), len(tokens) - 1)
        tokens = tokens[:same]
    return None


def make(args: argparse.Namespace) -> None:
    from fathomlm.checkpoints.resolve import load

    device = torch.device(chosen(args.device))
    model = load(args.source, dtype="bfloat16" if device.type == "cuda" else "float32", device=device)
    rows = args.rows or (512 if device.type == "cuda" else 16)
    engine = _engine(model, rows, LONGEST_PROMPT + args.new_tokens)
    begun, done = time.monotonic(), 0
    with Writer(model.tokenizer, args.out, args.held_out) as writer:
        first = writer.begun
        left = (chat for chat in itertools.islice(_chats(model, args), args.count) if chat.number >= first)
        while batch := list(itertools.islice(left, WAVES * rows)):
            done = batch[-1].number + 1
            batch = [chat for chat in batch if len(chat.prompt) <= LONGEST_PROMPT]
            batch.sort(key=lambda chat: not chat.greedy)  # greedy rows beside sampled ones would be drawn for, too
            results = engine.run([chat.request(args.new_tokens, args.seed) for chat in batch])
            both = sorted(zip(batch, results, strict=True), key=lambda pair: pair[0].number)
            writer.write([chat for chat, _ in both], [result for _, result in both])
            _report(engine, writer, done, first, args.count, time.monotonic() - begun)
            if args.seconds is not None and time.monotonic() - begun > args.seconds:
                return
        if max(first, done) < args.count:
            print(f"the documents give {max(first, done):,} different messages, not {args.count:,}", flush=True)


def _chats(model: FathomForCausalLM, args: argparse.Namespace) -> Iterator[Chat]:
    found = passages(args.documents, model.tokenizer, args.seed, args.long)
    said, draw = messages(found, args.seed), random.Random(f"continued {args.seed}")
    for number in itertools.count():
        continued = args.continued and draw.random() < args.continued
        message = next(found if continued else said, None)
        if message is None:
            return
        if continued:
            prompt = model.tokenizer(message, add_special_tokens=False)["input_ids"][:PASSAGE_TOKENS]
        else:
            prompt = chat_prompt(model, [{"role": "user", "content": message}])
        yield Chat(number, message, tuple(prompt))


def _engine(model: FathomForCausalLM, rows: int, length: int) -> Engine:
    """Room for every row at its longest, so that none is put aside; prompts are read as fast as rows become free."""
    shape = model.architecture
    weight = model.decoder.embed.weight
    token = shape.layers * shape.kv_bytes(weight.element_size())
    room = rows * (length + 128) * token
    return Engine(
        model, batch_size=rows, max_length=length, memory=room, prefill_chunk=8 * rows, penalties=False, max_logprobs=0
    )


def _report(engine: Engine, writer: Writer, done: int, first: int, count: int, seconds: float) -> None:
    left = seconds / (done - first) * (count - done)
    print(
        f"  {done:,} of {count:,} chats; {engine.totals.tokens:,} tokens written, "
        f"{engine.totals.tokens / seconds:,.0f} tokens/s; {writer.held_out:,} held out; read again, "
        f"{writer.shortened:,} were cut and {writer.left_out:,} left out; about {left:.0f} s left",
        flush=True,
    )


def prepare(args: argparse.Namespace) -> None:
    """The corpus of chats; its validation split is those held out. Every chat has as many tokens as when it was made."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    files = {"train": args.chats, "validation": held_out_file(args.chats)}
    corpus = prepare(
        PrepareOptions(
            sources=(str(files["train"]),),
            validation_from=(str(files["validation"]),),
            out=args.out,
            tokenizer=args.source,
            workers=args.workers,
        )
    )
    for split, file in files.items():
        stream = corpus.stream(split)
        with file.open(encoding="utf-8") as lines:
            lengths = [json.loads(line)["tokens"] for line in lines]
        read = [len(stream.document(number)) - 1 for number in range(stream.documents)]
        if lengths != read:
            raise SystemExit(f"{file} has other tokens in {args.out} than when it was made; is it the same tokenizer?")
    print(json.dumps({name: split.tokens for name, split in corpus.manifest.splits.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    found = verbs.add_parser("make")
    found.set_defaults(run=make)
    add = found.add_argument
    add("--documents", type=Path, nargs="+", required=True, help="a prepared corpus, or JSON lines with `text` (.xz, .gz)")
    add("--out", type=Path, required=True, help="chats.jsonl; what is held out goes to chats-held-out.jsonl beside it")
    add("--source", default="smollm2-135m", help="the model that replies")
    add("--count", type=int, default=20_000)
    add("--new-tokens", type=int, default=256, help="the longest reply")
    add("--rows", type=int, help="replies that are written at once (512 on a GPU, 16 on a CPU)")
    add(
        "--continued",
        type=float,
        default=0.0,
        help="the part that are documents which the model goes on with, without a chat",
    )
    add("--long", type=float, default=0.0, help="the part of the passages that are five times as long")
    add("--held-out", type=float, default=0.03, help="the part that is held out")
    add("--seconds", type=float, help="start no more after so long; the same command goes on")
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    found = verbs.add_parser("prepare")
    found.set_defaults(run=prepare)
    add = found.add_argument
    add("--chats", type=Path, required=True, help="what `make` wrote")
    add("--out", type=Path, required=True, help="the corpus of chats")
    add("--source", default="smollm2-135m", help="the model, which has the tokenizer")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
