"""The quality of a setting of a sweep: agreement with the full model, perplexity, or a metric of completions.

Each gives (quality, score): the number in its own unit, and the same from 0 to 1 where more is better.

Shapes: T tokens, N scored positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.decode.confidence import AtExit, find_classifiers
from fathomlm.decode.confidence import confidences as measure
from fathomlm.decode.exit_forward import exceeds
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import Generation
from fathomlm.decode.prompts import read_sources, start_token
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.evaluate.frontier import SweepSetting
from fathomlm.lab.evaluate.samples import Metric, Sample
from fathomlm.lab.evaluate.scoring import Pair, Scorer, TextEncoder, perplexity_of, predict, windows
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

Quality = tuple[float, float]
MAIN = {"rouge": "rougeL", "bleu": "bleu", "squad": "f1", "number": "exact_match"}
"""The number of each metric that is drawn."""


@torch.inference_mode()
def agreement(model: FathomModel, results: Sequence[Generation]) -> Quality:
    """How often the full model would have chosen the same token behind the same text. A difference counts once: what
    follows is judged behind the text that was made, not behind another."""
    same = total = 0
    decoder = model.decoder
    device = decoder.embed.weight.device
    for result in results:
        memory = None
        start = list(result.prompt_tokens)
        if isinstance(model, FathomForSeq2SeqLM):
            memory, start = read_sources(model, [start]), [start_token(model)]
        tokens_1T = torch.tensor([[*start, *result.tokens[:-1]]], device=device)
        hidden_NM = decoder(tokens_1T, memory=memory)[0, len(start) - 1 :]
        chosen_N = decoder.logits(hidden_NM).argmax(-1)
        same += int((chosen_N == torch.tensor(result.tokens, device=device)).sum())
        total += len(result.tokens)
    return same / total, same / total


def text_metric(name: str, metric: Metric, samples: Sequence[Sample], results: Sequence[Generation]) -> Quality:
    """Points from 0 to 100."""
    points = metric([result.text.strip() for result in results], [sample.references for sample in samples])[MAIN[name]]
    return points, points / 100


def perplexities(
    model: FathomForCausalLM,
    settings: Sequence[SweepSetting],
    texts: Sequence[str],
    on_done: OnProgress = unwatched,
) -> list[Quality]:
    """Of the documents, at every setting; one pass serves all exits and thresholds, each depth is a pass of its own."""
    if any(setting.exiting is not None and setting.exiting.mode != "static" for setting in settings):
        return _threshold_perplexities(model, settings, texts, on_done)
    scorer = Scorer(model, [setting.output for setting in settings], batch=1)
    found = predict(scorer, TextEncoder(model), texts, on_done=on_done)
    return [_of_nats(each.nats_per_token) for each in found]


def _of_nats(nats: float) -> Quality:
    return perplexity_of(-nats), math.exp(-nats)


@torch.inference_mode()
def _threshold_perplexities(
    model: FathomForCausalLM,
    settings: Sequence[SweepSetting],
    texts: Sequence[str],
    on_done: OnProgress,
) -> list[Quality]:
    """Each token is predicted by the exit where its confidence is above the threshold, and else by the full model. Keys and
    values are exact, as in parallel decoding; copied ones would be worse."""
    encoder, length = TextEncoder(model), model.architecture.context
    tokenised = encoder.encode_plain([text for text in texts if text])
    pairs = [pair for tokens in tokenised for pair in windows(tokens, prefix=encoder.prefix, length=length)]
    nats, scored = [0.0] * len(settings), 0
    for done, pair in enumerate(pairs, start=1):
        first = next(setting.exiting for setting in settings if setting.exiting is not None)
        early_N, late_N, sure = _both(model, first, pair)
        for place, setting in enumerate(settings):
            threshold = 1.0 if setting.exiting is None else setting.exiting.threshold_now()
            assert isinstance(threshold, float)  # each setting has one
            goes_N = torch.tensor([exceeds(confidence, threshold) for confidence in sure])
            nats[place] += float(torch.where(goes_N, early_N, late_N).sum())
        scored += len(pair.continuation)
        on_done(done, len(pairs))
    return [_of_nats(each / scored) for each in nats]


def _both(model: FathomForCausalLM, exiting: Exiting, pair: Pair) -> tuple[Tensor, Tensor, list[float]]:
    """Nats of each token at the exit and at the end, and the exit's confidence."""
    decoder = model.decoder
    device = decoder.embed.weight.device
    (exit,) = exiting.exits(model.plan)
    last, first = model.plan.unrolled_layers - 1, len(pair.context) - 1
    tokens_1T = torch.tensor([(*pair.context, *pair.continuation)[:-1]], device=device)
    targets_N = torch.tensor(pair.continuation, device=device)
    at = {exit, last} | ({exit - 1} if exit else set())
    found = decoder.states(tokens_1T, at=at)
    before_1TM = found[exit - 1] if exit else decoder.enter(tokens_1T)
    classifier = find_classifiers(decoder, [exit])[exit] if exiting.confidence == "classifier" else None
    logits_NV = decoder.exit_logits(found[exit][0, first:], exit)
    assert exiting.confidence is not None
    sure = measure(exiting.confidence, AtExit(before_1TM[0, first:], found[exit][0, first:], logits_NV, classifier))
    early_N, late_N = (
        torch.nn.functional.cross_entropy(scores.float(), targets_N, reduction="none").cpu()
        for scores in (logits_NV, decoder.exit_logits(found[last][0, first:], last))
    )
    return early_N, late_N, sure
