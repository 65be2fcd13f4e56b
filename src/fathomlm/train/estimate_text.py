"""A dry run's numbers as text for people."""

from __future__ import annotations

from fathomlm.train.estimate import Estimate
from fathomlm.train.footprint import PLANNED


def format_estimate(found: Estimate) -> str:
    """The estimate as text for people."""
    looped = f" looped {found.recursions} times, {found.unrolled_layers} run" if found.recursions > 1 else ""
    exits = f", exits after {', '.join(map(str, found.exits))}" if found.exits else ""
    exits += f", {found.router}-choice router" if found.router else ""
    lines = [
        ("model", f"{found.layout} layers{looped}{exits}"),
        ("parameters", f"{_short(found.non_embedding_parameters)} + {_short(found.embedding_parameters)} of embeddings"),
    ]
    if found.source_from is not None:
        lines.insert(0, ("source", f"not there yet; taken as what fathomlm train {found.source_from} leaves"))
    if found.encoder_parameters:
        lines.append(("  encoder", f"{_short(found.encoder_parameters)} besides"))
    if found.relaxation_parameters:
        lines.append(("  relaxation", f"{_short(found.relaxation_parameters)} of the first"))
    if found.exit_parameters:
        lines.append(("  exits", f"{_short(found.exit_parameters)} besides"))
    lines += [
        ("  that learn", f"{_short(found.trainable_parameters)} of {_short(found.total_parameters)}"),
        *_length(found),
        (
            "  a step",
            f"{found.rows_per_step:,} rows in {found.micro_batches} micro-batch(es) on each of {found.devices} device(s)",
        ),
        *_compute(found),
        ("memory", f"{_gb(found.memory.total)} a device ({_spread_in_words(found)})"),
    ]
    record = found.memory.to_dict()
    lines += [(f"  {kind}", _gb(size)) for kind, size in record.items() if size and kind != "total"]
    lines += [("fits", _fits(found)), ("time", _time(found))]
    return "\n".join(f"{label:<14}{text}" for label, text in lines)


def _length(found: Estimate) -> list[tuple[str, str]]:
    if found.steps is None:
        return [("length", f"epochs of data that are not prepared yet, in steps of {found.tokens_per_step:,} tokens")]
    whole = f"{found.steps:,} steps of {found.tokens_per_step:,} tokens = {_short(found.tokens or 0)}, {found.rows:,} rows"
    return [("length", whole), ("  warm-up", f"{found.warmup_steps:,} steps")]


def _compute(found: Estimate) -> list[tuple[str, str]]:
    if found.steps is None:
        each = f"{found.forward_flops_per_token:.3g} FLOPs a token forward as the thesis counts"
        return [("compute", f"{each}, {3 * found.forward_flops_per_token:.3g} with backward")]
    return [
        (
            "compute",
            f"{found.forward_flops:.3g} FLOPs forward as the thesis counts, {found.training_flops:.3g} with backward",
        ),
        ("", f"{found.model_flops:.3g} as 6 x parameters x tokens; {found.work_flops:.3g} with all that this run computes"),
    ]


def _spread_in_words(found: Estimate) -> str:
    return {"none": "one device", "ddp": f"{found.devices} copies", "fsdp": f"shards over {found.devices}"}[found.parallel]


def _fits(found: Estimate) -> str:
    if found.fits is None or found.device_memory is None:
        return "not known: name the device with hardware.gpu"
    verdict = "yes" if found.fits else "no: lower batch.micro, set recompute: layer, or parallel: fsdp on several devices"
    return f"{verdict} ({_gb(PLANNED * found.device_memory)} of {_gb(found.device_memory)} are planned for)"


def _time(found: Estimate) -> str:
    if found.steps is None:
        return "not known, as the length"
    if found.seconds is None:
        return "not known: name the device with hardware.gpu, or give hardware.peak_tflops"
    hours = found.seconds / 3600
    length = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    device = f"{found.devices} x {found.gpu}" if found.gpu else f"{found.devices} device(s)"
    assumed = f"{found.mfu:.0%} of {found.peak_tflops:g} TFLOP/s each"
    if found.sustained_tflops is not None:
        assumed += f" ({found.mfu_sustained:.0%} of the {found.sustained_tflops:g} that large products sustain)"
    return f"{length} on {device}, assuming {assumed}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _short(value: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return str(value)
