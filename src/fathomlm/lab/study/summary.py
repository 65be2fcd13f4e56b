"""The summary at the top of the page of results: for each chapter of the thesis what was confirmed, refuted and left open.
It is made from the verdicts alone, so that it cannot say anything that a section does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fathomlm.lab.study.differences import DECIDED, Verdict, gap
from fathomlm.lab.study.results import SHORT, Judged, Results, overall
from fathomlm.lab.study.spec import Claim, Study

CHAPTERS = {
    "free": "Chapter 2, early exits (FREE)",
    "rrt": "Chapter 3, relaxed recursive Transformers",
    "mor": "Chapter 4, mixtures of recursions",
    "": "Questions of ours",
}
"""By the middle of the thesis' labels, as in `tab_mor:main_results`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A claim with all that was found of it."""

    study: Study
    claim: Claim
    judged: tuple[Judged, ...]

    @property
    def verdict(self) -> Verdict:
        """The one of all settings, without what single settings say."""
        found = overall(self.judged)
        return next((verdict for verdict in SHORT if verdict == found), "not resolved at this scale")

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(each.verdict for each in self.judged)

    @property
    def decided(self) -> bool:
        return self.verdict in DECIDED

    @property
    def remains(self) -> bool:
        """Whether its verdict is the same where all comparisons of its study are tested together."""
        return self.decided and all(each.remains for each in self.judged)

    @property
    def decided_in_some(self) -> bool:
        return self.verdict == "not resolved at this scale" and bool(self.counts["confirmed"] + self.counts["refuted"])

    @property
    def chapter(self) -> str:
        """The claim's own; of a question of ours that of its study."""
        labels = [self.claim.thesis, *self.study.thesis]
        found = (re.match(r"(?:tab|fig)_(free|rrt|mor):", label) for label in labels)
        return next((match[1] for match in found if match), "")


def by_claim(results: Results) -> list[tuple[Claim, list[Judged]]]:
    """The claims of a study, those about its models' texts among them, each with all places at which it was tried."""
    claims = dict.fromkeys((*results.study.claims, *(each.claim for each in results.judged)))
    return [(claim, [each for each in results.judged if each.claim == claim]) for claim in claims]


def heading(study: Study) -> str:
    return f"{study.name}: {study.title}"


def anchor(title: str) -> str:
    """Where a heading is linked to, on GitHub and on the site."""
    return re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")


def summary(results: Sequence[Results]) -> list[str]:
    outcomes = [
        JudgedClaim(study=each.study, claim=claim, judged=tuple(judged))
        for each in results
        for claim, judged in by_claim(each)
    ]
    if not outcomes:
        return []
    lines = [
        "## Summary\n",
        f"{_many(outcomes)}. A claim is tested in every setting that it names, such as two budgets, and counts as confirmed "
        "or refuted only if it is so in all of them. Where one seed was trained, and nothing like it repeated, there is no "
        "interval, and a claim stays open however large the difference is. In brackets is the last setting with a verdict, "
        "and the difference there. *Singly* marks what is decided by itself, but not where all comparisons of its study are "
        "tested together.\n",
    ]
    for key, title in CHAPTERS.items():
        own = [outcome for outcome in outcomes if outcome.chapter == key]
        if own:
            lines += [f"**{title}.** {_many(own)}.\n", *_listed(own), ""]
    return lines


def _many(outcomes: Sequence[JudgedClaim]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    singly = Counter(outcome.verdict for outcome in outcomes if outcome.decided and not outcome.remains)
    told = [f"{counts[verdict]} {verdict}{_only(singly[verdict])}" for verdict in SHORT]
    claims = "claim" if len(outcomes) == 1 else "claims"
    return f"{len(outcomes)} {claims}: {', '.join(told[:-1])}, and {told[-1]}"


def _only(singly: int) -> str:
    return f" ({singly} of them singly)" if singly else ""


def _listed(outcomes: Sequence[JudgedClaim]) -> list[str]:
    """What is decided claim by claim, study by study; of the others in which study they are."""
    groups = {
        "Confirmed": [outcome for outcome in outcomes if outcome.verdict == "confirmed"],
        "Refuted": [outcome for outcome in outcomes if outcome.verdict == "refuted"],
        "Decided in some settings only": [outcome for outcome in outcomes if outcome.decided_in_some],
    }
    lines = []
    for word, found in groups.items():
        for study in dict.fromkeys(outcome.study.name for outcome in found):
            own = [outcome for outcome in found if outcome.study.name == study]
            lines.append(f"- {word}, {_link(own[0].study)}: {'; '.join(_told(outcome) for outcome in own)}.")
    rest = [each for each in outcomes if each.verdict == "not resolved at this scale" and not each.decided_in_some]
    unrun = [outcome for outcome in outcomes if outcome.verdict == "not run yet"]
    for word, found in (("Not resolved in any setting", rest), ("Not run yet", unrun)):
        if found:
            lines.append(f"- {word}: {_places(found)}.")
    return lines


def _told(outcome: JudgedClaim) -> str:
    """A claim with its last decided setting; where settings differ, of each verdict, with how many have which."""
    decided = {each.verdict: each for each in outcome.judged if each.decided}
    text = outcome.claim.text + (", stated afterwards" if outcome.claim.after else "")
    found = {verdict: gap(each.found) + ("" if each.remains else ", *singly*") for verdict, each in decided.items()}
    if not outcome.decided_in_some:
        return f"{text} ({'; '.join(f'{each.budget}: {found[verdict]}' for verdict, each in decided.items())})"
    counts = outcome.counts
    told = [f"{each.budget} {verdict}: {found[verdict]}" for verdict, each in decided.items()]
    many = ", ".join(f"{counts[verdict]} {word}" for verdict, word in SHORT.items() if counts[verdict])
    return f"{text} ({'; '.join(told)}; in all {many})"


def _places(outcomes: Iterable[JudgedClaim]) -> str:
    counts = Counter(outcome.study.name for outcome in outcomes)
    studies = {outcome.study.name: outcome.study for outcome in outcomes}
    return ", ".join(f"{many} of {_link(studies[name])}" for name, many in counts.items())


def _link(study: Study) -> str:
    return f"[{study.name}](#{anchor(heading(study))})"
