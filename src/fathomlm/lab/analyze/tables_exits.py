"""What `analyze exits` found, as rows of text: a header, and rows whose first column is a name."""

from __future__ import annotations

from fathomlm.lab.analyze.breakdown import PARTS, Breakdown
from fathomlm.lab.analyze.exits import ExitNumbers

Rows = list[list[str]]


def layer_table(numbers: ExitNumbers) -> Rows:
    """agree: with the last layer; right: the token that follows; sure: mean confidence; agreed: cosine where they agree."""
    rows = [["layer", "agree", "right", "loss", "sure", "cosine", "agreed", "first", "settled"]]
    for each in numbers.layers:
        agreed = "-" if each.cosine_agreed is None else f"{each.cosine_agreed:.3f}"
        shares = [f"{each.agreement:.1%}", f"{each.accuracy:.1%}"]
        numbers_shown = [f"{each.loss:.4f}", f"{each.confidence:.3f}", f"{each.cosine:.3f}", agreed]
        rows.append([str(each.layer), *shares, *numbers_shown, f"{each.first:.1%}", f"{each.settled:.1%}"])
    return rows


def fit_table(numbers: ExitNumbers) -> Rows:
    """A row an exit: the densities, the threshold, and what would come of it."""
    rows = [["exit", "agree", "Beta", "not", "Beta", "threshold", "leave", "and agree"]]
    for fit in numbers.exits:
        cells = []
        for samples in (fit.estimator.agree, fit.estimator.disagree):
            beta = samples.fit()
            cells += [f"{samples.count:,}", f"{beta.alpha:.2g}, {beta.beta:.2g}" if samples.count else "-"]
        agreed = "-" if fit.agreed is None else f"{fit.agreed:.1%}"
        rows.append([f"layer {fit.layer}", *cells, f"{fit.estimator.threshold:.3f}", f"{fit.early:.1%}", agreed])
    return rows


def time_table(breakdown: Breakdown) -> Rows:
    """A row a part, in per cent of each mode's own time, under its time against full depth."""
    modes = breakdown.modes
    rows = [[part, *(f"{mode.shares[part]:.1%}" for mode in modes)] for part in PARTS]
    whole = ["time against full depth", *(f"{mode.relative:.0%}" for mode in modes)]
    left = ["tokens that left early", *(f"{mode.exit_rate:.0%}" for mode in modes)]
    return [["part of the time", *(mode.name for mode in modes)], *rows, whole, left]
