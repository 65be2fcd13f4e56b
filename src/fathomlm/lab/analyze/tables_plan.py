"""What `fathomlm plan` found, as rows of text: a header, and rows whose first column is a name."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.lab.analyze.fitting import RoomRow
from fathomlm.lab.analyze.isoflop import IsoRow
from fathomlm.lab.analyze.scaling import Fit

Rows = list[list[str]]
NAMES = {"vanilla": "vanilla", "recursive": "rec.", "mor": "MoR"}


def iso_table(rows: Sequence[IsoRow]) -> Rows:
    """The thesis' columns: what a budget buys, and (equal) what as many tokens cost as the vanilla model gets."""
    header = ["base", "model", "layers", "params", "EFLOPs", "tokens", "ratio", "equal"]
    return [header, *(_iso_row(row) for row in rows)]


def _iso_row(row: IsoRow) -> list[str]:
    return [
        row.base,
        NAMES[row.kind] if row.kind == "vanilla" else f"{NAMES[row.kind]} {row.recursions}",
        row.layout,
        amount(row.non_embedding_parameters),
        f"{row.budget / 1e18:.4g}",
        amount(row.tokens),
        f"{row.relative_tokens:.3f}",
        f"{row.flops_at_equal_tokens / 1e18:.4g}",
    ]


def fit_table(fits: Sequence[Fit]) -> Rows:
    table = [["architecture", "FLOPs", "runs", "sizes", "best size", "best loss", "tokens there"]]
    for fit in fits:
        sizes = f"{amount(fit.sizes[0])} to {amount(fit.sizes[-1])}"
        table.append([fit.architecture, f"{fit.flops:.3g}", str(len(fit.runs)), sizes, *_best(fit)])
    return table


def _best(fit: Fit) -> list[str]:
    if fit.coefficients is None:
        return ["too few sizes", "-", "-"]
    if fit.best_parameters is None or fit.best_loss is None or fit.best_tokens is None:
        return ["no lowest point", "-", "-"]
    note = "" if fit.inside else " (beyond the runs)"
    return [f"{amount(fit.best_parameters)}{note}", f"{fit.best_loss:.4f}", amount(fit.best_tokens)]


def room_table(rows: Sequence[RoomRow]) -> Rows:
    table = [["base", "model", "rank", "params", "train", "memory", "KV", "serve"]]
    for row in rows:
        name = "vanilla" if row.recursions == 1 else f"{NAMES['mor' if row.routed else 'recursive']} {row.recursions}"
        table.append(
            [
                row.base,
                name,
                str(row.rank) if row.rank else "-",
                amount(row.parameters),
                f"{row.train_rows:,}" if row.train_rows else "none",
                _size(row.train_bytes),
                _size(row.kv_bytes_per_sequence),
                f"{row.serve_sequences:,}",
            ]
        )
    return table


def amount(number: float) -> str:
    """Three digits: 53.3B, 118M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}" if number < 1000 * size else f"{number / size:,.0f}{letter}"
    return f"{number:.3g}"


def _size(number: float) -> str:
    return f"{number / 1e9:.1f}GB" if number >= 1e9 else f"{number / 1e6:.0f}MB"
