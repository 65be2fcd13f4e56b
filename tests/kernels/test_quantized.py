"""Integer weights: how far they are from what they round, and the compiled products against the plain ones."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from fathomlm.errors import OutputError
from fathomlm.kernels import cpu_library as cpu_module
from fathomlm.kernels.cpu_library import CpuLibrary, build_library
from fathomlm.kernels.quantized import (
    GPU_KINDS,
    GROUP,
    KINDS,
    MOST_ROWS,
    Kind,
    QuantizedWeight,
    dequantize_int4,
    quantize_int4,
)
from kernels.row_cases import randoms

SHAPES = [(7, 40), (33, 64), (64, 96), (130, 5)]
"""Outputs that fill no tile, and inputs that fill no vector (int4 is int8 there)."""


def quantized(outputs: int, inputs: int, kind: Kind, library: CpuLibrary) -> QuantizedWeight:
    return QuantizedWeight(randoms()(outputs, inputs), kind, library)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_product_is_the_plain_one(
    shape: tuple[int, int], kind: Kind, threads: int, cpu_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathomlm.kernels.quantized.SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight = quantized(*shape, kind, cpu_library)
    assert weight.kind == ("int8" if shape[1] % GROUP else kind)
    for rows in (1, 2, 3, 4, 7, MOST_ROWS):
        x = randoms(seed=rows)(rows, shape[1])
        torch.testing.assert_close(weight.product(x), weight.plain_product(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(weight.product(x.view(rows, 1, -1))[:, 0], weight.product(x))
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_how_many_there_are(kind: Kind, cpu_library: CpuLibrary) -> None:
    weight, x = quantized(33, 96, kind, cpu_library), randoms()(MOST_ROWS, 96)
    alone = torch.cat([weight.product(row[None]) for row in x])
    for rows in (2, 3, 5, MOST_ROWS):
        assert torch.equal(weight.product(x[:rows]), alone[:rows])


def test_many_rows_and_other_dtypes_go_the_plain_way(cpu_library: CpuLibrary) -> None:
    weight = quantized(7, 64, "int8", cpu_library)
    x = randoms()(MOST_ROWS + 1, 64)
    assert torch.equal(weight.product(x), weight.plain_product(x))
    assert weight.product(x[:1].double()).dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind: Kind, cpu_library: CpuLibrary) -> None:
    x = torch.zeros(1, 64)
    x[0, 3] = float("nan")
    assert quantized(20, 64, kind, cpu_library).product(x).isnan().all()


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_one_byte_a_weight_and_how_far_it_moves(kind: Kind) -> None:
    weight = randoms()(6, 96) * torch.tensor([0.0, 1e-6, 1, 3, 1e4, 1])[:, None]
    narrow = QuantizedWeight(weight, kind, None)
    assert narrow.bytes == weight.numel() + 4 * len(weight)
    moved, scale = (narrow.multiplied_out() - weight).abs(), narrow.scales[:, None]
    bound = 0.5 * scale if kind == "int8" else torch.maximum(weight.abs() / 16, scale * 2**-10)
    assert (moved <= 1.001 * bound).all()
    assert (moved.amax(1) > 0).tolist() == [False, *[True] * 5]
    part = narrow[2:4]
    assert part.shape == (2, 96)
    assert torch.equal(part.multiplied_out(), narrow.multiplied_out()[2:4])
    assert part.data.data_ptr() == narrow.data[2:].data_ptr()


def test_no_int4_weight_moves_by_more_than_half_a_step() -> None:
    weight = randoms()(9, 96) * torch.tensor([0.0, 1e-6, 1, 3, 1e4, 1, 1, 1, 1])[:, None]
    weight[7], weight[8, :GROUP] = -0.25, 2.0  # groups without a width of their own
    packed, scales = quantize_int4(weight)
    assert (packed.dtype, packed.shape, scales.shape) == (torch.uint8, (9, 48), (9, 3, 2))
    moved = (dequantize_int4(packed, scales) - weight).abs().unflatten(1, (-1, GROUP)).amax(2)
    span = weight.unflatten(1, (-1, GROUP)).amax(2) - weight.unflatten(1, (-1, GROUP)).amin(2)
    largest = weight.abs().unflatten(1, (-1, GROUP)).amax(2)
    assert (moved <= span / 30 * 1.1 + largest * 2**-7).all()
    assert (moved[0] == 0).all()
    assert (moved[7] == 0).all()
    assert moved[8, 0] == 0


def test_what_int4_holds_it_gives_back() -> None:
    levels = torch.randint(0, 16, (4, 64), generator=torch.Generator().manual_seed(0)).float()
    levels[:, ::GROUP], levels[:, 1::GROUP] = 0.0, 15.0
    weight = levels * 0.25 - 2.0
    assert torch.equal(dequantize_int4(*quantize_int4(weight)), weight)


# The library.


def test_a_compiled_library_is_found_again(kernels_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "_compile", lambda *_: pytest.fail("compiled again"))
    again = build_library(kernels_home / "kernels")
    assert again is not None
    assert copy.deepcopy(again).path == pickle.loads(pickle.dumps(again)).path == again.path


def test_a_damaged_library_is_compiled_again(
    cpu_library: CpuLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(_: str, source: Path, *__: object) -> Path:
        return Path(shutil.copy(whole, source.with_suffix(".so")))

    (tmp_path / (whole := cpu_library.path).name).write_bytes(b"not a library")
    monkeypatch.setattr(cpu_module, "_compile", compile_)
    made = build_library(tmp_path)
    assert made is not None
    assert quantized(7, 64, "int8", made).product(torch.ones(1, 64)).shape == (1, 7)
    assert [file.name for file in tmp_path.iterdir()] == [cpu_library.path.name]


def test_no_compiler_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "COMPILERS", ("false",))
    assert build_library(tmp_path / "kernels") is None
    monkeypatch.setattr(cpu_module, "COMPILERS", ())
    assert build_library(tmp_path / "never") is None
    assert not (tmp_path / "never").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, cpu_library: CpuLibrary) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot keep the compiled kernels in .*file"):
        build_library(tmp_path / "file")
