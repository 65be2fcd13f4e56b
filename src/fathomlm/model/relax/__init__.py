"""Relaxations: what a step adds to the weights it shares (thesis 3.3.3). `depth.relaxation` names the kinds."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fathomlm.depth import Architecture, DepthPlan, Relaxation


class StepDelta(nn.Module):
    """What a step adds to the layer it shares: nothing here, and in each kind of relaxation what it overrides."""

    def __init__(self, architecture: Architecture, relaxation: Relaxation) -> None:
        super().__init__()
        self.linears = nn.ModuleDict()
        """Deltas on linears, by their names."""
        self.offsets = nn.ParameterDict()
        """Offsets on norms and biases, by `offset_key`."""
        self.prefix: nn.Parameter | None = None
        """Hidden vectors from which the step makes keys and values in front of every token's."""

    def reset_parameters(self) -> None:
        """Fresh values of the parameters that this module itself holds, such that the step adds nothing at first."""

    def match_weights(self, layer: nn.Module) -> None:
        """Set what follows from the shared layer's weights, once those are there."""

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        """A linear of the shared layer, as this step sees it."""
        out: Tensor = linear(x)
        return out

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        """A norm of the shared layer, as this step sees it."""
        out: Tensor = module(x)
        return out

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """One of the layer's tensors with what this step adds, in float32: what an unrolled export stores."""
        return tensor.float()

    def starts(
        self,
        name: str,
        tied: Tensor,
        residual: Callable[[], Tensor] | None,
        generator: torch.Generator,
        moment: Callable[[], Tensor | None] = lambda: None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Conversion: initial values of what this step adds to the tensor `name` of its layer. `tied` is that tensor as it
        is stored, and `residual` gives what the base layer in this place has beyond it; None asks for a delta of zero.
        `moment` gives the second moments of what that layer reads through the tensor, where it is to count by them."""
        yield from ()

    def own_starts(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Conversion: initial values of what belongs to no tensor of the layer; here as in a new model."""
        fresh = copy.deepcopy(self).to_empty(device="cpu")
        fresh.reset_parameters()
        yield from ((name, parameter.detach()) for name, parameter in fresh.named_parameters(recurse=False))


def build_deltas(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> nn.ModuleDict:
    """One module for each step that adds something, keyed by the step's index."""
    if relaxation is None:
        return nn.ModuleDict()
    kind: type[StepDelta] = pkgutil.resolve_name(relaxation.method.module)
    steps = [step for step in plan if relaxation.sits_on(plan, step)]
    return nn.ModuleDict({str(step.index): kind(architecture, relaxation) for step in steps})


def build_encodings(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> nn.ParameterList:
    """A vector for each recursion that multiplies its output, in kinds that have one."""
    if relaxation is None or not relaxation.method.per_recursion:
        return nn.ParameterList()
    return nn.ParameterList(nn.Parameter(torch.empty(architecture.hidden)) for _ in range(plan.recursions))
