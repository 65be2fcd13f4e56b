"""The confidence threshold that finds itself (thesis 2.5.3, adaptive threshold estimation, its algorithm).

The best threshold differs from one kind of text to another, and trials cost time. Parallel decoding learns of every token
how confident the shallow model was and whether the deep model agreed. So the first sequences of a stream are enough to
say from which confidence on the shallow model may be trusted.

The confidences c of the tokens where both agreed (k = 1), and of those where they did not (k = 0), are each described by
the Beta distribution of the same mean m and variance s^2:

    alpha_k = m_k (m_k (1 - m_k) / s_k^2 - 1)        beta_k = alpha_k (1 - m_k) / m_k
    p(k=1 | c) = p_1 Beta(c; alpha_1, beta_1) / (p_0 Beta(c; alpha_0, beta_0) + p_1 Beta(c; alpha_1, beta_1))

The threshold is the smallest confidence from which on p(k=1 | c) stays at or above a condition. The thesis takes the
smallest at which it holds. The two differ where the posterior falls again behind that point, as it does near 0 when some
tokens agreed without confidence: a threshold there would let the tokens of the dip exit as well. After a sequence,

    both classes have `least` samples    the rule above; 0.0 where the posterior is nowhere too low, and 1.0 where it is
                                         too low at the upper end, or everywhere; then raised, see below
    only disagreements have, and there   1.0: nothing exits, since a token exits above the threshold only. Samples go on
      are over four for one agreement    coming, so a false alarm ends while there is calibration
    otherwise                            the value stays

The priors are equal, p_0 = p_1, as in the thesis, whose streams mostly agree: there equal priors ask for more than the
counts would. Where hardly a token agrees they promise what is not so: of classes that look alike each confidence is half
likely to agree, also when 1 in 100 did. Densities fitted to two moments may promise too much as well. So the counts have
the last word: while fewer than `condition` of the tokens seen above a threshold agreed, it is raised, bin by bin, up to 1.0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import CheckpointError, OptionError, choices, require
from fathomlm.jsonfile import parse, read_bytes, shown
from fathomlm.options import check, option

FORMAT = 1
BINS = 50
CLIP = 1e-4
"""Confidences count as at least this and at most 1 minus this: at 0 and 1 the density of a Beta is 0 or infinite."""
GRID = 1000
"""Fitted thresholds are multiples of 1 / GRID, from 0 to 1."""
PERCENT = 3
"""The part of a known number of sequences that calibrates."""
RARE = 4
"""With more disagreements than this for each agreement there are hardly any agreements."""
WIDEST, NARROWEST = 1e-4, 1e6
"""The range of alpha + beta. The upper end is for samples that are all equal, the lower for rounding."""
ROUNDING = 0.01
"""How far a confidence may lie outside [0, 1]: as far as half precision may put a number near 1."""
KEPT = 10_000
"""The latest refits that are kept: a server that never stops calibrating must not fill its memory."""
PRIORS = ("equal", "measured")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions:
    initial: float = option(0.9, ge=0, le=1)
    """The threshold until there is enough to fit."""
    condition: float = option(0.4, ge=0, le=1, metavar="P", help="how likely agreement must be for a token to exit")
    """Equal priors, where one class is rare, ask for less than 0.5."""
    priors: str = option(
        "equal", choices=PRIORS, help="weight of the fitted classes: the same however rare, or by their counts"
    )
    least: int = option(10, ge=2)
    """Samples that a class needs to be fitted."""
    expected_sequences: int | None = option(None, ge=1)
    """How many sequences will come; the first 3 % of them calibrate, and at least one."""
    calibrating_sequences: int | None = option(None, ge=1)
    """How many sequences calibrate. Where neither this nor `expected_sequences` is given, all do."""

    def __post_init__(self) -> None:
        check(self)
        if self.expected_sequences is not None and self.calibrating_sequences is not None:
            raise OptionError(
                "expected_sequences and calibrating_sequences cannot be combined: each sets when calibration ends"
            )

    @property
    def calibrating(self) -> int | None:
        """How many sequences calibrate; None is all."""
        if self.expected_sequences is not None:
            return max(1, PERCENT * self.expected_sequences // 100)
        return self.calibrating_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Beta:
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            _check(name, getattr(self, name), CLIP * WIDEST / 2)

    @classmethod
    def of_moments(cls, mean: float, variance: float) -> Beta:
        """The Beta of this mean and variance; one of the mean where no Beta has both."""
        mean = _clipped(mean)
        total = mean * (1 - mean) / variance - 1 if variance > 0 else NARROWEST
        total = min(max(total, WIDEST), NARROWEST)
        return cls(alpha=mean * total, beta=(1 - mean) * total)

    @property
    def log_scale(self) -> float:
        """The logarithm of the factor that makes the area 1. The Gamma functions themselves overflow from 172 on."""
        return math.lgamma(self.alpha + self.beta) - math.lgamma(self.alpha) - math.lgamma(self.beta)

    def density(self, c: float) -> float:
        c = _clipped(c)
        return math.exp(self.log_scale + (self.alpha - 1) * math.log(c) + (self.beta - 1) * math.log1p(-c))


@dataclass(slots=True, kw_only=True)
class Samples:
    """The confidences of one class: Welford's running moments, and a histogram for pictures."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """The sum of squared distances from the mean."""
    bins: list[int] = field(default_factory=lambda: [0] * BINS)

    def __post_init__(self) -> None:
        _check("count", self.count, 0, integer=True)
        _check("mean", self.mean, 0, 1)
        _check("m2", self.m2, 0)
        require(self.count > 0 or self.mean == self.m2 == 0, "mean and m2", "0 without samples", (self.mean, self.m2))
        require(isinstance(self.bins, list) and len(self.bins) == BINS, "bins", f"a list of {BINS} counts", self.bins)
        for count in self.bins:
            _check("a bin", count, 0, integer=True)
        require(sum(self.bins) == self.count, "bins", f"counts that sum to {self.count}", self.bins)
        self.bins = list(self.bins)  # not shared with the record that they were read from

    @property
    def variance(self) -> float:
        return self.m2 / self.count if self.count else 0.0

    def add(self, confidence: float) -> None:
        self.bins[min(max(int(confidence * BINS), 0), BINS - 1)] += 1
        c = _clipped(confidence)
        self.count += 1
        before = c - self.mean
        self.mean += before / self.count
        self.m2 += before * (c - self.mean)

    def fit(self) -> Beta:
        """Uniform without samples."""
        return Beta.of_moments(self.mean, self.variance) if self.count else Beta(alpha=1.0, beta=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What was known after a sequence, and the threshold from then on."""

    sequence: int
    """The number of the sequence, from 1."""
    agreements: int
    disagreements: int
    agree: Beta
    disagree: Beta
    threshold: float

    def __post_init__(self) -> None:
        for name, low in (("sequence", 1), ("agreements", 0), ("disagreements", 0)):
            _check(name, getattr(self, name), low, integer=True)
        _check("threshold", self.threshold, 0, 1)


@dataclass(slots=True)
class ThresholdEstimator:
    """The threshold of one stream of requests, learnt while they run.

    `observe` tokens as the deep model reaches them, `end_sequence` when a sequence is done, and read `threshold`.
    """

    options: ThresholdOptions = field(default_factory=ThresholdOptions)
    agree: Samples = field(default_factory=Samples)
    disagree: Samples = field(default_factory=Samples)
    sequences: int = 0
    """How many have ended."""
    history: list[Refit] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check("sequences", self.sequences, 0, integer=True)

    @property
    def threshold(self) -> float:
        """A token exits when its confidence is above this."""
        return self.history[-1].threshold if self.history else self.options.initial

    @property
    def calibrating(self) -> bool:
        """Whether the sequences that run now still change the threshold."""
        calibrating = self.options.calibrating
        return calibrating is None or self.sequences < calibrating

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

    def end_sequence(self) -> None:
        """Count a sequence, and fit anew where it was a calibrating one."""
        calibrated, threshold = self.calibrating, self.threshold
        self.sequences += 1
        if not calibrated:
            return
        agreements, disagreements, least = self.agree.count, self.disagree.count, self.options.least
        if agreements >= least and disagreements >= least:
            threshold = self._raised(self._smallest())
        elif disagreements >= least and disagreements > RARE * agreements:
            threshold = 1.0
        counts = {"sequence": self.sequences, "agreements": agreements, "disagreements": disagreements}
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
        if record["format"] is True or record["format"] != FORMAT:
            raise CheckpointError(f"{where} has format {shown(record['format'])}; this version reads {FORMAT}")
        history = record.get("history")
        if not isinstance(history, list):
            raise CheckpointError(f"{where}: history must be a list, got {shown(history)}")
        refits = [_read(Refit, each, f"{where}, history {at}", agree=Beta, disagree=Beta) for at, each in enumerate(history)]
        rest = {name: value for name, value in record.items() if name != "format"} | {"history": refits}
        return _read(cls, rest, where, options=ThresholdOptions, agree=Samples, disagree=Samples)

    def save(self, path: Path) -> None:
        write_record(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> ThresholdEstimator:
        return cls.from_dict(read_record(path, "is not a saved threshold estimator"), str(path))

    def _smallest(self) -> float:
        """The last value before the first, from 1.0 downwards, at which agreement is too unlikely; 0.0 where none is."""
        posterior = self._posterior()
        for at in range(GRID, -1, -1):
            if posterior(at / GRID) < self.options.condition:
                return min(at + 1, GRID) / GRID
        return 0.0

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
            c = _clipped(c)
            log_odds = scale + alpha * math.log(c) + beta * math.log1p(-c)
            small = math.exp(-abs(log_odds))
            return (1.0 if log_odds >= 0 else small) / (1 + small)

        return posterior


def write_record(path: Path, record: dict[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")


def read_record(path: Path, otherwise: str) -> object:
    """What such a file holds; `otherwise` says what a file that is no JSON is not."""
    data = read_bytes(path, str(path), error=CheckpointError)
    try:
        record: object = parse(data, "it", error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{path} {otherwise}: {error}") from error
    return record


def _read(kind: Callable[..., T], record: object, where: str, **parts: Callable[..., object]) -> T:
    """A dataclass from a record that has its fields and no others. `parts` are those of them that are dataclasses."""
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if not isinstance(record, dict):
        raise CheckpointError(f"{where} must be an object with {', '.join(names)}, got {shown(record)}")
    for name in record:
        if name not in names:
            raise CheckpointError(f"{where}: {choices('field', str(name), names)}")
    missing = [name for name in names if name not in record]
    if missing:
        raise CheckpointError(f"{where} is missing {', '.join(missing)}; it must have {', '.join(names)}")
    read = {name: _read(part, record[name], f"{where}, {name}") for name, part in parts.items()}
    try:
        return kind(**{**record, **read})
    except OptionError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _clipped(c: float) -> float:
    return min(max(c, CLIP), 1 - CLIP)


def _check(name: str, value: object, low: float, high: float = 2.0**53, *, integer: bool = False) -> None:
    number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    rule = f"{'an integer' if integer else 'a number'} from {low:g} {'on' if high > 1 else f'to {high:g}'}"
    require(number and low <= value <= high, name, rule, value)  # type: ignore[operator]
