"""How many tokens of a row a recursion keeps in training where that is not simply a part of the row's length (thesis 4.3.2).

Three reasons: padding, which has no claim to capacity; packed documents that are to have a capacity each; and a warm-up
that changes with every step. Each makes the number depend on the data or the step, while compiled shapes may not, so a
recursion takes as many tokens as the row's length would give and the quota says which of them count.

Shapes: B rows, T tokens of a row, N tokens that are asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.depth import Routing
from fathomlm.model.attention_mask import TokenBatch
from fathomlm.model.route.trace import TopKOptions


@dataclass(frozen=True, slots=True)
class Quotas:
    """What each token's group, its document or its row, may send on."""

    routing: Routing
    sizes_BT: Tensor
    """Real tokens of the group that a token is in."""
    groups_BT: Tensor | None
    """Documents that compete among themselves; None where rows do."""
    openness: float | Tensor

    @classmethod
    def of(cls, routing: Routing, rows: TokenBatch, options: TopKOptions) -> Quotas | None:
        """None where every row keeps the part of its length that shapes say."""
        documents_BT = rows.documents_BT if options.per_document else None
        if rows.keep is None and documents_BT is None and options.exact is None:
            return None
        real_BT = torch.ones_like(rows.slots) if rows.keep is None else rows.keep.long()
        openness = options.openness if options.exact is None else options.exact
        if documents_BT is None:
            return cls(routing, real_BT.sum(1, keepdim=True).expand_as(real_BT), None, openness)
        groups_BT = documents_BT.long()
        at_BT = groups_BT.clamp_min(0)
        sizes_BT = torch.zeros_like(real_BT).scatter_add(1, at_BT, real_BT * (groups_BT >= 0)).gather(1, at_BT)
        return cls(routing, sizes_BT, groups_BT, openness)

    def at(self, recursion: int, slots_BN: Tensor) -> tuple[Tensor | None, Tensor]:
        """Groups and quotas of the tokens at these slots. A row keeps a token at least, as `Routing.kept` has it; a
        document shorter than 1/capacity keeps none, or many short ones would outgrow the row's share."""
        part = self.routing.part(recursion, self.openness)
        sizes_BN = self.sizes_BT.gather(1, slots_BN)
        quota_BN = (part * sizes_BN.double() + 1e-9).floor().long()
        if self.groups_BT is None:
            return None, torch.minimum(quota_BN.clamp_min(1), sizes_BN)
        return self.groups_BT.gather(1, slots_BN), torch.minimum(quota_BN, sizes_BN)
