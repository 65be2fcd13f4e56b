"""How sure an exit is of its choice, from 0 to 1 (thesis 2.3 and 2.5; CALM, Schuster et al. 2022, section 3.3).

Confidences are of the model's own probabilities. Temperature, filters and the repetition penalty do not change whether a
token exits, only which token is chosen.

Shapes: R rows, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder


class ExitScorer(Protocol):
    """A trained judge of one exit: from what the exit reads to one score a row, (R, 1) or (R)."""

    def __call__(self, state_RM: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AtExit:
    """What is known at an exit. The states are the residual stream, before the final norm."""

    before_RM: Tensor
    """In front of the exit's layer; entry-copy: of its loop."""
    after_RM: Tensor
    logits_RV: Tensor
    classifier: ExitScorer | None = None
    read_RM: Tensor | None = None
    """What the exit reads, where that is not `after_RM`: its own layer's output."""
    before: Sequence[float] | Tensor | None = None
    """The confidence at the exit before, where there was one."""
    logits_before_RV: Tensor | None = None
    """The scores there."""


def gap(exit: AtExit) -> Tensor:
    """The probability of the most likely token less that of the second."""
    top_R2 = exit.logits_RV.float().softmax(-1).topk(2, dim=-1).values
    return top_R2[:, 0] - top_R2[:, 1]


def largest(exit: AtExit) -> Tensor:
    """The probability of the most likely token."""
    return exit.logits_RV.float().softmax(-1).amax(-1)


def saturation(exit: AtExit) -> Tensor:
    """How little the exit's layer changed: the cosine of the states before it and after it."""
    return F.cosine_similarity(exit.before_RM.float(), exit.after_RM.float(), dim=-1)


def classified(exit: AtExit) -> Tensor:
    """What a trained classifier says of the state."""
    assert exit.classifier is not None
    return exit.classifier(exit.after_RM if exit.read_RM is None else exit.read_RM).float().sigmoid().reshape(-1)


def gated(exit: AtExit) -> Tensor:
    """How likely a token has exited by now, of a gate that says at each exit how likely it exits there (Ouro)."""
    here_R = classified(exit)
    if exit.before is None:
        return here_R
    return 1 - (1 - torch.as_tensor(exit.before, dtype=here_R.dtype, device=here_R.device)) * (1 - here_R)


def settled(exit: AtExit) -> Tensor:
    """How little the output changed since the exit before: exp(-KL) of the two distributions, that one first; there was none
    before the first, and every token was as likely as any other."""
    now_RV = exit.logits_RV.float().log_softmax(-1)
    before_RV = torch.zeros_like(now_RV) if exit.logits_before_RV is None else exit.logits_before_RV.float()
    return (-F.kl_div(now_RV, before_RV.log_softmax(-1), reduction="none", log_target=True).sum(-1)).exp()


MEASURES: dict[str, Callable[[AtExit], Tensor]] = {
    "gap": gap,
    "max": largest,
    "state": saturation,
    "classifier": classified,
    "gate": gated,
    "kl": settled,
}


def confidences(measure: str, exit: AtExit) -> list[float]:
    """The confidence of each row, in [0, 1]."""
    values: list[float] = MEASURES[measure](exit).clamp(0, 1).tolist()
    return values


def find_gate(decoder: Decoder, exits: Sequence[int]) -> dict[int, ExitScorer]:
    """The gate that all exits share, behind the final norm."""
    if decoder.exit_gate is None:
        raise OptionError("confidence 'gate' requires a model with an exit gate; gap, max and state require no training")
    gate = decoder.exit_gate
    return {index: lambda state_RM, index=index: gate(decoder.exit_hidden(state_RM, index)) for index in exits}


def find_classifiers(decoder: Decoder, exits: Sequence[int]) -> dict[int, ExitScorer]:
    """The classifier of each exit, or an error that says which ones the model lacks."""
    missing = [index + 1 for index in exits if str(index) not in decoder.exit_classifiers]
    if missing:
        have = ", ".join(str(int(index) + 1) for index in decoder.exit_classifiers)
        raise OptionError(
            f"confidence 'classifier' requires a trained classifier after layer {', '.join(map(str, missing))}; this model "
            f"has {f'them after {have} only' if have else 'none'}. gap, max and state need no training"
        )
    return {index: partial(decoder.exit_score, index=index, layered=True) for index in exits}
