"""Text in, batches out: sources are tokenised once into a corpus on disk, which loaders read in a reproducible order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fathomlm.errors import OptionError
from fathomlm.options import check, check_required, option
from fathomlm.sizes import parse_count

DEFAULT_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to prepare, from what, and where."""

    sources: tuple[str, ...] = option(
        positional=True, metavar="SOURCE",
        help="text (.txt, .md), JSON Lines (.jsonl, also .gz, .xz, .zst), Parquet, directories and patterns of these; or "
        "hf:owner/name:config@split from the Hugging Face hub",
    )  # fmt: skip
    out: Path = option(positional=True, help="directory to write")
    tokenizer: str = option(metavar="NAME", help="model source, tokenizer directory or file, or 'bytes'")
    column: str = option("text", metavar="NAME", help="field with the text in JSON Lines, Parquet and hub datasets")
    pairs: tuple[str, str] | None = option(
        None, metavar="SOURCE TARGET", help="two fields: prepare pairs for sequence-to-sequence training instead"
    )
    source_prefix: str = option("", help="pairs: prefix of every source, such as 'summarize: '", requires=("pairs",))
    """Which pairs are held out does not depend on it."""
    max_tokens: int | None = option(
        None, ge=1, parse=parse_count, help="stop at about N training tokens: 500M, 2B", metavar="N", default_text="all"
    )
    max_document_bytes: int = option(16_000_000, ge=1, size=1, help="largest document; a larger one is an error")
    """A text file, a line of JSON lines as it stands there, or a row's columns. A tokenizer needs about 80 times as much
    memory for it."""
    skip_long: bool = option(False, help="skip and count larger documents instead")
    separator: str | None = option(
        None, metavar="TOKEN", help="token after every document", default_text="<|endoftext|>, or the tokenizer's end token"
    )
    validation_fraction: float | None = option(
        None, ge=0, lt=1, metavar="F", help="fraction of documents to hold out",
        default_text=f"{DEFAULT_FRACTION:g}; 0 with --validation-from",
    )  # fmt: skip
    validation_from: tuple[str, ...] = option((), metavar="SOURCE", help="source to hold out entirely; repeatable")
    shard_tokens: int = option(
        32_000_000, ge=1, parse=parse_count, metavar="N", default_text="32M",
        help="tokens per file, and between two saves",
    )  # fmt: skip
    workers: int = option(1, ge=1, help="tokenizer processes")
    """The corpus does not depend on it."""
    force: bool = option(False, help="delete the corpus in OUT and start again")

    def __post_init__(self) -> None:
        check(self)
        check_required(self)
        if not self.sources:
            raise OptionError("give at least one source")

    @property
    def fraction(self) -> float:
        if self.validation_fraction is not None:
            return self.validation_fraction
        return 0.0 if self.validation_from else DEFAULT_FRACTION
