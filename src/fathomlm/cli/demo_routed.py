"""`fathomlm demo` of a routed model: completions with every token at its depth (thesis 4.6.2), and the cost of depth.

A token's depth is how many recursions ran at the position that chose it. On a terminal that has colors each token has its
depth's; elsewhere a raised number stands behind each token.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathomlm.checkpoints.locate import locate
from fathomlm.checkpoints.native import directory_bytes
from fathomlm.checkpoints.resolve import decoder_only, describe, load
from fathomlm.cli.common import QuantizeOptions
from fathomlm.cli.display import command_note, label, log, output_console, pieces, progress_bar, token_text, visible
from fathomlm.decode.generation import Generation
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.depth.cost import count
from fathomlm.engine.session import decoder_for
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from fathomlm.packaged import packaged_models
from fathomlm.sizes import amount

PROMPTS = (
    "Cells divide in order to",
    "In the middle of the nineteenth century,",
    '"I do not believe you," said the old man,',
)
CHOICE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "seed": 1}
"""Warm enough not to repeat itself, cool enough to read well; seeded, so that everyone sees the same completions."""
EXAMPLES = 8
ROUNDS = 5
"""How often both speeds are measured, one right after the other and each first in turn, so that whatever slows the machine
slows both. A ratio is of two neighbours; the median counts, and all of them tell how far to believe it."""
TIMED = 24
"""Tokens of each measurement, at most."""
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
EVERY_RECURSION = 1e6
"""A depth bias that no router's score outweighs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCompletion:
    """One prompt and what came of it, the end token left out."""

    prompt: str
    text: str
    tokens: list[int]
    pieces: list[str]
    """What each token adds to the text."""
    depths: list[int]
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCount:
    """How often a depth was used, and for which tokens."""

    depth: int
    tokens: int
    share: float
    examples: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens a second while decoding at batch size 1, as routed and with every recursion for every token: medians."""

    routed: float
    full_depth: float
    ratio: float | None
    """How many times as fast as at full depth; None where a text was too short to tell."""
    ratios: list[float]
    """Those of all rounds, lowest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
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
    depths: list[DepthCount]
    tokens_per_second: Speed
    texts: list[DemoCompletion]
    seconds: float
    sampling: dict[str, Any] = field(default_factory=lambda: dict(CHOICE))


def run_routed(source: str, tokens: int, *, as_json: bool, reference: bool = False) -> int:
    """The demo of a model with a router."""
    figures = measure(source, tokens, time.perf_counter(), reference)
    if as_json:
        print(json.dumps(asdict(figures)))
        return 0

    show(figures, output_console())
    return 0


def measure(source: str, tokens: int, begin: float, reference: bool) -> DemoFigures:
    path = locate(source)
    log(f"1/3  {source}: {path}")
    model = decoder_only(load(path, dtype="float32", quantize=QuantizeOptions().quantized(source)), "the demo")
    sampling = Sampling(max_new_tokens=tokens, **CHOICE)
    log(f"2/3  {len(PROMPTS)} completions of at most {tokens} tokens")
    with progress_bar("     writing", "tokens") as update:
        decode = decoder_for(model, sequences=len(PROMPTS), reference=reference)
        results = decode(PROMPTS, sampling, on_step=lambda done: update(done, tokens))
    texts = [_completion(model, prompt, result) for prompt, result in zip(PROMPTS, results, strict=True)]
    timed = min(tokens, TIMED)
    log(f"3/3  the speed of {timed} tokens, as routed and at full depth by turns, {ROUNDS} times")
    speed = _speed(model, sampling.with_options(max_new_tokens=timed, ignore_eos=True), reference)
    cost = count(model.architecture, model.plan, relaxation=model.relaxation)
    depths = [depth for text in texts for depth in text.depths]
    return DemoFigures(
        model=source,
        plan=describe(model),
        parameters=cost.parameters,
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


def depth_uses(model: FathomForCausalLM, texts: Sequence[DemoCompletion]) -> list[DepthCount]:
    """Each depth's tokens. Examples of a depth are tokens that went there more often than anywhere else."""
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
            DepthCount(depth=depth, tokens=used[depth], share=share, examples=[text for _, text in ranked[:EXAMPLES]])
        )
    return found


def _completion(model: FathomForCausalLM, prompt: str, result: Generation) -> DemoCompletion:
    assert result.depths is not None
    many = len(result.tokens) - (result.finish == "eos")
    strings = pieces(model.tokenizer, (*result.prompt_tokens, *result.tokens[:many]))
    return DemoCompletion(
        prompt=prompt,
        text=result.text,
        tokens=list(result.tokens[:many]),
        pieces=strings[len(result.prompt_tokens) :],
        depths=list(result.depths[:many]),
        finish=result.finish,
    )


def _speed(model: FathomForCausalLM, sampling: Sampling, reference: bool) -> Speed:
    controls = {"routed": None, "full_depth": DepthControl(bias=EVERY_RECURSION)}
    ways = {name: decoder_for(model, control, reference=reference) for name, control in controls.items()}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    with progress_bar("     measuring", "rounds") as update:
        for turn in range(ROUNDS):
            for name in sorted(ways, reverse=turn % 2 == 1):
                (result,) = ways[name](PROMPTS[:1], sampling)
                speeds[name].append(result.tokens_per_second)
            update(turn + 1, ROUNDS)
    pairs = zip(speeds["routed"], speeds["full_depth"], strict=True)
    ratios = sorted(routed / full for routed, full in pairs if full)
    routed, full = (median(speeds[name]) for name in ways)
    return Speed(routed=routed, full_depth=full, ratio=median(ratios) if ratios else None, ratios=ratios)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def show(figures: DemoFigures, console: Console) -> None:
    colourful = console.is_terminal and not console.no_color and console.color_system is not None
    styles = [f"{ink(colour)} on {colour}" for colour in depth_colours(figures.recursions)] if colourful else None
    size = f"{amount(figures.parameters)} parameters, {amount(figures.disk_bytes, 'B')} on disk"
    _print(console, Text(f"{figures.model}: {figures.plan}, {size}"))
    _print(console, _legend(figures, styles))
    for text in figures.texts:
        _print(console, Text("\n") + _coloured(text, styles))
    console.print(_table(figures, styles))
    _print(console, Text(_figures(figures)))
    # Not broken into lines, even on a narrow terminal: commands are there to be copied.
    console.print(Text(f"\n{figures.seconds:.0f} s in all. Try next:\n{_next_commands(figures.model)}"), soft_wrap=True)


def _figures(figures: DemoFigures) -> str:
    speed = figures.tokens_per_second
    saved = 1 - figures.layers_per_token / figures.layers
    layers = f"{figures.layers_per_token:.1f} of {figures.layers} layers a token, {saved:.0%} saved"
    return (
        f"mean depth {figures.mean_depth:.2f} of {figures.recursions}: {layers}\n"
        f"tokens/s, batch size 1, this CPU: {speed.routed:.1f} as routed, {speed.full_depth:.1f} at full depth"
        + _against(speed)
    )


def _against(speed: Speed) -> str:
    """The ratio where every round agrees which is faster; elsewhere the machine was too busy, or both are as fast."""
    if speed.ratio is None:
        return ""
    low, high = speed.ratios[0], speed.ratios[-1]
    if low < 1 < high:
        return f"; which is faster differs between rounds ({low:.2f}x to {high:.2f}x)"
    return f": {speed.ratio:.2f}x ({low:.2f}x to {high:.2f}x in {len(speed.ratios)} rounds)"


def _next_commands(model: str) -> str:
    served = "" if model in packaged_models()[:1] else f" {model}"
    return (
        f"  fathomlm serve{served}      # a page that colors your own prompts\n"
        f"  fathomlm generate {model} -p 'The sea' --temperature 0.7 --top-p 0.9 --stream\n"
        f"  fathomlm generate {model} -p 'The sea' --max-depth 1      # one recursion for every token\n"
        f"  fathomlm analyze routing {model} --data packaged:docs/generation.md      # how well the routers decide\n"
        "  fathomlm demo smollm2-135m      # a plain model made recursive" + command_note()
    )


def _print(console: Console, text: Text) -> None:
    """Lines are broken for a terminal only; a pipe gets them whole."""
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)


def _legend(figures: DemoFigures, styles: Sequence[str] | None) -> Text:
    if styles is None:
        return Text(
            "The raised number behind a token is its depth: the recursions that ran to choose it. Prompts have none."
        )
    chips = [part for use in figures.depths for part in ((f" {use.depth} ", styles[use.depth]), " ")]
    return Text.assemble("Colours are depths: ", *chips, "recursions that ran to choose a token. Prompts have none.")


def _coloured(completion: DemoCompletion, styles: Sequence[str] | None) -> Text:
    text = Text.assemble((completion.prompt, "" if styles is None else "dim"))
    for piece, depth in zip(completion.pieces, completion.depths, strict=True):
        seen = visible(piece)
        if styles is not None:
            text.append(seen, style=styles[depth])
            continue
        body = seen.removesuffix("\n")
        text.append(body + "".join(RAISED[int(digit)] for digit in str(depth)) + seen[len(body) :])
    return text


def _table(figures: DemoFigures, styles: Sequence[str] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("depth", "tokens", "share"):
        table.add_column(name, justify="right")
    table.add_column("such as", overflow="fold")
    for use in figures.depths:
        number = Text(f" {use.depth} ", style="" if styles is None else styles[use.depth])
        table.add_row(number, str(use.tokens), f"{use.share:.0%}", Text("  ".join(use.examples)))
    return table
