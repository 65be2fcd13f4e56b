"""What the uses of one shared layer add to it, for rows at any of them in one pass (thesis 3.3.3: depth-wise relaxation).

The shared product runs once for all rows, whatever their recursion. Each row then gets what its own recursion adds: low-rank
factors, DoRA's row lengths and biases in one grouped product (`kernels.grouped_lora`), and norms with weights of its own.

Shapes: N rows, M input width, W output width, D recursions, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.kernels.grouped_lora import add_grouped_lora
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.relax import StepDelta
from fathomlm.model.relax.lora import DoraDelta, LoraDelta, LoraStep, offset_key


class Additions(NamedTuple):
    """What all recursions add to one linear: `grouped_lora`'s arguments."""

    a_DRM: Tensor
    b_DWR: Tensor
    gain_DW: Tensor | None
    shift_DW: Tensor | None


class GroupedDelta:
    """Stands where a layer's `StepDelta` stands. Kinds of relaxation that are not known here are computed for every
    recursion, and each row takes its own."""

    prefix: Tensor | None = None

    def __init__(self, deltas: Sequence[StepDelta]) -> None:
        self._deltas = deltas
        self._known = all(isinstance(delta, LoraStep) for delta in deltas)
        self._additions: dict[str, Additions | None] = {}
        self._offsets = {
            key: torch.stack([delta.offsets[key].detach() for delta in deltas])
            for key in (deltas[0].offsets if self._known else ())
        }
        self._recursion_N: Tensor | None = None

    @classmethod
    def build(cls, deltas: Sequence[StepDelta | None]) -> GroupedDelta | None:
        """For all uses of one layer; None where they add nothing to its linears and norms, as a prefix does."""
        found = [delta for delta in deltas if delta is not None and delta.prefix is None]
        if not found:
            return None
        assert len(found) == len(deltas), "every use of a relaxed layer has its own delta"
        return cls(found)

    def at(self, recursion_N: Tensor) -> GroupedDelta:
        """The same, for rows of these recursions. Until it is called, all rows are at the first of the uses."""
        self._recursion_N = recursion_N
        return self

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        if not self._known:
            return self._select([delta.project(name, linear, x) for delta in self._deltas])
        if name not in self._additions:
            self._additions[name] = self._find_additions(name, linear)
        added, bias_DW = self._additions[name], self._offset(f"{self._paths[name]}.bias")
        if added is None:
            out_N1W: Tensor = linear(x)
            return out_N1W if bias_DW is None else (out_N1W + self._own(bias_DW, out_N1W)).to(out_N1W.dtype)
        out_N1W = linear(x) if added.gain_DW is None or linear.bias is None else linear(x) - linear.bias
        a_DRM, b_DWR, gain_DW, shift_DW = added
        if self._recursion_N is None:
            out_N1W = out_N1W + F.linear(F.linear(x, a_DRM[0]), b_DWR[0])
            out_N1W = out_N1W if gain_DW is None else out_N1W * gain_DW[0]
            return out_N1W if shift_DW is None else out_N1W + shift_DW[0]
        add_grouped_lora(out_N1W[:, 0], x[:, 0], a_DRM, b_DWR, self._recursion_N, gain_DW=gain_DW, shift_DW=shift_DW)
        return out_N1W

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        if not self._known:
            return self._select([delta.norm(name, module, x) for delta in self._deltas])
        weight_DW = self._offset(f"{name}.weight")
        if weight_DW is None:
            plain: Tensor = module(x)
            return plain
        if isinstance(module, RMSNorm):
            shifted: Tensor = module(x, offset=self._own(weight_DW, x))
            return shifted
        assert isinstance(module, nn.LayerNorm)
        bias_DW = self._offset(f"{name}.bias")
        assert bias_DW is not None
        unit = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        return unit * (module.weight + self._own(weight_DW, x)) + (module.bias + self._own(bias_DW, x))

    @property
    def _paths(self) -> dict[str, str]:
        first = self._deltas[0]
        assert isinstance(first, LoraStep)
        return first.paths

    def _offset(self, name: str) -> Tensor | None:
        return self._offsets.get(offset_key(name))

    def _own(self, stack_DW: Tensor, x: Tensor) -> Tensor:
        """Each row's vector, to be multiplied with or added to x (N, ..., W)."""
        if self._recursion_N is None:
            return stack_DW[0]
        return stack_DW[self._recursion_N].view(len(x), *[1] * (x.dim() - 2), -1)

    @torch.no_grad()
    def _find_additions(self, name: str, linear: nn.Linear) -> Additions | None:
        """Once for each linear: DoRA's lengths are those of whole merged weights."""
        low = [delta.linears[name] for delta in self._deltas if name in delta.linears]
        if not low:
            return None
        found = [one for one in low if isinstance(one, LoraDelta)]
        assert len(found) == len(self._deltas), "every use of a relaxed layer has the same linears"
        dtype = found[0].a.dtype
        gains = [one.gain(linear).to(dtype) for one in found if isinstance(one, DoraDelta)]
        offset_DW = self._offset(f"{self._paths[name]}.bias")
        bias_DW = linear.bias.detach().expand(len(found), -1) if gains and linear.bias is not None else None
        shift_DW = offset_DW if bias_DW is None else bias_DW if offset_DW is None else bias_DW + offset_DW
        return Additions(
            torch.stack([one.a for one in found]),
            torch.stack([one.b for one in found]),
            torch.stack(gains) if gains else None,
            None if shift_DW is None else shift_DW.to(dtype).contiguous(),
        )

    def _select(self, each: Sequence[Tensor]) -> Tensor:
        """Row by row that of its recursion."""
        if self._recursion_N is None:
            return each[0]
        stacked = torch.stack(list(each), dim=1)
        at = self._recursion_N.view(-1, *[1] * (stacked.dim() - 1)).expand(-1, 1, *stacked.shape[2:])
        return stacked.gather(1, at)[:, 0]
