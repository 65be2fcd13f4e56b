"""What `analyze weights` found, as rows of text: a header, and rows whose first column is a name."""

from __future__ import annotations

from fathomlm.lab.analyze.weights import SHARES, WeightNumbers

Rows = list[list[str]]


def rank_table(numbers: WeightNumbers) -> Rows:
    """What one rank on every linear would capture, and cost."""
    rows = [["rank on every linear", *(f"captured, {init}" for init in numbers.inits), "added", "parameters", "of the base"]]
    for row in numbers.ranks:
        captured = [f"{row.captured[init]:.1%}" for init in numbers.inits]
        size = [_short(row.added_parameters), _short(row.non_embedding_parameters), f"{row.relative_parameters:.2f}x"]
        rows.append([str(row.rank), *captured, *size])
    return rows


def kind_table(numbers: WeightNumbers) -> Rows:
    """For each linear the norm of what is lost, and the rank that the worst step needs for parts of its energy."""
    rows = [["linear", "init", "lost norm", *(f"rank for {share:.0%}" for share in SHARES), "full rank"]]
    for linear in numbers.linears:
        for init in numbers.inits:
            sums = numbers.sums(init, linear)
            ranks = [str(sums[f"rank_{round(100 * share)}"]) for share in SHARES]
            rows.append([linear, init, f"{sums['relative']:.2f}", *ranks, str(sums["full_rank"])])
    return rows


def _short(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
