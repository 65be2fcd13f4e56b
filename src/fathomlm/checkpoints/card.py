"""The model card of a conversion: what was tied or dropped, what the result costs, and how it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.resolve import describe, dtype_name
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import BLOCK, Cost, count
from fathomlm.model.seq2seq import FathomModel
from fathomlm.sizes import amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A finished conversion, for reports: the base's shape, the result, and what was measured on the way."""

    name: str
    """The base, as the user wrote it."""
    base: Architecture
    model: FathomModel
    activations: Activations | None = None
    start_loss: float | None = None

    @property
    def costs(self) -> tuple[Cost, Cost]:
        """Of the base and of the result."""
        before = count(self.base, DepthPlan.vanilla(self.base.layers))
        return before, count(self.model.architecture, self.model.plan, relaxation=self.model.relaxation)

    @property
    def shares(self) -> tuple[float, float]:
        """Bytes in the same number format and forward FLOPs, as parts of the base's."""
        before, after = self.costs
        return after.parameters / before.parameters, after.forward_flops_per_token / before.forward_flops_per_token

    @property
    def warnings(self) -> list[str]:
        """Where the result is no smaller or cheaper than the base, or cannot be stored as small as it could be."""
        size, flops = self.shares
        found = [f"the result is larger than the base: {size:.0%} of its bytes"] if size > 1 else []
        if flops > 1:
            found.append(f"the result takes more compute than the base: {flops:.0%} of its FLOPs per token")
        neurons = self.model.architecture.intermediate
        if neurons != self.base.intermediate and neurons % BLOCK:
            found.append(
                f"{neurons:,} neurons are no multiple of {BLOCK}: quantized GGUF files keep the down projections in 16 bits"
            )
        return found


def model_card(made: Conversion, out: Path, command: str, training: str) -> str:
    """The text of README.md: `command` made the model, `training` says how it is trained on, where it has to be."""
    before, after = made.costs
    size, flops = made.shares
    width = made.model.decoder.embed.weight.element_size()
    rows = [
        ("layers with weights of their own", before.layout, after.layout),
        ("layers run", f"{before.unrolled_layers}", f"{after.unrolled_layers}"),
        ("parameters", amount(before.parameters), f"{amount(after.parameters)} ({size:.1%})"),
        (
            f"bytes in {dtype_name(made.model)}",
            amount(before.parameters * width, "B"),
            amount(after.parameters * width, "B"),
        ),
        (
            f"forward FLOPs per token, context {after.context:,}",
            amount(before.forward_flops_per_token),
            f"{amount(after.forward_flops_per_token)} ({flops:.1%})",
        ),
        ("KV cache per token, 16 bits", amount(before.kv_bytes_per_token, "B"), amount(after.kv_bytes_per_token, "B")),
    ]
    if made.activations is not None and made.start_loss is not None:
        rows.append(("loss before training, nats per token", f"{made.activations.loss:.3f}", f"{made.start_loss:.3f}"))
    table = "\n".join(f"| {' | '.join(row)} |" for row in (("", "base", "this model"), ("---", "--:", "--:"), *rows))
    task = "text2text-generation" if made.base.cross else "text-generation"
    parts = [
        f"---\nlibrary_name: fathomlm\npipeline_tag: {task}\n---",
        f"# {out.name}",
        f"{describe(made.model)}, made from {made.name} ({before.unrolled_layers} layers) by\n\n```\n{command}\n```",
        table,
    ]
    if made.activations is not None:
        held_out = made.activations.held_out_NT.numel()
        parts.append(f"Losses are over {held_out:,} held-out tokens of the {made.activations.tokens:,} calibrated on.")
    parts += [*_layers(made), *(f"Note: {warning}." for warning in made.warnings)]
    parts += [] if made.model.plan.injection else [training]
    return "\n\n".join(parts) + "\n"


def _layers(made: Conversion) -> list[str]:
    """What was dropped, and which base layer each step stands for; layers are counted from 0."""
    kept, plan = made.model.config.kept_layers, made.model.plan
    found = []
    if kept is not None:
        gone = [str(layer) for layer in range(made.base.layers) if layer not in kept]
        found.append(f"Dropped layers of the base, counted from 0: {', '.join(gone) or 'none'}.")
    if (neurons := made.model.architecture.intermediate) != made.base.intermediate:
        found.append(f"Feed-forward neurons of each layer: {neurons:,} of the base's {made.base.intermediate:,}.")
    if (vocab := made.model.architecture.vocab) != made.base.vocab:
        found.append(f"Tokens: {vocab:,} of the base's {made.base.vocab:,}.")
    if plan.recursions > 1 and not plan.injection:
        places = kept or range(made.base.layers)
        rows = [
            f"| {layer} | {', '.join(str(places[step.origin]) for step in plan.uses(layer))} |"
            for layer in range(plan.unique_layers)
        ]
        found.append("\n".join(["| layer | runs in the place of base layers |", "|--:|---|", *rows]))
    return found
