"""Exit trajectories from real text through a real model (thesis 3.5.5): where each token could exit, or was sent.

The sequence is taken as if the model had made it. The oracle exits at the earliest exit whose most likely token is the last
layer's, which nobody can know while decoding: what is computed from it is labelled so. Confidence is what the engine
compares with its threshold, the gap between the two most likely tokens.

Shapes: N rows, T tokens of a row, n some of them, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fathomlm.decode.confidence import MEASURES, AtExit
from fathomlm.decode.exiting import check_exit_layers
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.trajectories import Trajectories, Trajectory
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import RoutingTrace

ExitRule = Literal["oracle", "confidence", "router"]
MOST_SCORES = 1 << 24
"""Scores over the vocabulary that are held at once."""


def exits_of(plan: DepthPlan, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The steps after which tokens may exit: those asked for, else the model's own, else where recursions end."""
    if layers is not None:
        check_exit_layers(plan, layers)
        return tuple(sorted({layer - 1 for layer in layers}))
    if plan.exits:
        return plan.exits
    if plan.recursions > 1 and plan.whole_passes:
        return plan.recursion_ends()
    raise OptionError("this model has no recursions to exit after; give layers with --exit-layer")


@torch.inference_mode()
def collect(
    model: FathomForCausalLM,
    tokens_NT: Tensor,
    *,
    exit_rule: ExitRule,
    threshold: float = 0.9,
    layers: Sequence[int] | None = None,
    prompt: int = 1,
    on_rows: OnProgress = unwatched,
) -> Trajectories:
    """One sequence per row: its first `prompt` tokens are the prompt, the others generated. `on_rows` gets (done, total)."""
    plan, decoder = model.plan, model.decoder
    if not 1 <= prompt < tokens_NT.shape[1]:
        raise OptionError(f"--prompt must be from 1 to {tokens_NT.shape[1] - 1}, one less than a row has; got {prompt}")
    if (plan.routing is not None) != (exit_rule == "router"):
        wrong = "the model's router chooses depths" if plan.routing is not None else "the model has no router"
        raise OptionError(f"--depth {exit_rule} is not supported by this model: {wrong}")
    exits = () if exit_rule == "router" else exits_of(plan, layers)
    deepest = plan.recursions if exit_rule == "router" else len(exits) + 1
    device = decoder.embed.weight.device
    sequences = []
    for done, tokens_T in enumerate(tokens_NT, start=1):
        tokens_1T = tokens_T[None].to(device)
        if exit_rule == "router":
            trace = RoutingTrace()
            decoder.states(tokens_1T, causal=True, trace=trace)
            assert trace.depths_BT is not None
            depths_T = trace.depths_BT[0].clamp_min(1)
        else:
            depths_T = _exit_depths(decoder, tokens_1T, exits, None if exit_rule == "oracle" else threshold)
        sequences.append(Trajectory(prompt, tuple(depths_T[prompt - 1 :].tolist())))
        on_rows(done, len(tokens_NT))
    return Trajectories(tuple(sequences), deepest, exit_rule, _label(exit_rule, exits, threshold))


def _label(exit_rule: ExitRule, exits: Sequence[int], threshold: float) -> str:
    where = ", ".join(str(index + 1) for index in exits)
    return {
        "router": "router: each token as deep as the model's router sends it, over given text",
        "oracle": f"oracle: the earliest exit (layers {where}) that agrees with the last layer, over given text",
        "confidence": f"confidence above {threshold:g} at exits (layers {where}), over given text",
    }[exit_rule]


def _exit_depths(decoder: Decoder, tokens_1T: Tensor, exits: Sequence[int], threshold: float | None) -> Tensor:
    """The depth of each token: the number of the first exit that it takes, or one more than there are."""
    states = decoder.states(tokens_1T, at=exits)
    last = decoder.plan.unrolled_layers - 1
    depths_T = torch.full((tokens_1T.shape[1],), len(exits) + 1)
    final_T = _predict(decoder, states[last][0], last)[0] if threshold is None else None
    for number in reversed(range(len(exits))):
        choice_T, sure_T = _predict(decoder, states[exits[number]][0], exits[number])
        if final_T is not None:
            exits_T = choice_T == final_T
        else:
            exits_T = (sure_T > threshold) if threshold else torch.ones_like(choice_T, dtype=torch.bool)
        depths_T[exits_T] = number + 1
    return depths_T


def _predict(decoder: Decoder, state_TM: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Choices after a step, and how sure they are."""
    size = max(1, MOST_SCORES // decoder.architecture.vocab)
    choices, sures = [], []
    for at in range(0, len(state_TM), size):
        state_nM = state_TM[at : at + size]
        logits_nV = decoder.exit_logits(state_nM, index)
        choices.append(logits_nV.argmax(-1).cpu())
        sures.append(MEASURES["gap"](AtExit(state_nM, state_nM, logits_nV)).cpu())
    return torch.cat(choices), torch.cat(sures)
