"""Tiny random models with a tokenizer, and the slow way to read any of their outputs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from fathomlm.cache import NoCache, build_cache
from fathomlm.decode.full import next_logits
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.lab.evaluate.outputs import Output
from fathomlm.lab.evaluate.scoring import Pair, Score
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.data.tokenizers import byte_tokenizer
from random_weights import randomise

VOCAB = 257
SHAPE: dict[str, Any] = {
    "layers": 6, "hidden": 24, "intermediate": 32, "heads": 4, "kv_heads": 2, "head_dim": 6, "vocab": VOCAB, "context": 96,
    "tied_embeddings": False,
}  # fmt: skip
LOOP = DepthPlan.build("cycle", 3, 6)
MIDDLE = DepthPlan.build("middle-cycle", 2, 6)
LORA = Relaxation(kind="lora", ranks={"q": 4, "v": 4, "down": 4})
PLANS: dict[str, tuple[DepthPlan, Relaxation | None]] = {
    "plain": (DepthPlan.vanilla(6), None),
    "looped": (LOOP.with_exits(LOOP.recursion_ends()), LORA),
    "middle": (MIDDLE, None),
    "shared kv": (MIDDLE.with_kv("share"), None),
    "expert": (MIDDLE.with_routing(build_routing("expert", 2)), None),
    "token": (MIDDLE.with_routing(build_routing("token", 2)), None),
}
ROUTED = ("expert", "token")


def model_of(name: str, *, windows: tuple[int | None, ...] | None = None, seed: int = 0) -> FathomForCausalLM:
    """Random weights throughout, exit heads of their own where there are exits; it reads bytes."""
    plan, relaxation = PLANS[name]
    family = {"family": "llama"} if windows is None else {"family": "mistral", "windows": windows}
    rank = 3 if plan.exits else 0
    config = FathomConfig.of(
        Architecture(**SHAPE, **family),
        plan,
        relaxation,
        exit_rank=rank,
        dtype=torch.float32,
        bos_token_id=256,
        eos_token_id=256,
    )
    model = FathomForCausalLM(config)
    randomise(model, seed)
    model.tokenizer = byte_tokenizer()
    return model.eval()


def random_pairs(many: int, longest: int = 30, seed: int = 0) -> list[Pair]:
    draw = random.Random(seed)
    tokens = [[draw.randrange(VOCAB) for _ in range(draw.randint(2, longest))] for _ in range(many)]
    cuts = [draw.randint(1, len(row) - 1) for row in tokens]
    return [Pair(tuple(row[:cut]), tuple(row[cut:])) for row, cut in zip(tokens, cuts, strict=True)]


@torch.inference_mode()
def slow_score(model: FathomForCausalLM, output: Output, pair: Pair) -> Score:
    """One request by itself, nothing shared and nothing padded."""
    tokens = (*pair.context, *pair.continuation)
    likely = slow_logits(model, output, list(tokens[:-1])).log_softmax(-1)[-len(pair.continuation) :]
    targets = torch.tensor(pair.continuation)
    return Score(float(likely.gather(1, targets[:, None]).sum()), bool((likely.argmax(-1) == targets).all()))


def slow_logits(model: FathomForCausalLM, output: Output, tokens: list[int]) -> Tensor:
    """(T, V): step by step; a routed model token by token behind its cache, which cannot look ahead."""
    decoder, plan = model.decoder, model.plan
    if plan.routing is not None:
        cache = build_cache(plan, reserve=len(tokens))
        return torch.cat([next_logits(decoder, torch.tensor([[token]]), cache, control=output.control) for token in tokens])
    x = decoder.enter(torch.tensor([tokens]))
    masks = full_masks(decoder.architecture, plan, TokenBatch.of(x, None, None, past=0), x.dtype)
    kv = NoCache(plan)
    last = 0
    for step in plan:
        if output.layer is not None and step.index == output.layer:
            break
        if output.max_depth is not None and step.part == "core" and step.recursion >= output.max_depth:
            continue
        x = decoder.run_steps(x, [step], masks, kv)  # type: ignore[arg-type]
        last = step.index
    # Fewer recursions is a shorter model with the model's own head, not one of its exits.
    return (decoder.logits(decoder.norm(x)) if output.max_depth is not None else decoder.exit_logits(x, last))[0]
