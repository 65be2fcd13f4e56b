"""One token for each row from its scores, its settings and a number in [0, 1) that its seed and position in the sequence
give.

`decode.sampling` says what the settings mean. Here they differ from row to row, and what comes out may not depend on the
other rows or on how many there are. Therefore:

- randomness is a function of (seed, position in the sequence), not a generator that is moved on;
- sums that decide anything are of integers: on a GPU the order in which floats are added up depends on the number of
  rows, and a running sum of them may differ from run to run;
- ties go by token id, never by what a device's sort or search happens to do with them.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.kernels.splitmix import GOLDEN, mix, shift

BITS = 52
"""Probabilities are added up in units of 2^-52. Those of at least 2^-28 are exact in it (a float32 has 24 bits), a sum
stays below 2^53 where float64 counts without gaps, and a token of less than one unit is never drawn."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each row's settings, as columns (N, 1): float32, the last two int64."""

    temperature_N1: Tensor
    """0 is greedy."""
    tail_N1: Tensor
    """1 - top_p, the probability that the least likely tokens lose; -1 leaves all."""
    min_p_N1: Tensor
    repetition_N1: Tensor
    presence_N1: Tensor
    frequency_N1: Tensor
    top_k_N1: Tensor
    """From 1 to V, which is no limit."""
    seed_N1: Tensor


def row_chances(level_NV: Tensor, settings: Settings, *, filtered: bool) -> Tensor:
    """The probabilities that tokens are drawn with, as `decode.logits.sampling_probabilities`. The highest score must be 0.

    Without `filtered` top-k and top-p are left out, and with them the sort of the whole vocabulary. Greedy rows have no
    chances: what comes out for them means nothing.
    """
    scaled_NV = level_NV / settings.temperature_N1
    if filtered:
        scaled_NV = _keep_top(scaled_NV, settings)
    plain_NV = scaled_NV.softmax(-1)
    least_N1 = settings.min_p_N1 * plain_NV.amax(-1, keepdim=True)
    return scaled_NV.masked_fill(plain_NV < least_N1, -math.inf).softmax(-1)


def _keep_top(scores_NV: Tensor, settings: Settings) -> Tensor:
    """The k highest scores with their ties; of those, the fewest that make up top_p, of equal ones the lowest ids."""
    # A stable sort of the mirrored vocabulary: of equal scores the lowest id comes last, and is the last to be dropped.
    rising_NV, order_NV = scores_NV.flip(-1).sort(dim=-1, stable=True)
    kth_N1 = rising_NV.gather(-1, scores_NV.shape[-1] - settings.top_k_N1)
    rising_NV = rising_NV.masked_fill(rising_NV < kth_N1, -math.inf)
    reach_NV = running_sum(_units(rising_NV.softmax(-1))).double() * 2.0**-BITS
    # The reference compares in float32; so does this, to keep the same tokens.
    drop_NV = (reach_NV.float() <= settings.tail_N1) | rising_NV.isneginf()
    drop_NV[:, -1:].fill_(False)
    mirrored_NV = torch.empty_like(drop_NV).scatter_(-1, order_NV, drop_NV)
    return scores_NV.masked_fill(mirrored_NV.flip(-1), -math.inf)


def draw(chances_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """The token, (N, 1), at which the running sum of probabilities, in the vocabulary's order, passes the uniform number.

    The number has 52 bits, so that its product with the sum rounds to less than the sum: there always is such a token,
    and it is never one of probability 0.
    """
    reach_NV = running_sum(_units(chances_NV))
    target_N1 = (uniform_N1 * reach_NV[:, -1:].double()).long()
    return torch.searchsorted(reach_NV, target_N1, right=True)


@torch.library.custom_op("fathomlm::running_sum", mutates_args=())
def running_sum(whole_NV: Tensor) -> Tensor:
    """Along rows. An operation of its own, so that compilers leave it to torch's kernel: for rows as long as a vocabulary
    torch 2.11's own splits the sum, and then fails on what is computed on the way in."""
    return whole_NV.cumsum(-1)


@running_sum.register_fake
def _(whole_NV: Tensor) -> Tensor:
    return torch.empty_like(whole_NV)


def _units(chances_NV: Tensor) -> Tensor:
    return (chances_NV.double() * 2.0**BITS).long()


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """A number in [0, 1) for each seed (int64) and step, as float64 with 52 random bits.

    It is the `step`-th number of splitmix64, started not from the seed but from what
    splitmix64 makes of the seed: neighbouring seeds would else run through the same numbers.
    """
    bits = mix(mix(seeds + GOLDEN) + (steps.long() + 1) * GOLDEN)
    return shift(bits, 64 - BITS).double() * 2.0**-BITS


def likeliest_tokens(logits_NV: Tensor, k: int) -> Tensor:
    """The tokens of the k highest scores, (N, k), highest first and of equal ones the lowest id.

    A float32's bits, mended for the sign, order as the number does. With the token behind them no two keys are equal.
    """
    rows, vocab = logits_NV.shape
    if k == 0:
        return torch.empty(rows, 0, dtype=torch.int64, device=logits_NV.device)
    bits_NV = (logits_NV.float() + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    ordered_NV = (bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)).long()
    keys_NV = (ordered_NV << 32) - torch.arange(vocab, device=logits_NV.device)
    return keys_NV.topk(k, dim=-1).indices
