"""Grouped-query attention over dense keys and values.

Shapes: B batch, H query heads, G key-value heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_heads(x_BTW: Tensor, head_dim: int) -> Tensor:
    """What a projection gave, head by head: (B, heads, T, D)."""
    return x_BTW.view(*x_BTW.shape[:-1], -1, head_dim).transpose(1, 2)


def attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """softmax(q k^T * scale) v. `mask` is boolean (B or 1, 1, T, S), True where a query may look; `causal` needs T = S."""
    B, H, T, D = q_BHTD.shape
    G = k_BGSD.shape[1]
    if T == 1 and H != G:
        # One token: the H/G queries of a group are just H/G rows over the same keys, so no key is copied.
        rows = q_BHTD.reshape(B, G, H // G, D)
        return F.scaled_dot_product_attention(rows, k_BGSD, v_BGSD, attn_mask=mask, scale=scale).reshape(B, H, 1, D)
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=H != G
    )


def attention_mask(
    queries: int,
    keys: int,
    *,
    window: int | None,
    keep_BS: Tensor | None,
    device: torch.device,
    documents_BT: Tensor | None = None,
) -> Tensor | None:
    """Which keys each of the last `queries` of `keys` slots may see; None where nothing needs to be hidden from SDPA.

    None with one query means "all keys"; None with as many queries as keys means "plain causal". A padded slot still sees
    itself, so that no row of the softmax is empty; nobody reads what it computes. `documents_BT` numbers the documents of
    a packed row, which do not see each other; it covers all slots, so there can be no cache beside it.
    """
    plain = keep_BS is None and documents_BT is None
    if plain and (window is None or window >= keys) and queries in (1, keys):
        return None
    query_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
    key_1S = torch.arange(keys, device=device)[None, :]
    seen = key_1S <= query_T1
    if window is not None:
        seen = seen & (key_1S > query_T1 - window)
    if plain:
        return seen[None, None]
    seen = seen[None]
    if documents_BT is not None:
        seen = seen & (documents_BT[:, :, None] == documents_BT[:, None, :])
    if keep_BS is not None:
        seen = seen & keep_BS[:, None, :].bool() | (key_1S == query_T1)
    return seen[:, None]
