"""A color a depth, for every place that shows one: the server's page, the plots of the lab, the demo in a terminal.

Colours are matplotlib's viridis, whose lightness falls evenly, so that order shows without seeing hue: the deeper, the
darker. Letters are black or white, whichever stands out more: at least 4.5 to 1 on any background, which is what WCAG asks
of text.
"""

from __future__ import annotations

_VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
_SHALLOW, _DEEP = 0.95, 0.25
"""The part of the scale that is used; its dark end would hide the page's text selection."""
NO_DEPTH = "#d0d0d0"
"""Tokens that ran no recursion at all."""


def depth_colours(deepest: int) -> list[str]:
    """The color of each depth from 0 to `deepest`: recursions, or layers where tokens exit."""
    fall = (_SHALLOW - _DEEP) / max(deepest - 1, 1)
    return [NO_DEPTH, *(_viridis(_SHALLOW - fall * depth) for depth in range(deepest))]


def ink(background: str) -> str:
    """Black or white, whichever can be read better on a background."""
    light = luminance(background)
    return "#000000" if (light + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def luminance(colour: str) -> float:
    """WCAG's relative luminance of a color, from 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in _parts(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _viridis(at: float) -> str:
    place = at * (len(_VIRIDIS) - 1)
    low = min(int(place), len(_VIRIDIS) - 2)
    pairs = zip(_parts(_VIRIDIS[low]), _parts(_VIRIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
