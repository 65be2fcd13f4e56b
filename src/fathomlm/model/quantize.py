"""A model whose layers multiply with integers (`kernels.quantized`), for decoding few sequences at once.

The linears of layers and the head are replaced; routers, relaxations and the adapters of exits stay as they are, and so does
the embedding, of which a token reads one row. A tied head gets integers of its own, and on a CPU so does the part of it that
exits with a vocabulary of their own read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fathomlm.errors import OptionError
from fathomlm.kernels.cpu_layers import CpuLayers, LayerWeights
from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.kernels.half import effective_weight, folded
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.quantized import Kind, QuantizedWeight
from fathomlm.model.blocks import Block, CrossBlock
from fathomlm.model.blocks.attention import QuantizedLinear
from fathomlm.model.blocks.feed_forward import FeedForward
from fathomlm.model.blocks.step_context import CrossRows, PackedRows
from fathomlm.model.stack import LayerStack


@torch.no_grad()
def quantize_layers(decoder: LayerStack, kind: Kind, library: CpuLibrary | None) -> None:
    """Replace the decoder's matrices. `library` has the kernels for a CPU. Without it they are for the kernels of decoding
    rows on a GPU, and can be looked at anywhere."""
    weight = decoder.embed.weight
    if library is not None and (weight.device.type != "cpu" or weight.dtype != torch.float32):
        raise OptionError(f"quantize requires a float32 model on the CPU; this one is {weight.dtype} on {weight.device}")
    if decoder.architecture.experts:
        raise OptionError("quantize cannot be combined with experts: their weights would stay as they are")
    drafts = () if decoder.exit_draft is None else (("draft", decoder.exit_draft.block),)
    for name, layer in (*decoder.layers.named_children(), *decoder.exit_blocks.named_children(), *drafts):
        if library is None and isinstance(layer, Block) and layer.packs_rows and not decoder.deltas:
            _pack(layer, kind, name)
            continue
        for path, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, own = path.rpartition(".")
                made = QuantizedLinear(_quantized(linear.weight, kind, library, f"{name}.{path}"), linear.bias)
                setattr(layer.get_submodule(parent), own, made)
    matrix_VM = weight if decoder.head is None else decoder.head.weight
    # The last product decides between tokens: fewer bits would cost more than they save.
    head = QuantizedLinear(_quantized(matrix_VM, "int8", library, "head"), None)
    if decoder.head is None:
        decoder.tied_head = head
    else:
        decoder.head = head
    if library is not None and decoder.exit_vocab is not None:
        rows = _quantized(decoder.exit_vocab.rows_WM, "int8", library, "head of exits")
        decoder.exit_vocab.quantized = QuantizedLinear(rows, None)
    if library is not None and decoder.exit_draft is not None:
        mix = decoder.exit_draft.mix
        decoder.exit_draft.mix = QuantizedLinear(_quantized(mix.weight, kind, library, "draft.mix"), None)
    decoder.quantized = kind
    decoder.cpu_layers = None if library is None else _cpu_layers(decoder, library)


def _quantized(weight_OI: Tensor, kind: Kind, library: CpuLibrary | None, name: str) -> QuantizedWeight:
    if not bool(weight_OI.isfinite().all()):
        raise OptionError(f"the weight of '{name}' holds numbers that are not finite; {kind} has no place for them")
    return QuantizedWeight(weight_OI, kind, library)


def _pack(layer: Block, kind: Kind, name: str) -> None:
    """Norms go into the weights behind them before those are rounded, so that modules and kernels multiply with the same
    integers; the layer's linears are views of what it is packed in."""

    def packed(part: nn.Module, names: Sequence[str], norm: nn.Module | None = None) -> QuantizedWeight:
        weights: list[Tensor] = [part.get_submodule(own).get_parameter("weight") for own in names]
        whole_OI = torch.cat(weights)
        if norm is not None:
            assert isinstance(norm, RMSNorm)
            whole_OI = folded(weights, norm.weight, norm.plus_one, torch.float32)
            norm.weight.fill_(0.0 if norm.plus_one else 1.0)
        whole = _quantized(whole_OI, kind, None, f"{name}.{'+'.join(names)}")
        begin = 0
        for own, weight in zip(names, weights, strict=True):
            setattr(part, own, QuantizedLinear(whole[begin : begin + len(weight)], None))
            begin += len(weight)
        return whole

    attn, mlp, cross = layer.attn, layer.mlp, None
    if isinstance(layer, CrossBlock):  # its keys and values are made of another stream
        cross = CrossRows(packed(layer.cross, ("q",), layer.norm_cross), packed(layer.cross, ("o",)))
        packed(layer.cross, ("k",))
        packed(layer.cross, ("v",))
    layer.rows = PackedRows(
        packed(attn, ("q", "k", "v"), layer.norm_attn), packed(attn, ("o",)),
        packed(mlp, ("gate", "up"), layer.norm_mlp), packed(mlp, ("down",)),
        *layer.after(), mlp.activation, cross,
    )  # fmt: skip


def _cpu_layers(decoder: LayerStack, library: CpuLibrary) -> CpuLayers | None:
    """All layers at once, where they have the form that cpu_rows.c knows."""
    if decoder.deltas or decoder.encodings or decoder.architecture.local_rope is not None:
        return None
    layers = [layer for layer in decoder.layers if isinstance(layer, Block) and layer.packs]
    if len(layers) < len(decoder.layers):
        return None
    own = [] if decoder.exit_draft is None else [decoder.exit_draft.block]
    own += decoder.exit_blocks.values()  # in the order of exits, as their steps count layers on from the plan's
    layers += [layer for layer in own if isinstance(layer, Block) and layer.packs]
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
