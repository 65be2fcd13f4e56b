"""`fathomlm convert --vocab`: the same model with fewer tokens."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ColumnOptions, texts_of
from fathomlm.cli.display import progress_bar
from fathomlm.cli.first import check_text
from fathomlm.options import like, option
from fathomlm.sizes import amount

if TYPE_CHECKING:
    from fathomlm.checkpoints.assemble import BaseCheckpoint
    from fathomlm.checkpoints.card import Conversion
    from fathomlm.checkpoints.reduced import KeptTokens


@dataclass(frozen=True, kw_only=True)
class VocabOptions:
    """Which tokens a model keeps."""

    vocab: int | None = option(
        None, ge=1, requires=("vocab_from",),
        help="keep the N tokens that are most frequent in --vocab-from, and all layers; other tokens are then written with "
        "smaller ones",
    )  # fmt: skip
    vocab_from: tuple[str, ...] | None = option(
        None, nargs="+", metavar="FILE", first=check_text, requires=("vocab",),
        help="text, JSON Lines or Parquet similar to what the model will be used on",
    )  # fmt: skip
    vocab_column: str = like(
        ColumnOptions,
        "column",
        help="field with the text in JSON Lines and Parquet of --vocab-from",
        requires=("vocab_from",),
    )

    def choose(self, base: BaseCheckpoint, size: int) -> KeptVocab:
        """The tokens that stay, by the files' text."""
        from fathomlm.checkpoints.reduced import KeptTokens
        from fathomlm.checkpoints.vocabulary import (
            count_tokens,
            frequent_parts,
            pieces_more,
            tokenizer_of,
            trimmed_tokenizer,
        )
        from fathomlm.train.data.sources import expand

        tokenizer, sources = tokenizer_of(base), expand(list(self.vocab_from or ()))
        with progress_bar("counting tokens", unit="bytes") as update:
            counts = count_tokens(texts_of(sources, self.vocab_column, update), tokenizer)
        tokens = frequent_parts(base, tokenizer, counts, size)
        small = KeptTokens(base, tokens, trimmed_tokenizer(tokenizer, tokens))
        share, times = pieces_more(tokenizer, small, counts)
        return KeptVocab(base=small, counted=counts.total(), share=share, times=times)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVocab:
    base: KeptTokens
    """The model with the tokens that stay."""
    counted: int
    """Tokens of the text that chose them."""
    share: float
    """How many of those stay."""
    times: float
    """How many times as many it has now."""

    def card(self, made: Conversion, out: Path, command: str) -> str:
        from fathomlm.checkpoints.card import model_card

        small = shlex.quote(f"{out.name}-small")
        text = (
            f"Of the {self.counted:,} tokens of the text that chose the vocabulary, {self.share:.2%} stay; it now has "
            f"{self.times:.4f} times as many. Text whose tokens all stay is read as the base reads it. What takes the place "
            "of other tokens is unusual to the layers, which some training mends.\n\n"
            "To loop, drop or relax layers, convert this model. It is then the teacher of the result, since both have the "
            f"same tokens:\n\n```\nfathomlm convert {shlex.quote(str(out))} {small} --drop 4\n```"
        )
        return model_card(made, out, command, text)

    def record(self, made: Conversion, out: Path, seconds: float) -> dict[str, Any]:
        from fathomlm.checkpoints.native import directory_bytes
        from fathomlm.checkpoints.resolve import dtype_name

        shares = made.shares
        return {
            "model": made.name,
            "out": str(out),
            "vocab": made.model.architecture.vocab,
            "base_vocab": made.base.vocab,
            "counted_tokens": self.counted,
            "tokens_kept_share": round(self.share, 6),
            "tokens_times": round(self.times, 6),
            "dtype": dtype_name(made.model),
            "bytes": directory_bytes(out),
            "bytes_share": round(shares[0], 4),
            "flops_share": round(shares[1], 4),
            "seconds": round(seconds, 3),
        }


def show_trimmed(record: dict[str, Any]) -> None:
    size, seconds = amount(record["bytes"], "B"), record["seconds"]
    print(f"{record['out']}: {record['vocab']:,} of {record['base_vocab']:,} tokens, {size} on disk, {seconds:.1f} s")
    shares = f"{record['bytes_share']:.0%} of the base's bytes in the same number format, {record['flops_share']:.0%} of its"
    print(f"  {shares} FLOPs per token")
    kept, times = record["tokens_kept_share"], record["tokens_times"]
    print(f"  {kept:.2%} of the {record['counted_tokens']:,} tokens of the text stay; it now has {times:.4f} times as many")
