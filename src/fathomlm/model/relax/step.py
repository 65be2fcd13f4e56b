"""All that one step adds of its own, and the building of it from a plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.relax.dora import DoraDelta
from fathomlm.model.relax.lora import LoraDelta

LOW_RANK: dict[str, type[LoraDelta]] = {"lora": LoraDelta, "dora": DoraDelta}


class StepDelta(nn.Module):
    """What a step adds: deltas on linears and offsets on norms and biases (lora, dora), or a prefix of hidden vectors.

    The prefix is P vectors of the hidden width that go straight through the step's k and v projections, without a
    position, and stand in front of every token's keys (thesis appendix on alternative relaxations).
    """

    def __init__(self, architecture: Architecture, relaxation: Relaxation) -> None:
        super().__init__()
        self.linears = nn.ModuleDict()
        self.offsets = nn.ParameterDict()
        self.prefix: nn.Parameter | None = None
        self.paths = {spec.name: spec.path for spec in architecture.linears()}
        if relaxation.kind == "prefix":
            self.prefix = nn.Parameter(torch.empty(relaxation.prefix_length, architecture.hidden))
        if not relaxation.low_rank:
            return
        make = LOW_RANK[relaxation.kind]
        for spec in architecture.linears():
            if rank := relaxation.rank(spec):
                self.linears[spec.name] = make(spec, rank)
        if relaxation.vectors:
            for name, width in architecture.vectors().items():
                self.offsets[offset_key(name)] = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        """A prefix starts small and random; deltas and offsets are modules of their own and reset themselves."""
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)

    def match_lengths(self, layer: nn.Module) -> None:
        """Give DoRA rows the lengths they have now, so that the step starts as its plain LoRA delta."""
        for name, delta in self.linears.items():
            if isinstance(delta, DoraDelta):
                linear = layer.get_submodule(self.paths[name])
                assert isinstance(linear, nn.Linear)
                delta.set_magnitude(linear.weight)

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        """A linear of the shared layer, as this step sees it."""
        out: Tensor = self.linears[name](x, linear) if name in self.linears else linear(x)
        bias = self._offset(f"{self.paths[name]}.bias")
        return out if bias is None else (out + bias).to(out.dtype)  # autocast's dtype, not the offset's

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        """A norm of the shared layer, as this step sees it."""
        weight = self._offset(f"{name}.weight")
        if weight is None:
            plain: Tensor = module(x)
            return plain
        if isinstance(module, RMSNorm):
            shifted: Tensor = module(x, offset=weight)
            return shifted
        assert isinstance(module, nn.LayerNorm)
        bias = self._offset(f"{name}.bias")
        assert bias is not None
        return F.layer_norm(x, module.normalized_shape, module.weight + weight, module.bias + bias, module.eps)

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """One of the layer's tensors with what this step adds, in float32: what an unrolled export stores."""
        path, end = name.rsplit(".", 1)
        linear = next((linear for linear, where in self.paths.items() if where == path), "")
        if end == "weight" and linear in self.linears:
            delta = self.linears[linear]
            assert isinstance(delta, LoraDelta)
            return delta.merged(tensor)
        offset = self._offset(name)
        return tensor.float() if offset is None else tensor.float() + offset.float()

    def _offset(self, name: str) -> Tensor | None:
        offset: Tensor | None = self.offsets.get(offset_key(name))
        return offset


def offset_key(name: str) -> str:
    """A parameter's name may hold no dot where it is a key."""
    return name.replace(".", "-")


def build_deltas(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> nn.ModuleDict:
    """One module for each step that adds something, keyed by the step's index."""
    deltas = nn.ModuleDict()
    if relaxation is None:
        return deltas
    for step in plan:
        if relaxation.sits_on(plan, step):
            deltas[str(step.index)] = StepDelta(architecture, relaxation)
    return deltas


def build_encodings(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> nn.ParameterList:
    """A vector for each recursion that multiplies its output (thesis appendix: position encoding by recursion)."""
    if relaxation is None or relaxation.kind != "encoding":
        return nn.ParameterList()
    return nn.ParameterList(nn.Parameter(torch.empty(architecture.hidden)) for _ in range(plan.recursions))
