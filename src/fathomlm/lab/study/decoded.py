"""Claims about how trained models decode: differences between texts, which were measured elsewhere and lie in the ledger's
folder `decoded`, a file for each study whose models wrote them. The verdicts are given here, as those of losses are.

Of two settings of one model there is an interval over the texts. Models were trained once each, and the texts do not say how
much another training run would differ; where two are compared there is none, and so no order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fathomlm.errors import DataError
from fathomlm.jsonfile import read_object
from fathomlm.lab.study.differences import Difference
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.results import Judged, Results, adjusted, verdict_on
from fathomlm.lab.study.spec import Claim

DIRECTORY = "decoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedDifference:
    """One difference: the score of one setting less another's."""

    setting: str
    one: str
    other: str
    mean: float
    interval: tuple[float, float] | None = None
    """95 %, over the texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedClaim:
    """That the first of each pair scores less, or, with `within`, that they differ by less than that."""

    text: str
    thesis: str
    places: tuple[DecodedDifference, ...]
    within: float | None = None
    after: bool = False
    """As a study's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    device: str
    torch: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTexts:
    study: str
    metric: str
    texts: int
    environment: Environment
    claims: tuple[DecodedClaim, ...]

    def judged(self) -> Iterator[Judged]:
        for claim in self.claims:
            within = claim.within or 0.0
            own = Claim(text=claim.text, thesis=claim.thesis, metric=self.metric, within=within, after=claim.after)
            for place in claim.places:
                found = Difference(mean=place.mean, seeds=1, half=None, freedom=0, interval=place.interval)
                yield verdict_on(own, place.setting, place.one, place.other, found)

    @property
    def about(self) -> str:
        where = self.environment
        return (
            f"{self.texts} texts, {self.metric}, {where.device}, torch {where.torch}, {where.date}; intervals are over the "
            "texts, and differences of two models, each trained once, have none."
        )


def with_decoded(results: Results, ledger: Ledger) -> Results:
    """With the claims about texts that a study's models wrote, where there are any."""
    found = read_decoded(ledger, results.study.name)
    if found is None:
        return results
    return replace(results, judged=(*results.judged, *adjusted(found.judged())), decoded=found.about)


def read_decoded(ledger: Ledger, study: str) -> DecodedTexts | None:
    """What was measured with a study's models; None where nothing was."""
    path = ledger.directory / DIRECTORY / f"{study}.json"
    if not path.is_file():
        return None
    found = read_object(path, error=DataError).build(DecodedTexts)
    if found.study != study:
        raise DataError(f"{path} is of the study {found.study}")
    return found
