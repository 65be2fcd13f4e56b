"""What a step may add of its own to the layer it shares (thesis 3.3.3; appendices "Alternative Approaches to Relaxed
Parameter Sharing" and "Relaxation for key-value sharing constraints"). One kind a file, all of them in `RELAXATIONS`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fathomlm.depth.architecture import CROSS, LINEARS, Architecture, LinearSpec
from fathomlm.depth.bounds import read_record, to_record
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation.encoding import Encoding
from fathomlm.depth.relaxation.kind import RelaxationKind, RelaxationSettings
from fathomlm.depth.relaxation.lora import Dora, Lora
from fathomlm.depth.relaxation.prefix import Prefix
from fathomlm.depth.steps import Step
from fathomlm.errors import OptionError, choices
from fathomlm.options import check

RELAXATIONS: dict[str, RelaxationKind] = {
    "lora": Lora(),
    "dora": Dora(),
    "prefix": Prefix(),
    "encoding": Encoding(),
}
"""Every kind of relaxation by its name in options, recipes and files."""
DEFAULT_RANK = 64
DEFAULT_PREFIX_LENGTH = 256
RANK_GROUPS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in LINEARS},
    "out": ("o",),
    "kv": ("k", "v"),
    "qkv": ("q", "k", "v"),
    "attn": ("q", "k", "v", "o"),
    "cross": CROSS,
    "ffn": ("gate", "up", "down"),
}


def kinds_with(option: str) -> str:
    """The kinds that take an option, for messages."""
    return " or ".join(name for name, kind in RELAXATIONS.items() if option in kind.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation(RelaxationSettings):
    """The kind of a relaxation and its size, checked by that kind."""

    def __post_init__(self) -> None:
        if self.kind not in RELAXATIONS:
            raise OptionError(choices("relaxation", str(self.kind), RELAXATIONS))
        check(self)
        for option in ("ranks", "prefix_length", "everywhere"):
            if getattr(self, option) and option not in self.method.options:
                raise OptionError(f"{option} requires {kinds_with(option)}, and cannot be combined with {self.kind}")
        self.method.check(self)

    @property
    def method(self) -> RelaxationKind:
        """What its kind answers; see `RelaxationKind`."""
        return RELAXATIONS[self.kind]

    def sits_on(self, plan: DepthPlan, step: Step) -> bool:
        """Whether a step has something of its own."""
        return self.method.sits_on(self, plan, step)

    def tensors(self, architecture: Architecture, plan: DepthPlan) -> list[tuple[int, ...]]:
        """The shapes of all that it adds to a model."""
        one = list(self.method.shapes(self, architecture))
        own = [shape for step in plan if self.sits_on(plan, step) for shape in one]
        return own + ([(architecture.hidden,)] * plan.recursions if self.method.per_recursion else [])

    def to_dict(self) -> dict[str, Any]:
        return to_record(self, ("everywhere",)) | {"ranks": dict(self.ranks)}

    @classmethod
    def from_dict(cls, record: object) -> Relaxation:
        return read_record(cls, record, "relaxation")


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
    if relax is not None and relax not in RELAXATIONS:
        raise OptionError(choices("relaxation", relax, RELAXATIONS))
    options = () if relax is None else RELAXATIONS[relax].options
    given = {
        "rank": ("ranks", rank is not None),
        "linears-only": ("vectors", linears_only),
        "prefix-length": ("prefix_length", prefix_length is not None),
    }
    for name, (option, wanted) in given.items():
        if wanted and option not in options:
            raise OptionError(f"{name} requires a {kinds_with(option)} relaxation")
    if relax is None:
        return None
    ranks = parse_ranks(DEFAULT_RANK if rank is None else rank, linears) if "ranks" in options else {}
    length = (DEFAULT_PREFIX_LENGTH if prefix_length is None else prefix_length) if "prefix_length" in options else 0
    return Relaxation(kind=relax, ranks=ranks, prefix_length=length, vectors=not linears_only, everywhere=everywhere)


def check_fits(relaxation: Relaxation | None, plan: DepthPlan) -> None:
    """Refuse a relaxation that a plan has no place for."""
    if relaxation is not None:
        relaxation.method.check_plan(relaxation, plan)


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
