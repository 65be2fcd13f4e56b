"""Small decoders with random weights for early exits, and thresholds at which some of their tokens leave and some do not."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathomlm.cache import DenseCache, Entries, NoCache
from fathomlm.cache.dense import Buffer
from fathomlm.decode.confidence import AtExit, confidences
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Generation, Session, generate
from fathomlm.depth import Architecture, DepthPlan, Relaxation, Rope, Step
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

SHAPE: dict[str, Any] = {
    "layers": 6, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 96, "context": 128,
    "tied_embeddings": False,
}  # fmt: skip
LLAMA = Architecture(family="llama", **SHAPE)
GEMMA3 = Architecture(
    family="gemma3",
    norm="rms_plus_one",
    residual="sandwich",
    activation="gelu_tanh",
    qk_norm=True,
    windows=(3, None, 4, 3, None, 3),
    rope=Rope(theta=1e6),
    local_rope=Rope(),
    embedding_scale=32**0.5,
    **SHAPE,
)
NEOX = Architecture(
    family="neox",
    norm="layer",
    residual="parallel",
    activation="gelu",
    gated=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    rotary_fraction=0.5,
    **{**SHAPE, "kv_heads": 4},
)
VANILLA = DepthPlan.vanilla(6)
LOOP = DepthPlan.build("cycle", 2, 6)
FOUR = DepthPlan.build("cycle", 4, 6, "add")
MIDDLE = DepthPlan.build("middle-cycle", 2, 6)
LORA = Relaxation(kind="lora", ranks={"q": 4, "v": 4, "down": 4})

MODELS: dict[str, tuple[Architecture, DepthPlan, Relaxation | None, int]] = {
    "vanilla": (LLAMA, VANILLA.with_exits([2]), None, 3),
    "lora": (LLAMA, LOOP.with_exits(LOOP.recursion_ends()), LORA, 3),
    "gemma3": (GEMMA3, VANILLA, None, 3),
    "prefix": (LLAMA, LOOP, Relaxation(kind="prefix", prefix_length=4), 4),
    "encoding": (LLAMA, LOOP, Relaxation(kind="encoding"), 3),
    "four-loops": (LLAMA, FOUR, LORA, 4),
    "four-loops-shared-kv": (LLAMA, FOUR.with_kv("share"), LORA, 4),
    "neox": (NEOX, MIDDLE, None, 3),
    "loop-shared-kv": (LLAMA, LOOP.with_kv("share"), None, 3),
    "shared-kv": (LLAMA, MIDDLE.with_kv("share"), None, 3),
    "plain-shared-kv": (LLAMA, VANILLA.with_kv("share", "cycle", 2), None, 2),
}
"""Architecture, plan, relaxation, and the layer after which tokens may leave."""
OWN_LAYERS: dict[str, tuple[Architecture, DepthPlan, Relaxation | None, int]] = {
    "own-layer": (LLAMA, VANILLA.with_exits([2], layer=True), None, 3),
    "own-lora": (LLAMA, LOOP.with_exits(LOOP.recursion_ends(), layer=True), LORA, 3),
    "own-gemma3": (GEMMA3, VANILLA.with_exits([1, 2, 4], layer=True), None, 3),
    "own-shared-kv": (LLAMA, MIDDLE.with_kv("share").with_exits([2], layer=True), None, 3),
}
"""The same, with a layer of its own at each exit."""
DRAFTS: dict[str, tuple[Architecture, DepthPlan, Relaxation | None, int]] = {
    "draft": (LLAMA, VANILLA.with_exits((), draft=True), None, 1),
    "draft-lora": (LLAMA, LOOP.with_exits((), draft=True), LORA, 1),
    "draft-gemma3": (GEMMA3, VANILLA.with_exits((), draft=True), None, 1),
    "draft-shared-kv": (LLAMA, MIDDLE.with_kv("share").with_exits((), draft=True), None, 1),
}
"""With a draft layer behind them, whose drafts count as one layer."""
ALL = MODELS | OWN_LAYERS | DRAFTS
MAIN = ("vanilla", "lora", "gemma3")
OTHERS = tuple(name for name in MODELS | OWN_LAYERS if name not in MAIN)
PROMPTS = [[5, 9, 33, 7, 81, 2, 64, 13, 50], [17], [3, 90, 11, 42]]
MANY = [*PROMPTS, [44, 2]]
NEW = 6
MEASURED = 8
"""Tokens that thresholds are chosen from."""
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7}


@cache
def build(name: str) -> FathomForCausalLM:
    """Shared by all tests: do not change its weights."""
    architecture, plan, relaxation, _ = ALL[name]
    rank = 2 if "lora" in name else 0
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation, exit_rank=rank, dtype=torch.float32)).eval()
    neutral = 0.0 if architecture.norm == "rms_plus_one" else 1.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            offset = "offsets" in key or key.endswith("bias")
            centre = 1.0 if "encoding" in key else neutral if "norm" in key and not offset else 0.0
            # Layers that change the stream little, and a head that is sure: exits agree with the last layer now and then.
            std = 0.06 if key.endswith(("o.weight", "down.weight")) else 0.5 if "head.w" in key or "embed" in key else 0.2
            parameter.normal_(mean=centre, std=std, generator=generator)
        if (draft := model.decoder.exit_draft) is not None:  # it reads most of all what the layers change little
            model.decoder.embed.weight.mul_(2.5)
            draft.norm_token.weight.fill_(1.0)
            draft.mix.weight.mul_(0.2)[:, : SHAPE["hidden"]] += torch.eye(SHAPE["hidden"])
    return model


def exit_layer(name: str) -> int:
    return ALL[name][3]


def exiting(name: str, mode: str, **options: Any) -> Exiting:
    """One exit, at the model's layer, or its draft layer."""
    own = {} if mode == "full" or name in DRAFTS else {"exit_layers": (exit_layer(name),)}
    return Exiting(mode=mode, **own, **options)  # type: ignore[arg-type]


@cache
def mixing_threshold(name: str, part: float = 0.5, confidence: str = "gap") -> float:
    """A threshold that about this part of the confidences is below, well between two of them: no rounding moves it."""
    results = generate(
        build(name),
        PROMPTS,
        max_new_tokens=MEASURED,
        exiting=exiting(name, "parallel", threshold=1.0, confidence=confidence),
    )
    found = sorted(confidence for result in results for confidence in result.confidences or ())
    near = range(int(part * len(found)) - 4, int(part * len(found)) + 4)
    at = max(near, key=lambda i: found[i + 1] - found[i])
    return (found[at] + found[at + 1]) / 2


def tokens(results: list[Generation]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def told(results: list[Generation]) -> list[Any]:
    """Everything that a row's neighbours could change."""
    return [
        (result.tokens, result.finish, result.text, result.exit_layers, result.agreements, result.exits)
        for result in results
    ]


def mixed(results: list[Generation]) -> bool:
    """Whether some tokens left early and some did not."""
    depths = {layer for result in results for layer in result.exit_layers or ()}
    return len(depths) > 1


@torch.inference_mode()
def full_entries(model: FathomForCausalLM, text: list[int]) -> dict[int, Entries]:
    """Keys and values of every step that makes any, those of exits' own layers too, from one pass over a text."""
    dense, plan, decoder = DenseCache(model.plan), model.plan, model.decoder
    decoder(torch.tensor([text]), cache=dense)
    found = {index: buffer.entries() for index, buffer in dense._steps.items()}
    states = decoder.states(torch.tensor([text]), at=plan.exits)
    masks = full_masks(
        decoder.architecture, plan, TokenBatch.of(states[plan.unrolled_layers - 1], None, None, 0), torch.float32
    )
    for exit in plan.exits:
        for own in plan.exit_steps((exit,)):
            buffer = Buffer(1)
            kept = SimpleNamespace(at=lambda _, it=buffer: it, reads=lambda _: None)
            decoder.run_steps(states[exit], (own,), masks, kept)  # type: ignore[arg-type]
            found[own.index] = buffer.entries()
    return found


def every_step(name: str) -> tuple[Step, ...]:
    """All that run while tokens leave at the model's layer."""
    plan = build(name).plan
    return (*plan.steps, *plan.exit_steps((exit_layer(name) - 1,)))


@torch.inference_mode()
def naive(model: FathomForCausalLM, prompt: list[int], setting: Exiting, new: int = NEW) -> tuple[list[int], list[int]]:
    """Greedy tokens and exit layers without any cache: everything is computed again for every token.

    A token that left early is frozen: with state copying deeper layers do not change its stream, which is then also what
    they make its keys and values of; in the other modes nothing is frozen, since every token gets its own deep entries.
    """
    decoder, plan = model.decoder, model.plan
    exits, copies = setting.exits(plan), setting.mode in ("state-copy", "oracle-copy")
    text, left, layers = list(prompt), [plan.unrolled_layers] * len(prompt), []
    for index in range(new):
        x, guesses = decoder.enter(torch.tensor([text])), {}
        rows = TokenBatch.of(x, None, None, past=0)
        masks = full_masks(decoder.architecture, plan, rows, x.dtype)
        kv = NoCache(plan)
        chosen = None
        for step in plan:
            out = decoder.run_steps(x, [step], masks, kv)  # type: ignore[arg-type]
            frozen = torch.tensor([copies and layer <= step.index for layer in left])
            before, x = x, torch.where(frozen[None, :, None], x, out)
            if chosen is None and step.index in exits:
                read = decoder.run_steps(x, plan.exit_steps((step.index,)), masks, kv)  # type: ignore[arg-type]
                logits = decoder.exit_logits(read[:, -1], step.index, layered=True)
                (sure,) = confidences(setting.confidence or "gap", AtExit(before[:, -1], x[:, -1], logits))
                threshold = setting.threshold_now()
                if setting.decay is not None and threshold is not None:
                    threshold = min(1.0, 0.9 * threshold + 0.1 * math.exp(-setting.decay * index / new))
                guesses[step.index + 1] = int(logits.argmax())
                if setting.mode == "static" or threshold == 0 or (threshold is not None and sure > threshold):
                    chosen = int(logits.argmax()), step.index + 1
                    left[-1] = step.index + 1
        if setting.mode == "oracle-copy":
            best = int(decoder.exit_logits(x[:, -1], plan.unrolled_layers - 1).argmax())
            left[-1] = next((layer for layer, guess in guesses.items() if guess == best), plan.unrolled_layers)
            chosen = best, left[-1]
        chosen = chosen or (int(decoder.exit_logits(x[:, -1], plan.unrolled_layers - 1).argmax()), plan.unrolled_layers)
        text.append(chosen[0])
        layers.append(chosen[1])
        left.append(plan.unrolled_layers)
    return text[len(prompt) :], layers


def check_interrupted(name: str, mode: str, stop_at: int) -> None:
    """A session that Ctrl-C ends in a layer, the one that comes so late, answers as a fresh one afterwards."""
    model, count = build(name), 0
    session = Session(model, exiting=exiting(name, mode, threshold=mixing_threshold(name, 0.3)))

    def interrupt(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == stop_at:
            raise KeyboardInterrupt

    blocks = [*model.decoder.layers, *model.decoder.exit_blocks.values()]
    hooks = [block.mlp.register_forward_pre_hook(interrupt) for block in blocks]  # type: ignore[union-attr]
    try:
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPTS[0], max_new_tokens=12)
    finally:
        for hook in hooks:
            hook.remove()
    prompt = [*PROMPTS[0], *generate(model, [PROMPTS[0]], max_new_tokens=4, exiting=session.exiting)[0].tokens, 30, 31]
    got = session.generate(prompt, max_new_tokens=8)
    assert told([got]) == told(generate(model, [prompt], max_new_tokens=8, exiting=session.exiting))
