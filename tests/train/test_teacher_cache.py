"""A teacher's likeliest tokens: what they are compared by, and a run that reads them in place of the teacher."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fathomlm.errors import DataError, OptionError, OutputError
from fathomlm.train import teacher_cache
from fathomlm.train.losses.divergence import DIVERGENCES
from fathomlm.train.losses.head import IGNORE, HeadTerms, LikeliestTokens, Teacher, head_loss, likeliest_tokens
from fathomlm.train.reading import build_recipe
from fathomlm.train.report import read_records
from fathomlm.train.run import train
from fathomlm.train.teacher_cache import SplitCache
from interrupting import interrupted_everywhere

pytestmark = pytest.mark.usefixtures("one_thread")
N, M, V, K = 19, 8, 31, 5


def grouped(probabilities_NV: Tensor, tokens_NK: Tensor) -> Tensor:
    """The K + 1 outcomes: the known tokens, and all others as one."""
    known = probabilities_NV.gather(1, tokens_NK)
    return torch.cat((known, 1 - known.sum(1, keepdim=True)), dim=1)


def divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    mean = (p + q) / 2
    kl = {"forward_kl": (p, q), "reverse_kl": (q, p)}
    if kind in kl:
        a, b = kl[kind]
        return (a * (a / b).log()).sum()
    if kind == "jensen_shannon":
        return ((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()) / 2
    return (p - q).abs().sum() / 2


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_what_is_compared_is_the_known_tokens_and_the_rest_as_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, taught, taught_weight = (torch.randn(n, M, generator=generator) for n in (N, V, N, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[[0, 7]] = IGNORE
    known = likeliest_tokens(Teacher(taught, taught_weight), K, torch.float32, chunk=4)
    assert (known.tokens_NK.dtype, known.logs_NK.dtype, known.logs_NK.shape) == (torch.int32, torch.float16, (N, K))
    terms = HeadTerms(0.7, kind, 1.3)
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    total, _, distance = head_loss(*own, targets, terms, teacher=known, chunk=6)
    total.backward()
    wide = [each.detach().double().requires_grad_() for each in own]
    logits = wide[0] @ wide[1].T
    p = known.logs_NK.double().exp()
    p = torch.cat((p, 1 - p.sum(1, keepdim=True)), dim=1)
    q = grouped(logits.softmax(-1), known.tokens_NK.long())
    counted = targets != IGNORE
    expected = torch.stack([divergence(kind, *pair) for pair in zip(p[counted], q[counted], strict=True)]).sum()
    ce = torch.nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum")
    (0.7 * ce + 1.3 * expected).backward()
    assert float(distance) == pytest.approx(float(expected.detach()), rel=1e-4)
    for found, wanted in zip(own, wide, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad, wanted.grad.float(), rtol=2e-4, atol=2e-5)


def test_all_tokens_known_is_the_whole_teacher_but_for_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, taught, taught_weight = (torch.randn(n, M, generator=generator) for n in (N, V, N, V))
    targets, whole = torch.zeros(N, dtype=torch.long), Teacher(taught, taught_weight)
    known = likeliest_tokens(whole, 2 * V, torch.float32)
    assert known.tokens_NK.shape == (N, V)
    distances = [
        float(head_loss(hidden, weight, targets, HeadTerms(1.0, "forward_kl", 1.0), teacher=teacher)[2])
        for teacher in (whole, known)
    ]
    assert distances[0] == pytest.approx(distances[1], rel=1e-2)


def test_a_certain_teacher_leaves_something_for_the_rest() -> None:
    known = LikeliestTokens(torch.tensor([[3]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.float16))
    hidden, weight = torch.ones(1, M, requires_grad=True), torch.randn(V, M)
    total, _, _ = head_loss(hidden, weight, torch.tensor([3]), HeadTerms(1.0, "forward_kl", 1.0), teacher=known)
    total.backward()
    assert hidden.grad is not None
    assert total.isfinite()
    assert hidden.grad.isfinite().all()


@pytest.fixture
def run(values: Callable[..., dict[str, Any]], teacher: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    """Trains for some steps; what was recorded, times left out."""

    def make(name: str, *, budget: int = 4, resume: bool = False, **distill: Any) -> list[Any]:
        loss = {"distill": {"source": str(teacher), "top_k": 6, **distill}}
        chosen = {
            "out": str(tmp_path / name),
            "budget": {"steps": budget},
            "evaluate": {"every": 2, "rows": 3},
            "loss": loss,
        }
        train(build_recipe(values(**chosen)), resume=resume)
        return [(r["kind"], r["step"], r.get("loss"), r["parts"]) for r in read_records(tmp_path / name / "metrics.jsonl")]

    return make


def test_a_run_from_the_cache_is_the_run_beside_the_teacher(
    run: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = run("beside")
    assert any("distill" in parts for *_, parts in beside)
    cache = str(tmp_path / "cache")
    assert run("first", cache=cache) == beside
    monkeypatch.setattr(teacher_cache, "build_teacher", lambda *args: pytest.fail("there is nothing to ask the teacher"))
    assert run("second", cache=cache) == beside
    assert run("beside", resume=True, cache=cache) == beside  # where the tokens come from is no part of what is trained


def test_only_what_is_missing_is_asked(
    run: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "cache")
    run("short", cache=cache, budget=2)
    asked: list[int] = []
    fill = teacher_cache.fill

    def counting(cache: Any, windows: Any, *rest: Any, **more: Any) -> None:
        asked.append(len(windows))
        fill(cache, windows, *rest, **more)

    monkeypatch.setattr(teacher_cache, "fill", counting)
    longer = run("long", cache=cache, budget=4)
    assert longer == run("beside", budget=4)
    done = np.fromfile(tmp_path / "cache" / "train.done", np.uint8)
    assert 0 < asked[0] < done.sum()
    assert asked[1] == 0


def test_a_full_disk_is_told(run: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, *how: Any, **more: Any) -> Any:
        if path.suffix == ".logs":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OutputError, match=r"cannot write .*train\.logs: No space left"):
        run("first", cache=str(tmp_path / "cache"))


def test_an_interrupt_before_any_line_leaves_a_cache_that_opens(tmp_path: Path) -> None:
    place = tmp_path / "cache"

    def opened() -> SplitCache:
        place.mkdir(exist_ok=True)
        return SplitCache(place, "train", 4, 8, 3, False)

    stopped = 0
    for _ in interrupted_everywhere(opened, teacher_cache):
        assert len(opened().missing(np.arange(4))) == 4
        assert sorted(os.listdir(place)) == ["train.done", "train.logs", "train.tokens"]
        shutil.rmtree(place)
        stopped += 1
    assert stopped > 20


def test_a_window_is_marked_when_the_rest_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    cache = SplitCache(tmp_path, "train", 4, 8, 3, False)
    names = {path.stat().st_ino: path.name for path in tmp_path.iterdir()}

    def noting(handle: int) -> None:
        sync(handle)
        assert cache.done.sum() == (2 if synced[1:] else 0)
        synced.append(names[os.fstat(handle).st_ino])

    monkeypatch.setattr(os, "fsync", noting)
    found = LikeliestTokens(torch.ones(16, 3, dtype=torch.int32), torch.zeros(16, 3, dtype=torch.float16))
    cache.put(np.array([1, 3]), found)
    assert synced == ["train.tokens", "train.logs", "train.done"]
    assert cache.done.tolist() == [0, 1, 0, 1]


def test_a_cache_of_something_else_is_refused(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run("first", cache=str(cache), budget=2)
    with pytest.raises(DataError, match="top_k is 6 there and 7 here"):
        run("second", cache=str(cache), top_k=7)
    (cache / "train.logs").write_bytes(b"cut off")
    with pytest.raises(DataError, match="7 bytes instead of"):
        run("third", cache=str(cache))
    (cache / "cache.json").write_text(json.dumps([]))
    with pytest.raises(DataError):
        run("fourth", cache=str(cache))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"distill": {"source": "x", "cache": "c"}}, "requires loss.distill.top_k"),
        ({"distill": {"source": "x", "cache": "c", "top_k": 4}, "heal": {}}, "cannot be combined with loss.heal"),
    ],
)
def test_what_a_cache_requires(values: Callable[..., dict[str, Any]], loss: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_recipe(values(loss=loss))
