"""LoRA and DoRA on linears, with offsets on norms and biases (thesis 3.3.3).

LoRA is h = W x + B A x. The scaling is exactly 1, so that full rank can restore any weight. DoRA takes that weight's
direction and learns the length of each output row: h = m * (W + B A) x / |W + B A|, the norm taken over each row and, as its
authors do, kept out of the gradient (thesis appendix, Table of KV relaxations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture, LinearSpec, Relaxation
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.relax import StepDelta

DAMPING = 1e-2
"""Of the mean of a moment's diagonal."""


class LoraDelta(nn.Module):
    """A low-rank delta on one linear at one step."""

    def __init__(self, spec: LinearSpec, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, spec.inputs))
        self.b = nn.Parameter(torch.empty(spec.outputs, rank))

    def reset_parameters(self) -> None:
        """The standard start: Gaussian A, zero B, so that the delta is nothing at first."""
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor, linear: nn.Linear) -> Tensor:
        out: Tensor = linear(x)
        return out + F.linear(F.linear(x, self.a), self.b)

    def merged(self, weight: Tensor) -> Tensor:
        """The plain weight that does the same, in float32."""
        return weight.float() + self.b.float() @ self.a.float()

    def starts(self, tied: Tensor, residual: Tensor, generator: torch.Generator, moment: Tensor | None) -> dict[str, Tensor]:
        """Conversion: A and B towards `residual`, what the shared weight lacks; `moment` is `svd_factors`'."""
        a, b = svd_factors(residual, self.a.shape[0], generator, moment)
        return {"a": a, "b": b}


class DoraDelta(LoraDelta):
    """A low-rank delta with row lengths of its own."""

    def __init__(self, spec: LinearSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self.magnitude = nn.Parameter(torch.empty(spec.outputs))

    def reset_parameters(self) -> None:
        """Lengths of 1 until `set_magnitude` has seen the shared weight."""
        super().reset_parameters()
        nn.init.ones_(self.magnitude)

    @torch.no_grad()
    def set_magnitude(self, weight: Tensor) -> None:
        """Start from the rows' own lengths, so that the module begins as the plain LoRA delta."""
        self.magnitude.copy_(self._lengths(weight))

    def forward(self, x: Tensor, linear: nn.Linear) -> Tensor:
        shared = F.linear(x, linear.weight) if isinstance(linear, nn.Linear) else _without_bias(linear, x)
        direction = shared + F.linear(F.linear(x, self.a), self.b)
        out = self.gain(linear).to(direction.dtype) * direction
        return out if linear.bias is None else (out + linear.bias).to(out.dtype)

    def gain(self, linear: nn.Linear) -> Tensor:
        """By how much each row of the linear's weight, the low-rank delta in it, is made longer, in float32."""
        gain: Tensor = self.magnitude.float() / self._lengths(
            linear.weight if isinstance(linear, nn.Linear) else _weight_of(linear)
        )
        return gain

    def merged(self, weight: Tensor) -> Tensor:
        rows: Tensor = (self.magnitude.float() / self._lengths(weight))[:, None] * super().merged(weight)
        return rows

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(super().merged(weight), dim=1)
        return lengths.clamp_min(1e-12)

    def starts(self, tied: Tensor, residual: Tensor, generator: torch.Generator, moment: Tensor | None) -> dict[str, Tensor]:
        factors = super().starts(tied, residual, generator, moment)
        a, b = (factors[name].to(tied.dtype).float() for name in ("a", "b"))
        return factors | {"magnitude": torch.linalg.vector_norm(tied.float() + b @ a, dim=1)}


class LoraStep(StepDelta):
    """One step's deltas, and its offsets."""

    delta: type[LoraDelta] = LoraDelta

    def __init__(self, architecture: Architecture, relaxation: Relaxation) -> None:
        super().__init__(architecture, relaxation)
        self.paths = {spec.name: spec.path for spec in architecture.linears()}
        for spec in architecture.linears():
            if rank := relaxation.rank(spec):
                self.linears[spec.name] = self.delta(spec, rank)
        if relaxation.vectors:
            for name, width in architecture.vectors().items():
                self.offsets[offset_key(name)] = nn.Parameter(torch.empty(width))

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
        if (found := self._linear_of(name)) is not None:
            return found[1].merged(tensor)
        offset = self._offset(name)
        return tensor.float() if offset is None else tensor.float() + offset.float()

    def starts(
        self,
        name: str,
        tied: Tensor,
        residual: Callable[[], Tensor] | None,
        generator: torch.Generator,
        moment: Callable[[], Tensor | None] = lambda: None,
    ) -> Iterator[tuple[str, Tensor]]:
        if (found := self._linear_of(name)) is not None:
            towards = torch.zeros(tied.shape) if residual is None else residual()
            for own, value in found[1].starts(tied, towards, generator, moment()).items():
                yield f"linears.{found[0]}.{own}", value
        elif offset_key(name) in self.offsets:
            yield f"offsets.{offset_key(name)}", torch.zeros(tied.shape) if residual is None else residual()

    def own_starts(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Every tensor belongs to one of the layer's."""
        yield from ()

    def _linear_of(self, name: str) -> tuple[str, LoraDelta] | None:
        """The delta on one of the layer's tensors, with its linear's name."""
        path, end = name.rsplit(".", 1)
        linear = next((linear for linear, where in self.paths.items() if where == path), "")
        if end != "weight" or linear not in self.linears:
            return None
        delta = self.linears[linear]
        assert isinstance(delta, LoraDelta)
        return linear, delta

    def _offset(self, name: str) -> Tensor | None:
        offset: Tensor | None = self.offsets.get(offset_key(name))
        return offset


class DoraStep(LoraStep):
    delta = DoraDelta

    def match_weights(self, layer: nn.Module) -> None:
        """Give rows the lengths they have now, so that the step starts as its plain LoRA delta."""
        for name, delta in self.linears.items():
            assert isinstance(delta, DoraDelta)
            delta.set_magnitude(layer.get_parameter(f"{self.paths[name]}.weight"))


def _without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    """What a linear that another package has wrapped (PEFT) does to x, whatever it adds, and its bias taken off."""
    out: Tensor = linear(x)
    return out if linear.bias is None else out - linear.bias


@torch.no_grad()
def _weight_of(linear: nn.Linear) -> Tensor:
    """The plain weight that does what a wrapped linear does: what it makes of each unit vector, without dropout."""
    training = linear.training
    linear.eval()
    units = torch.eye(linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
    weight = _without_bias(linear, units).T
    linear.train(training)
    return weight


def offset_key(name: str) -> str:
    """A parameter's name may hold no dot where it is a key."""
    return name.replace(".", "-")


def svd_factors(
    residual: Tensor, rank: int, generator: torch.Generator | None = None, moment: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A = V_r^T and B = U_r S_r with B A the best rank-r approximation of `residual`, in float32.

    With the second moments C of the inputs, B A is best for what comes out: it minimises the mean of |(R - B A) x|^2, which
    is |(R - B A) C^1/2|^2. With U the first left singular vectors of R C^1/2 that is U U^T R, so no inverse is needed where
    a matrix is wide; where it is tall, the right ones are fewer, and C's Cholesky factor is divided out again. The rows of A
    have length 1 in either case, and C = I gives the plain SVD.

    Computed as the eigenvectors of the smaller Gram matrix in float64: that is as exact as a float32 SVD, since squaring
    halves the digits that float64 doubled, and about three times as fast. Where the tied weight already is the original,
    the residual is exactly zero and the thesis starts LoRA as usual: Gaussian A, zero B.
    """
    outputs, inputs = residual.shape
    rank = min(rank, outputs, inputs)
    if not residual.any():
        return _gaussian(rank, inputs, generator).to(residual.device), torch.zeros(outputs, rank, device=residual.device)
    m = residual.double()
    weights = None if moment is None else damped(moment)
    if outputs <= inputs:
        u = torch.linalg.eigh((m if weights is None else m @ weights) @ m.T).eigenvectors.flip(-1)[:, :rank]
        rows = u.T @ m
        lengths = torch.linalg.vector_norm(rows, dim=1)
        a, b = rows / lengths.clamp_min(torch.finfo(m.dtype).tiny)[:, None], u * lengths
        if (lost := lengths == 0).any():  # beyond the residual's own rank a direction must still be able to learn
            a[lost] = _gaussian(int(lost.sum()), inputs, generator).to(a)
    elif weights is None:
        a = torch.linalg.eigh(m.T @ m).eigenvectors.flip(-1)[:, :rank].T
        b = m @ a.T
    else:
        root = torch.linalg.cholesky(weights)
        m = m @ root
        v = torch.linalg.eigh(m.T @ m).eigenvectors.flip(-1)[:, :rank]
        a = torch.linalg.solve_triangular(root, v.T, upper=False, left=False)
        lengths = torch.linalg.vector_norm(a, dim=1)
        a, b = a / lengths[:, None], (m @ v) * lengths
    return a.float().contiguous(), b.float().contiguous()


def residual_energies(residual: Tensor, moment: Tensor | None = None) -> Tensor:
    """The squares of the singular values that `svd_factors` keeps from the first on: what each further rank restores."""
    m = residual.double()
    weights = None if moment is None else damped(moment)
    if m.shape[0] <= m.shape[1]:
        gram = (m if weights is None else m @ weights) @ m.T
    else:
        m = m if weights is None else m @ torch.linalg.cholesky(weights)
        gram = m.T @ m
    energies: Tensor = torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)
    return energies


def energy(weight: Tensor, moment: Tensor | None = None) -> Tensor:
    """The sum of all `residual_energies`, without their values: the mean of |W x|^2."""
    w = weight.double()
    return (w * (w if moment is None else w @ damped(moment))).sum()


def damped(moment: Tensor) -> Tensor:
    """Second moments in float64, with a little of their mean added to the diagonal: a sample of text leaves directions out
    in which an error would then cost nothing, and be as large as it likes."""
    c = moment.double()
    return c + DAMPING * c.diagonal().mean() * torch.eye(len(c), dtype=c.dtype, device=c.device)


def _gaussian(rank: int, inputs: int, generator: torch.Generator | None) -> Tensor:
    return torch.empty(rank, inputs).normal_(std=inputs**-0.5, generator=generator)
