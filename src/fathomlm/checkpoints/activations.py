"""The calibration pass of a conversion: what a plain model's layers do to real text.

Layers are run one at a time over all rows, so that only one of them is in memory beside the rows' residual stream: a
checkpoint that is converted a tensor at a time is calibrated so too. Of each layer is kept

    its influence            1 - cos(residual stream in front of it, behind it), the mean over tokens (ShortGPT)
    second moments           mean x x^T over tokens of each linear's input x, by which an error of its weight counts

A greedy search for layers to leave out (`drop_order.py`) may follow; it holds the whole model.

Moments are as large as the squares of the widths, so they lie in a temporary directory until a conversion reads them.

Shapes: N rows, T tokens of a row, M hidden width, I inputs of a linear.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import NoCache
from fathomlm.checkpoints.assemble import BaseCheckpoint, OnProgress, configure, empty_model, put_base, telling
from fathomlm.checkpoints.drop_order import candidates, drop_order, row_loss, shifted
from fathomlm.checkpoints.measured_model import MeasuredModel
from fathomlm.checkpoints.resolve import plain_base
from fathomlm.checkpoints.tying import CALIBRATION_TOKENS
from fathomlm.depth import DepthPlan
from fathomlm.errors import CheckpointError, DataError, OptionError, is_int, require
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomModel

ROW = 512
"""Tokens of a row, or the model's context where that is shorter."""
AT_ONCE = 2048
"""Tokens of one forward pass."""
HELD_OUT = 8
"""Every so many rows one is left out of all that is measured, for the loss."""
SAME_INPUT = {"k": "q", "v": "q", "gate": "up"}
"""Linears that read what another one reads."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What was measured; see `measure_activations`."""

    tokens: int
    """How many were read, held-out ones included."""
    influence: tuple[float, ...]
    """Of each layer."""
    loss: float
    """Of the plain model over the held-out rows, in nats a token."""
    held_out_NT: Tensor
    layers: tuple[int, ...]
    """The layers of the measured model that these are of, in order."""
    directory: tempfile.TemporaryDirectory[str] | None = field(repr=False)
    """Where second moments lie, a file for each layer; None where they were not asked for."""
    model: MeasuredModel = field(repr=False)
    """What all this was measured on."""
    order: tuple[int, ...] = ()
    """The layers that a greedy search leaves out, the first one first; empty where it was not asked for."""
    order_losses: tuple[float, ...] = ()
    """Over the rows that are not held out, without the layers up to each of them, in nats a token."""

    def moment(self, layer: int, linear: str) -> Tensor:
        """The second moments (I, I) of what a linear reads, in float32."""
        if self.directory is None:
            raise ValueError("second moments were not measured")
        moments: dict[str, Tensor] = torch.load(_file(self.directory, self.layers[layer]), mmap=True, weights_only=True)
        return moments[SAME_INPUT.get(linear, linear)].clone()

    def of(self, layers: Sequence[int]) -> Activations:
        """The same of some of the layers, as of a model that has only those."""
        influence = tuple(self.influence[layer] for layer in layers)
        picked = tuple(self.layers[layer] for layer in layers)
        model = self.model.of_layers(layers)
        return dataclasses.replace(self, layers=picked, influence=influence, model=model, order=(), order_losses=())

    def check_of(self, base: BaseCheckpoint) -> None:
        """Refuse another model than the measured one. A copy in another number format is the same one."""
        if (why := self.model.difference(base)) is not None:
            raise OptionError(
                f"the activations were measured on another model {why}; measure the model that is converted "
                "(measure_activations)"
            )

    @torch.no_grad()
    def loss_of(self, model: FathomForCausalLM) -> float:
        """What another model, such as the converted one, loses over the held-out rows."""
        decoder = model.decoder
        rows = self.held_out_NT.to(decoder.embed.weight.device)
        return sum(row_loss(decoder.logits(decoder(row[None]))[0], row) for row in rows) / len(rows)


def token_rows(texts: Iterable[str], base: BaseCheckpoint, tokens: int = CALIBRATION_TOKENS) -> Tensor:
    """Rows (N, T) of about so many tokens, at most, from texts in their order: joined with the end token, and cut. No more
    text is read than is needed."""
    require(is_int(tokens) and tokens >= 1, "tokens", "an integer of at least 1", tokens)
    tokenizer = base.tokenizer()
    if tokenizer is None:
        raise OptionError("calibration text requires a tokenizer, and the model has none")
    separator = list(base.tokens.eos[:1])
    found: list[int] = []
    for text in texts:
        found += [*tokenizer(text, add_special_tokens=False)["input_ids"], *separator]
        if len(found) >= tokens:
            break
    length = min(ROW, base.architecture.context, tokens)
    rows = torch.tensor(found[:tokens])[: len(found[:tokens]) // length * length].view(-1, length)
    if not len(rows):
        raise DataError(f"the calibration text has {len(found):,} tokens; at least {length:,} are required")
    return rows


@torch.no_grad()
def measure_activations(
    model: FathomModel | BaseCheckpoint | str | Path,
    text: str | Iterable[str] | Tensor,
    *,
    tokens: int = CALIBRATION_TOKENS,
    moments: bool = True,
    greedy: int = 0,
    device: torch.device | str = "cpu",
    on_layer: OnProgress | None = None,
) -> Activations:
    """Run `text`, one document or several, of which about so many `tokens` are read (or rows of tokens, N x T), through a
    plain decoder-only model, layer by layer, in float32. The same rows give the same numbers on the same machine. Without
    `moments` only the layers' influence and the loss are measured. `greedy` layers are left out one at a time, for
    `by="greedy"`: hundreds of forward passes over the text, with the whole model in memory."""
    base = plain_base(model)
    architecture = base.architecture
    if not base.plan.plain or architecture.cross:
        raise OptionError("calibration requires a plain decoder-only model")
    if not 0 <= greedy < architecture.layers:
        raise OptionError(f"greedy must be between 0 and {architecture.layers - 1}, got {greedy}")
    text = [text] if isinstance(text, str) else text  # its characters are no documents
    rows_NT = text if isinstance(text, Tensor) else token_rows(text, base, tokens)
    if not 0 <= int(rows_NT.min()) <= int(rows_NT.max()) < architecture.vocab:
        raise DataError(f"the calibration rows have tokens beyond the model's vocabulary of {architecture.vocab:,}")
    place, plan = torch.device(device), DepthPlan.vanilla(architecture.layers)
    measured = empty_model(configure(architecture, plan, None, base.tokens, torch.float32)).eval()
    outer = ("embed", "norm", "head")
    for name in [name for name, _ in measured.decoder.named_parameters() if name.split(".")[0] in outer]:
        put_base(measured, name, base, place)
    kept, held_out = _split(rows_NT.to(place))
    total = architecture.layers + candidates(architecture.layers, greedy)
    streams = [measured.decoder.enter(rows) for rows in (*kept, *held_out)]
    directory = tempfile.TemporaryDirectory(prefix="fathomlm-moments-") if moments else None
    influence: list[float] = []
    for step in telling(plan.steps, shifted(on_layer, 0, total)):
        for name in architecture.layer_shapes():
            put_base(measured, f"layers.{step.layer}.{name}", base, place)
        layer = measured.decoder.layers[step.layer]
        sums, cosines = _ActivationSums(), 0.0
        for i, x_NTM in enumerate(streams):
            masks = full_masks(architecture, plan, TokenBatch.of(x_NTM, None, None, past=0), x_NTM.dtype)
            with sums.watching(layer if i < len(kept) and moments else None):
                streams[i] = measured.decoder.run_steps(x_NTM, (step,), masks, NoCache(plan))
            if i < len(kept):
                cosines += F.cosine_similarity(x_NTM, streams[i], dim=-1).double().sum().item()
        read = sum(rows.numel() for rows in kept)
        influence.append(1 - cosines / read)
        if directory is not None:
            torch.save({name: (total / read).cpu() for name, total in sums.totals.items()}, _file(directory, step.layer))
        if not greedy:
            layer.to("meta")
    ends = zip(torch.cat(streams[len(kept) :]), torch.cat(held_out), strict=True)
    losses = [row_loss(measured.decoder.logits(measured.decoder.norm(x_TM)), row_T) for x_TM, row_T in ends]
    if not all(map(math.isfinite, (*losses, *influence))):
        raise CheckpointError("over the calibration text the model computes numbers that are not finite; are its weights?")
    found = drop_order(measured.decoder, kept, greedy, shifted(on_layer, architecture.layers, total))
    return Activations(
        tokens=rows_NT.numel(),
        influence=tuple(influence),
        loss=sum(losses) / len(losses),
        held_out_NT=torch.cat(held_out).cpu(),
        layers=tuple(range(architecture.layers)),
        directory=directory,
        model=MeasuredModel.of(base),
        order=tuple(layer for layer, _ in found),
        order_losses=tuple(loss for _, loss in found),
    )


class _ActivationSums:
    """Sums of x^T x over the inputs of a layer's linears."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, layer: nn.Module | None) -> Iterator[None]:
        hooks = []
        for path, module in () if layer is None else layer.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, nn.Linear) and name not in SAME_INPUT:
                hooks.append(module.register_forward_pre_hook(self._adding(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _adding(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_KI = inputs[0].flatten(0, -2).float()
            if name not in self.totals:
                self.totals[name] = torch.zeros(x_KI.shape[1], x_KI.shape[1], device=x_KI.device)
            self.totals[name].addmm_(x_KI.T, x_KI)

        return add


def _split(rows_NT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows to measure and held-out ones, in batches; a single row is both."""
    out = torch.arange(len(rows_NT)) % HELD_OUT == HELD_OUT - 1
    if not out.any():
        out[-1] = True
    kept = rows_NT[~out] if len(rows_NT) > 1 else rows_NT
    size = max(1, AT_ONCE // rows_NT.shape[1])
    return list(torch.split(kept, size)), list(torch.split(rows_NT[out], size))


def _file(directory: tempfile.TemporaryDirectory[str], layer: int) -> Path:
    return Path(directory.name) / f"{layer}.pt"
