"""Products of decoding rows against the plainest formula, in float64, row by row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fathomlm.kernels import row_linear
from fathomlm.kernels.half import folded
from fathomlm.kernels.norm import rms_norm
from fathomlm.kernels.quantized import GPU_KINDS, Kind, QuantizedWeight
from kernels.row_cases import randoms

ROWS = [1, 17]
EPS = 0.3


def normed(x_NM: Tensor) -> Tensor:
    return torch.stack([row / (row.square().mean() + EPS).sqrt() for row in x_NM])


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_in_front_of_a_product(rows: int) -> None:
    random = randoms(dtype=torch.float64)
    x, weight = random(rows, 12), random(7, 12)
    torch.testing.assert_close(row_linear.norm_linear(x, weight, EPS), normed(x) @ weight.T)
    torch.testing.assert_close(row_linear.norm_linear(x, weight, EPS, scale=False), x @ weight.T)


def test_the_norm_of_a_model_is_what_is_left_when_its_weight_is_folded_in() -> None:
    random = randoms()
    x, norm, weight = random(5, 12), random(12), random(7, 12)
    wanted = rms_norm(x, norm, 1e-5, plus_one=True) @ weight.T
    found = row_linear.norm_linear(x, folded((weight,), norm, True, torch.float32), 1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_gate_behind_a_product(rows: int) -> None:
    random = randoms(dtype=torch.float64)
    x, gate, up = random(rows, 12), random(7, 12), random(7, 12)
    opened = normed(x) @ gate.T
    wanted = opened / (1 + (-opened).exp()) * (normed(x) @ up.T)
    torch.testing.assert_close(row_linear.norm_gated(x, torch.cat((gate, up)), EPS), wanted)


@pytest.mark.parametrize("rows", ROWS)
def test_a_product_added_to_the_stream(rows: int) -> None:
    random = randoms(dtype=torch.float64)
    stream, x, weight = random(rows, 7), random(rows, 12), random(7, 12)
    wanted, before = stream + x @ weight.T, stream.clone()
    torch.testing.assert_close(row_linear.add_linear(stream, x, weight), wanted)
    assert torch.equal(stream, before)
    assert row_linear.add_linear(stream, x, weight, out=stream) is stream
    torch.testing.assert_close(stream, wanted)


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_weights_of_one_byte_mean_what_they_are_multiplied_out(kind: Kind) -> None:
    random = randoms(dtype=torch.float64)
    x, stream, weight = random(3, 12), random(3, 14), QuantizedWeight(random(14, 12), kind, None)
    wide = weight.multiplied_out().double()
    torch.testing.assert_close(row_linear.norm_linear(x, weight, EPS), row_linear.norm_linear(x, wide, EPS))
    torch.testing.assert_close(row_linear.norm_gated(x, weight, EPS), row_linear.norm_gated(x, wide, EPS))
    torch.testing.assert_close(row_linear.add_linear(stream, x, weight), stream + x @ wide.T)


def test_outputs_that_are_given_are_filled() -> None:
    random = randoms()
    x, weight = random(5, 12), random(8, 12)
    for function, width in ((row_linear.norm_linear, 8), (row_linear.norm_gated, 4)):
        out = torch.full((5, width), torch.nan)
        assert function(x, weight, EPS, out=out) is out
        assert torch.equal(out, function(x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    random = randoms(dtype=dtype)
    x, weight = random(5, 12), random(8, 12)
    assert row_linear.norm_linear(x, weight, EPS).dtype == dtype
    logits = row_linear.norm_linear(x, weight, EPS, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert torch.equal(row_linear.norm_linear(x, weight, EPS, out=torch.empty(5, 8)), logits)
    assert row_linear.norm_gated(x, weight, EPS).dtype == dtype
    assert row_linear.add_linear(x, x, random(12, 12)).dtype == dtype


def test_scratch_for_shared_sums_is_enough_for_every_cut() -> None:
    """For fewer rows than it was made for, too, whose tiles are lower and may be more."""
    for made_for in (1, 16, 17, 64, 65, 200):
        space = row_linear.SplitSpace.build(made_for, 960, "cpu")
        assert not space.arrived.any()
        for rows, size in itertools.product(range(1, made_for + 1), (2, 4)):
            tall = row_linear.row_block(rows, size)
            for columns in (16, 32, 64, 128):
                tiles = -(-rows // tall) * -(-960 // columns)
                assert space.arrived.numel() >= tiles
                assert space.partial.numel() >= tiles * row_linear.MAX_SPLIT * tall * columns
