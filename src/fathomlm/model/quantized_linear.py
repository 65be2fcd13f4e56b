"""A linear whose weight is a `QuantizedWeight`."""

from __future__ import annotations

from torch import Tensor, nn

from fathomlm.kernels.quantized import QuantizedWeight
from fathomlm.kernels.row_linear import few_rows, norm_linear


class QuantizedLinear(nn.Linear):
    """It has no gradient; `weight` is multiplied out whenever it is read, which is right everywhere and fast nowhere."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = quantized.shape
        self.quantized = quantized
        self.bias = bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.multiplied_out()

    def forward(self, x: Tensor) -> Tensor:
        if few_rows(x) and x.numel() > 0:
            rows_NI = x.reshape(-1, self.in_features).contiguous()
            out = norm_linear(rows_NI, self.quantized, 0.0, scale=False).view(*x.shape[:-1], self.out_features)
        else:
            out = self.quantized.product(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantized.kind}"
