"""Routing written out with loops over rows, tokens and recursions: what the package's walks are held against.

Layers are the decoder's own; who goes on, who sees whom and what becomes of the stream is said here once more, from the
method's rules, without `RoutedWalk`, its masks or its caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fathomlm.depth import Step
from fathomlm.kernels.rope import rope_table
from fathomlm.model.blocks import StepContext
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import draw

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "identity": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
}  # fmt: skip


class Entries:
    """One row's keys and values, by step and slot, each (G, D)."""

    def __init__(self, decoder: Decoder) -> None:
        self.plan = decoder.plan
        self.made: dict[int, dict[int, tuple[Tensor, Tensor]]] = {step.index: {} for step in decoder.plan}

    def seen_by(self, step: Step) -> dict[int, tuple[Tensor, Tensor]]:
        if step.part != "core" or self.plan.kv == "cache":
            return self.made[step.index]
        first = next(other for other in self.plan if other.layer == step.layer)
        return self.made[first.index] if self.plan.kv == "share" else self.made[first.index] | self.made[step.index]


class Writer:
    """Takes a step's new entries in, and shows it what it may look at."""

    stores = True

    def __init__(self, entries: Entries, step: Step, slots: list[int]) -> None:
        self.entries, self.step, self.slots = entries, step, slots

    def append(self, k_1GND: Tensor, v_1GND: Tensor) -> tuple[Tensor, Tensor]:
        for i, slot in enumerate(self.slots):
            self.entries.made[self.step.index][slot] = (k_1GND[0, :, i], v_1GND[0, :, i])
        return stacked(self.entries.seen_by(self.step))

    def prefix(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return make()


def stacked(entries: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    order = sorted(entries)
    return torch.stack([entries[s][0] for s in order], 1)[None], torch.stack([entries[s][1] for s in order], 1)[None]


def run_steps(
    decoder: Decoder, steps: list[Step], stream: dict[int, Tensor], slots: list[int], first: int, held: Entries,
    documents: list[int] | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """Some slots of one row through some steps; `first` is the row's first real slot. Gives f of each slot's state."""
    if not slots:
        return {}
    x = torch.stack([stream[s] for s in slots])[None]
    for step in steps:
        shares = step.part == "core" and step.recursion > 0 and decoder.plan.kv == "share"
        window = decoder.architecture.window(step.origin)
        keys = sorted(set(held.seen_by(step)) | (set() if shares else set(slots)))
        mask = torch.zeros(1, 1, len(slots), len(keys), dtype=torch.bool)
        for i, query in enumerate(slots):
            for j, key in enumerate(keys):
                near = window is None or key > query - window
                together = documents is None or documents[key] == documents[query]
                mask[0, 0, i, j] = key <= query and near and together
        positions = torch.tensor([[s - first for s in slots]])
        cos, sin = rope_table(decoder.architecture.rope, decoder.architecture.rotary_dim, positions, x.dtype)
        writer = None if shares else Writer(held, step, slots)
        reads = stacked(held.seen_by(step)) if shares else None
        x = decoder.layers[step.layer](x, StepContext(cos, sin, mask, False, writer, reads, decoder.delta(step)))
    return {slot: x[0, i] for i, slot in enumerate(slots)}


def part(decoder: Decoder, name: str) -> list[Step]:
    return [step for step in decoder.plan if step.part == name]


def core(decoder: Decoder, recursion: int) -> list[Step]:
    return [step for step in decoder.plan if step.part == "core" and step.recursion == recursion]


def drawn(token: int, position: int, recursion: int) -> float:
    return float(draw(torch.tensor([position + 1_000_003 * token]), recursion))


def slow_top_k(
    decoder: Decoder, tokens: list[int], pads: int = 0, kept: list[int] | None = None, documents: list[int] | None = None,
    per_document: bool = False,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Expert-choice training over one row: the stream after the last step and each slot's depth. `pads` empty slots come
    first. `kept` is how many tokens each recursion keeps; `per_document` gives each document its own part."""
    routing, T = decoder.plan.routing, len(tokens)
    assert routing is not None
    kept = [max(1, int(c * (T - pads) + 1e-9)) for c in routing.capacity] if kept is None else kept
    real = list(range(pads, T))
    held, depths = Entries(decoder), [0] * T
    stream = {t: decoder.embed.weight[tokens[t]] for t in real}
    if prelude := part(decoder, "prelude"):
        stream = run_steps(decoder, prelude, stream, real, pads, held, documents)
    alive = real
    for recursion in range(decoder.plan.recursions):
        logits = {t: decoder.routers.main[recursion](stream[t][None, None])[0, 0, 0] for t in alive}
        rank = {t: drawn(tokens[t], t - pads, recursion) for t in alive}
        rank = rank if routing.random else {t: float(logits[t].detach()) for t in alive}
        best = sorted(alive, key=lambda t: -rank[t])
        if per_document:
            quota = {d: int(routing.capacity[recursion] * documents.count(d) + 1e-9) for d in set(documents)}
            best = [t for d in quota for t in [t for t in best if documents[t] == d][: quota[d]]]
        alive = sorted(best if per_document else best[: kept[recursion]])
        out = run_steps(decoder, core(decoder, recursion), stream, alive, pads, held, documents)
        for t in alive:
            weight = routing.alpha * SCORES[routing.score](logits[t])
            stream[t] = stream[t] + weight * (out[t] if routing.update == "add" else out[t] - stream[t])
            depths[t] += 1
    if coda := part(decoder, "coda"):
        stream = run_steps(decoder, coda, stream, real, pads, held, documents)
    return torch.stack([stream[t] for t in real]), depths


def slow_causal(decoder: Decoder, tokens: list[int], max_depth: int | None = None) -> tuple[Tensor, list[int]]:
    """Routed inference, one token after the other: the stream after the last step and each token's depth."""
    routing = decoder.plan.routing
    assert routing is not None
    held, depths, rows = Entries(decoder), [], []
    deepest = decoder.plan.recursions if max_depth is None else max_depth
    for t, token in enumerate(tokens):
        x = decoder.embed.weight[token]
        if prelude := part(decoder, "prelude"):
            x = run_steps(decoder, prelude, {t: x}, [t], 0, held)[t]
        if routing.kind == "expert":
            x, depth = _expert(decoder, x, t, token, held, deepest)
        else:
            x, depth = _token(decoder, x, t, token, held, deepest)
        if coda := part(decoder, "coda"):
            x = run_steps(decoder, coda, {t: x}, [t], 0, held)[t]
        rows.append(x)
        depths.append(depth)
    return torch.stack(rows), depths


def _expert(decoder: Decoder, x: Tensor, t: int, token: int, held: Entries, deepest: int) -> tuple[Tensor, int]:
    routing = decoder.plan.routing
    before = 1.0
    for recursion in range(deepest):
        logit = decoder.routers.main[recursion](x[None, None])[0, 0, 0]
        judge = logit
        if routing.sampling == "aux_router":
            judge = decoder.routers.aux[recursion](x[None, None])[0, 0, 0]
        capacity = routing.capacity[recursion]
        if routing.random:
            goes = drawn(token, t, recursion) >= 1 - capacity / before
        else:
            goes = bool(SCORES[routing.score](judge) >= (0.5 if routing.score == "sigmoid" else 0.0))
        before = capacity
        if capacity < 1 and not goes:
            return x, recursion
        out = run_steps(decoder, core(decoder, recursion), {t: x}, [t], 0, held)[t]
        weight = routing.alpha * SCORES[routing.score](logit)
        x = x + weight * (out if routing.update == "add" else out - x)
    return x, deepest


def _token(decoder: Decoder, x: Tensor, t: int, token: int, held: Entries, deepest: int) -> tuple[Tensor, int]:
    """weighting "every": H <- g f(H), and H <- g f(H) + H^1 at the end. "last": f alone, and H^1 + g f(H) at the end."""
    routing, first = decoder.plan.routing, x
    scores = SCORES[routing.score](decoder.routers.main[0](x[None, None])[0, 0])
    ranked = scores if decoder.routers.bias is None else scores + decoder.routers.bias
    chosen = int(drawn(token, t, 0) * routing.recursions) if routing.random else int(ranked.argmax())
    depth = min(chosen + 1, deepest)
    for recursion in range(depth):
        out = run_steps(decoder, core(decoder, recursion), {t: x}, [t], 0, held)[t]
        last = recursion == depth - 1
        weight = routing.alpha * scores[recursion]
        x = weight * out if routing.weighting == "every" or last else out
        x = x + first if last else x
    return x, depth
