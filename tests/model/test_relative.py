"""The relative position bias: Hugging Face's buckets, and the same numbers wherever a token stands in a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.attention_mask import RelativeBias, TokenBatch, buckets_of, full_masks, gathered_masks

SHAPE: dict[str, Any] = {
    "family": "t5", "layers": 3, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 4, "head_dim": 6, "vocab": 50,
    "rotary_fraction": 0.0, "positions": "relative", "relative_buckets": 8, "relative_distance": 20,
}  # fmt: skip
PLAIN = Architecture(**SHAPE)
STEPS = tuple(DepthPlan.vanilla(3))
T = 37


def bias_of(architecture: Architecture = PLAIN) -> RelativeBias:
    torch.manual_seed(0)
    bias = RelativeBias(architecture)
    torch.nn.init.normal_(bias.weight)
    return bias


def rows(bias: RelativeBias, tokens: int, past: int = 0, keep: torch.Tensor | None = None, batch: int = 2) -> TokenBatch:
    made = TokenBatch.of(torch.empty(batch, tokens, 1), None, keep, past)
    return TokenBatch(made.positions_BT, made.keep_BS, None, past, relative=bias, alike=made.alike)


def hidden_at(mask: torch.Tensor) -> torch.Tensor:
    return mask == -torch.inf


def full_mask(bias: RelativeBias, keep: torch.Tensor | None = None, batch: int = 2) -> torch.Tensor:
    """What a pass over all tokens adds to its scores, (B, H, T, T)."""
    mask = full_masks(PLAIN, STEPS, rows(bias, T, keep=keep, batch=batch), torch.float32)[None].mask
    assert mask is not None
    return mask.expand(batch, -1, -1, -1)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (2, 5), (7, 64), (6, 4), (64, 1000)])
def test_buckets_are_those_of_hugging_face(buckets: int, farthest: int) -> None:
    distances = torch.arange(2 * farthest)
    expected = T5Attention._relative_position_bucket(-distances, False, buckets, farthest)
    found = buckets_of(buckets, farthest, torch.device("cpu"))[distances.clamp_max(farthest)]
    assert torch.equal(found, expected)


def test_the_bias_is_that_of_hugging_face_behind_a_causal_mask() -> None:
    bias = bias_of()
    relative = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    buckets = T5Attention._relative_position_bucket(relative, False, 8, 20)
    expected = bias.weight[buckets].permute(2, 0, 1)
    mask = full_mask(bias)[0]
    past = torch.ones(T, T, dtype=torch.bool).tril()
    assert torch.equal(mask[:, past], expected[:, past])
    assert hidden_at(mask[:, ~past]).all()


def test_rows_that_stand_alike_share_one_bias() -> None:
    attention = full_masks(PLAIN, STEPS, rows(bias_of(), T, batch=5), torch.float32)[None]
    assert attention.mask is not None
    assert attention.mask.shape == (1, 4, T, T)
    assert not attention.causal
    assert attention.cos.numel() == attention.sin.numel() == 0


@pytest.mark.parametrize("past", [1, 7, 36])
def test_tokens_behind_a_cache_have_the_last_rows(past: int) -> None:
    bias = bias_of()
    attention = full_masks(PLAIN, STEPS, rows(bias, T - past, past=past), torch.float32)[None]
    assert attention.mask is not None
    assert torch.equal(attention.mask[0], full_mask(bias)[0, :, past:])


@pytest.mark.parametrize("past", [0, 12])
def test_padding_in_front_moves_nothing(past: int) -> None:
    """A row behind padding sees the numbers that it sees without it, also behind a cache."""
    bias, padding = bias_of(), 5
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[0, :padding] = False
    attention = full_masks(PLAIN, STEPS, rows(bias, T - past, past=past, keep=keep), torch.float32)[None]
    assert attention.mask is not None
    alone = full_mask(bias)[0]
    first = max(past, padding)
    assert torch.equal(
        attention.mask[0, :, first - past :, padding:], alone[:, first - padding : T - padding, : T - padding]
    )
    assert hidden_at(attention.mask[0, :, first - past :, :padding]).all()
    assert torch.equal(attention.mask[1], alone[:, past:])


@pytest.mark.parametrize("keys", ["themselves", "all"])
@pytest.mark.parametrize("padding", [0, 5])
def test_gathered_tokens_stand_at_their_true_positions(keys: str, padding: int) -> None:
    bias = bias_of()
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[0, :padding] = False
    whole = full_mask(bias, keep)
    queries = torch.tensor([[6, 9, 20, 36], [0, 1, 17, 30]])
    looked_at = torch.arange(T).expand(2, T) if keys == "all" else None
    shown = keep if keys == "all" else None
    attention = gathered_masks(
        PLAIN, STEPS, rows(bias, T, keep=keep), torch.float32, queries, keys_BK=looked_at, shown_BK=shown
    )[None]
    assert attention.mask is not None
    for row in range(2):
        expected = whole[row][:, queries[row]]
        assert torch.equal(attention.mask[row], expected if keys == "all" else expected[:, :, queries[row]])


def test_gathered_tokens_behind_a_cache_look_at_the_slots_they_are_told() -> None:
    """Entries that are not there have a slot past the end of everything; nobody may trip over them."""
    bias, past = bias_of(), 30
    queries, nowhere = torch.tensor([[31, 35], [30, 36]]), 2**31
    keys = torch.tensor([[2, 17, 31, 35, nowhere], [0, 29, 30, 33, 36]])
    attention = gathered_masks(PLAIN, STEPS, rows(bias, T - past, past=past), torch.float32, queries, keys_BK=keys)[None]
    assert attention.mask is not None
    whole = full_mask(bias)
    assert torch.equal(attention.mask[0][:, :, :4], whole[0][:, queries[0]][:, :, keys[0, :4]])
    assert hidden_at(attention.mask[0][:, :, 4]).all()
    assert torch.equal(attention.mask[1], whole[1][:, queries[1]][:, :, keys[1]])


def test_a_table_that_inference_made_first_can_still_learn() -> None:
    buckets_of.cache_clear()
    bias = bias_of()
    with torch.inference_mode():
        bias(torch.arange(3)[None], torch.arange(3)[None])
    bias(torch.arange(30)[None], torch.arange(30)[None]).sum().backward()
    assert bias.weight.grad is not None
    assert (bias.weight.grad > 0).all()


def test_rows_without_the_bias_are_an_error_and_not_another_model() -> None:
    plain = TokenBatch.of(torch.empty(1, 4, 1), None, None, 0)
    with pytest.raises(AssertionError, match="equipped"):
        full_masks(PLAIN, STEPS, plain, torch.float32)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rotary_fraction": 1.0}, "rotary_fraction=0"),
        ({"kv_heads": 2}, "kv_heads == heads"),
        ({"relative_distance": 4}, "more than half"),
        ({"relative_buckets": 1}, ">= 2"),
        ({"positions": "relativ"}, "did you mean 'relative'"),
        ({"cross": True}, "memory_width requires cross"),
        ({"memory_width": 24}, "memory_width requires cross"),
        ({"cross": True, "memory_width": 24, "residual": "parallel"}, "residual='pre'"),
    ],
)
def test_traits_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Architecture(**{**SHAPE, **fields})


def test_other_models_are_written_as_before() -> None:
    plain = Architecture(family="llama", layers=2, hidden=8, intermediate=8, heads=2, kv_heads=1, head_dim=4, vocab=9)
    assert not {"positions", "relative_buckets", "cross", "memory_width", "head_scale"} & set(plain.to_dict())
    for architecture in (plain, PLAIN, Architecture(**SHAPE, cross=True, memory_width=24, head_scale=0.5)):
        assert Architecture.from_dict(architecture.to_dict()) == architecture
