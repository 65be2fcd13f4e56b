"""The confidence threshold that finds itself (thesis 2.5.3, adaptive threshold estimation, its algorithm).

The best threshold differs from one kind of text to another, and trials cost time. Parallel decoding learns of every token
how confident the shallow model was and whether the deep model agreed. So the first sequences of a stream are enough to
say from which confidence on the shallow model may be trusted.

The confidences c of the tokens where both agreed (k = 1), and of those where they did not (k = 0), are each described by
the Beta distribution of the same mean m and variance s^2:

    alpha_k = m_k (m_k (1 - m_k) / s_k^2 - 1)        beta_k = alpha_k (1 - m_k) / m_k
    p(k=1 | c) = p_1 Beta(c; alpha_1, beta_1) / (p_0 Beta(c; alpha_0, beta_0) + p_1 Beta(c; alpha_1, beta_1))

By the rule `thesis` the threshold is the smallest confidence from which on p(k=1 | c) stays at or above a condition. The
thesis takes the smallest at which it holds. The two differ where the posterior falls again behind that point, as it does
near 0 when some tokens agreed without confidence: a threshold there would let the tokens of the dip exit as well. `public`
is the same rule over ten candidates from 0.3 to 0.9 only, as the research code searches. After a sequence,

    both classes have `least` samples    the rule above; 0.0 (0.3) where the posterior is nowhere too low, and 1.0 where it
                                         is too low at the upper end, or everywhere; then raised, see below
    only disagreements have, and there   1.0: nothing exits, since a token exits above the threshold only. Samples go on
      are over four for one agreement    coming, so a false alarm ends while there is calibration
    otherwise                            the value stays

The priors are equal, p_0 = p_1, as in the thesis, whose streams mostly agree: there equal priors ask for more than the
counts would. Where hardly a token agrees they promise what is not so: of classes that look alike each confidence is half
likely to agree, also when 1 in 100 did. Densities fitted to two moments may promise too much as well. So the counts have
the last word: while fewer than `condition` of the tokens seen above a threshold agreed, it is raised, bin by bin, up to 1.0.

How many of the tokens that exit are wrong no condition says: 40 % likely to agree is 60 % likely to err. The rule `risk`,
the default, bounds the share of wrong tokens among all (threshold_samples.py). Under every rule the samples of all are kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import whole_file
from fathomlm.decode.threshold_samples import BINS, Beta, Samples, Texts, clipped
from fathomlm.errors import CheckpointError, OptionError, require
from fathomlm.fields import Fields, shown
from fathomlm.jsonfile import parse, read_bytes
from fathomlm.options import check, option

FORMAT = 2
"""Format 1 knew no sequences and the thesis' rule only."""
GRID = 1000
"""Fitted thresholds are multiples of 1 / GRID, from 0 to 1."""
PERCENT = 3
"""The part of a known number of sequences that calibrates."""
LEAST_SEQUENCES = 30
"""That the rule `risk` needs. Fewer do not show whether wrong tokens come in clusters: where one sequence in seven holds
most of them, 10 give a share above the target in 20 of 100 trials, 30 in 3 (benchmarks/threshold_risk.py --simulate)."""
RARE = 4
"""With more disagreements than this for each agreement there are hardly any agreements."""
ROUNDING = 0.01
"""How far a confidence may lie outside [0, 1]: as far as half precision may put a number near 1."""
KEPT = 10_000
"""The latest refits that are kept: a server that never stops calibrating must not fill its memory."""
PRIORS = ("equal", "measured")
RULES = ("risk", "thesis", "public")
CANDIDATES = [at / GRID for at in range(GRID + 1)]
PUBLIC = [round(0.3 + 0.6 * at / 9, 3) for at in range(10)]
"""Where the rules `thesis` and `public` look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions:
    """By which rule a threshold is found, and how careful it is."""

    rule: str = option(
        "risk", choices=RULES,
        help="how the threshold follows from the samples: risk bounds the share of wrong tokens; thesis fits Beta densities "
        "and asks for --condition; public is the same over ten candidates from 0.3 to 0.9",
    )  # fmt: skip
    risk: float = option(
        0.01, gt=0, lt=1, metavar="P", requires=("rule", "risk"),
        help="rule risk: the share of tokens that may be chosen at the exit and not be the full model's choice",
    )  # fmt: skip
    level: float = option(
        0.95, gt=0, lt=1, metavar="P", requires=("rule", "risk"),
        help="rule risk: confidence level with which the share is below --risk",
    )  # fmt: skip
    initial: float | None = option(None, ge=0, le=1)
    """The threshold until there is enough to go by; None is 1 for the rule risk, where nothing exits, and else 0.9."""
    condition: float = option(
        0.4, ge=0, le=1, metavar="P", requires=("rule", "thesis", "public"),
        help="rules thesis, public: how likely agreement must be for a token to exit",
    )  # fmt: skip
    """Equal priors, where one class is rare, ask for less than 0.5."""
    priors: str = option(
        "equal", choices=PRIORS, requires=("rule", "thesis", "public"),
        help="rules thesis, public: weight of the fitted classes, the same however rare, or by their counts",
    )  # fmt: skip
    least: int = option(10, ge=2)
    """Samples that a class needs to be fitted."""
    expected_sequences: int | None = option(None, ge=1)
    """How many sequences will come; the first 3 % of them calibrate, and at least one, and as many as the rule needs."""
    calibrating_sequences: int | None = option(None, ge=1)
    """How many sequences calibrate. Where neither this nor `expected_sequences` is given, all do."""

    def __post_init__(self) -> None:
        check(self)
        if self.expected_sequences is not None and self.calibrating_sequences is not None:
            raise OptionError(
                "expected_sequences and calibrating_sequences cannot be combined: each sets when calibration ends"
            )

    @property
    def start(self) -> float:
        """The initial threshold."""
        if self.initial is not None:
            return self.initial
        return 1.0 if self.rule == "risk" else 0.9

    @property
    def calibrating(self) -> int | None:
        """How many sequences calibrate, where those are enough for the rule; None is all."""
        if self.expected_sequences is not None:
            return max(1, PERCENT * self.expected_sequences // 100)
        return self.calibrating_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What was known after a sequence, and the threshold from then on."""

    sequence: int = option(ge=1)
    """The number of the sequence, from 1."""
    agreements: int = option(ge=0)
    disagreements: int = option(ge=0)
    agree: Beta
    disagree: Beta
    threshold: float = option(ge=0, le=1)

    def __post_init__(self) -> None:
        check(self, inside=False)


@dataclass(slots=True)
class ThresholdEstimator:
    """The threshold of one stream of requests, learnt while they run.

    `observe` tokens as the deep model reaches them, `end_sequence` when a sequence is done, and read `threshold`.
    """

    options: ThresholdOptions = field(default_factory=ThresholdOptions)
    agree: Samples = field(default_factory=Samples)
    disagree: Samples = field(default_factory=Samples)
    texts: Texts = field(default_factory=Texts)
    sequences: int = option(0, ge=0)
    """How many have ended."""
    history: list[Refit] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self, inside=False)

    @property
    def threshold(self) -> float:
        """A token exits when its confidence is above this."""
        enough = self.history and self._enough(self.options.rule)  # calibrations of earlier versions may have too few
        return self.history[-1].threshold if enough else self.options.start

    def _enough(self, rule: str) -> bool:
        """Whether there are as many sequences with tokens as a rule needs."""
        return rule != "risk" or self.texts.count >= LEAST_SEQUENCES

    @property
    def calibrating(self) -> bool:
        """Whether the sequences that run now still change the threshold."""
        calibrating = self.options.calibrating
        lacks = self.options.expected_sequences is not None and not self._enough(self.options.rule)
        return calibrating is None or self.sequences < calibrating or lacks

    def observe(self, confidences: Sequence[float], agreements: Sequence[bool]) -> None:
        """Take in tokens: the shallow model's confidence, and whether the deep model chose the same token.

        After calibration nothing is taken in: the samples stay those that the threshold came from.
        """
        if len(confidences) != len(agreements):
            raise OptionError(f"observe requires one agreement per confidence, got {len(agreements)} for {len(confidences)}")
        values = [float(confidence) for confidence in confidences]
        for value in values:
            require(-ROUNDING <= value <= 1 + ROUNDING, "a confidence", "between 0 and 1", value)
        if self.calibrating:
            for value, agreed in zip(values, agreements, strict=True):
                (self.agree if agreed else self.disagree).add(value)
                self.texts.add(value, bool(agreed))

    def end_sequence(self) -> None:
        """Count a sequence, and fit anew where it was a calibrating one."""
        calibrated, threshold = self.calibrating, self.threshold
        self.sequences += 1
        if not calibrated:
            return
        self.texts.end()
        self._note(self.by(self.options.rule, threshold))

    def by(self, rule: str, before: float | None = None) -> float:
        """What a rule makes of the samples so far; `before`, by default its initial value, where they are too few for it."""
        own = self.options.initial if rule == self.options.rule else None
        options = dataclasses.replace(self.options, rule=rule, initial=own)
        if not self._enough(rule):
            return options.start
        before = options.start if before is None else before
        if rule == "risk":
            return self.texts.threshold(options.risk, options.level)
        agreements, disagreements = self.agree.count, self.disagree.count
        if agreements >= options.least and disagreements >= options.least:
            return self._raised(self._smallest(rule))
        return 1.0 if disagreements >= options.least and disagreements > RARE * agreements else before

    def for_drafts(self) -> ThresholdEstimator:
        """The same samples, by the thesis' rule where these go by risk: a draft is verified, so that a wrong one costs some
        time and no token, and one that is more likely right than not pays."""
        if self.options.rule != "risk":
            return self
        again = ThresholdEstimator.from_dict(self.to_dict())
        again.options, again.history = dataclasses.replace(self.options, rule="thesis"), []
        if self.history:
            again._note(again.by("thesis"))
        return again

    def _note(self, threshold: float) -> None:
        counts = {"sequence": self.sequences, "agreements": self.agree.count, "disagreements": self.disagree.count}
        self.history.append(Refit(**counts, agree=self.agree.fit(), disagree=self.disagree.fit(), threshold=threshold))
        del self.history[:-KEPT]

    def density(self, agreed: bool, c: float) -> float:
        """The density of one class' confidences, fitted to the samples so far."""
        return (self.agree if agreed else self.disagree).fit().density(c)

    def posterior(self, c: float) -> float:
        """How likely the deep model agrees at a confidence, by the samples so far."""
        return self._posterior()(c)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in values that JSON keeps exactly."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, record: object, where: str = "the estimator") -> ThresholdEstimator:
        """`where` is what errors call the record."""
        if not isinstance(record, dict) or "format" not in record:
            raise CheckpointError(f"{where} is not a saved threshold estimator: it must be an object with a format")
        if record["format"] is True or record["format"] not in (1, FORMAT):
            raise CheckpointError(f"{where} has format {shown(record['format'])}; this version reads {FORMAT} and 1")
        if record["format"] == 1 and isinstance(record.get("options"), dict):
            defaults = {name: getattr(ThresholdOptions(), name) for name in ("risk", "level")}
            options = {"rule": "thesis", **defaults, **record["options"]}
            record = {**record, "options": options, "texts": dataclasses.asdict(Texts())}
        rest = {name: value for name, value in record.items() if name != "format"}
        return Fields(rest, where, error=CheckpointError).build(cls, whole=True)

    def save(self, path: Path) -> None:
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> ThresholdEstimator:
        data = read_bytes(path, str(path), error=CheckpointError)
        try:
            return cls.from_dict(parse(data, "it", error=CheckpointError), str(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not a saved threshold estimator: {error}") from error

    def _smallest(self, rule: str) -> float:
        """The last candidate before the first, from the largest downwards, at which agreement is too unlikely; the smallest
        where none is, and 1.0 where the largest is."""
        candidates, found = PUBLIC if rule == "public" else CANDIDATES, 1.0
        posterior = self._posterior()
        for c in reversed(candidates):
            if posterior(c) < self.options.condition:
                break
            found = c
        return found

    def _raised(self, threshold: float) -> float:
        """This, or the first edge of a bin above it from which on enough of the tokens seen agreed; 1.0 where there is none,
        or too little was seen there to say so."""
        first = int(threshold * BINS)
        for at in range(first, BINS):
            agreed, all_ = self._seen(at)
            above, all_above = self._seen(at + 1)  # what is above for certain; the threshold may lie anywhere in its bin
            enough = all_ >= (1 if at == first else self.options.least)
            if enough and agreed >= self.options.condition * all_ and above >= self.options.condition * all_above:
                return threshold if at == first else at / BINS
        return 1.0

    def _seen(self, at: int) -> tuple[int, int]:
        """How many tokens agreed from a bin on, and how many there were."""
        agreed = sum(self.agree.bins[at:])
        return agreed, agreed + sum(self.disagree.bins[at:])

    def _posterior(self) -> Callable[[float], float]:
        agree, disagree = self.agree.fit(), self.disagree.fit()
        measured = math.log((self.agree.count + 1) / (self.disagree.count + 1))
        scale = agree.log_scale - disagree.log_scale + (measured if self.options.priors == "measured" else 0.0)
        alpha, beta = agree.alpha - disagree.alpha, agree.beta - disagree.beta

        def posterior(c: float) -> float:
            c = clipped(c)
            log_odds = scale + alpha * math.log(c) + beta * math.log1p(-c)
            small = math.exp(-abs(log_odds))
            return (1.0 if log_odds >= 0 else small) / (1 + small)

        return posterior


def write_record(path: Path, record: dict[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
