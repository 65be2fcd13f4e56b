"""Weights of one byte on a GPU: the kernels against their plain twins, and models against the same weights multiplied out.

The twins are given the same numbers in float32, so a kernel differs by the order of its sums and by rounding once to the
dtype of its rows (see test_row_kernels.py). Models run in float32 where tokens are compared, since the reference on the CPU
then chooses the same ones, and in bfloat16 where the kernels for few rows are to run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.exit_models import build
from engine.test_engine import NEW, many
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import dtype_name, load
from fathomlm.decode.full import generate
from fathomlm.engine.engine import Engine
from fathomlm.engine.session import EngineSession
from fathomlm.kernels import row_linear, row_qkv
from fathomlm.kernels.quantized import GPU_KINDS, Kind, QuantizedWeight
from fathomlm.kernels.row_blocks import Blocks
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers
from kernels.row_cases import angles, near, near_many, some_slots
from model.route.small import model_of, routed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA, EPS, PAGE = "cuda", 1e-5, 16
SHAPES = {"360M": (960, 2560, 15, 5, 64), "1.7B": (2048, 8192, 32, 32, 64)}
ROWS = [1, 2, 8, 16, 17, 32, 51, 200]
CASES = [(torch.bfloat16, rows) for rows in ROWS] + [
    (dtype, rows) for dtype in (torch.float16, torch.float32) for rows in (1, 8)
]
SIZES: dict[str, Any] = {"page_size": 16, "batch_size": 4, "prefill_chunk": 5, "max_length": 48}
MODELS = {
    "vanilla": lambda: build("vanilla"),
    "lora": lambda: build("lora"),
    "gemma3": lambda: build("gemma3"),
    "routed": lambda: model_of(routed()),
    "routed, shared": lambda: model_of(routed("expert", "share")),
}


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, device=CUDA)).to(dtype)


def weight(width: int, depth: int, kind: Kind) -> QuantizedWeight:
    return QuantizedWeight(random(width, depth, std=depth**-0.5), kind, None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "rows"), CASES)
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_products_of_a_layer(kind: Kind, dtype: torch.dtype, rows: int, shape: str) -> None:
    M, inner, H, G, D = SHAPES[shape]
    x, gated = 3 * random(rows, M, dtype=dtype), random(rows, inner, dtype=dtype)
    qkv, both, down = weight((H + 2 * G) * D, M, kind), weight(2 * inner, M, kind), weight(M, inner, kind)
    for scale in (True, False):
        out = row_linear.norm_linear(x, qkv, EPS, scale)
        assert out.dtype == dtype
        near_many(out, row_linear.plain_norm_linear(x.float(), qkv, EPS, scale), dtype, rows)
    near_many(row_linear.norm_gated(x, both, EPS), row_linear.plain_norm_gated(x.float(), both, EPS), dtype, rows)
    space = row_linear.SplitSpace.build(rows, M, CUDA)
    wanted = row_linear.plain_add_linear(x.float(), gated.float(), down)
    for given in (space, space, None):
        near_many(row_linear.add_linear(x, gated, down, space=given), wanted, dtype, rows, atol=1e-3)
    assert not space.arrived.any()
    logits = row_linear.norm_linear(x, qkv, EPS, out_dtype=torch.float32)
    near(logits, row_linear.plain_norm_linear(x.float(), qkv, EPS), torch.float32)


@pytest.mark.parametrize("shape", [*SHAPES.values(), (96, 0, 4, 1, 80), (96, 0, 4, 0, 64)])
@pytest.mark.parametrize(("dtype", "rows"), CASES)
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_entrance_of_attention(kind: Kind, dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> None:
    M, _, H, G, D = shape
    x, qkv, slots = 2 * random(rows, M, dtype=dtype), weight((H + 2 * G) * D, M, kind), some_slots(rows, 20 * PAGE).to(CUDA)
    cos, sin = angles(random, rows, D)
    ours = [torch.zeros(21, PAGE, G, D, dtype=dtype, device=CUDA) for _ in range(2)]
    theirs = [torch.zeros(21, PAGE, G, D, device=CUDA) for _ in range(2)]
    q = row_qkv.norm_qkv_rope_write(x, qkv, EPS, H, G, cos, sin, *ours, slots)
    near_many(q, row_qkv.plain_norm_qkv_rope_write(x.float(), qkv, EPS, H, G, cos, sin, *theirs, slots), dtype, rows)
    for one, other in zip(ours, theirs, strict=True):
        near_many(one[:20], other[:20], dtype, rows)
        assert not one[20].any()


@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 37, 72), (17, 100, 1000), (65, 130, 264), (5, 16, 40)])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_awkward_widths(kind: Kind, rows: int, width: int, depth: int) -> None:
    x, stream, w = (
        random(rows, depth, dtype=torch.bfloat16),
        random(rows, width, dtype=torch.bfloat16),
        weight(2 * width, depth, kind),
    )
    near(row_linear.norm_linear(x, w, EPS), row_linear.plain_norm_linear(x.float(), w, EPS), x.dtype)
    near_many(row_linear.norm_gated(x, w, EPS), row_linear.plain_norm_gated(x.float(), w, EPS), x.dtype, rows)
    wanted = row_linear.plain_add_linear(stream.float(), x.float(), w[:width])
    near_many(row_linear.add_linear(stream, x, w[:width]), wanted, x.dtype, rows, atol=1e-3)


@pytest.mark.parametrize("kind", GPU_KINDS)
@pytest.mark.parametrize("split", [1, 3])
def test_the_same_bits_every_time_and_for_any_number_of_rows(kind: Kind, split: int) -> None:
    """Tiles of 16 and of 32 rows add up their products in the same order. (One row alone goes its own way.)"""
    stream, x, w = random(51, 960, dtype=torch.bfloat16), random(51, 2560, dtype=torch.bfloat16), weight(960, 2560, kind)
    space = row_linear.SplitSpace.build(51, 960, CUDA)
    blocks = Blocks(32, 128, split=split)
    first = row_linear._triton_add_linear(stream, x, w, None, space, blocks)
    for _ in range(100):
        assert torch.equal(row_linear._triton_add_linear(stream, x, w, None, space, blocks), first)
    for rows in (2, 16, 17, 33):
        assert torch.equal(row_linear._triton_add_linear(stream[:rows], x[:rows], w, None, space, blocks), first[:rows])


def test_calls_are_recorded_in_a_graph() -> None:
    x, both, down = random(8, 960, dtype=torch.bfloat16), weight(5120, 960, "int8"), weight(960, 2560, "int8")
    out, space = torch.empty_like(x), row_linear.SplitSpace.build(8, 960, CUDA)

    def call() -> None:
        row_linear.add_linear(x, row_linear.norm_gated(x, both, EPS), down, out=out, space=space)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        call()
        assert torch.equal(replayed, out)


# Models.


def narrow(
    name: str, kind: Kind, dtype: torch.dtype = torch.float32, rounded: torch.dtype = torch.float32
) -> FathomForCausalLM:
    """Weights are rounded first: what lies next to a tie of one byte must be on the same side in both dtypes."""
    model = copy.deepcopy(MODELS[name]()).cuda().to(rounded).to(dtype)
    quantize_layers(model.decoder, kind, None)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", GPU_KINDS)
@pytest.mark.parametrize("fuse", [True, False])
def test_the_engine_says_what_the_reference_says(name: str, kind: Kind, fuse: bool) -> None:
    slow = copy.deepcopy(MODELS[name]())
    quantize_layers(slow.decoder, kind, None)
    wanted = [generate(slow, [prompt], max_new_tokens=NEW)[0] for prompt in many(slow)]
    model = narrow(name, kind)
    results = Engine(model, fuse=fuse, compile=fuse, **SIZES).generate(many(slow), max_new_tokens=NEW)
    assert [result.tokens for result in results] == [row.tokens for row in wanted]
    assert [result.depths for result in results] == [row.depths for row in wanted]


@pytest.mark.parametrize("name", ["vanilla", "lora", "gemma3", "routed"])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_bfloat16_through_the_kernels(name: str, kind: Kind) -> None:
    """Logits of the modules, which take the kernels for few rows, beside those of the same weights in float32."""
    tokens_BT = torch.tensor([[5, 9, 33, 7]], device=CUDA)
    model, wide = narrow(name, kind, torch.bfloat16), narrow(name, kind, rounded=torch.bfloat16)
    with torch.no_grad():
        found, wanted = model.decoder(tokens_BT).float(), wide.decoder(tokens_BT)
    off = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert off < 0.05
    results = Engine(model, **SIZES).generate(many(MODELS[name]()), max_new_tokens=NEW)
    assert all(len(result.tokens) == NEW for result in results)


def test_a_session_with_one_byte_a_weight() -> None:
    """What `fathomlm generate --device cuda` runs."""
    slow = copy.deepcopy(build("vanilla"))
    quantize_layers(slow.decoder, "int8", None)
    prompt = many(slow)[0]
    session = EngineSession(narrow("vanilla", "int8"))
    assert session.generate(prompt, max_new_tokens=NEW).tokens == generate(slow, [prompt], max_new_tokens=NEW)[0].tokens
    half = EngineSession(narrow("vanilla", "int8", torch.bfloat16))
    assert len(half.generate(prompt, max_new_tokens=NEW).tokens) == NEW


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_loading(kind: Kind, tmp_path: Path) -> None:
    save(build("vanilla"), tmp_path / "model")
    model = load(tmp_path / "model", "bfloat16", CUDA, quantize=kind)
    assert dtype_name(model) == kind
    assert model.decoder.layers[0].rows is not None
    assert model.decoder.layers[0].rows.qkv_WM.data.is_cuda
