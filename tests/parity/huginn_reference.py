"""Huginn and the recurrent retrofits as their authors describe them, written as plainly as can be: no cache, one sequence,
float32. A prelude makes e of the tokens; a state begins as zeros and loops through adapter([state, e]) and the core; a coda
reads the last state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.looped_reference import rms, rotated

Weights = dict[str, Tensor]


def pairs_rotated(x_HTD: Tensor, theta: float) -> Tensor:
    """Entry 2i against entry 2i + 1."""
    T, D = x_HTD.shape[1:]
    angles = torch.arange(T)[:, None] / theta ** (torch.arange(0, D, 2) / D)[None]
    turned = torch.view_as_complex(x_HTD.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def attention(x_TM: Tensor, w: Weights, config: dict) -> Tensor:
    T, heads, groups = len(x_TM), config["n_heads"], config["num_key_value_heads"]
    D = config["n_embd"] // heads
    q, k, v = (x_TM @ w["attn.Wqkv.weight"].T).split((heads * D, groups * D, groups * D), dim=-1)
    if "attn.q_norm.weight" in w:
        q, k = (rms(t, w[f"attn.{name}_norm.weight"], config["norm_eps"]) for t, name in ((q, "q"), (k, "k")))
    q, k, v = q.view(T, heads, D), k.view(T, groups, D), v.view(T, groups, D)
    if config["qk_bias"]:
        q, k = q + w["attn.qk_bias"][0], k + w["attn.qk_bias"][1]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if "norm_4.weight" in w:
        q, k = pairs_rotated(q, config["rope_base"]), pairs_rotated(k, config["rope_base"])
    else:
        q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, heads * D) @ w["attn.proj.weight"].T


def mlp(x: Tensor, w: Weights) -> Tensor:
    gate, up = (x @ w["mlp.fc.weight"].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ w["mlp.proj.weight"].T


def block(x: Tensor, w: Weights, config: dict) -> Tensor:
    """Huginn's, OLMo 2's or Llama's."""

    def n(number: int, x: Tensor) -> Tensor:
        return rms(x, w[f"norm_{number}.weight"], config["norm_eps"])

    if "norm_4.weight" in w:
        x = n(2, attention(n(1, x), w, config) + x)
        return n(4, mlp(n(3, x), w) + x)
    if "attn.q_norm.weight" in w:
        x = n(1, attention(x, w, config)) + x
        return n(2, mlp(x, w)) + x
    x = attention(n(1, x), w, config) + x
    return mlp(n(2, x), w) + x


def part(x: Tensor, tensors: Weights, config: dict, name: str, layers: int) -> Tensor:
    for number in range(layers):
        start = f"transformer.{name}.{number}."
        x = block(x, {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}, config)
    return x


def states(tensors: Weights, config: dict, tokens_T: Tensor, loops: int, start_TM: Tensor | None = None) -> list[Tensor]:
    """The state in front of the first loop, and after each."""
    e = tensors["transformer.wte.weight"][tokens_T] * config["init_values"]["embed_scale"]
    e = part(e, tensors, config, "prelude", config["n_layers_in_prelude"])
    found = [torch.zeros_like(e) if start_TM is None else start_TM]
    for _ in range(loops):
        x = torch.cat((found[-1], e), -1) @ tensors["transformer.adapter.weight"].T
        found.append(part(x, tensors, config, "core_block", config["n_layers_in_recurrent_block"]))
    return found


def predict(tensors: Weights, config: dict, x: Tensor) -> Tensor:
    """Logits of a state: Huginn norms it first."""
    ln_f, eps = tensors["transformer.ln_f.weight"], config["norm_eps"]
    if "transformer.coda.0.norm_4.weight" in tensors:
        x = rms(x, ln_f, eps)
    x = rms(part(x, tensors, config, "coda", config["n_layers_in_coda"]), ln_f, eps)
    return x @ tensors.get("lm_head.weight", tensors["transformer.wte.weight"]).T
