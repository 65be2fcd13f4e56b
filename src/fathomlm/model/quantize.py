"""A model whose layers multiply with integers (`kernels.quantized`), for decoding on a CPU.

The linears of layers and the head are replaced; norms, routers, relaxations and what exits add stay as they are, and so does
the embedding, of which a token reads one row. A tied head gets integers of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathomlm.errors import OptionError
from fathomlm.kernels.cpu_layers import CpuLayers, LayerWeights
from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.kernels.half import effective_weight
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.quantized import Kind, QuantizedWeight
from fathomlm.model.blocks import Block
from fathomlm.model.blocks.parts import FeedForward
from fathomlm.model.stack import LayerStack


class QuantizedLinear(nn.Linear):
    """A linear with integer weights. It has no gradient; `weight` is multiplied out whenever it is read, which is right
    everywhere and fast nowhere."""

    def __init__(self, weight_OI: Tensor, bias: nn.Parameter | None, kind: Kind, library: CpuLibrary) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_OI.shape
        self.quantized = QuantizedWeight(weight_OI, kind, library)
        self.bias = bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.multiplied_out()

    def forward(self, x: Tensor) -> Tensor:
        out = self.quantized.product(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantized.kind}"


@torch.no_grad()
def quantize_layers(decoder: LayerStack, kind: Kind, library: CpuLibrary) -> None:
    """Replace the decoder's matrices."""
    weight = decoder.embed.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise OptionError(f"quantize requires a float32 model on the CPU; this one is {weight.dtype} on {weight.device}")
    if decoder.architecture.experts:
        raise OptionError("quantize cannot be combined with experts: their weights would stay as they are")
    for name, layer in (*decoder.layers.named_children(), *decoder.exit_blocks.named_children()):
        for path, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, own = path.rpartition(".")
                made = _quantized(linear.weight, linear.bias, kind, library, f"{name}.{path}")
                setattr(layer.get_submodule(parent), own, made)
    matrix_VM = weight if decoder.head is None else decoder.head.weight
    # The last product decides between tokens: int4 would cost more than it saves.
    head = _quantized(matrix_VM, None, "int8", library, "head")
    if decoder.head is None:
        decoder.tied_head = head
    else:
        decoder.head = head
    decoder.quantized, decoder.cpu_layers = kind, _cpu_layers(decoder, library)


def _quantized(weight_OI: Tensor, bias: nn.Parameter | None, kind: Kind, library: CpuLibrary, name: str) -> QuantizedLinear:
    if not bool(weight_OI.isfinite().all()):
        raise OptionError(f"the weight of '{name}' holds numbers that are not finite; {kind} has no place for them")
    return QuantizedLinear(weight_OI, bias, kind, library)


def _cpu_layers(decoder: LayerStack, library: CpuLibrary) -> CpuLayers | None:
    """All layers at once, where they have the form that cpu_rows.c knows."""
    if decoder.deltas or decoder.encodings or decoder.architecture.local_rope is not None:
        return None
    layers = [layer for layer in decoder.layers if isinstance(layer, Block) and layer.packs]
    if len(layers) < len(decoder.layers):
        return None
    return CpuLayers([_weights(layer) for layer in layers], decoder.architecture, library)


def _weights(layer: Block) -> LayerWeights:
    def integers(linear: nn.Linear | None) -> QuantizedWeight:
        assert isinstance(linear, QuantizedLinear)
        return linear.quantized

    def norm(module: nn.Module) -> Tensor:
        assert isinstance(module, RMSNorm)
        return effective_weight(module.weight, module.plus_one).contiguous()

    attn, mlp = layer.attn, layer.mlp
    assert isinstance(mlp, FeedForward)
    return LayerWeights(
        q=integers(attn.q), k=integers(attn.k), v=integers(attn.v), o=integers(attn.o),
        gate=integers(mlp.gate), up=integers(mlp.up), down=integers(mlp.down),
        norm_attn_M=norm(layer.norm_attn), norm_mlp_M=norm(layer.norm_mlp),
    )  # fmt: skip
