"""What `fathomlm demo` shows of a routed model: texts with every token at its depth (thesis 4.6.2), and what depth costs.

A token's depth is how many recursions ran at the position that chose it. Here are the numbers and texts; demo_shown.py
puts them on a terminal or into a pipe.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import layer_bar, say

if TYPE_CHECKING:
    from fathomlm.decode.generation import Generation
    from fathomlm.decode.sampling import Sampling
    from fathomlm.depth import DepthPlan
    from fathomlm.model.hub import FathomForCausalLM

PROMPTS = (
    "Cells divide in order to",
    "In the middle of the nineteenth century,",
    '"I do not believe you," said the old man,',
)
CHOICE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "seed": 1}
"""Warm enough not to repeat itself, cool enough to read well; seeded, so that everyone sees the same texts."""
EXAMPLES = 8
ROUNDS = 2
"""How often each speed is measured, by turns; the best counts, since whatever else the machine does only slows it."""
EVERY_RECURSION = 1e6
"""A depth bias that no router's score outweighs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One prompt and what came of it, the end token left out."""

    prompt: str
    text: str
    tokens: list[int]
    pieces: list[str]
    """What each token adds to the text."""
    depths: list[int]
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthUse:
    """How often a depth was used, and for which tokens."""

    depth: int
    tokens: int
    share: float
    examples: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens a second while decoding one row, as routed and with every recursion for every token."""

    routed: float
    full_depth: float
    ratio: float | None
    """How many times as fast as at full depth; None where a text was too short to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """All that the demo shows."""

    model: str
    plan: str
    parameters: int
    disk_bytes: int
    recursions: int
    layers: int
    """Those that a token at full depth runs."""
    layers_per_token: float
    mean_depth: float
    depths: list[DepthUse]
    tokens_per_second: Speed
    texts: list[Told]
    seconds: float
    sampling: dict[str, Any] = field(default_factory=lambda: dict(CHOICE))


def run_routed(args: argparse.Namespace, source: str) -> int:
    """The demo of a model with a router."""
    begin = time.perf_counter()
    shown = measure(source, args.tokens, begin)
    if args.json:
        print(json.dumps(asdict(shown)))
        return 0
    from rich.console import Console

    from fathomlm.cli.demo_shown import show

    show(shown, Console())
    return 0


def measure(source: str, tokens: int, begin: float) -> Shown:
    from fathomlm.checkpoints.resolve import decoder_only, describe, load, locate
    from fathomlm.checkpoints.save import directory_bytes
    from fathomlm.decode.full import generate
    from fathomlm.decode.sampling import Sampling
    from fathomlm.depth.cost import count

    path = locate(source)
    say(f"1/3  {source}: {path}")
    model = decoder_only(load(path, dtype="float32"), "the demo")
    sampling = Sampling(max_new_tokens=tokens, **CHOICE)
    say(f"2/3  {len(PROMPTS)} texts of at most {tokens} tokens")
    with layer_bar("     writing", "tokens") as tick:
        results = generate(model, PROMPTS, sampling, on_step=lambda done: tick(done, tokens))
    texts = [_told(model, prompt, result) for prompt, result in zip(PROMPTS, results, strict=True)]
    say(f"3/3  the speed of {tokens} tokens, as routed and at full depth")
    speed = _speed(model, sampling)
    cost = count(model.architecture, model.plan, relaxation=model.relaxation)
    depths = [depth for text in texts for depth in text.depths]
    return Shown(
        model=source,
        plan=describe(model),
        parameters=cost.non_embedding_parameters + cost.embedding_parameters,
        disk_bytes=directory_bytes(path),
        recursions=model.plan.recursions,
        layers=model.plan.unrolled_layers,
        layers_per_token=_mean([layers_run(model.plan, depth) for depth in depths]),
        mean_depth=_mean(depths),
        depths=depth_uses(model, texts),
        tokens_per_second=speed,
        texts=texts,
        seconds=time.perf_counter() - begin,
    )


def layers_run(plan: DepthPlan, depth: int) -> int:
    """The layers that a token of this depth runs."""
    return sum(step.part != "core" or step.recursion < depth for step in plan)


def depth_uses(model: FathomForCausalLM, texts: Sequence[Told]) -> list[DepthUse]:
    """Each depth's tokens. Examples of a depth are tokens that went there more often than anywhere else."""
    from fathomlm.cli.shown import label, token_text

    used = Counter(depth for text in texts for depth in text.depths)
    where: dict[int, Counter[int]] = {}
    for token, depth in (pair for text in texts for pair in zip(text.tokens, text.depths, strict=True)):
        where.setdefault(token, Counter())[depth] += 1
    examples: dict[int, list[tuple[int, str]]] = {}
    for token, depths in where.items():
        depth, often = depths.most_common(1)[0]
        examples.setdefault(depth, []).append((often, label(token_text(model.tokenizer, token))))
    found = []
    for depth in sorted({*range(1, model.plan.recursions + 1), *used}):
        ranked = sorted(examples.get(depth, ()), key=lambda pair: -pair[0])
        share = used[depth] / max(used.total(), 1)
        found.append(
            DepthUse(depth=depth, tokens=used[depth], share=share, examples=[text for _, text in ranked[:EXAMPLES]])
        )
    return found


def _told(model: FathomForCausalLM, prompt: str, result: Generation) -> Told:
    from fathomlm.cli.shown import pieces

    assert result.depths is not None
    many = len(result.tokens) - (result.finish == "eos")
    said = pieces(model.tokenizer, (*result.prompt_tokens, *result.tokens[:many]))
    return Told(
        prompt=prompt,
        text=result.text,
        tokens=list(result.tokens[:many]),
        pieces=said[len(result.prompt_tokens) :],
        depths=list(result.depths[:many]),
        finish=result.finish,
    )


def _speed(model: FathomForCausalLM, sampling: Sampling) -> Speed:
    from fathomlm.decode.full import generate
    from fathomlm.model.route import DepthControl

    ways = {"routed": None, "full_depth": DepthControl(bias=EVERY_RECURSION)}
    best = dict.fromkeys(ways, 0.0)
    with layer_bar("     measuring", "texts") as tick:
        for turn in range(ROUNDS):
            for number, (name, control) in enumerate(ways.items(), start=1):
                result = generate(model, PROMPTS[:1], sampling, control=control, ignore_eos=True)[0]
                best[name] = max(best[name], result.tokens_per_second)
                tick(turn * len(ways) + number, ROUNDS * len(ways))
    ratio = best["routed"] / best["full_depth"] if best["full_depth"] else None
    return Speed(routed=best["routed"], full_depth=best["full_depth"], ratio=ratio)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
