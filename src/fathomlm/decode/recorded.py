"""Steps of fixed shape for one row, recorded once and replayed (a CUDA graph; on a CPU they are simply run).

    shallow       one token up to the exit, and through the exit's own layer where it has one: its choice, how sure it is,
                  its state on the stack
    deep, k       what waits on the stack through the layers behind the exit, all at once
    cycle         as many tokens as the stack holds up to the exit, one after the other, and then all through the layers
                  behind it: drafts and their judgement, with nothing to ask the host in between
    full          one token through all layers; static: up to the exit
    segment, i    one token from exit i - 1 to exit i, or to the end: its choice there, and how sure it is
    copy, i       keys and values of the layers behind exit i from the state that left there

Token, slot and stack are tensors that the recorded work itself moves on, so between two steps the host only reads a choice
and a confidence, and chooses the next step.

Shapes: N tokens of a pass, K places on the stack, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fathomlm.cache.static import StaticCache
from fathomlm.decode.captured_ops import added_masks, clear, judge, move_on, push, refill, room_for, settle
from fathomlm.depth import Step
from fathomlm.kernels.best_token import best_and_gap
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory

ALIGNED = 16
"""Slots come in multiples of this many, or attention would copy the mask at every layer to align its rows."""
WARM_UPS = 3
"""Runs of a step before it is recorded: kernels are chosen and compiled in them."""


class RecordedSteps:
    """The work of one decoder with its exits, for rows of at most `length` tokens."""

    def __init__(
        self,
        decoder: Decoder,
        length: int,
        exit_layers: tuple[int, ...],
        max_stack: int,
        compile: bool,
        pack: bool,
        source: int | None,
    ) -> None:
        self.decoder = decoder
        self.exit_layers = exit_layers
        self.length, self.max_stack = length, max_stack
        self.source = source
        steps = decoder.plan.steps
        self.layers = len(steps)
        first = exit_layers[0] if exit_layers else self.layers
        self._shallow, self._deep = steps[:first], steps[first:]
        weight = decoder.embed.weight
        self._device, self._dtype = weight.device, weight.dtype
        length += max_stack if exit_layers else 0  # drafts of a cycle may go beyond the end of the text
        length = -(-(length + 1) // ALIGNED) * ALIGNED - 1  # and the scratch slot
        exits = tuple(layer - 1 for layer in exit_layers)
        self._own = decoder.plan.exit_steps(exits)
        self.cache = StaticCache(decoder.architecture, decoder.plan, length, self._device, self._dtype, exits)
        self._keys_1S = torch.arange(length + 1, device=self._device)[None]
        self._memory = room_for(source, decoder) if source is not None else None
        rows = TokenBatch(positions_BT=self._keys_1S, keep_BS=None, documents_BT=None, past=0)
        self._rows = decoder.equipped(rows, self._memory)
        # What the recorded work moves on. The stack's spare places point at the scratch slot.
        self._choice, self._slot, self._count = (self._zeros(1) for _ in range(3))
        self._states_KM = torch.zeros(max_stack, decoder.architecture.hidden, device=self._device, dtype=self._dtype)
        self._slots_K, self._deep_choices_K = self._zeros(max_stack), self._zeros(max_stack)
        self._result_2 = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._drafts_K2 = torch.zeros(max_stack, 2, dtype=torch.float64, device=self._device)
        self._results_3K = torch.zeros(3, max_stack, dtype=torch.float64, device=self._device)
        pinned = self._device.type == "cuda"
        self._host_result_2 = torch.zeros(2, dtype=torch.float64, pin_memory=pinned)
        self._host_results_3K = torch.zeros(3, max_stack, dtype=torch.float64, pin_memory=pinned)
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._recorded: dict[tuple[str, int, bool], Callable[[], None]] = {}
        self._pool: Any = None
        # Weights of one byte are read as they are, through the layers' linears.
        self._packed = decoder.pack_layers(self._own) if pack and decoder.quantized is None else None
        self._build_masks: Callable[..., AttentionMasks] = added_masks
        self._move_on, self._push, self._clear, self._judge = move_on, push, clear, judge
        if compile:
            decoder.compile_layers()
            self._build_masks = torch.compile(added_masks, dynamic=False)
            moves = (move_on, push, clear, judge)
            self._move_on, self._push, self._clear, self._judge = (torch.compile(f, dynamic=False) for f in moves)

    def set_memory(self, memory: EncoderMemory) -> None:
        """Set the encoder's output, of one row, for the recorded steps. Its keys and values are computed here, once."""
        assert self._memory is not None
        with _not_compiled():
            refill(self._memory, memory, self.decoder, self._rows, self.cache)

    def _step_full(self, steps: Sequence[Step]) -> None:
        self._move_on(self._slot, self._count)
        _, logits_11V = self._ask(self.decoder.enter(self._choice[None]), steps, self._slot)
        self._conclude(logits_11V[0])

    def _step_shallow(self) -> None:
        self._draft()
        self._copy_to_host()

    def _draft(self) -> None:
        self._move_on(self._slot, self._count)
        x_11M, logits_11V = self._ask(self.decoder.enter(self._choice[None]), self._shallow, self._slot)
        self._push(self._states_KM, self._slots_K, self._count, x_11M[0], self._slot)
        settle(logits_11V[0], self._choice, self._result_2)

    def _step_cycle(self) -> None:
        for place in range(self.max_stack):
            self._draft()
            self._drafts_K2[place].copy_(self._result_2)
        _, logits_1KV = self._ask(self._states_KM[None], self._deep, self._slots_K)
        choices_K, _ = best_and_gap(logits_1KV[0])
        self._judge(
            choices_K, self._drafts_K2, self._choice, self._slot, self._count, self._slots_K, self.cache.scratch,
            self._results_3K,
        )  # fmt: skip
        self._host_results_3K.copy_(self._results_3K, non_blocking=True)

    def _step_segment(self, number: int) -> None:
        """State copying keeps one state, in the stack's first place."""
        first, last = (0, *self.exit_layers)[number], (*self.exit_layers, self.layers)[number]
        if number == 0:
            self._move_on(self._slot, self._count)
        x_11M = self._states_KM[None, :1] if number else self.decoder.enter(self._choice[None])
        x_11M, logits_11V = self._ask(x_11M, self.decoder.plan.steps[first:last], self._slot)
        self._states_KM[:1].copy_(x_11M[0])
        self._conclude(logits_11V[0])

    def _step_deep(self, size: int, choose: bool) -> None:
        slots_N = self._slots_K[:size]
        _, logits_1NV = self._ask(self._states_KM[None, :size], self._deep, slots_N)
        choices_N, _ = best_and_gap(logits_1NV[0])
        chosen = (self._choice, self._result_2) if choose else None
        self._clear(choices_N, self._deep_choices_K, self._slots_K, self._count, self.cache.scratch, chosen)
        if choose:
            self._copy_to_host()

    def _step_copy(self, number: int) -> None:
        own = self.decoder.plan.exit_steps(layer - 1 for layer in self.exit_layers[number + 1 :])
        behind = (*self.decoder.plan.steps[self.exit_layers[number] :], *own)
        self.cache.focus(self._slot)
        self.decoder.keep_entries(self._states_KM[None, :1], behind, self._masks(behind, self._slot), self.cache)

    def _conclude(self, logits_1V: Tensor) -> None:
        settle(logits_1V, self._choice, self._result_2)
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        """Part of the recorded step: the result is in host memory when the step ends."""
        self._host_result_2.copy_(self._result_2, non_blocking=True)

    def _ask(self, x_1NM: Tensor, steps: Sequence[Step], slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after some steps, and the scores there: of the exit, whose own layer runs too, or of the end."""
        index = steps[-1].index
        own = self.decoder.plan.exit_steps((index,))
        self.cache.focus(slots_N)
        masks = self._masks((*steps, *own), slots_N)
        x_1NM = self.decoder.run_steps(x_1NM, steps, masks, self.cache, self._packed)
        read_1NM = self.decoder.run_steps(x_1NM, own, masks, self.cache, self._packed)
        return x_1NM, self.decoder.exit_logits(read_1NM, index, layered=True)

    def _read(self, tokens_1N: Tensor, steps: Sequence[Step], slots_N: Tensor) -> None:
        """Tokens of a prompt through the first steps. Of the exits' own layers only keys and values are made."""
        plan, decoder = self.decoder.plan, self.decoder
        self.cache.focus(slots_N)
        masks = self._masks((*steps, *self._own), slots_N)
        x_1NM, first = decoder.enter(tokens_1N), 0
        for layer in self.exit_layers:
            x_1NM = decoder.run_steps(x_1NM, steps[first:layer], masks, self.cache, self._packed)
            decoder.keep_entries(x_1NM, plan.exit_steps((layer - 1,)), masks, self.cache)
            first = layer
        decoder.run_steps(x_1NM, steps[first:], masks, self.cache, self._packed)

    def _masks(self, steps: Sequence[Step], slots_N: Tensor) -> AttentionMasks:
        return self._build_masks(
            self.decoder.architecture, steps, self._rows, self._dtype, slots_N[None], keys_BK=self._keys_1S
        )

    # Recording and replaying.

    def record(self, mode: str) -> None:
        """Record the steps that a mode is made of, where they are not yet."""
        if mode == "full":
            self._recording("full", partial(self._step_full, self.decoder.plan.steps))
            return
        if mode == "static":
            self._recording("static", partial(self._step_full, self._shallow))
            return
        if mode == "state-copy":
            for number in range(len(self.exit_layers) + 1):
                self._recording("segment", partial(self._step_segment, number), number)
            for number in range(len(self.exit_layers)):
                self._recording("copy", partial(self._step_copy, number), number)
            return
        if mode == "cycle":
            self._recording("cycle", self._step_cycle)
            return
        self._recording("shallow", self._step_shallow)
        for choose in (True, False) if mode == "parallel" else (False,):
            for size in self._sizes():
                self._recording("deep", partial(self._step_deep, size, choose), size, choose)

    def _recording(self, kind: str, step: Callable[[], None], size: int = 0, choose: bool = False) -> None:
        key = (kind, size, choose)
        if key in self._recorded:
            return
        if self._device.type != "cuda":
            self._recorded[key] = step
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._restart()
                self._slot.fill_(0)
                self._count.fill_(0 if kind == "deep" else -1)
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        self._recorded[key] = graph.replay

    def run(self, kind: str, size: int = 0, choose: bool = False) -> None:
        """Start a recorded step; a GPU may still be busy with it afterwards."""
        self._recorded[kind, size, choose]()
        if self._done is not None:
            self._done.record()

    def result(self) -> list[float]:
        """Waits for the step: its confidence, and its choice."""
        self._wait()
        result: list[float] = self._host_result_2.tolist()
        return result

    def cycle_results(self) -> tuple[list[float], list[int], list[int]]:
        """Waits for a cycle: the confidences of its drafts, the drafts, and the full model's choices in their places."""
        self._wait()
        sures, drafts, choices = self._host_results_3K.tolist()
        return sures, [int(token) for token in drafts], [int(token) for token in choices]

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def read(self, prompt: Sequence[int], shallow: bool) -> None:
        """Run all tokens of a prompt but the last, which the first step runs; `shallow` to the exit only."""
        steps = self._shallow if shallow else self.decoder.plan.steps
        self._restart()
        if len(prompt) > 1:
            tokens_1N = torch.tensor([list(prompt[:-1])], device=self._device)
            slots_N = torch.arange(len(prompt) - 1, device=self._device)
            with _not_compiled():
                self._read(tokens_1N, steps, slots_N)
        self.move(prompt[-1], len(prompt) - 2)

    def move(self, token: int, slot: int) -> None:
        """The next step will run this token, in the slot after this one."""
        self._choice.fill_(token)
        self._slot.fill_(slot)
        self._count.fill_(-1)

    def _restart(self) -> None:
        self._slots_K.fill_(self.cache.scratch)
        self.move(0, -1)

    def _sizes(self) -> list[int]:
        """Passes are recorded for powers of two, so that one at most twice as large serves any stack. Where nothing is
        recorded every size costs nothing, and a processor feels each row more."""
        if self._device.type != "cuda":
            return list(range(1, self.max_stack + 1))
        return sorted({min(2**i, self.max_stack) for i in range(self.max_stack.bit_length() + 1)})

    def size(self, waiting: int) -> int:
        """The recorded size that so many tokens take."""
        return next(size for size in self._sizes() if size >= waiting)

    def _zeros(self, many: int) -> Tensor:
        return torch.zeros(many, dtype=torch.long, device=self._device)

    @property
    def ready(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._recorded)

    def deep_choices(self, many: int) -> list[int]:
        """What the last layers chose for each token that waited."""
        found: list[int] = self._deep_choices_K[:many].tolist()
        return found

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Prompts have any length, and no compiled code is worth making for each."""
    with torch.compiler.set_stance("force_eager"):
        yield
