"""How good generated texts are, against references: one metric a file, all of them in points from 0 to 100."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fathomlm.errors import OptionError, choices
from fathomlm.lab.evaluate.metrics import bleu, number, rouge, squad


class Metric(Protocol):
    """Texts, and for each at least one reference; the metric's numbers by name."""

    def __call__(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]: ...


METRICS: dict[str, Metric] = {"rouge": rouge.rouge, "bleu": bleu.bleu, "squad": squad.squad, "number": number.number}
_NEEDED: dict[str, Callable[[], object]] = {"rouge": rouge.needed, "bleu": bleu.needed}
"""What imports the package that a metric is made with."""


def find_metric(name: str) -> Metric:
    """A metric that can be computed here; asked for before a model is loaded."""
    if name not in METRICS:
        raise OptionError(choices("metric", name, METRICS))
    if name in _NEEDED:
        try:
            _NEEDED[name]()
        except ImportError as error:
            raise OptionError(f"the metric {name} needs the package {error.name}: pip install 'fathomlm[eval]'") from error
    return METRICS[name]
