"""Sizes in bytes and counts, as people write them: one reading for every option that takes one.

A number alone is bytes, everywhere. With a unit it may have a fraction: `1.5GB`. KB, MB, GB and TB are powers of a
thousand, as disks and data sheets have them; KiB, MiB, GiB and TiB are powers of 1,024.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

from fathomlm.errors import OptionError

UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("IB", 1024))
}
MOST = 2**60
"""More than any machine has."""
MEGABYTE = 10**6
Amount = int | float | str
"""A count, plain or with a letter: 500, 2e6, 15B."""
COUNTS = {"K": 3, "M": 6, "B": 9, "T": 12}
"""The powers of ten that letters behind a count stand for."""
MOST_COUNT = 10**18


def parse_size(text: str, option: str, *, least: int = 1) -> int:
    """Bytes from 512MB, 8GB, 8GiB or a number of bytes. `option` is what errors call it. A number alone that is below
    `least` was meant in another unit, and is refused with that unit named."""
    match = re.fullmatch(r"([0-9]{1,400}(?:\.[0-9]{1,400})?)\s*([a-z]{0,3})", text.strip(), re.IGNORECASE | re.ASCII)
    unit = UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0
    if size > MOST:
        raise OptionError(f"{option} {text:.30} is more than any machine has")
    if match and not match[2] and 0 < size < least:
        raise OptionError(f"{option} {text} is {text} bytes, since a number alone is bytes; write {text}GB for gigabytes")
    if size < 1:
        raise OptionError(f"{option} takes a size such as 512MB, 8GB or 8GiB, or a number of bytes, got '{text:.30}'")
    return int(size)


def format_size(size: int) -> str:
    """The shortest way to write a size that `parse_size` reads again: 16MB, 1MiB, 1234."""
    best = str(size)
    for unit, factor in UNITS.items():
        if factor > 1 and size % factor == 0 and size >= factor:
            shown = f"{size // factor}{unit.replace('IB', 'iB')}"
            best = min(best, shown, key=len)
    return best


def parse_count(text: str, option: str) -> int:
    """An integer from 20e9, 20B, 300M, 1.5T or 20_000."""
    number = _decimal(text)
    if number is None or not number.is_finite() or not 1 <= number <= MOST_COUNT or number != number.to_integral_value():
        raise OptionError(f"{option} must be an integer between 1 and 1e18, such as 20e9, 20B or 300M, got '{text:.30}'")
    return int(number)


def parse_amount(name: str, value: Amount) -> float:
    """A number from the same, which need not be whole."""
    number = _decimal(str(value))
    if number is None:
        raise OptionError(f"cannot read {name} '{value}'; write a number such as 500, 2e6 or 15B")
    if not 0 < float(number) < math.inf:
        raise OptionError(f"{name} must be > 0, got {value}")
    return float(number)


def _decimal(text: str) -> Decimal | None:
    text = text.strip().replace(",", "")
    power = COUNTS.get(text[-1:].upper(), 0)
    try:
        return Decimal(text[:-1] if power else text).scaleb(power)
    except InvalidOperation:
        return None


def amount(number: float, unit: str = "", digits: int = 4) -> str:
    """A number for people: 134.5M, 98.4 MB."""
    for power, letter in zip((12, 9, 6, 3), "TGMk" if unit else "TBMK", strict=True):
        if abs(number) >= 10**power:
            scaled = number / 10**power
            shown = f"{scaled:.{digits}g}" if scaled < 1000 else f"{scaled:,.0f}"
            return f"{shown} {letter}{unit}" if unit else f"{shown}{letter}"
    return f"{number:.{digits}g}{' ' if unit else ''}{unit}"
