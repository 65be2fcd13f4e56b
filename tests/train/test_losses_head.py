"""The chunked head: the numbers of full logits in float64, without ever holding them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fathomlm.train.losses import head
from fathomlm.train.losses.divergence import DIVERGENCES
from fathomlm.train.losses.head import IGNORE, HeadTerms, Teacher, default_chunk, head_loss, plain_head_loss

N, M, V = 23, 8, 31
KINDS = [None, *DIVERGENCES]


def make(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, t_hidden, t_weight = (torch.randn(n, M, generator=generator) for n in (N, V, N, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[[0, 5, 6, 7, N - 1]] = IGNORE
    teacher = Teacher(t_hidden.to(dtype), t_weight.to(dtype))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, teacher


def divergence(kind, p, q):
    """Plain formulas, for one token after another."""
    mean = (p + q) / 2
    return {
        "forward_kl": lambda: (p * (p.log() - q.log())).sum(),
        "reverse_kl": lambda: (q * (q.log() - p.log())).sum(),
        "jensen_shannon": lambda: ((p * (p.log() - mean.log())).sum() + (q * (q.log() - mean.log())).sum()) / 2,
        "total_variation": lambda: (p - q).abs().sum() / 2,
    }[kind]()


def reference(terms, seed=0):
    """Sums and gradients from all logits at once, in float64."""
    hidden, weight, targets, teacher = make(seed, torch.float64)
    counted = targets != IGNORE
    logits = hidden @ weight.T
    ce = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
    distance = torch.zeros((), dtype=torch.float64)
    if terms.divergence is not None:
        taught = (teacher.hidden_NM @ teacher.weight_VM.T).softmax(-1)
        pairs = zip(taught[counted], logits.softmax(-1)[counted], strict=True)
        distance = torch.stack([divergence(terms.divergence, p, q) for p, q in pairs]).sum()
    total = terms.weight * ce + terms.divergence_weight * distance
    gradients = torch.autograd.grad(total, (hidden, weight))
    return [x.detach().float() for x in (total, ce, distance, *gradients)]


def chunked(terms, chunk, seed=0, factor=1.0):
    hidden, weight, targets, teacher = make(seed)
    shown = teacher if terms.divergence is not None else None
    total, ce, distance = head_loss(hidden, weight, targets, terms, teacher=shown, chunk=chunk)
    (factor * total).backward()
    return [x.detach() for x in (total, ce, distance, hidden.grad, weight.grad)]


@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_add_up_to_full_logits(kind, chunk):
    terms = HeadTerms(0.7, kind, 0.0 if kind is None else 1.3)
    for found, wanted in zip(chunked(terms, chunk), reference(terms), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_twin_says_the_same(kind):
    terms = HeadTerms(0.7, kind, 0.0 if kind is None else 1.3)
    hidden, weight, targets, teacher = make()
    plain = plain_head_loss(hidden, weight, targets, terms, teacher)
    plain.backward()
    total, _, _, d_hidden, d_weight = chunked(terms, 7)
    torch.testing.assert_close(plain.detach(), total, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(weight.grad, d_weight, rtol=2e-5, atol=2e-5)


def test_the_gradient_scales_with_what_is_behind():
    terms = HeadTerms(1.0, "forward_kl", 0.5)
    once, thrice = chunked(terms, 7), chunked(terms, 7, factor=3.0)
    torch.testing.assert_close(thrice[3], 3 * once[3])
    torch.testing.assert_close(thrice[4], 3 * once[4])


def test_ignored_tokens_count_for_nothing():
    hidden, weight, targets, teacher = make()
    terms = HeadTerms(1.0, "reverse_kl", 1.0)
    total, *parts = head_loss(hidden, weight, targets, terms, teacher=teacher, chunk=7)
    total.backward()
    kept = targets != IGNORE
    assert (hidden.grad[~kept] == 0).all()
    assert (hidden.grad[kept].abs().sum(-1) > 0).all()
    fewer = Teacher(teacher.hidden_NM[kept], teacher.weight_VM)
    _, *wanted = head_loss(hidden.detach()[kept], weight, targets[kept], terms, teacher=fewer)
    torch.testing.assert_close(parts, wanted)
    nothing, *_ = head_loss(hidden, weight, torch.full_like(targets, IGNORE), terms, teacher=teacher)
    assert nothing == 0


def test_a_teacher_of_the_same_weights_gets_no_gradient():
    hidden, weight, targets, _ = make()
    own = Teacher((2 * hidden).detach(), weight.detach())
    terms = HeadTerms(0.0, "forward_kl", 1.0)
    total, ce, distance = head_loss(hidden, weight, targets, terms, teacher=own, chunk=7)
    total.backward()
    h, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    taught, log_q = (2 * hidden @ weight.T).detach().softmax(-1), (h @ w.T).log_softmax(-1)
    wanted = (taught * (taught.log() - log_q)).sum(-1)[targets != IGNORE].sum()
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=2e-5, atol=2e-5)
    assert total == distance
    assert not ce.requires_grad
    torch.testing.assert_close(hidden.grad, h.grad, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(weight.grad, w.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, N])
@pytest.mark.parametrize("kind", [None, "forward_kl"])
def test_no_more_than_a_chunk_of_logits_is_held(kind, chunk, monkeypatch):
    hidden, weight, targets, teacher = make()
    shapes, plain = [], head._chunk_loss

    def watched(logits_CV, targets_C, teacher_CV, *rest):
        shapes.extend(tuple(x.shape) for x in (logits_CV, teacher_CV) if x is not None)
        return plain(logits_CV, targets_C, teacher_CV, *rest)

    monkeypatch.setattr(head, "_chunk_loss", watched)
    head_loss(hidden, weight, targets, HeadTerms(1.0, kind, 1.0), teacher=teacher if kind else None, chunk=chunk)
    assert all(rows <= chunk and words == V for rows, words in shapes)
    assert sum(rows for rows, _ in shapes) == (2 * N if kind else N)


def test_nothing_of_the_size_of_all_logits_is_ever_made():
    """The largest tensor of a forward and a backward pass, by looking at every operation's result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    Largest.seen = max(Largest.seen, tensor.numel())
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    targets = torch.randint(0, 50, (64,))
    with Largest():
        total, *_ = head_loss(hidden, weight, targets, HeadTerms(), chunk=8)
        total.backward()
    assert 8 * 50 <= Largest.seen <= max(8 * 50, 64 * 4)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_does_not_learn_costs_no_gradient(frozen):
    hidden, weight, targets, _ = make()
    _, _, _, d_hidden, d_weight = chunked(HeadTerms(), 7)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    total, ce, _ = head_loss(hidden, weight, targets, HeadTerms(), chunk=7)
    assert total == ce
    assert total.requires_grad == (frozen != "both")
    if frozen != "both":
        total.backward()
    assert hidden.grad is None or torch.equal(hidden.grad, d_hidden)
    assert weight.grad is None or torch.equal(weight.grad, d_weight)
    assert (hidden.grad is None) == (frozen in ("hidden", "both"))
    assert (weight.grad is None) == (frozen in ("weight", "both"))


def test_without_gradients_the_value_is_the_same():
    hidden, weight, targets, teacher = make()
    terms = HeadTerms(1.0, "jensen_shannon", 0.3)
    with torch.no_grad():
        total, *parts = head_loss(hidden, weight, targets, terms, teacher=teacher, chunk=7)
    assert not total.requires_grad
    wanted = chunked(terms, 7)
    assert total == wanted[0]
    assert parts == wanted[1:3]


def test_products_are_taken_in_autocasts_type_and_gradients_keep_theirs(monkeypatch):
    hidden, weight, targets, _ = make()
    seen, plain = [], head._chunk_loss

    def watched(logits_CV, *rest):
        seen.append(logits_CV.dtype)
        return plain(logits_CV, *rest)

    monkeypatch.setattr(head, "_chunk_loss", watched)
    with torch.autocast("cpu", torch.bfloat16):
        total, ce, _ = head_loss(hidden, weight, targets, HeadTerms(), chunk=7)
    total.backward()
    assert set(seen) == {torch.bfloat16}
    assert ce.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    wanted = chunked(HeadTerms(), 7)
    torch.testing.assert_close(ce, wanted[1], rtol=0.02, atol=0.0)
    torch.testing.assert_close(weight.grad, wanted[4], rtol=0.05, atol=0.05)


def test_the_default_chunk_is_a_good_shape_and_never_nothing():
    assert default_chunk("cpu", 49_152) % 1024 == 0
    assert default_chunk("cpu", 10**9) == 1024
    assert default_chunk("cuda", 49_152) > default_chunk("cpu", 49_152)
    assert default_chunk("cuda", 10**9, (64 * 2048, 960)) == 1024
    hidden, weight, targets, _ = make()
    assert head_loss(hidden, weight, targets, HeadTerms())[0] == chunked(HeadTerms(), N)[0]


@pytest.mark.parametrize(("rows", "chunk"), [(1, 2048), (16, 4096), (24, 6144), (64, 16384), (65, 15360)])
def test_a_larger_pass_on_a_gpu_has_larger_chunks_of_equal_sizes(rows: int, chunk: int):
    """SmolLM-360M's shape. Logits of a chunk stay below what the gradients inside a feed-forward part take."""
    tokens, width, vocab, inner = rows * 2048, 960, 49_152, 2560
    assert default_chunk("cuda", vocab, (tokens, width)) == chunk
    assert chunk * vocab <= max(3 * inner * tokens, default_chunk("cuda", vocab) * vocab)
    assert default_chunk("cpu", vocab, (tokens, width)) == default_chunk("cpu", vocab)


def test_a_wide_model_with_few_words_never_holds_more_than_an_eighth_of_many_logits():
    assert default_chunk("cuda", 32_000, (64 * 2048, 8192)) == 64 * 2048 // 8
