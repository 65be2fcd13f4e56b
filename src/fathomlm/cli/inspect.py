"""`fathomlm inspect MODEL`: what a model costs under a depth plan, counted without its weights.

Presets need no file at all; for anything else only the configuration is read.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from fathomlm.cli.common import SOURCE, JsonOptions
from fathomlm.cli.convert_vocab import VocabOptions
from fathomlm.cli.display import print_table
from fathomlm.cli.first import check_shape
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing, cost
from fathomlm.depth.dropping import DropOptions, kept_layers, with_neurons, with_vocab
from fathomlm.depth.options import PlanOptions, RelaxOptions, RoutingOptions
from fathomlm.depth.plan import KVMode
from fathomlm.depth.presets import PRESETS
from fathomlm.depth.relaxation import check_fits
from fathomlm.errors import OptionError
from fathomlm.options import like, option, section
from fathomlm.sizes import amount, parse_count


@dataclass(frozen=True, kw_only=True)
class Inspect(JsonOptions):
    """Count the parameters, forward FLOPs and KV cache of a model under a depth plan, next to those of the untied base. No
    weights are read. Without --sharing and --recursions, MODEL is counted as it is."""

    model: str = option(positional=True, help=SOURCE, first=check_shape)
    router: str | None = like(RoutingOptions, "router")
    kv: KVMode | None = like(RoutingOptions, "kv")
    tokens: int | None = option(None, parse=parse_count, metavar="N", help="training tokens to count FLOPs for: 20B, 300M")
    context: int = option(2048, ge=1, help="sequence length to count attention at")
    drop: int | None = like(DropOptions, "drop")
    neurons: int | None = like(DropOptions, "neurons", help="keep N feed-forward neurons of each layer that is left")
    vocab: int | None = like(
        VocabOptions, "vocab", help="count MODEL with N of its tokens (`fathomlm convert --vocab`)", requires=()
    )
    budget: float | None = option(
        None, gt=0, le=1, metavar="PART",
        help="compare plans that have at most this part of MODEL's bytes in the same number format: dropped layers, fewer "
        "neurons, loops, loops with the highest LoRA rank that fits",
    )  # fmt: skip
    plan: PlanOptions = section(PlanOptions, "depth plan")
    relaxation: RelaxOptions = section(RelaxOptions, "relaxation")

    def run(self) -> int:
        planned = self.plan.planned
        architecture, own_plan, own_relaxation = _read(self.model)
        whole = architecture
        if self.vocab is not None:
            architecture = with_vocab(whole, self.vocab, "--vocab")
        if self.budget is not None:
            return _compare(self, architecture, whole, own_plan)
        if self.drop is not None:
            if own_plan is not None and own_plan.recursions > 1:
                raise OptionError(f"--drop requires a plain model; {self.model} is recursive already")
            architecture = architecture.with_layers(kept_layers(architecture.layers, self.drop, "stepwise"))
            architecture = architecture if self.neurons is None else with_neurons(architecture, self.neurons)
            own_plan = None
        if self.neurons is not None and planned and self.plan.recursions != 1:
            raise OptionError("--neurons cannot be combined with --sharing or --recursions, as in convert")
        kept = None
        if planned:
            architecture, plan = self.plan.over(architecture, own_plan)
        elif own_plan is not None:
            plan, kept = own_plan, own_relaxation
        else:
            plan = DepthPlan.vanilla(architecture.layers)
        relaxation = self.relaxation.build_relaxation(architecture.linears()) or kept
        check_fits(relaxation, plan)
        _needs_a_loop(self, plan)
        if self.router is not None:
            plan = plan.with_routing(build_routing(self.router, plan.recursions))
        if self.kv is not None:
            plan = plan.with_kv(self.kv)
        tokens = self.tokens
        counted = cost.count(architecture, plan, relaxation=relaxation, tokens=tokens, context=self.context)
        layers = plan.base_layers if self.drop is None else whole.layers
        base = cost.count(whole, DepthPlan.vanilla(layers), tokens=tokens, context=self.context)
        if self.drop is not None:
            counted = _relative_to(counted, base)
        exits = _exit_parameters(self.model, architecture, plan)
        if self.json:
            about = {
                "model": self.model,
                "family": architecture.family,
                "sharing": plan.sharing,
                "recursions": plan.recursions,
                "relaxation": None if relaxation is None else relaxation.to_dict(),
                "router": None if plan.routing is None else plan.routing.kind,
                "kv": plan.kv,
                "exits": [index + 1 for index in plan.exits],
                "exit_layer": plan.exit_layer,
                "draft": plan.draft,
                "exit_parameters": exits,
            }
            about |= {"encoder_parameters": _encoder_parameters(self.model)} if architecture.cross else {}
            print(json.dumps(about | counted.to_dict()))
            return 0
        caption = (
            f"FLOPs at a context of {self.context} tokens; cache in 16 bits. Sequences that fit: where "
            f"{cost.REFERENCE_BATCH} of the same plan without routing or sharing fill the memory of the shared layers."
        )
        rows = _rows(counted, base, exits)
        if architecture.cross:
            size = amount(_encoder_parameters(self.model))
            rows.insert(3, ("parameters of the encoder", size, size))
            caption += " The other figures are the decoder's, over a source as long as the context."
        title = _title(self, architecture, plan, relaxation)
        print_table([["", "this plan", "untied base"], *map(list, rows)], title, caption=caption)
        return 0


def _read(model: str) -> tuple[Architecture, DepthPlan | None, Relaxation | None]:
    if model in PRESETS and not Path(model).exists():
        return PRESETS[model].architecture, PRESETS[model].plan, None
    from fathomlm.checkpoints.resolve import architecture_of

    return architecture_of(model)


def _compare(options: Inspect, architecture: Architecture, whole: Architecture, plan: DepthPlan | None) -> int:
    """Candidate plans at a byte budget, in one table; relative figures are against the model as it is."""
    from fathomlm.depth.cost import candidates

    assert options.budget is not None
    planned = options.plan.recursions or options.plan.resize or options.relaxation != RelaxOptions()
    if planned or options.router or options.kv or options.drop is not None or options.tokens is not None:
        raise OptionError(
            "--budget compares plans of its own; it can be combined with --sharing, --context and --vocab only"
        )
    if plan is not None and plan.recursions > 1:
        raise OptionError(f"--budget requires a plain model; {options.model} is recursive already")
    found = candidates(architecture, options.budget, options.plan.sharing or "cycle", options.context, whole=whole)
    base = cost.count(whole, DepthPlan.vanilla(whole.layers), context=options.context)
    if options.json:
        rows = [
            {"options": each.options, **_relative_to(each.cost, base).to_dict(), "bytes_share": each.share(base)}
            for each in found
        ]
        print(json.dumps({"model": options.model, "budget": options.budget, "candidates": rows}))
        return 0
    table = [["fathomlm convert ...", "layers", "run", "bytes", "FLOPs", "KV"]]
    for each in found:
        flops = each.cost.forward_flops_per_token / base.forward_flops_per_token
        shares = (each.share(base), flops, each.cost.kv_bytes_per_token / base.kv_bytes_per_token)
        sizes = [each.cost.layout, str(each.cost.unrolled_layers), *(f"{share:.2f}x" for share in shares)]
        table.append([each.options.replace(" --relax", "\n  --relax") if options.plan.sharing else each.options, *sizes])
    caption = (
        f"Against {options.model}, in the same number format, embeddings included; FLOPs at a context of {options.context} "
        "tokens. --neurons also requires --calibrate FILE, text to measure over. Which plan keeps most is decided by "
        "training, not by this table."
    )
    title = f"{options.model} in {options.budget:.0%} of its bytes"
    if options.vocab is not None:
        title += f", with {options.vocab:,} of {whole.vocab:,} tokens"
        caption += " Trim the vocabulary first (--vocab), then convert the result."
    print_table(table, title, caption=caption, dense=True)
    return 0


def _relative_to(counted: cost.Cost, base: cost.Cost) -> cost.Cost:
    """With its shares of a base that has other layers than the plan."""
    return dataclasses.replace(
        counted,
        relative_flops=counted.forward_flops_per_token / base.forward_flops_per_token,
        relative_kv=counted.kv_bytes_per_token / base.kv_bytes_per_token,
    )


def _exit_parameters(model: str, architecture: Architecture, plan: DepthPlan) -> int:
    """What the exits of a trained model have of their own."""
    if not plan.exits and not plan.draft:
        return 0
    from fathomlm.checkpoints.resolve import exits_of

    return exits_of(model).parameters(architecture, plan)


def _encoder_parameters(model: str) -> int:
    from fathomlm.checkpoints.resolve import encoder_of
    from fathomlm.model.encoder import encoder_parameters

    encoder = encoder_of(model)
    assert encoder is not None
    return encoder_parameters(encoder)


def _needs_a_loop(options: Inspect, plan: DepthPlan) -> None:
    """Refuse options that would do nothing when no layer is shared: a forgotten --recursions, most likely."""
    if plan.recursions > 1:
        return
    pointless = {
        "--router": options.router is not None,
        f"--kv {options.kv}": options.kv in ("share", "hybrid"),
    }
    for flag, given in pointless.items():
        if given:
            raise OptionError(f"{flag} requires shared layers: --recursions 2 or more")


def _title(options: Inspect, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> str:
    if plan.plain:
        parts = [f"{options.model} ({architecture.family}), no shared layers"]
    else:
        parts = [f"{options.model} ({architecture.family}), {plan.sharing}, {plan.recursions} recursions"]
    if plan.injection:
        parts.append("an injection at the beginning of each")
    if relaxation is not None:
        parts.append(relaxation.method.describe(relaxation))
    if plan.routing is not None:
        parts.append(f"{plan.routing.kind}-choice router")
    if plan.kv != "cache":
        parts.append("shared keys and values" if plan.kv == "share" else "keys and values shared where a token stops")
    if plan.exits:
        own = ", each with a layer of its own" if plan.exit_layer else ""
        parts.append(f"exits after {', '.join(str(index + 1) for index in plan.exits)}{own}")
    if plan.draft:
        parts.append("a draft layer")
    return ", ".join(parts)


def _rows(counted: cost.Cost, base: cost.Cost, exits: int) -> list[tuple[str, str, str]]:
    """One fact a row: what it is, this model's figure, the untied base's. `exits` are the parameters that exits add."""
    rows = [
        ("layers with weights of their own", counted.layout, base.layout),
        ("layers run at full depth", str(counted.unrolled_layers), str(base.unrolled_layers)),
        (
            "parameters without embeddings",
            _against(counted.non_embedding_parameters, base.non_embedding_parameters),
            amount(base.non_embedding_parameters),
        ),
    ]
    if counted.relaxation_parameters:
        rows.append(("  of these, relaxation", amount(counted.relaxation_parameters), "-"))
    if counted.router_parameters:
        rows.append(("  of these, router", amount(counted.router_parameters), "-"))
    rows.append(("parameters of embeddings", amount(counted.embedding_parameters), amount(base.embedding_parameters)))
    if exits:
        rows.append(("parameters of exits", amount(exits), "-"))
    rows += [
        (
            "forward FLOPs per token",
            _against(counted.forward_flops_per_token, base.forward_flops_per_token),
            amount(base.forward_flops_per_token),
        ),
        (
            "KV cache per token",
            f"{_bytes(counted.kv_bytes_per_token)} ({counted.relative_kv:.2f}x the base)",
            _bytes(base.kv_bytes_per_token),
        ),
        ("sequences that fit", str(counted.relative_max_batch), str(base.relative_max_batch)),
    ]
    if counted.tokens is not None:
        label = f"forward FLOPs for {amount(counted.tokens)} tokens"
        rows.append((label, f"{counted.training_flops:.2e}", f"{base.training_flops:.2e}"))
    return rows


def _against(value: int, base: int) -> str:
    return f"{amount(value)} ({value / base:.2f}x the base)"


def _bytes(value: int) -> str:
    return f"{value / 1024:.1f} KiB" if value < 1024**2 else f"{value / 1024**2:.1f} MiB"
