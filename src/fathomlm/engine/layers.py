"""The model's layers over rows: one token each, of different sequences and recursions.

Three ways to run a layer that agree but for rounding. `fused` multiplies with packed weights in a few kernels made for few
rows (`fused_layers`), for layers with a norm before each half, and perhaps one behind it (Ouro); what a step adds to its
layer is merged into weights of its own. `quantized` runs layers of the first kind in one call on a CPU, where their weights
are integers. `blocks` runs the model's own modules, whatever their family, and asks only attention to look into pages.
Layers that attend to an encoder's output are `fused`, too, where every token has an entry for each of its steps.
On a CPU rows that stand for nothing are left out of every pass.

Shapes: N rows, M hidden width, D head width, H query heads, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fathomlm.depth import Step
from fathomlm.engine.fused_layers import FusedLayers
from fathomlm.engine.grouped import GroupedDelta
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages, StepKVPages, Windows
from fathomlm.engine.layout import Layout
from fathomlm.engine.row_positions import RowPositions
from fathomlm.engine.sources import Sources
from fathomlm.kernels.cpu_layers import CpuLayers, StepEntries, describe
from fathomlm.kernels.half import folded
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.row_linear import norm_linear
from fathomlm.model.blocks import Block, StepContext
from fathomlm.model.decoder import Decoder


class PagedLayers:
    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        pages: KVPages,
        max_length: int,
        *,
        own: Sequence[Step] = (),
        sources: Sources | None = None,
        fuse: bool | None = None,
        compiled: bool = False,
        alone: bool = False,
        merge: bool = True,
    ) -> None:
        """`max_length` is the most tokens of a sequence, `own` what exits run of their own, `sources` what an encoder made.
        `fuse` says how layers are run; by default fused where they can be and a GPU is there. `compiled` compiles what is
        not a layer. `alone`: passes have one row, whose sums may be rounded as one row's are; otherwise a row's never depend
        on how many there are. `merge`: fused layers may be relaxed, each step with merged weights of its own."""
        self.decoder, self.layout, self.pages, self.sources = decoder, layout, pages, sources
        self.architecture = decoder.architecture
        self.device, self.dtype = decoder.embed.weight.device, decoder.embed.weight.dtype
        wanted = self.device.type == "cuda" if fuse is None else fuse
        routed = decoder.plan.routing is not None
        merge = merge and not routed  # a routed model's rows of all recursions share a pass
        plain = wanted and not decoder.encodings and decoder.inject is None and not (routed and decoder.relative is not None)
        self.packed = decoder.pack_rows(own, merge=merge) if plain else {}
        self.fused = bool(self.packed)
        self.merged = self.fused and bool(decoder.deltas)
        """Rows of one pass then run the same steps: weights are a step's, not a layer's."""
        integers = pages.dtype == torch.float32 and decoder.inject is None
        self._quantized = decoder.cpu_layers if fuse is not False and integers else None
        self._described: dict[tuple[object, ...], Tensor] = {}
        self._places = RowPositions(decoder, layout, pages, max_length)
        self._bias_DH = None if decoder.relative is None else decoder.relative.by_distance().detach()
        self._norm = torch.compile(decoder.norm.forward, dynamic=False) if compiled else decoder.norm
        self._norm_some = torch.compile(self._norm_some_plain, dynamic=False) if compiled else self._norm_some_plain
        self._numbers = layout.prefix_numbers() if pages.prefix.end else {}
        self._numbers_R: dict[tuple[int, ...], Tensor] = {}
        for step in (step for step in decoder.plan if step.index in self._numbers):
            layer, delta = decoder.layer_of(step), decoder.delta(step)
            assert isinstance(layer, Block)
            with torch.no_grad():
                made = [each[0].transpose(0, 1).contiguous() for each in layer.attn.prefix_entries(delta)]
            pages.store_prefix(*layout.home(step), self._numbers[step.index], *made)
        self._draft_rows: Tensor | None = None
        self._fused = None if not self.fused else FusedLayers(
            decoder, self.packed, layout, pages, self._places, max_length, bias_DH=self._bias_DH, sources=sources,
            alone=alone, entering=self._entering,
        )  # fmt: skip
        self._grouped: dict[tuple[int, int | None], GroupedDelta | None] = {}

    def enter(self, tokens_N: Tensor) -> Tensor:
        return self.decoder.enter(tokens_N)

    @property
    def embeds_only(self) -> bool:
        """Whether a token enters as its row of the embedding and nothing else, which a kernel may look up."""
        return type(self.decoder.embed) is nn.Embedding and self.architecture.embedding_scale == 1.0

    def scores(self, x_NM: Tensor, exit_index: int | None = None) -> Tensor:
        """Over the vocabulary, in float32 at least: after the last step, or at an exit, from what its own layer made. A row
        that stands for nothing, and so came out of `run` as zeros, has none on a CPU: they are 0."""
        if self.device.type == "cpu" and not bool((live_N := x_NM.any(1)).all()):
            scores_NV = x_NM.new_zeros(len(x_NM), self.architecture.vocab, dtype=torch.float32)
            at_K = live_N.nonzero()[:, 0]
            return scores_NV.index_copy_(0, at_K, self._scores(x_NM[at_K], exit_index)) if len(at_K) else scores_NV
        return self._scores(x_NM, exit_index)

    def draft_scores(self, x_NM: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a draft layer's output scores, over the exit vocabulary alone, and the tokens of its columns, where those are
        not all."""
        limited, norm = self.decoder.exit_vocab, self.decoder.norm
        if limited is None:
            return self._scores(x_NM, None), None
        if not self.fused or not isinstance(norm, RMSNorm):
            return limited.few(self._norm(x_NM)).float(), limited.vocab_W
        if self._draft_rows is None:  # the norm goes into the weights: one product, and a draft may be rounded as it likes
            self._draft_rows = folded((limited.rows_WM,), norm.weight, norm.plus_one, self.dtype)
        return norm_linear(x_NM, self._draft_rows, norm.eps, out_dtype=torch.float32), limited.vocab_W

    def _scores(self, x_NM: Tensor, exit_index: int | None) -> Tensor:
        if exit_index is not None:
            return self.decoder.exit_logits(x_NM, exit_index, layered=True).float()
        hidden_NM = self._norm(x_NM)
        if not self.fused:
            return self.decoder.logits(hidden_NM).float()
        return norm_linear(hidden_NM, self.decoder.head_rows, 0.0, scale=False, out_dtype=torch.float32)

    def run(
        self,
        x_NM: Tensor,
        steps: Sequence[Step],
        attention: AttentionMetadata,
        positions_N: Tensor,
        recursion_N: Tensor | None = None,
        *,
        spend: bool = False,
        alone: bool = False,
    ) -> Tensor:
        """The stream after some steps. Rows at later uses of the same layers say in `recursion_N` how many recursions
        on; None where every row runs just these steps. `spend`: nobody needs `x_NM` afterwards. `alone`: a single row always
        comes alone to these steps, and may be rounded as one row is."""
        self._check(steps, attention)
        if self.sources is not None and steps:
            attention = replace(attention, source=self._source(self.sources, steps, attention, recursion_N))
        if self.device.type == "cpu" and 0 in (lengths := attention.lengths_N.tolist()):
            at_K = torch.tensor([row for row, length in enumerate(lengths) if length], dtype=torch.int64)
            return self._live(x_NM, at_K, steps, attention, positions_N, recursion_N)
        return self._run(x_NM, steps, attention, positions_N, recursion_N, spend, alone)

    def _run(
        self, x_NM: Tensor, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor,
        recursion_N: Tensor | None, spend: bool, alone: bool,
    ) -> Tensor:  # fmt: skip
        attention = self._places.place(steps, attention, positions_N, recursion_N)
        if (
            self._quantized is not None
            and self._integral(self._quantized, steps, attention, recursion_N)
            and self._quantized.takes(x_NM)
        ):
            return self._integers(
                self._quantized, x_NM if spend else x_NM.clone(), steps, attention, positions_N, recursion_N
            )
        if self._fused is not None:
            return self._fused.run(x_NM if spend else x_NM.clone(), steps, attention, positions_N, recursion_N, alone)
        seen = self._seen(steps, attention, positions_N, recursion_N)
        if self.decoder.inject is not None:
            return self._injected(x_NM, steps, seen, positions_N, recursion_N)
        for step, here in zip(steps, seen, strict=True):
            x_NM = self._block(self._entering(x_NM, step, recursion_N, here), step, here, positions_N, recursion_N)
        return x_NM

    def _seen(
        self, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor, recursion_N: Tensor | None
    ) -> list[AttentionMetadata]:
        """What rows look at, by step: behind its trained prefix, where it has one."""
        made: dict[tuple[int, ...], AttentionMetadata] = {}
        seen = []
        for step in steps:
            numbers = self._prefixes(step, recursion_N)
            if numbers not in made:
                behind = attention
                if numbers:
                    behind = self.pages.behind_prefix(self.layout.home(step)[0], attention, self._own(numbers, recursion_N))
                if self._bias_DH is not None and self._places.kept(step, recursion_N):
                    behind = replace(behind, back_NE=self._places.back(step, behind, positions_N))
                elif self.device.type == "cpu" and self.pages.dtype == self.dtype and attention.bits_N is None:
                    behind = behind.gathering(self.pages.page_size)
                made[numbers] = behind
            seen.append(made[numbers])
        return seen

    def _prefixes(self, step: Step, recursion_N: Tensor | None) -> tuple[int, ...]:
        """The numbers of the prefixes that rows at a step see, by recursion where these differ; empty without prefixes."""
        if not self._numbers or step.part == "exit":
            return ()
        numbers = tuple(self._numbers[use.index] for use in self._places.uses(step, recursion_N))
        return numbers if len(set(numbers)) > 1 else numbers[:1]

    def _own(self, numbers: tuple[int, ...], recursion_N: Tensor | None) -> Tensor | int:
        if len(numbers) == 1:
            return numbers[0]
        assert recursion_N is not None
        if numbers not in self._numbers_R:
            self._numbers_R[numbers] = torch.tensor(numbers, device=self.device)
        return self._numbers_R[numbers][recursion_N][:, None]

    def _source(
        self, sources: Sources, steps: Sequence[Step], attention: AttentionMetadata, recursion_N: Tensor | None
    ) -> AttentionMetadata:
        """What rows see of their sources: in the planes of the steps that they run."""
        plan, offset_N, planes = self.decoder.plan, None, 1
        if recursion_N is not None:
            offset_N, planes = recursion_N * plan.core_layers * self.pages.stride(0), len(plan.steps) - steps[-1].index
        seen = sources.seen(attention, offset_N, planes)
        if self.device.type == "cpu":
            self.pages.check(0, seen)
        return seen

    def _injected(
        self, x_NM: Tensor, steps: Sequence[Step], seen: Sequence[AttentionMetadata], positions_N: Tensor,
        recursion_N: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Loops that begin with an injection. Rows that run loops alone bring what is injected, the prelude's output, beside
        their state (N, 2M), and take it along."""
        plan, M = self.decoder.plan, self.architecture.hidden
        inject, wide = self.decoder.inject, x_NM.shape[1] > M
        assert inject is not None
        x_NM, beside_NM = (x_NM[:, :M], x_NM[:, M:]) if wide else (x_NM, None)
        for step, attention in zip(steps, seen, strict=True):
            if plan.begins_recursion(step):
                if beside_NM is None:
                    x_NM, beside_NM = torch.zeros_like(x_NM), x_NM
                entered_NM = self._entering(x_NM, step, recursion_N, attention)
                x_NM = inject(torch.cat((entered_NM, beside_NM), dim=-1))
            elif step.part == "coda" and plan.norms_before(step):
                x_NM = self.decoder.norm(x_NM)
            x_NM = self._block(x_NM, step, attention, positions_N, recursion_N)
        return torch.cat((x_NM, beside_NM), dim=-1) if wide and beside_NM is not None else x_NM

    def keep(self, x_NM: Tensor, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor) -> None:
        """Store what steps would make of the stream as keys and values; nothing else of them runs (state copying)."""
        self._check(steps, attention)
        entered, angles = False, self._places.angles(("all",), positions_N, None, attention.angles)
        for step in steps:
            if not entered and self._norms_between(step) and step.recursion:
                x_NM, entered = self._norm(x_NM), True
            if self._fused is not None:
                self._fused.keep(x_NM, step, attention, positions_N, angles)
                continue
            layer, context = self.decoder.layer_of(step), self._context(step, attention, positions_N, None)
            assert isinstance(layer, Block)
            layer.keep_entries(x_NM[:, None], context)

    def _check(self, steps: Sequence[Step], attention: AttentionMetadata) -> None:
        """Page numbers are the same for all steps of a pool: they are looked at once."""
        if self.device.type == "cpu":
            for pool in {self.layout.home(step)[0] for step in steps}:
                self.pages.check(pool, attention)

    def _live(
        self, x_NM: Tensor, at_K: Tensor, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor,
        recursion_N: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The same for the rows that see anything; the others come out as zeros."""
        out_NM = torch.zeros_like(x_NM)
        if not len(at_K):
            return out_NM
        recursion_K = None if recursion_N is None else recursion_N[at_K]
        return out_NM.index_copy_(
            0, at_K, self._run(x_NM[at_K], steps, attention.rows(at_K), positions_N[at_K], recursion_K, True, False)
        )

    # The model's own modules.

    def _block(
        self, x_NM: Tensor, step: Step, attention: AttentionMetadata, positions_N: Tensor, recursion_N: Tensor | None
    ) -> Tensor:
        decoder, plan = self.decoder, self.decoder.plan
        layer = decoder.layer_of(step)
        assert isinstance(layer, Block)
        out_NM: Tensor = layer(x_NM[:, None], self._context(step, attention, positions_N, recursion_N))[:, 0]
        if decoder.encodings and plan.is_last_of_recursion(step):
            if recursion_N is None:
                out_NM = out_NM * decoder.encodings[step.recursion]
            else:
                out_NM = out_NM * torch.stack(tuple(decoder.encodings))[step.recursion + recursion_N]
            out_NM = out_NM.to(x_NM.dtype)
        return out_NM

    def _norms_between(self, step: Step) -> bool:
        return self.decoder.plan.loop_norm and self.decoder.plan.begins_recursion(step)

    def _entering(self, x_NM: Tensor, step: Step, recursion_N: Tensor | None, attention: AttentionMetadata) -> Tensor:
        """The stream as a step reads it: through the final norm where it comes from the recursion before. Prompts come in
        any number of rows, for each of which a compiled norm would be compiled anew."""
        if not self._norms_between(step) or (recursion_N is None and step.recursion == 0):
            return x_NM
        prompts = attention.sequence_N is not None
        if recursion_N is None:
            entered_NM: Tensor = self.decoder.norm(x_NM) if prompts else self._norm(x_NM)
        else:
            norm_some = self._norm_some_plain if prompts else self._norm_some
            entered_NM = norm_some(x_NM, recursion_N, step.recursion)
        return entered_NM

    def _norm_some_plain(self, x_NM: Tensor, recursion_N: Tensor, first: int) -> Tensor:
        return torch.where((first + recursion_N > 0)[:, None], self.decoder.norm(x_NM), x_NM)

    def _context(
        self, step: Step, attention: AttentionMetadata, positions_N: Tensor, recursion_N: Tensor | None
    ) -> StepContext:
        decoder, plan = self.decoder, self.decoder.plan
        windows = self._places.windows(step, recursion_N)
        cos, sin = self._turns(step, attention, positions_N, recursion_N)
        mixed = recursion_N is not None and plan.is_shared(step)
        key = (step.layer, None) if mixed else (step.layer, step.index)
        if key not in self._grouped:
            uses = plan.uses(step.layer) if mixed else (step,)
            self._grouped[key] = GroupedDelta.build([decoder.delta(use) for use in uses])
        delta = self._grouped[key]
        if mixed and delta is not None:
            assert recursion_N is not None
            delta = delta.at(step.recursion + recursion_N)
        source = None
        if (read := attention.source) is not None:
            source = StepKVPages(*self.pages.at(0, step.index, read.planes), read, reads=True)
        pages = StepKVPages(
            *self.pages.at(*self.layout.home(step), attention.planes), attention, windows[0], attention.starts.get(windows),
            reads=plan.reads_kv(step), bias_DH=self._bias_DH, source=source,
        )  # fmt: skip
        return StepContext(cos, sin, None, False, None, None, delta, pages=pages)

    # Integers, on a CPU.

    def _integers(
        self, layers: CpuLayers, x_NM: Tensor, steps: Sequence[Step], attention: AttentionMetadata, positions_N: Tensor,
        recursion_N: Tensor | None,
    ) -> Tensor:  # fmt: skip
        cos_ND, sin_ND = self._places.angles(("all",), positions_N, None)
        starting = tuple(attention.starts)
        starts_KN = torch.stack([attention.starts[windows] for windows in starting]) if starting else None
        where = attention.slot_mapping_N, attention.table_NP.contiguous(), attention.lengths_N, starts_KN
        starts = [number for number, step in enumerate(steps) if self._norms_between(step)]
        for begin, end in zip((0, *starts), (*starts, len(steps)), strict=True):
            if begin == end:
                continue
            x_NM = self._entering(x_NM, steps[begin], recursion_N, attention)
            described = self._steps_of(steps[begin:end], attention.planes, starting, recursion_N)
            x_NM = layers.run(x_NM, described, cos_ND, sin_ND, *where)
        return x_NM

    def _integral(
        self, layers: CpuLayers, steps: Sequence[Step], attention: AttentionMetadata, recursion_N: Tensor | None
    ) -> bool:
        """Whether steps run in integers: their layers are there, and rows of a step turn alike."""
        if attention.bits_N is not None:
            return False
        return all(step.layer < len(layers) and len(self._places.turns(step, recursion_N)) == 1 for step in steps)

    def _steps_of(
        self, steps: Sequence[Step], planes: int, starts: tuple[Windows, ...], recursion_N: Tensor | None
    ) -> Tensor:
        """Pages stay where they are, so steps are described once. `starts`: the windows whose first entries are given."""
        key = (planes, starts, recursion_N is not None, *(step.index for step in steps))
        if key not in self._described:
            plan, described = self.decoder.plan, []
            for step in steps:
                windows = self._places.windows(step, recursion_N)
                described.append(
                    StepEntries.over(
                        step.layer, *self.pages.at(*self.layout.home(step), planes), (0, 1, 2), windows[0],
                        plan.reads_kv(step), self._places.turns(step, recursion_N) == ("all",),
                        starts.index(windows) if windows in starts else None,
                    )
                )  # fmt: skip
            self._described[key] = describe(described)
        return self._described[key]

    def row_angles(self) -> tuple[Tensor, ...]:
        """The same, where kernels want them: looked up with all else that a decode step begins with, not in passes."""
        return self.angle_tables() if self.fused else ()

    def angle_tables(self) -> tuple[Tensor, ...]:
        """Cosines and sines of every position, (P, D) each."""
        return self._places.tables()

    def _turns(
        self, step: Step, attention: AttentionMetadata, positions_N: Tensor, recursion_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Angles as blocks take them, (N, 1, 1, D) each; on a CPU looked up once in a pass."""
        known = {} if attention.gathered is None else attention.gathered.turns
        turns = self._places.turns(step, recursion_N)
        if turns not in known:
            cos_ND, sin_ND = self._places.angles(turns, positions_N, recursion_N)
            known[turns] = cos_ND[:, None, None], sin_ND[:, None, None]
        return known[turns]
