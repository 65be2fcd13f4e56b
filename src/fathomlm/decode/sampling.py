"""What a user may ask of sampling, without a tensor library: command lines and servers read it before they load one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fathomlm.errors import OptionError, choices, require
from fathomlm.options import check, option

COLDEST = 1e-6
"""The lowest temperature that is not greedy; below it float32 scores lose their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens and when to stop. The defaults are greedy: the most likely token each time."""

    max_new_tokens: int = option(128, ge=1, help="stop after N new tokens")
    temperature: float = option(
        0.0, ge=0, metavar="T", help="0 always takes the most likely token (greedy), 1 samples the model's own distribution"
    )
    top_k: int = option(0, ge=0, le=2**31 - 1, metavar="K", help="sample from the K most likely tokens; 0 is no limit")
    top_p: float = option(1.0, gt=0, le=1, metavar="P", help="sample from the fewest tokens with a total probability >= P")
    min_p: float = option(
        0.0, ge=0, le=1, metavar="P", help="drop tokens less likely than P times the probability of the most likely one"
    )
    repetition_penalty: float = option(
        1.0,
        ge=0.01,
        le=100,
        help="above 1, tokens that occurred before become less likely, in greedy decoding too",
    )
    seed: int | None = option(
        None, ge=0, le=2**63 - 1, help="make sampling repeatable; equal prompts give equal completions"
    )
    stop: tuple[str, ...] = option((), help="end the completion before this string; repeatable")
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, to `max_new_tokens`: for measurements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop) if isinstance(self.stop, list | tuple) else (self.stop,))
        check(self, inside=False)
        t = self.temperature
        require(t == 0 or t >= COLDEST, "temperature", f"0 (greedy) or >= {COLDEST:g}", t)
        require(all(self.stop), "stop", "one or more strings that are not empty", self.stop)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False", self.ignore_eos)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_options(self, **options: object) -> Sampling:
        """A copy with some fields changed; a field that does not exist is an error that names the nearest one."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                raise OptionError(choices("sampling option", name, known))
        return dataclasses.replace(self, **options)  # type: ignore[arg-type]
