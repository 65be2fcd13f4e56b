"""The numbers of an analysis as rows of text: what is printed, drawn under pictures and shown in pages."""

from __future__ import annotations

import math

from fathomlm.lab.analyze.kv import KVNumbers
from fathomlm.lab.analyze.routing import RoutingNumbers

Rows = list[list[str]]
"""A header, and rows whose first column is a name."""


def routing_table(numbers: RoutingNumbers) -> Rows:
    """The metrics of both passes; token-choice has one."""
    top_k, causal = numbers.top_k or {}, numbers.causal
    R = len(numbers.capacity)
    rows = [["", "top-k", "causal"]]
    rows.append(["loss (nats per token)", _number(numbers.top_k_loss, ".4f"), f"{numbers.causal_loss:.4f}"])
    formats = {"mean_depth": ("mean depth", ".2f")}
    formats |= {f"load_{depth}": (f"tokens at depth {depth}", ".1%") for depth in range(R + 1)}
    formats |= {"sampling_accuracy": ("sampling accuracy", ".1%"), "dead_tokens": ("dead token ratio", ".1%")}
    formats |= {"max_violation": ("MaxVio", ".3f"), "entropy": (f"entropy (at most {math.log(R):.3f})", ".3f")}
    for name, (title, form) in formats.items():
        if name in top_k or name in causal:
            rows.append([title, _number(top_k.get(name), form), _number(causal.get(name), form)])
    return rows if numbers.top_k is not None else [[row[0], row[2]] for row in rows]


def flops_table(numbers: RoutingNumbers) -> Rows:
    """Forward FLOPs, and what part of the unrouted plan's they are."""
    flops = numbers.flops
    named = (("as the capacities say", flops.nominal), ("as the text was run", flops.actual), ("unrouted", flops.unrouted))
    rows = [[name, f"{value:,}", f"{value / flops.unrouted:.1%}"] for name, value in named]
    return [["forward FLOPs", "per token", "of unrouted"], *rows]


def score_table(numbers: RoutingNumbers) -> Rows:
    """A row a recursion (expert) or a depth (token)."""
    expert = numbers.router == "expert"
    rows = [["recursion" if expert else "depth", "tokens", "selected", "mean score", "not selected", "mean score"]]
    for histogram in numbers.histograms:
        kept, left = sum(histogram.selected), sum(histogram.unselected)
        asked = max(kept + left, 1)
        means = [_number(mean, ".3f") for mean in (histogram.selected_mean, histogram.unselected_mean)]
        shares = f"{kept / asked:.1%}", f"{left / asked:.1%}"
        rows.append([str(histogram.recursion), f"{kept + left:,}", shares[0], means[0], shares[1], means[1]])
    return rows


def scaling_table(numbers: RoutingNumbers) -> Rows:
    """A row a maximum depth."""
    rows = [["max. depth", "loss (nats)", "log-likelihood of a row", "mean depth", "FLOPs per token", "of unrouted"]]
    rows += [
        [
            str(limit.max_depth),
            f"{limit.loss:.4f}",
            f"{limit.log_likelihood[-1]:,.1f}",
            f"{limit.mean_depth:.2f}",
            f"{limit.flops_per_token:,}",
            f"{limit.flops_per_token / numbers.flops.unrouted:.1%}",
        ]
        for limit in numbers.scaling
    ]
    return rows


def gain_table(numbers: RoutingNumbers) -> Rows:
    """A row for the tokens of each depth: what recursions gained them."""
    rows = [["routed to depth", "tokens", "loss, one recursion", "own depth", "gain", "every recursion", "gain"]]
    for own in numbers.gain.by_depth:
        losses = [f"{value:.4f}" for value in (own.one_loss, own.loss, own.gain, own.full_loss, own.full_gain)]
        rows.append([str(own.depth), f"{own.share:.1%}", *losses])
    return rows


def worth_table(numbers: RoutingNumbers) -> Rows:
    """What it is worth to choose who goes deep, at equal cost."""
    gain = numbers.gain
    error = "" if gain.routing_gain_error is None else f" ± {gain.routing_gain_error:.4f}"
    return [
        ["at the same mean depth", "loss (nats)"],
        ["depths as routed", f"{gain.loss:.4f}"],
        ["the same depths, shuffled in each row", f"{gain.shuffled_loss:.4f}"],
        ["what routing gains (± standard error over rows)", f"{gain.routing_gain:.4f}{error}"],
        ["correlation of depth and what depth would gain", _number(gain.correlation, ".3f")],
    ]


def kv_table(numbers: KVNumbers) -> Rows:
    """A row a kind; the final norm is no step."""
    rows = [["L2 norm", "first step", "last step", "least", "most", "cosine tied", "untied"]]
    for kind, states in numbers.states().items():
        lengths = states.magnitude[: len(numbers.running)]
        known = [length for length in lengths if length is not None]
        shown = [lengths[0], lengths[-1], min(known, default=None), max(known, default=None)]
        cosines = [_number(value, ".3f") for value in (states.tied, states.untied)]
        rows.append([kind, *(_number(value, ",.4g") for value in shown), *cosines])
    return rows


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
