"""Looped models as their authors describe them, written as plainly as can be: no cache, no batch tricks, float32.

The released weights are large, so each family is held against the code below on tiny random configurations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x_HTD: Tensor, theta: float) -> Tensor:
    """Half the head against the other half."""
    T, D = x_HTD.shape[1:]
    angles_TD = torch.arange(T)[:, None] / theta ** (torch.arange(0, D, 2) / D)[None]
    cos, sin = angles_TD.cos(), angles_TD.sin()
    a, b = x_HTD[..., : D // 2], x_HTD[..., D // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(x_TM: Tensor, w: dict[str, Tensor], config: dict) -> Tensor:
    heads, groups, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    T = len(x_TM)
    q = (x_TM @ w["self_attn.q_proj"].T).view(T, heads, D).transpose(0, 1)
    k = (x_TM @ w["self_attn.k_proj"].T).view(T, groups, D).transpose(0, 1)
    v = (x_TM @ w["self_attn.v_proj"].T).view(T, groups, D).transpose(0, 1)
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2)) / D**0.5
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, heads * D) @ w["self_attn.o_proj"].T


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return (F.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def layer_weights(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    start = f"model.layers.{number}."
    return {name.removeprefix(start).removesuffix(".weight"): t for name, t in tensors.items() if name.startswith(start)}


def ouro_states(tensors: dict[str, Tensor], config: dict, tokens_T: Tensor) -> list[Tensor]:
    """What head, gate and next loop read after each loop: norms around both halves, and the final norm behind every loop."""
    eps = config["rms_norm_eps"]
    x, states = tensors["model.embed_tokens.weight"][tokens_T], []
    for _ in range(config["total_ut_steps"]):
        for number in range(config["num_hidden_layers"]):
            w = layer_weights(tensors, number)
            x = x + rms(attention(rms(x, w["input_layernorm"], eps), w, config), w["input_layernorm_2"], eps)
            x = x + rms(mlp(rms(x, w["post_attention_layernorm"], eps), w), w["post_attention_layernorm_2"], eps)
        x = rms(x, tensors["model.norm.weight"], eps)
        states.append(x)
    return states


def ouro_logits(tensors: dict[str, Tensor], config: dict, tokens_T: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Logits of each token at the first loop where the probability to have left reaches the threshold, and those loops."""
    states = ouro_states(tensors, config, tokens_T)
    weight, bias = tensors["model.early_exit_gate.weight"][0], tensors["model.early_exit_gate.bias"]
    stays, found, loops = torch.ones(len(tokens_T)), states[-1].clone(), torch.full((len(tokens_T),), len(states))
    for loop, state in enumerate(states[:-1], start=1):
        stays = stays * (1 - (state @ weight + bias).sigmoid())
        leaves = (1 - stays >= threshold) & (loops == len(states))
        found[leaves], loops[leaves] = state[leaves], loop
    return found @ tensors["lm_head.weight"].T, loops


def nanbeige_logits(tensors: dict[str, Tensor], config: dict, tokens_T: Tensor) -> Tensor:
    """Llama's layers `num_loops` times; the final norm after every loop, or only at the end."""
    eps, loops = config["rms_norm_eps"], config["num_loops"]
    x = tensors["model.embed_tokens.weight"][tokens_T]
    for loop in range(loops):
        for number in range(config["num_hidden_layers"]):
            w = layer_weights(tensors, number)
            x = x + attention(rms(x, w["input_layernorm"], eps), w, config)
            x = x + mlp(rms(x, w["post_attention_layernorm"], eps), w)
        if loop == loops - 1 or not config["skip_loop_final_norm"]:
            x = rms(x, tensors["model.norm.weight"], eps)
    return x @ tensors["lm_head.weight"].T
