"""What accelerators can do: the figures behind the expected time of a run, its memory check and its MFU.

Peaks are data-sheet figures for dense bfloat16 products, which is what the field states utilisation (MFU) against. No
product reaches them: where the rate that a chip sustains on large products is known, utilisation is stated against that
too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fathomlm.errors import OptionError, choices
from fathomlm.train.recipe import HardwareRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device."""

    peak: float
    """Dense bfloat16 TFLOP/s by its data sheet."""
    memory: float
    """GB (10^9 bytes) by its data sheet."""
    device_name: str
    """A pattern for the name that the driver gives it, in lower case."""
    sustained: float | None = None
    """Dense bfloat16 TFLOP/s that large matrix products reach, measured on an H200; an H100 has the same chip."""


ACCELERATORS: dict[str, Accelerator] = {
    "a100-40gb": Accelerator(peak=312, memory=40, device_name=r"\ba100\b.*\b40gb\b"),
    "a100-80gb": Accelerator(peak=312, memory=80, device_name=r"\ba100\b.*\b80gb\b"),
    "h100": Accelerator(peak=989, memory=80, device_name=r"\bh100\b", sustained=790),
    "h200": Accelerator(peak=989, memory=141, device_name=r"\bh200\b", sustained=790),
    "b200": Accelerator(peak=2250, memory=180, device_name=r"\bb200\b"),
    "l40s": Accelerator(peak=362, memory=48, device_name=r"\bl40s\b"),
    "rtx3090": Accelerator(peak=71, memory=24, device_name=r"\brtx 3090$"),
    "rtx4090": Accelerator(peak=165, memory=24, device_name=r"\brtx 4090$"),
}
SHORT = {"a100": "a100-80gb"}
"""Names that leave out what is usual."""


def accelerator_name(hardware: HardwareRecipe, device_name: str | None = None) -> str | None:
    """The known accelerator that a recipe names, or else the one that a driver's device name stands for."""
    if hardware.gpu is not None:
        name = SHORT.get(hardware.gpu.lower(), hardware.gpu.lower())
        if name not in ACCELERATORS:
            raise OptionError(choices("hardware.gpu", hardware.gpu, [*ACCELERATORS, *SHORT]))
        return name
    found = (device_name or "").lower()
    return next((name for name, device in ACCELERATORS.items() if re.search(device.device_name, found)), None)


@dataclass(frozen=True, slots=True)
class Rates:
    """Dense bfloat16 TFLOP/s of one device."""

    peak: float | None
    """By its data sheet or by the recipe, what MFU is a part of; None where nothing is known of the device."""
    sustained: float | None
    """On large products; None where nobody has measured it, and where the recipe gives a peak of its own."""

    @classmethod
    def of(cls, hardware: HardwareRecipe, device_name: str | None = None) -> Rates:
        name = accelerator_name(hardware, device_name)
        if hardware.peak_tflops is not None:
            return cls(hardware.peak_tflops, None)
        return cls(None, None) if name is None else cls(ACCELERATORS[name].peak, ACCELERATORS[name].sustained)

    def parts(self, flops_per_s: float) -> dict[str, float | None]:
        """What a rate of one device is of each: `mfu` of the data sheet's, `mfu_sustained` of the sustained one."""
        both = {"mfu": self.peak, "mfu_sustained": self.sustained}
        return {name: None if rate is None else round(flops_per_s / (rate * 1e12), 4) for name, rate in both.items()}


def memory_bytes(hardware: HardwareRecipe, device_name: str | None = None) -> int | None:
    """Memory of one device, or None where it is not known."""
    name = accelerator_name(hardware, device_name)
    return None if name is None else round(ACCELERATORS[name].memory * 1e9)
