"""How products of decoding rows are cut into programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathomlm.kernels.row_blocks import SMS, product_blocks, row_block, share_of
from fathomlm.kernels.wide_rows import MANY_ROWS, MOST_KERNEL_ROWS, Product, library_from

SHAPES = [(1600, 960), (49152, 960), (960, 2560), (960, 960), (2048, 8192), (6144, 2048), (64, 32), (100352, 8192)]


def test_tiles_hold_all_rows_up_to_64() -> None:
    rows = (1, 2, 16, 17, 32, 33, 64, 65, 512)
    assert [row_block(many, 4) for many in rows] == [1, 16, 16, 32, 32, 32, 32, 32, 32]
    assert [row_block(many, 2) for many in rows] == [1, 64, 64, 64, 64, 64, 64, 64, 64]
    assert [row_block(many, 2, narrow=True) for many in rows] == [1, 16, 16, 32, 32, 32, 32, 32, 32]


@pytest.mark.parametrize(("width", "depth"), SHAPES)
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_fit_and_fill_the_device(width: int, depth: int, weights: int, size: int) -> None:
    for rows in (1, 17, 64, 200):
        b = product_blocks(rows, width, depth, size, weights=weights)
        assert b.split == 1
        assert all(number & (number - 1) == 0 for number in (b.columns, b.depth, b.warps))
        if rows > 1:
            tall = row_block(rows, max(size, 2), narrow=size == 1)
            assert b.stages * (tall * max(size, 2) + weights * b.columns * size) * b.depth <= 96 * 1024
            assert b.columns * weights == (32 if size == 1 else 16) or 2 * -(-width // b.columns) >= SMS
        else:
            assert b.columns * weights * b.depth * max(size, 2) <= 2 * 256 * 32 * b.warps, "a tile is in registers"


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_sum_is_cut_by_its_weight_alone(width: int, depth: int) -> None:
    """Otherwise a row's rounding would follow from how many others there are. (One row alone goes its own way.)"""
    for size in (1, 2):
        assert len({product_blocks(rows, width, depth, size, splits=True).split for rows in range(2, 200)}) == 1


def test_sums_are_shared_where_programs_are_few() -> None:
    assert [product_blocks(32, 960, depth, 2, splits=True).split for depth in (256, 960, 2560)] == [1, 1, 4]
    assert product_blocks(32, 2048, 8192, 2, splits=True)[::4] == (32, 2)
    assert product_blocks(32, 49152, 960, 2, splits=True).split == 1
    assert product_blocks(1, 960, 2560, 2, splits=True).split == 1


def test_shares_cover_the_sum_and_begin_on_whole_lines() -> None:
    for depth in (64, 100, 960, 2560):
        assert share_of(depth, 1) == depth
        for split in (2, 3, 4, 8):
            share = share_of(depth, split)
            assert share % 64 == 0
            assert share * split >= depth
            assert share < depth / split + 64


RECORD = Path(__file__).parents[2] / "benchmarks/results/row_products_h200.json"
PRODUCTS: dict[str, Product] = {"qkv": "qkv", "o": "added", "down": "added", "gated": "gated", "head, no norm": "scores"}


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_what_multiplies_is_what_was_measured_to_be_faster(kernel: str) -> None:
    """From 65 rows on nobody loses more than a tenth by the table. Below, the kernels keep a row's result what it is."""
    for shape in (one for one in json.loads(RECORD.read_text())["products"] if one["kernel"] == kernel):
        first = library_from(PRODUCTS[kernel], shape["width"] * shape["depth"])
        assert MANY_ROWS <= first <= MOST_KERNEL_ROWS + 1
        for tried in (one for one in shape["tried"] if one["rows"] >= MANY_ROWS):
            taken = tried["library_us"] if tried["rows"] >= first else tried["kernel_us"]
            assert taken <= 1.1 * min(tried["library_us"], tried["kernel_us"]), (shape["shape"], tried)
