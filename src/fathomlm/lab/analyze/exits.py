"""What would happen at every layer if tokens exited there (thesis 2.4, its observations 1 and 2; 2.5.3).

Text is run through the full model once (of an encoder-decoder its own completions, behind their sources), and every layer's
prediction is evaluated: how often its most likely token is
the last layer's, how often it is right, how near its state is to the last one. At some layers, the exits, the confidences
are counted by agreement, and the two Beta densities are fitted from which the adaptive threshold comes.

Observation 1: a token's state may be far from the last layer's although it already chooses the same token, which is why
copying states into deeper layers costs quality. So the cosine is also taken at each token's first layer from which on no
layer disagrees with the last (settled), and at the first that agrees (the oracle's exit).
Observation 2: leaving everything at an early layer loses most of the quality: agreement, accuracy and loss by layer.

States are the residual stream before the final norm.

Shapes: L layers, N tokens, n some of them, M hidden width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.decode.confidence import MEASURES, AtExit, ExitScorer, find_classifiers
from fathomlm.decode.exiting import ONE_EXIT
from fathomlm.decode.full import generate
from fathomlm.decode.prompts import read_sources, start_token
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices
from fathomlm.lab.analyze.breakdown import TimeBreakdown
from fathomlm.lab.common import OnProgress, unwatched, without
from fathomlm.lab.simulate.collect import exits_of
from fathomlm.lab.token_rows import TokenRows
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

MOST_SCORES = 1 << 24
"""Scores over the vocabulary that are held at once, in float32: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNumbers:
    """One layer as an exit for every token."""

    layer: int
    """From 1, in unrolled depth."""
    recursion: int | None
    """From 1; None in prelude, coda and models that do not loop."""
    agreement: float
    """The part of the tokens at which its most likely token is the last layer's."""
    accuracy: float
    """The part at which it is the token that follows."""
    loss: float
    """Next-token loss in nats."""
    confidence: float
    """Its mean."""
    cosine: float
    """The mean cosine of its state with the last layer's."""
    cosine_agreed: float | None
    """The same where the two choose the same token."""
    first: float
    """The part of the tokens for which it is the first layer that agrees with the last: the oracle's exit."""
    settled: float
    """The part for which no later layer disagrees, and the one before it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFit:
    """The confidences at one exit, by agreement, and what was fitted to them."""

    layer: int
    estimator: ThresholdEstimator
    early: float
    """The part of the tokens whose confidence is above the fitted threshold."""
    agreed: float | None
    """The part of those that agree with the last layer."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "threshold": self.estimator.threshold,
            "early": self.early,
            "agreed": self.agreed,
            "agree": _class(self.estimator, agreed=True),
            "disagree": _class(self.estimator, agreed=False),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitNumbers:
    rows: int
    context: int
    confidence: str
    """Which measure."""
    layers: list[LayerNumbers]
    exits: list[ExitFit]
    oracle_layer: float
    """The mean first layer that agrees."""
    oracle_cosine: float
    """The mean cosine of the states there with the last layer's (thesis, `tab_free:obs1`)."""
    settled_layer: float
    breakdown: TimeBreakdown | None = None
    """Where the time goes while decoding; None where it was not asked for."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(dataclasses.replace(self, exits=[])) | {"exits": [fit.to_dict() for fit in self.exits]}

    def summary(self) -> dict[str, Any]:
        """Without histograms."""
        found: dict[str, Any] = without(self.to_dict(), ("bins",))
        return found


def _class(estimator: ThresholdEstimator, agreed: bool) -> dict[str, Any]:
    samples = estimator.agree if agreed else estimator.disagree
    fitted = samples.fit()
    return {
        "tokens": samples.count,
        "mean": samples.mean,
        "variance": samples.variance,
        "alpha": fitted.alpha,
        "beta": fitted.beta,
        "bins": samples.bins,
    }


def check_exits(plan: DepthPlan, layers: Sequence[int] | None, confidence: str) -> tuple[int, ...]:
    """The exits to look at, from 1: those asked for, else the model's own, else where recursions end, else a third and two
    thirds of the way."""
    if plan.routing is not None:
        raise OptionError("a routed model has no exits: its router chooses each token's depth; see `analyze routing`")
    last = plan.unrolled_layers
    if last < 2:
        raise OptionError("a model of one layer has no exit")
    if confidence not in ONE_EXIT:
        raise OptionError(choices("confidence", confidence, ONE_EXIT))
    if layers is None and not plan.exits and not (plan.recursions > 1 and plan.whole_passes):
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3)}))
    return tuple(index + 1 for index in exits_of(plan, layers))


@dataclass(frozen=True, slots=True)
class DecodedSource:
    """What an encoder-decoder made of a source, as its decoder reads it: from the start token on."""

    source: list[int]
    tokens_T: Tensor
    targets_T: Tensor


def complete(
    model: FathomForSeq2SeqLM, sources: Sequence[list[int]], new: int, on_text: OnProgress = unwatched
) -> list[DecodedSource]:
    """Greedily, at full depth."""
    made = []
    for source in sources:
        (text,) = generate(model, [source], max_new_tokens=new)
        made.append(DecodedSource(source, torch.tensor([start_token(model), *text.tokens[:-1]]), torch.tensor(text.tokens)))
        on_text(len(made), len(sources))
    return made


@torch.inference_mode()
def measure(
    model: FathomModel,
    rows: TokenRows | Sequence[DecodedSource],
    *,
    layers: Sequence[int] | None = None,
    confidence: str = "gap",
    rule: ThresholdOptions | None = None,
    on_rows: OnProgress = unwatched,
) -> ExitNumbers:
    """Run each row, and evaluate every layer at every token. `on_rows` is called with (done, total)."""
    decoder, plan = model.decoder, model.plan
    exits = check_exits(plan, layers, confidence)
    judges = find_classifiers(decoder, [layer - 1 for layer in exits]) if confidence == "classifier" else {}
    measured = confidence if confidence != "classifier" else "gap"
    sums = _ExitSums(plan.unrolled_layers)
    estimators = {layer: ThresholdEstimator(rule or ThresholdOptions(rule="thesis")) for layer in exits}
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in exits}
    for done, (tokens_T, targets_T, memory) in enumerate(_texts(model, rows), start=1):
        row = _Row.read(decoder, tokens_T, targets_T, measured, memory)
        sums.add(row)
        for layer in exits:
            sure_N = row.classified(layer, judges) if judges else row.confidence_LN[layer - 1]
            agreed_N = row.agreed_LN[layer - 1]
            estimators[layer].observe(sure_N.tolist(), agreed_N.tolist())
            estimators[layer].end_sequence()
            kept[layer].append((sure_N, agreed_N))
        on_rows(done, len(rows))
    return ExitNumbers(
        rows=len(rows),
        context=rows.context if isinstance(rows, TokenRows) else max(len(each.tokens_T) for each in rows),
        confidence=confidence,
        layers=sums.layers(plan),
        exits=[_fit(layer, estimators[layer], kept[layer]) for layer in exits],
        oracle_layer=sums.first_sum / sums.tokens,
        oracle_cosine=sums.oracle_sum / sums.tokens,
        settled_layer=sums.settled_sum / sums.tokens,
    )


def _texts(
    model: FathomModel, rows: TokenRows | Sequence[DecodedSource]
) -> Iterator[tuple[Tensor, Tensor, EncoderMemory | None]]:
    if isinstance(rows, TokenRows):
        assert rows.targets_NT is not None
        yield from ((tokens_T, targets_T, None) for tokens_T, targets_T in zip(rows.tokens_NT, rows.targets_NT, strict=True))
        return
    assert isinstance(model, FathomForSeq2SeqLM)
    for each in rows:
        yield each.tokens_T, each.targets_T, read_sources(model, [each.source])


def _fit(layer: int, estimator: ThresholdEstimator, kept: Sequence[tuple[Tensor, Tensor]]) -> ExitFit:
    sure_N, agreed_N = (torch.cat(parts) for parts in zip(*kept, strict=True))
    exits_N = sure_N > estimator.threshold if estimator.threshold > 0 else torch.ones_like(agreed_N)
    many = int(exits_N.sum())
    agreed = float((agreed_N & exits_N).sum()) / many if many else None
    return ExitFit(layer=layer, estimator=estimator, early=many / len(sure_N), agreed=agreed)


@dataclass(frozen=True, slots=True)
class _Row:
    """Every layer's predictions for one row."""

    states: list[Tensor]
    """(N, M) each; the first is before the first layer."""
    agreed_LN: Tensor
    right_LN: Tensor
    loss_LN: Tensor
    confidence_LN: Tensor
    cosine_LN: Tensor

    @classmethod
    def read(
        cls, decoder: Decoder, tokens_T: Tensor, targets_T: Tensor, measure: str, memory: EncoderMemory | None = None
    ) -> _Row:
        device = decoder.embed.weight.device
        tokens_1T, targets_N = tokens_T[None].to(device), targets_T.to(device)
        L = decoder.plan.unrolled_layers
        found = decoder.states(tokens_1T, at=range(L), memory=memory)
        states = [decoder.enter(tokens_1T)[0], *(found[index][0] for index in range(L))]
        predictions = [_ask(decoder, states, index, targets_N, measure) for index in range(L)]
        choice_LN, loss_LN, confidence_LN = (torch.stack(parts).cpu() for parts in zip(*predictions, strict=True))
        last_NM = states[-1].float()
        cosine_LN = torch.stack([F.cosine_similarity(state.float(), last_NM, dim=-1) for state in states[1:]]).cpu()
        agreed_LN = choice_LN == choice_LN[-1]
        return cls(states, agreed_LN, choice_LN == targets_N.cpu(), loss_LN, confidence_LN, cosine_LN)

    def classified(self, layer: int, judges: dict[int, ExitScorer]) -> Tensor:
        """What a trained judge says after a layer that has one."""
        return judges[layer - 1](self.states[layer]).float().sigmoid().reshape(-1).cpu()


def _ask(
    decoder: Decoder, states: Sequence[Tensor], index: int, targets_N: Tensor, measure: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's most likely tokens, its losses and its confidences."""
    choices_n, losses_n, sure_n = [], [], []
    size = max(1, MOST_SCORES // decoder.architecture.vocab)
    for at in range(0, len(targets_N), size):
        part = slice(at, at + size)
        before_nM, after_nM = states[index][part], states[index + 1][part]
        logits_nV = decoder.exit_logits(after_nM, index)
        choices_n.append(logits_nV.argmax(-1))
        losses_n.append(F.cross_entropy(logits_nV.float(), targets_N[part], reduction="none"))
        sure_n.append(MEASURES[measure](AtExit(before_nM, after_nM, logits_nV)).clamp(0, 1))
    return torch.cat(choices_n), torch.cat(losses_n), torch.cat(sure_n)


class _ExitSums:
    """Accumulates predictions over rows."""

    def __init__(self, L: int) -> None:
        self.tokens = 0
        names = ("agreed", "right", "loss", "sure", "cosine", "cosine_agreed", "first", "settled")
        self._sums = {name: torch.zeros(L, dtype=torch.float64) for name in names}
        self.first_sum = self.settled_sum = self.oracle_sum = 0.0

    def add(self, row: _Row) -> None:
        L, N = row.agreed_LN.shape
        agreed_LN = row.agreed_LN.double()
        parts = {
            "agreed": agreed_LN,
            "right": row.right_LN.double(),
            "loss": row.loss_LN.double(),
            "sure": row.confidence_LN.double(),
            "cosine": row.cosine_LN.double(),
            "cosine_agreed": row.cosine_LN.double() * agreed_LN,
        }
        for name, values_LN in parts.items():
            self._sums[name] += values_LN.sum(1)
        first_N = row.agreed_LN.int().argmax(0)  # the last layer agrees with itself, so there is one
        unbroken_LN = row.agreed_LN.flip(0).int().cumprod(0).flip(0)
        settled_N = L - unbroken_LN.sum(0)
        self._sums["first"] += torch.bincount(first_N, minlength=L)
        self._sums["settled"] += torch.bincount(settled_N, minlength=L)
        self.first_sum += float((first_N + 1).sum())
        self.settled_sum += float((settled_N + 1).sum())
        self.oracle_sum += float(row.cosine_LN.gather(0, first_N[None]).double().sum())
        self.tokens += N

    def layers(self, plan: DepthPlan) -> list[LayerNumbers]:
        mean = {name: (values / self.tokens).tolist() for name, values in self._sums.items()}
        agreed_cosine = (self._sums["cosine_agreed"] / self._sums["agreed"]).tolist()
        return [
            LayerNumbers(
                layer=step.index + 1,
                recursion=step.recursion + 1 if step.part == "core" and plan.recursions > 1 else None,
                agreement=mean["agreed"][step.index],
                accuracy=mean["right"][step.index],
                loss=mean["loss"][step.index],
                confidence=mean["sure"][step.index],
                cosine=mean["cosine"][step.index],
                cosine_agreed=cosine if math.isfinite(cosine := agreed_cosine[step.index]) else None,
                first=mean["first"][step.index],
                settled=mean["settled"][step.index],
            )
            for step in plan
        ]
