"""Hidden states, keys and values from step to step: how large they are, and how alike (thesis 4, appendix "Key Value
Representation Trends in Recursive Transformers"). It is why sharing keys and values between recursions costs so little:
a tied projection makes nearly the same ones again.

Hidden states are the layers' outputs, and the final norm's as a last row, as in the thesis. Keys are taken before rotation:
a rotation turns the keys of a token alike at every step, so it moves neither their lengths nor the angles between them
where all steps rotate alike, and would hide how alike keys are where steps do not (Gemma 3's windows). Per-head norms are
applied. Heads are laid side by side, so a key is one vector.

Keys and values are made again from what enters a layer's attention, by the step's own rule: a hook on the shared linears
would not see what a relaxation adds, and with DoRA would not be called at all.

A routed model runs causally, where every recursion is computed for every token and a mask discards what should not have
run. What was discarded is not counted here either: a token that has stopped enters the next recursion unchanged, and would
make its steps look alike. A mean over two steps is over the tokens that ran both. A step that reads another's entries
(kv mode share) shows those, and is marked.

Shapes: S steps (one more for hidden states), T tokens of a row, W width of a vector, P buckets of positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fathomlm.depth import DepthPlan
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.token_rows import TokenRows
from fathomlm.model.blocks import Block, StepContext
from fathomlm.model.blocks.attention import Attention
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import RoutingTrace

BUCKETS = 16
_CHUNK = 256
"""Tokens whose vectors of all steps are held in float32 at once."""

Grid = list[list[float | None]]
"""Rows of numbers; None where no token was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """What a row of the maps is."""

    name: str
    """From 1, as "7"; "norm" is the final norm's output."""
    recursion: int | None
    """From 1; None in prelude, coda and norm."""
    layer: int | None
    """From 1."""
    reads: int | None
    """The step, from 1, whose keys and values it reads; None where they are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMaps:
    """One kind of vectors over all steps."""

    steps: list[StepNote]
    magnitude: list[float | None]
    """The mean L2 norm at each step."""
    by_position: Grid
    """The same by step and bucket of positions."""
    cosine: Grid
    """The mean cosine between the same token's vectors at two steps."""
    tied: float | None
    """The mean cosine of steps that run the same layer; None where none do, or all of them read the same entries."""
    untied: float | None
    """The mean cosine of steps that run different layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVNumbers:
    rows: int
    context: int
    buckets: list[int]
    """The first position of each bucket."""
    borders: list[int]
    """Steps before which a recursion begins or the core ends."""
    running: list[float]
    """The part of the tokens that ran each step."""
    hidden: StateMaps
    key: StateMaps
    value: StateMaps

    def states(self) -> dict[str, StateMaps]:
        return {"hidden": self.hidden, "key": self.key, "value": self.value}

    def summary(self) -> dict[str, Any]:
        """Without the maps."""
        record = {"rows": self.rows, "context": self.context, "steps": len(self.running)}
        return record | {
            kind: {"magnitude": states.magnitude, "tied": states.tied, "untied": states.untied}
            for kind, states in self.states().items()
        }


@torch.inference_mode()
def measure(model: FathomForCausalLM, rows: TokenRows, *, on_rows: OnProgress = unwatched) -> KVNumbers:
    """Run each row, and add up what its steps made. `on_rows` is called with (done, total)."""
    decoder, plan = model.decoder, model.plan
    device = decoder.embed.weight.device
    T, S = rows.context, plan.unrolled_layers
    P = min(BUCKETS, T)
    bucket_T = torch.arange(T, device=device) * P // T
    sums = {"hidden": _KVSums(S + 1, P, device), "key": _KVSums(S, P, device), "value": _KVSums(S, P, device)}
    ran = torch.zeros(S, dtype=torch.float64, device=device)
    for done, tokens_T in enumerate(rows.tokens_NT, start=1):
        trace = None if plan.routing is None else RoutingTrace()
        with _recording(decoder) as seen:
            final_TM = decoder(tokens_T[None].to(device), trace=trace)[0]
        assert len(seen.hidden) == S, "each step calls its layer once"
        ran_ST = _ran(plan, trace, T, device)
        ran += ran_ST.sum(1)
        everyone = torch.ones(1, T, dtype=torch.bool, device=device)
        sums["hidden"].add([*seen.hidden, final_TM], torch.cat((ran_ST, everyone)), bucket_T)
        sources = [plan.kv_sources[step.index] if plan.reads_kv(step) else step.index for step in plan]
        for kind, made in (("key", seen.keys), ("value", seen.values)):
            sums[kind].add([_own(made[source]) for source in sources], ran_ST[sources], bucket_T)
        on_rows(done, len(rows))
    notes = _notes(plan)
    last = StepNote(name="norm", recursion=None, layer=None, reads=None)
    return KVNumbers(
        rows=len(rows),
        context=T,
        buckets=[-(-bucket * T // P) for bucket in range(P)],
        borders=_borders(plan),
        running=(ran / (len(rows) * T)).tolist(),
        hidden=sums["hidden"].read([*(dataclasses.replace(note, reads=None) for note in notes), last]),
        key=sums["key"].read(notes),
        value=sums["value"].read(notes),
    )


@dataclass(slots=True)
class _Seen:
    """What one pass over one row made, a tensor (T, W) a step."""

    hidden: list[Tensor] = field(default_factory=list)
    keys: list[Tensor | None] = field(default_factory=list)
    """None where a step reads another's."""
    values: list[Tensor | None] = field(default_factory=list)


@contextmanager
def _recording(decoder: Decoder) -> Iterator[_Seen]:
    """Watch every layer: a tied one is called several times, and the calls come in the order of the steps."""
    seen = _Seen()

    def note_entries(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
        x_BTM, step = arguments
        assert isinstance(attention, Attention)
        assert isinstance(step, StepContext)
        key, value = (None, None) if step.reads is not None else _entries(attention, x_BTM, step)
        seen.keys.append(key)
        seen.values.append(value)

    def note_output(layer: nn.Module, arguments: tuple[Any, ...], out_BTM: Tensor) -> None:
        seen.hidden.append(out_BTM[0])

    handles = []
    for layer in decoder.layers:
        assert isinstance(layer, Block)
        handles.append(layer.attn.register_forward_pre_hook(note_entries))
        handles.append(layer.register_forward_hook(note_output))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _entries(attention: Attention, x_BTM: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
    """The keys and values that a step makes of its input, (T, W), the keys not rotated."""
    key, value = step.project("k", attention.k, x_BTM), step.project("v", attention.v, x_BTM)
    if attention.k_norm is not None:
        heads = key.view(*key.shape[:-1], -1, attention.head_dim)
        key = step.norm("attn.k_norm", attention.k_norm, heads).flatten(-2)
    return key[0], value[0]


def _own(entries: Tensor | None) -> Tensor:
    assert entries is not None, "a step reads one that has made entries"
    return entries


def _ran(plan: DepthPlan, trace: RoutingTrace | None, T: int, device: torch.device) -> Tensor:
    """Which tokens of the row ran each step, (S, T)."""
    if trace is None:
        return torch.ones(plan.unrolled_layers, T, dtype=torch.bool, device=device)
    assert trace.depths_BT is not None
    depths_T = trace.depths_BT[0]
    return torch.stack([depths_T > step.recursion if step.part == "core" else depths_T >= 0 for step in plan])


class _KVSums:
    """Adds up lengths and cosines of one kind over rows."""

    def __init__(self, S: int, P: int, device: torch.device) -> None:
        self._lengths_SP, self._counts_SP = (torch.zeros(S, P, dtype=torch.float64, device=device) for _ in range(2))
        self._cosines_SS, self._pairs_SS = (torch.zeros(S, S, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, vectors: Sequence[Tensor], ran_ST: Tensor, bucket_T: Tensor) -> None:
        T = len(bucket_T)
        for at in range(0, T, _CHUNK):
            part = slice(at, min(at + _CHUNK, T))
            x_STW = torch.stack([vector[part] for vector in vectors]).float()
            ran, bucket = ran_ST[:, part].double(), bucket_T[part]
            length_ST = torch.linalg.vector_norm(x_STW, dim=-1)
            self._lengths_SP.index_add_(1, bucket, length_ST.double() * ran)
            self._counts_SP.index_add_(1, bucket, ran)
            unit_SV = (x_STW / length_ST.clamp_min(1e-30)[..., None] * ran[..., None].float()).flatten(1)
            self._cosines_SS += (unit_SV @ unit_SV.T).double()
            self._pairs_SS += ran @ ran.T

    def read(self, notes: list[StepNote]) -> StateMaps:
        cosine = _grid(self._cosines_SS / self._pairs_SS)
        tied, untied = _tied(cosine, notes)
        return StateMaps(
            steps=notes,
            magnitude=_grid((self._lengths_SP.sum(1) / self._counts_SP.sum(1))[None])[0],
            by_position=_grid(self._lengths_SP / self._counts_SP),
            cosine=cosine,
            tied=tied,
            untied=untied,
        )


def _tied(cosine: Grid, notes: Sequence[StepNote]) -> tuple[float | None, float | None]:
    """Mean cosines between different steps of one layer, and between steps of different layers; steps with nothing of
    their own are left out."""
    own = [i for i, note in enumerate(notes) if note.reads is None and note.layer is not None]
    groups: dict[bool, list[float]] = {True: [], False: []}
    for i in own:
        for j in own:
            value = cosine[i][j]
            if i < j and value is not None:
                groups[notes[i].layer == notes[j].layer].append(value)
    tied, untied = (sum(group) / len(group) if group else None for group in (groups[True], groups[False]))
    return tied, untied


def _notes(plan: DepthPlan) -> list[StepNote]:
    return [
        StepNote(
            name=str(step.index + 1),
            recursion=step.recursion + 1 if step.part == "core" and plan.recursions > 1 else None,
            layer=step.layer + 1,
            reads=plan.kv_sources[step.index] + 1 if plan.reads_kv(step) else None,
        )
        for step in plan
    ]


def _borders(plan: DepthPlan) -> list[int]:
    """Where a pass through the core begins or ends, by the index of the step behind it."""
    if plan.recursions == 1 or not plan.whole_passes:
        return []
    pairs = zip(plan.steps, plan.steps[1:], strict=False)
    return [after.index for step, after in pairs if (step.part, step.recursion) != (after.part, after.recursion)]


def _grid(values: Tensor) -> Grid:
    return [[value if math.isfinite(value) else None for value in row] for row in values.tolist()]
