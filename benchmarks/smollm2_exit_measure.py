"""One exit of one model on one device: time for a token, drafts kept, and whether the text is the full model's.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fathomlm.decode.captured import CapturedDecoder, CapturedText
from fathomlm.decode.exiting import Exiting

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
"""At 0 every token leaves, and every draft is as long as the stack."""
ROUNDS = 3
"""How often texts are made; the first time warms up, and the fastest of the others counts."""


class Bench:
    def __init__(self, args: argparse.Namespace, source: Path, layer: int, device: torch.device) -> None:
        from fathomlm.checkpoints.resolve import load

        self.layer, self.new, self.max_stack = layer, args.new_tokens, args.max_stack
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        self.decoder = load(source, dtype=dtype, device=device).decoder.requires_grad_(False)
        length = args.prompt_tokens + args.new_tokens
        self.captured = CapturedDecoder(
            self.decoder,
            length=length,
            exit_layers=layer,
            max_stack=args.max_stack,
            compile=device.type == "cuda",
            pack=args.pack,
        )
        found = beginnings(args.data / "corpus", 2 * args.prompts, args.prompt_tokens)
        self.prompts, self.calibrating = found[: args.prompts], found[args.prompts :]

    def texts(self, mode: Any, threshold: Any = None, calibrating: bool = False) -> list[CapturedText]:
        fields: dict[str, Any] = {} if mode == "full" else {"exit_layers": (self.layer,)}
        if mode in ("parallel", "speculative"):
            fields |= {"threshold": threshold, "max_stack": self.max_stack}
        exiting = Exiting(mode=mode, **fields)
        prompts = self.calibrating if calibrating else self.prompts
        return [self.captured.generate(prompt, exiting, self.new) for prompt in prompts]

    def adaptive(self) -> float:
        """The threshold that the estimator learns from texts of other prompts (thesis 2.5.3)."""
        from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions

        estimator = ThresholdEstimator(ThresholdOptions(calibrating_sequences=len(self.calibrating)))
        self.texts("parallel", estimator, calibrating=True)
        return float(estimator.threshold)

    def timed(self, mode: str, threshold: float | None = None) -> tuple[dict[str, Any], list[CapturedText]]:
        """Figures and texts."""
        rounds = [self.texts(mode, threshold) for _ in range(ROUNDS)][1:]
        texts = rounds[0]
        tokens = sum(len(text.tokens) for text in texts)
        seconds = [sum(text.decode_seconds for text in made) for made in rounds]
        found = {"ms_per_token": 1e3 * min(seconds) / tokens, "threshold": threshold}
        if mode in ("parallel", "speculative"):
            left = sum(layer == self.layer for text in texts for layer in text.exit_layers)
            found |= {
                "exit_rate": left / tokens,
                "shallow_passes": sum(len(text.confidences) for text in texts) / tokens,
                "deep_passes": sum(text.deep_passes for text in texts) / tokens,
            }
        if mode == "speculative":
            found["acceptance"] = sum(text.accepted for text in texts) / max(1, sum(text.drafted for text in texts))
        return found, texts

    @torch.inference_mode()
    def judged(self, texts: list[CapturedText]) -> dict[str, float]:
        """What the full model thinks of texts, each read as it stands: how often it would have chosen the same token, and
        its perplexity."""
        agreed, nats, count = 0, 0.0, 0
        for prompt, text in zip(self.prompts, texts, strict=True):
            tokens_1T = torch.tensor([[*prompt, *text.tokens]], device=self.decoder.embed.weight.device)
            begin = len(prompt) - 1
            logits_TV = self.decoder.logits(self.decoder(tokens_1T[:, :-1])[0, begin:]).float()
            made_T = tokens_1T[0, begin + 1 :]
            agreed += int((logits_TV.argmax(-1) == made_T).sum())
            nats += float(torch.nn.functional.cross_entropy(logits_TV, made_T, reduction="sum"))
            count += len(made_T)
        return {"agreement": agreed / count, "perplexity": float(torch.tensor(nats / count).exp())}


def beginnings(corpus: Path, count: int, length: int) -> list[list[int]]:
    """The first tokens of held-out documents that are long enough."""
    from fathomlm.train.data.corpus import Corpus

    stream = Corpus.open(corpus).stream("validation")
    documents = (stream.document(number)[:length].tolist() for number in range(stream.documents))
    found = [tokens for tokens in documents if len(tokens) == length][:count]
    if len(found) < count:
        raise SystemExit(f"{corpus} holds out {len(found)} documents of {length} tokens; {count} are needed (--prompts)")
    return found


def same_text(texts: list[CapturedText], full: list[CapturedText]) -> dict[str, float]:
    """How many texts are full decoding's to the last token, and how far the others go with it."""
    pairs = [(one.tokens, other.tokens) for one, other in zip(texts, full, strict=True)]
    far = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return {
        "same_texts": sum(a == b for a, b in pairs) / len(pairs),
        "same_prefix": sum(far) / sum(len(a) for a, _ in pairs),
    }


def measure_exit(args: argparse.Namespace, source: Path, layer: int, device: torch.device) -> dict[str, Any]:
    bench = Bench(args, source, layer, device)
    full, texts = bench.timed("full")
    adaptive = bench.adaptive()
    static, _ = bench.timed("static")
    kinds = (bench.decoder.exit_adapters, bench.decoder.exit_blocks)
    own = [kind[str(layer - 1)] for kind in kinds if str(layer - 1) in kind]
    adapter = sum(p.numel() for module in own for p in module.parameters())
    found: dict[str, Any] = {
        "adapter_bytes": 2 * adapter,
        "adaptive_threshold": adaptive,
        "full": full | bench.judged(texts),
        "static": static,
        "speculative": {},
        "parallel": {},
    }
    thresholds = {"adaptive": adaptive} | {f"{value:g}": value for value in args.thresholds}
    for name, threshold in thresholds.items():
        for mode in ("speculative", "parallel"):
            figures, made = bench.timed(mode, threshold)
            figures["speedup"] = full["ms_per_token"] / figures["ms_per_token"]
            figures |= same_text(made, texts) | ({} if mode == "speculative" else bench.judged(made))
            found[mode][name] = figures
    return found
