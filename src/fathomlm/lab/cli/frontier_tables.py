"""What `fathomlm eval frontier` shows for people: each setting of a sweep, and each sweep summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.frontier import Curve


def point_table(curve: Curve, quality: str) -> list[list[str]]:
    """A row a setting, with what lies on the frontier marked."""
    from fathomlm.lab.evaluate.frontier import frontier

    best = frontier([(point.relative_latency, point.score) for point in curve.points])
    rows = [["setting", quality, "ms/token", "latency", "FLOPs", "early", "best"]]
    for point, on in zip(curve.points, best, strict=True):
        left = "-" if point.exit_rate is None else f"{point.exit_rate:.1%}"
        costs = [f"{point.ms_per_token:.2f}", f"{point.relative_latency:.3f}", f"{point.relative_flops:.3f}"]
        rows.append([point.name, f"{point.quality:.4g}", *costs, left, "yes" if on else ""])
    return rows


def summary_table(curves: Sequence[Curve]) -> list[list[str]]:
    """A row a model."""
    rows = [["model", "full quality", "ms/token", "latency area", "FLOPs area", "adaptive"]]
    for curve in curves:
        full = next(point for point in curve.points if point.kind == "full")
        found = next((point for point in curve.points if point.kind == "adaptive"), None)
        adaptive = "-" if found is None else f"{found.value:.3f}: {found.quality:.4g} at {found.relative_latency:.2f}x"
        areas = [f"{curve.latency_area:.4f}", f"{curve.flops_area:.4f}"]
        rows.append([curve.model, f"{full.quality:.4g}", f"{full.ms_per_token:.2f}", *areas, adaptive])
    return rows
