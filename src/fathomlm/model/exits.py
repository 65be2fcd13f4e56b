"""What an early exit has of its own, over a model that stays as it is: an adapter and a classifier, which are trained, and
the vocabulary that it chooses among.

Shapes: M hidden width, r rank; `...` are batch and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture
from fathomlm.errors import OptionError
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.blocks.attention import build_linear
from fathomlm.model.relax.lora import LoraDelta


class ExitAdapter(nn.Module):
    """x + B silu(A norm(x)) on the residual stream at an exit, in front of the final norm and the head.

    A token that does not leave goes on from x itself, so the last output is what it was, bit for bit.
    """

    def __init__(self, architecture: Architecture, rank: int) -> None:
        super().__init__()
        self.norm = RMSNorm(architecture.hidden, architecture.norm_eps, plus_one=False)
        self.a = nn.Parameter(torch.empty(rank, architecture.hidden))
        self.b = nn.Parameter(torch.empty(architecture.hidden, rank))

    def reset_parameters(self) -> None:
        """Gaussian A, zero B: it starts as the plain exit. The norm is a module of its own and resets itself."""
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(self.norm(x), self.a))
        return x + F.linear(inner, self.b)


class ExitClassifier(nn.Module):
    """From what the head reads at an exit to one logit: that the likeliest token here is the last output's too (CALM,
    Schuster et al. 2022, section 3.3)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, architecture.hidden))
        self.bias = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """It starts undecided."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)[..., 0]


class DraftLayer(nn.Module):
    """A layer behind the whole model that drafts the tokens to come (EAGLE, Li et al. 2024): of a token's embedding and the
    last layer's state of the token before it, it foretells the last layer's state of this one. A draft's own state is not
    known yet, and the layer's output stands in for it, so that it can be rolled forward over its own drafts."""

    def __init__(self, architecture: Architecture, block: nn.Module) -> None:
        super().__init__()
        self.norm_token = RMSNorm(architecture.hidden, architecture.norm_eps, plus_one=False)
        self.norm_state = RMSNorm(architecture.hidden, architecture.norm_eps, plus_one=False)
        self.mix = build_linear(architecture.pair_linear("mix"))
        self.block = block

    def forward(self, tokens_BTM: Tensor, before_BTM: Tensor) -> Tensor:
        """What the layer reads: embeddings, and the states of the tokens before them."""
        mixed: Tensor = self.mix(torch.cat((self.norm_token(tokens_BTM), self.norm_state(before_BTM)), dim=-1))
        return mixed


class ExitVocab(nn.Module):
    """The tokens that exits choose among, and their rows of the head, copied so that only those are read: in a small model
    the head is most of what a token reads up to an exit. Drafts lose little by it, and what verifies them sees every token.

    Neither is among a model's weights: its configuration and exit packs name the tokens, and the rows are the head's.
    Shapes: W tokens of the exit vocabulary.
    """

    vocab_W: Tensor
    rows_WM: Tensor

    def __init__(self, vocab_W: Tensor, head_VM: Tensor) -> None:
        super().__init__()
        self.vocab = head_VM.shape[0]
        check_exit_vocab(vocab_W, self.vocab)
        vocab_W = vocab_W.to(head_VM.device, torch.long)
        self.register_buffer("vocab_W", vocab_W, persistent=False)
        self.register_buffer("rows_WM", head_VM.detach()[vocab_W].clone(), persistent=False)
        self.quantized: nn.Linear | None = None
        """The rows in integers, where layers have those (`model.quantize`): else they would be most of what is read."""

    def few(self, hidden_BTM: Tensor) -> Tensor:
        """Scores of these tokens alone."""
        few_BTW: Tensor = F.linear(hidden_BTM, self.rows_WM) if self.quantized is None else self.quantized(hidden_BTM)
        return few_BTW

    @torch.no_grad()
    def take_rows(self, head_VM: Tensor) -> None:
        """Copy the rows anew, in the same place, where other weights were put into the head."""
        self.rows_WM.copy_(head_VM[self.vocab_W])

    def logits(self, hidden_BTM: Tensor, delta: LoraDelta | None) -> Tensor:
        """Scores over the vocabulary, -inf for all other tokens."""
        few_BTW = self.few(hidden_BTM)
        if delta is not None:
            few_BTW = few_BTW + F.linear(F.linear(hidden_BTM, delta.a), delta.b[self.vocab_W])
        none_BTV = few_BTW.new_full((*few_BTW.shape[:-1], self.vocab), -torch.inf)
        return none_BTV.index_copy(-1, self.vocab_W, few_BTW)


def check_exit_vocab(vocab_W: Tensor, vocab: int) -> None:
    """Refuse what exits cannot choose among."""
    if vocab_W.dim() != 1 or vocab_W.is_floating_point() or len(set(vocab_W.tolist())) != len(vocab_W) or not len(vocab_W):
        raise OptionError("the exit vocabulary must be one or more different tokens")
    if int(vocab_W.min()) < 0 or int(vocab_W.max()) >= vocab:
        raise OptionError(f"the exit vocabulary must be tokens of the model, from 0 to {vocab - 1}")


def check_rising(tokens: Sequence[int], vocab: int, name: str) -> None:
    """Refuse tokens that are not in the order of files: one vocabulary has one spelling."""
    if not tokens or tokens[0] < 0 or tokens[-1] >= vocab or any(a >= b for a, b in pairwise(tokens)):
        raise OptionError(f"{name} must be different tokens in rising order, from 0 to {vocab - 1}")
