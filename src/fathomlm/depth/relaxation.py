"""What a step may add of its own to the layer it shares (thesis 3.3.3; appendices "Alternative Approaches to Relaxed
Parameter Sharing" and "Relaxation for key-value sharing constraints").

    lora      a low-rank delta B A on linears, one module per step, and offsets for the norms and biases
    dora      the same with a learned length for each output row
    prefix    trainable vectors from which a step makes extra keys and values
    encoding  a vector that multiplies the output of each recursion

LoRA and DoRA relax a *tie*, so only steps whose layer is shared have them; a prefix adds something new anywhere, so
every step has one. That is also what the thesis' parameter tables count. To fine-tune a plain model, where nothing is
tied, they may be put `everywhere`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fathomlm.depth.architecture import LinearSpec
from fathomlm.depth.bounds import check_flag, check_record, check_size
from fathomlm.depth.plan import DepthPlan, Step
from fathomlm.errors import OptionError, choices
from fathomlm.jsonfile import shown

DEFAULT_RANK = 64
DEFAULT_PREFIX_LENGTH = 256
KINDS = ("lora", "dora", "prefix", "encoding")
CROSS = ("cross_q", "cross_k", "cross_v", "cross_o")
LINEARS = ("q", "k", "v", "o", *CROSS, "gate", "up", "down")
RANK_GROUPS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in LINEARS},
    "out": ("o",),
    "kv": ("k", "v"),
    "qkv": ("q", "k", "v"),
    "attn": ("q", "k", "v", "o"),
    "cross": CROSS,
    "ffn": ("gate", "up", "down"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The kind of a relaxation and its size."""

    kind: str
    ranks: Mapping[str, int] = field(default_factory=dict)
    """lora, dora: the rank on each linear, before it is capped by the matrix; a linear not named here has none."""
    prefix_length: int = 0
    """prefix: how many vectors each step has."""
    vectors: bool = True
    """lora, dora: whether a step also has offsets for norms and biases. No product of matrices can restore those, so
    without them even full rank does not give the original model back; they are about a thousandth of its parameters."""
    everywhere: bool = False
    """lora, dora: on every step, not only where a layer is shared."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(choices("relaxation", str(self.kind), KINDS))
        if not isinstance(self.ranks, Mapping):
            raise OptionError(f"ranks must be an object with a rank for each linear, got {shown(self.ranks)}")
        check_size("prefix_length", self.prefix_length)
        for flag in ("vectors", "everywhere"):
            check_flag(flag, getattr(self, flag))
        low_rank = self.kind in ("lora", "dora")
        if low_rank and not self.ranks:
            raise OptionError(f"{self.kind} needs a rank, such as 64 or q=64,kv=128,ffn=256")
        if not low_rank and self.ranks:
            raise OptionError(f"a rank goes with lora and dora, not with {self.kind}")
        if (self.kind == "prefix") != (self.prefix_length > 0):
            wants = "needs a prefix length of at least 1" if self.kind == "prefix" else "takes no prefix length"
            raise OptionError(f"{self.kind} {wants}, got {self.prefix_length}")
        if self.everywhere and not low_rank:
            raise OptionError(f"everywhere goes with lora and dora, not with {self.kind}")
        for name, rank in self.ranks.items():
            if name not in LINEARS:
                raise OptionError(choices("linear", name, LINEARS))
            if check_size("rank", rank, called=f"the rank on {name}") < 1:
                raise OptionError(f"the rank on {name} must be >= 1, got {rank}")

    @property
    def low_rank(self) -> bool:
        return self.kind in ("lora", "dora")

    def sits_on(self, plan: DepthPlan, step: Step) -> bool:
        """Whether a step has something of its own. An encoding belongs to a recursion, not to a step."""
        if self.low_rank:
            return self.everywhere or plan.is_shared(step)
        return self.kind == "prefix"

    def rank(self, linear: LinearSpec) -> int:
        """The rank on a linear, capped by the matrix (Gemma's k and v are 256 wide); 0 where it has none."""
        return min(self.ranks.get(linear.name, 0), linear.inputs, linear.outputs)

    def linear_parameters(self, linear: LinearSpec) -> int:
        """What one step adds to one linear."""
        rank = self.rank(linear)
        return rank * (linear.inputs + linear.outputs) + (linear.outputs if rank and self.kind == "dora" else 0)

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        if not self.everywhere:
            del record["everywhere"]
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Relaxation:
        return cls(**check_record("relaxation", record, [f.name for f in dataclasses.fields(cls)], ["kind"]))


def build_relaxation(
    linears: tuple[LinearSpec, ...],
    relax: str | None,
    rank: int | str | Mapping[str, int] | None = None,
    prefix_length: int | None = None,
    *,
    linears_only: bool = False,
    everywhere: bool = False,
) -> Relaxation | None:
    """A relaxation from what a user asks for, each option refused where it has no meaning."""
    low_rank = relax in ("lora", "dora")
    for name, given in (("rank", rank is not None), ("linears-only", linears_only)):
        if given and not low_rank:
            raise OptionError(f"{name} goes with a lora or dora relaxation")
    if prefix_length is not None and relax != "prefix":
        raise OptionError("prefix-length goes with a prefix relaxation")
    if relax is None:
        return None
    ranks = parse_ranks(DEFAULT_RANK if rank is None else rank, linears) if low_rank else {}
    length = (DEFAULT_PREFIX_LENGTH if prefix_length is None else prefix_length) if relax == "prefix" else 0
    return Relaxation(kind=relax, ranks=ranks, prefix_length=length, vectors=not linears_only, everywhere=everywhere)


def check_fits(relaxation: Relaxation | None, plan: DepthPlan) -> None:
    """Refuse a relaxation that a plan has no place for."""
    if relaxation is None:
        return
    if relaxation.low_rank and plan.recursions == 1 and not relaxation.everywhere:
        raise OptionError(f"{relaxation.kind} relaxes a tie, but with one recursion nothing is tied; give 2 or more")
    if relaxation.kind == "encoding" and not plan.whole_passes:
        raise OptionError(
            "encoding multiplies the output of each recursion, so it needs a core that loops as a whole "
            f"(cycle, middle-cycle or cycle-rev), not {plan.sharing}"
        )


def parse_ranks(value: int | str | Mapping[str, int], linears: Iterable[LinearSpec]) -> dict[str, int]:
    """Ranks from 64, "64", "q=64,kv=128,ffn=256" or a mapping; one number means every linear."""
    names = [linear.name for linear in linears]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, int) or value.strip().removeprefix("-").isdecimal():
        pairs = [(name, int(value)) for name in names]
    else:
        pairs = [_pair(item) for item in value.split(",")]
    ranks: dict[str, int] = {}
    for group, rank in pairs:
        if group not in RANK_GROUPS:
            here = [known for known, members in RANK_GROUPS.items() if set(members) & set(names)]
            raise OptionError(choices("linear in rank", group, here))
        members = [name for name in RANK_GROUPS[group] if name in names]
        if not members:
            raise OptionError(f"this family has no '{group}' linear; it has {', '.join(names)}")
        if rank < 1:
            raise OptionError(f"the rank on {group} must be >= 1, got {rank}")
        ranks.update(dict.fromkeys(members, rank))
    return {name: ranks[name] for name in names if name in ranks}


def _pair(item: str) -> tuple[str, int]:
    name, _, number = item.partition("=")
    if not number.strip().isdecimal():
        raise OptionError(f"cannot read '{item}' as a rank; write a number (64) or pairs (q=64,kv=128,ffn=256)")
    return name.strip(), int(number)
