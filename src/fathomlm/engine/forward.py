"""What one plain forward pass over a sequence gives: the log probabilities of its tokens, and an embedding of it.

The decode steps compute logits of what comes next alone. This is for what they do not have, and runs between two of them
(`AsyncEngine.call`), as the reference decoder's prefill: at full depth, or at the router's own choice.

Shapes: T tokens, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.cache import build_cache
from fathomlm.checkpoints.resolve import decoder_only
from fathomlm.engine.draws import likeliest_tokens
from fathomlm.engine.request import TokenLogprobs
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from fathomlm.model.seq2seq import FathomModel

CHUNK = 64
"""Tokens whose logits are in memory at a time."""


@torch.inference_mode()
def prompt_logprobs(
    model: FathomModel, tokens: Sequence[int], top: int = 0, max_depth: int | None = None
) -> list[TokenLogprobs | None]:
    """The log probability of each token behind those before it, with the `top` likeliest; None of the first."""
    model = decoder_only(model, "the log probabilities of a prompt")
    tokens_T = torch.tensor(tokens, device=model.decoder.embed.weight.device)
    hidden_TM = hidden_states(model, tokens_T, max_depth)
    found: list[TokenLogprobs | None] = [None]
    for first in range(0, len(tokens) - 1, CHUNK):
        next_K = tokens_T[first + 1 : first + 1 + CHUNK]
        logits_KV = model.decoder.logits(hidden_TM[first : first + len(next_K)])
        logprobs_KV = logits_KV.log_softmax(-1, dtype=torch.float32)
        top_KA = likeliest_tokens(logits_KV, top)
        own = logprobs_KV.gather(-1, next_K[:, None])[:, 0].tolist()
        pairs = zip(own, top_KA.tolist(), logprobs_KV.gather(-1, top_KA).tolist(), strict=True)
        found += [TokenLogprobs(logprob=one, top=tuple(zip(ids, values, strict=True))) for one, ids, values in pairs]
    return found


def deepest(model: FathomModel) -> int:
    """How deep an embedding may be taken: in layers, or where tokens differ in their layers, in recursions."""
    return model.plan.unrolled_layers if model.plan.routing is None else model.plan.recursions


@torch.inference_mode()
def embedding(model: FathomModel, tokens: Sequence[int], depth: int | None = None) -> list[float]:
    """The mean over the tokens of their hidden states behind `depth` (see `deepest`) and the final norm, of length 1."""
    model = decoder_only(model, "an embedding")
    tokens_T = torch.tensor(tokens, device=model.decoder.embed.weight.device)
    if depth is None or model.plan.routing is not None:
        hidden_TM = hidden_states(model, tokens_T, depth)
    else:
        states: list[Tensor] = []
        model.decoder(tokens_T[None], states=states)
        hidden_TM = model.decoder.norm(states[depth][0])
    values: list[float] = torch.nn.functional.normalize(hidden_TM.float().mean(0), dim=0).tolist()
    return values


def hidden_states(model: FathomForCausalLM, tokens_T: Tensor, max_depth: int | None = None) -> Tensor:
    """Behind the final norm, (T, M)."""
    control = None if max_depth is None else DepthControl(max_depth=max_depth)
    hidden_1TM: Tensor = model.decoder(tokens_T[None], cache=build_cache(model.plan, len(tokens_T)), control=control)
    return hidden_1TM[0]
