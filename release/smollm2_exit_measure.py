"""One exit of one model on one device: time for a token, drafts kept, and whether the text is the full model's.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import end_tokens
from fathomlm.lab.bench.play import OneSequence, TimedText
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.frequent import frequent_in_corpus

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""At 0 every token leaves, and every draft is as long as the stack."""
LONGEST = 512
"""Tokens of a held-out text that its loss is taken over."""


@dataclass(frozen=True)
class Texts:
    """Held-out texts of one kind."""

    prompts: list[list[int]]
    calibrating: list[list[int]]
    whole: list[tuple[list[int], int]]
    """Texts, and how many tokens at the start of each nobody has to foretell: a chat's up to its reply."""

    @classmethod
    def documents(cls, corpus: Path, count: int, length: int, rows: int) -> Texts:
        """Prompts are the first tokens of documents that are long enough."""
        found = list(held_out(corpus))
        prompts = [tokens[:length] for tokens in found if len(tokens) > length]
        return cls._of(corpus, prompts, [(tokens[:LONGEST], 1) for tokens in found[:rows]], count)

    @classmethod
    def chats(cls, corpus: Path, count: int, tokenizer: Any, rows: int) -> Texts:
        """Prompts are chats up to where the reply begins."""
        header = reply_header(tokenizer)
        found = [(tokens, behind(tokens, header)) for tokens in held_out(corpus) if is_chat(tokens, header)]
        prompts = [tokens[:begin] for tokens, begin in found]
        return cls._of(corpus, prompts, [(tokens[:LONGEST], begin) for tokens, begin in found[:rows]], count)

    @classmethod
    def _of(cls, corpus: Path, prompts: list[list[int]], whole: list[tuple[list[int], int]], count: int) -> Texts:
        if len(prompts) < 2 * count:
            raise SystemExit(
                f"{corpus} holds out {len(prompts)} texts to begin from, and {2 * count} are needed (--prompts)"
            )
        return cls(prompts[:count], prompts[count : 2 * count], whole)


def held_out(corpus: Path) -> Iterator[list[int]]:
    """Held-out texts without their separator."""
    stream = Corpus.open(corpus).stream("validation")
    return (stream.document(number)[:-1].tolist() for number in range(stream.documents))


def reply_header(tokenizer: Any) -> list[int]:
    """What the chat template puts in front of a reply."""
    said = [{"role": "user", "content": "Hello"}]
    without, whole = (
        tokenizer.apply_chat_template(said, add_generation_prompt=asked, tokenize=False) for asked in (False, True)
    )
    header: list[int] = tokenizer(whole[len(without) :], add_special_tokens=False)["input_ids"]
    return header


def is_chat(tokens: list[int], header: list[int]) -> bool:
    """Whether a text has a reply, and is not a document that the model went on with."""
    return any(tokens[i : i + len(header)] == header for i in range(len(tokens) - len(header)))


def behind(tokens: list[int], header: list[int]) -> int:
    """Where a chat's reply begins."""
    size = len(header)
    return next(i + size for i in range(len(tokens) - size) if tokens[i : i + size] == header)


@dataclass(frozen=True)
class Way:
    """A way to decode."""

    mode: Any
    threshold: Any = None

    @property
    def drafts(self) -> bool:
        return self.mode in ("parallel", "speculative")


class Bench:
    """One exit, with the words that it may choose among and the drafts that may wait: an engine for each mode."""

    def __init__(self, args: argparse.Namespace, model: FathomForCausalLM, layer: int, stack: int, length: int) -> None:
        self.model, self.layer, self.max_stack = model, layer, stack
        self.new, self.rounds, self.length = args.new_tokens, args.rounds, length
        self._engines: dict[str, OneSequence] = {}

    def exiting(self, way: Way) -> Exiting:
        fields: dict[str, Any] = {} if way.mode == "full" else {"exit_layers": (self.layer,)}
        if way.drafts:
            fields |= {"threshold": way.threshold, "max_stack": self.max_stack}
        return Exiting(mode=way.mode, **fields)

    def text(self, prompt: list[int], way: Way, new: int | None = None) -> TimedText:
        if way.mode not in self._engines:
            self._engines[way.mode] = OneSequence(self.model, self.exiting(way), length=self.length)
        return self._engines[way.mode].text(prompt, new or self.new, threshold=way.threshold)

    def adaptive(self, prompts: Sequence[list[int]]) -> float:
        """The threshold that the thesis' rule learns from texts of other prompts (thesis 2.5.3)."""
        from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions

        estimator = ThresholdEstimator(ThresholdOptions(rule="thesis", calibrating_sequences=len(prompts)))
        learning = OneSequence(self.model, self.exiting(Way("parallel", estimator)), length=self.length)
        for prompt in prompts:
            learning.text(prompt, self.new)
        return float(estimator.threshold)

    def race(self, prompts: Sequence[list[int]], ways: Sequence[Way]) -> list[tuple[dict[str, Any], list[TimedText]]]:
        """Figures and texts of every way. Each prompt goes through all of them before the next one does, round after round,
        and of a text's times the shortest counts: what slows a machine down for a while would else be one way's fault."""
        for way in ways:
            self.text(prompts[0], way)
        rounds = [[[self._timed(prompt, way) for way in ways] for prompt in prompts] for _ in range(self.rounds)]
        found = []
        for i, way in enumerate(ways):
            texts = [made[i][0] for made in rounds[0]]
            best = [min(turn[place][i][1] for turn in rounds) for place in range(len(prompts))]
            found.append((self._figures(way, texts, sum(best)), texts))
        return found

    def _timed(self, prompt: list[int], way: Way) -> tuple[TimedText, float]:
        """A text, and what its tokens behind the first took."""
        text = self.text(prompt, way)
        return text, text.decode_seconds(self.text(prompt, way, 1))

    def _figures(self, way: Way, texts: list[TimedText], seconds: float) -> dict[str, Any]:
        tokens = sum(len(text.result.tokens) for text in texts)
        found = {"ms_per_token": 1e3 * seconds / max(1, tokens - len(texts)), "threshold": way.threshold, "tokens": tokens}
        if way.drafts:
            left = sum(depth == self.layer for text in texts for depth in text.result.depths or ())
            found |= {
                "exit_rate": left / tokens,
                "shallow_passes": sum(text.passes["shallow"] for text in texts) / tokens,
                "deep_passes": sum(text.passes["deep"] for text in texts) / tokens,
            }
            if way.mode == "speculative":
                found["acceptance"] = left / max(1, sum(text.result.drafted for text in texts))
        return found


@torch.inference_mode()
def judged(decoder: Decoder, prompts: Sequence[list[int]], texts: Sequence[TimedText]) -> dict[str, float]:
    """What the full model thinks of texts, each read as it stands: how often it would have chosen the same token, and its
    perplexity."""
    agreed, nats, count = 0, 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens_1T = torch.tensor([[*prompt, *text.result.tokens]], device=decoder.embed.weight.device)
        begin = len(prompt) - 1
        logits_TV = decoder.logits(decoder(tokens_1T[:, :-1])[0, begin:]).float()
        made_T = tokens_1T[0, begin + 1 :]
        agreed += int((logits_TV.argmax(-1) == made_T).sum())
        nats += float(torch.nn.functional.cross_entropy(logits_TV, made_T, reduction="sum"))
        count += len(made_T)
    return {"agreement": agreed / count, "perplexity": float(torch.tensor(nats / count).exp())}


@torch.inference_mode()
def held_out_loss(decoder: Decoder, layer: int, whole: Sequence[tuple[list[int], int]]) -> dict[str, float]:
    """The exit's loss and the last output's on texts as they stand, where the next token is among the exit's words; and how
    often both choose the same token."""
    own = decoder.plan.exit_steps((layer - 1,))
    at, last = own[0].index if own else layer - 1, decoder.plan.unrolled_layers - 1
    sums, agreed, known, count = {"loss": 0.0, "full_loss": 0.0}, 0, 0, 0
    for tokens, begin in whole:
        tokens_1T = torch.tensor([tokens], device=decoder.embed.weight.device)
        states = decoder.states(tokens_1T[:, :-1], at=(at,))
        exit_TV = decoder.exit_logits(states[at], layer - 1, layered=True)[0, begin - 1 :].float()
        full_TV = decoder.exit_logits(states[last], last)[0, begin - 1 :].float()
        next_T = tokens_1T[0, begin:]
        known_T = exit_TV.gather(1, next_T[:, None])[:, 0].isfinite()
        for name, logits_TV in (("loss", exit_TV), ("full_loss", full_TV)):
            sums[name] += float(torch.nn.functional.cross_entropy(logits_TV[known_T], next_T[known_T], reduction="sum"))
        agreed += int((exit_TV.argmax(-1) == full_TV.argmax(-1)).sum())
        known += int(known_T.sum())
        count += len(next_T)
    losses = {name: total / known for name, total in sums.items()}
    return losses | {"agreement": agreed / count, "tokens": count, "known": known / count}


def same_text(texts: Sequence[TimedText], full: Sequence[TimedText]) -> dict[str, float]:
    """How many texts are full decoding's to the last token, and how far the others go with it."""
    pairs = [(one.result.tokens, other.result.tokens) for one, other in zip(texts, full, strict=True)]
    far = [next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair))) for pair in pairs]
    return {
        "same_texts": sum(a == b for a, b in pairs) / len(pairs),
        "same_prefix": sum(far) / sum(len(b) for _, b in pairs),
    }


def measure_run(args: argparse.Namespace, source: Path, corpus: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every exit of a run with every choice of words and of drafts that may wait. `corpus` is what the run learnt from."""
    from fathomlm.checkpoints.resolve import load

    model = load(source, dtype=args.dtype, device=device)
    decoder = model.decoder.requires_grad_(False)
    kinds: dict[str, Texts] = {}
    for kind in args.prompts_from:
        if kind == "chats":
            kinds[kind] = Texts.chats(args.chats, args.prompts, model.tokenizer, args.rows)
        else:
            kinds[kind] = Texts.documents(args.data / "corpus", args.prompts, args.prompt_tokens, args.rows)
    longest = max(len(prompt) for texts in kinds.values() for prompt in (*texts.prompts, *texts.calibrating))
    learnt = decoder.exit_vocab
    own = {0: None} if learnt is None else {len(learnt.vocab_W): learnt.vocab_W.cpu()}
    words = own if args.exit_vocab is None else {many: exit_vocab_for(model, corpus, many) for many in args.exit_vocab}
    for layer in args.layers:
        for many, few in words.items():
            decoder.limit_exits(few)
            losses = {kind: held_out_loss(decoder, layer, texts.whole) for kind, texts in kinds.items()}
            for stack in args.max_stack:
                bench = Bench(args, model, layer, stack, longest + args.new_tokens)
                print(f"layer {layer}, {f'{many:,} words' if many else 'all words'}, {stack} drafts", flush=True)
                found = {kind: _measure_kind(args, bench, kind, texts) for kind, texts in kinds.items()}
                for kind, figures in found.items():
                    figures["held_out"] = losses[kind]
                yield {
                    "layer": layer,
                    "words": many,
                    "max_stack": stack,
                    "corpus": str(corpus),
                    "adapter_bytes": 2 * _weights(decoder, layer),
                    "kinds": found,
                }


def exit_vocab_for(model: FathomForCausalLM, corpus: Path, many: int) -> Tensor | None:
    """What exits choose among, as a pack would have it; None (0 words) is everything."""
    if not many:
        return None
    vocab, ends = model.architecture.vocab, end_tokens(model)
    return frequent_in_corpus(Corpus.open(corpus), model.tokenizer, many, vocab=vocab, always=ends, name="--exit-vocab")


def _measure_kind(args: argparse.Namespace, bench: Bench, kind: str, texts: Texts) -> dict[str, Any]:
    """Full decoding is timed here too, though it is the same for all: a machine's speed changes with time."""
    thresholds = {f"{value:g}": value for value in args.thresholds} | {"adaptive": bench.adaptive(texts.calibrating)}
    tried = [(name, Way(mode, threshold)) for name, threshold in thresholds.items() for mode in args.modes]
    begun = time.perf_counter()
    raced = bench.race(texts.prompts, [Way("full"), Way("static"), *(way for _, way in tried)])
    (full, reference), (static, _), *rest = raced
    full |= judged(bench.model.decoder, texts.prompts, reference)
    found: dict[str, Any] = {"full": full, "static": static} | {mode: {} for mode in args.modes}
    took = time.perf_counter() - begun
    shown = f"full {full['ms_per_token']:.3f} ms a token, to the exit {static['ms_per_token']:.3f}"
    print(f"  {kind}: {shown} ({took:.0f} s)", flush=True)
    for (name, way), (figures, made) in zip(tried, rest, strict=True):
        figures["speedup"] = full["ms_per_token"] / figures["ms_per_token"]
        figures |= same_text(made, reference)
        if way.mode == "parallel":
            figures |= judged(bench.model.decoder, texts.prompts, made)
        found[way.mode][name] = figures
        kept = f", {figures['acceptance']:.0%} of drafts kept" if way.mode == "speculative" else ""
        print(f"  {kind}: {way.mode} at {way.threshold:.2f}: {figures['speedup']:.2f}x{kept}", flush=True)
    return found


def _weights(decoder: Decoder, layer: int) -> int:
    """How many an exit has of its own in front of the head."""
    kinds = (decoder.exit_adapters, decoder.exit_blocks)
    own = [kind[str(layer - 1)] for kind in kinds if str(layer - 1) in kind]
    return sum(p.numel() for module in own for p in module.parameters())
