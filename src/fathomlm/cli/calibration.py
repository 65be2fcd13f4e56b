"""Text over which a plain model's layers are measured, and which of them are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fathomlm.checkpoints.tying import CALIBRATION_TOKENS
from fathomlm.cli.common import ColumnOptions
from fathomlm.cli.first import check_text
from fathomlm.cli.progress import progress_bar
from fathomlm.depth.dropping import DropOptions
from fathomlm.options import like, option

if TYPE_CHECKING:
    from fathomlm.checkpoints.activations import Activations
    from fathomlm.checkpoints.assemble import BaseCheckpoint
    from fathomlm.model.seq2seq import FathomModel


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Text over which a plain model's activations are measured."""

    calibrate: tuple[str, ...] | None = option(
        None, metavar="FILE", first=check_text,
        help="measure layers over this text: .txt, .md, JSON Lines (also .gz, .xz, .zst) or Parquet; repeatable",
    )  # fmt: skip
    calibrate_tokens: int | None = option(
        None, ge=2, help="tokens of it to read", default_text=f"{CALIBRATION_TOKENS:,}", requires=("calibrate",)
    )
    column: str | None = like(ColumnOptions, "column", None, default_text="text", requires=("calibrate",))

    def measured(
        self, source: FathomModel | BaseCheckpoint, *, moments: bool = True, device: str = "cpu"
    ) -> Activations | None:
        """What `measure_activations` finds, with a progress bar; None without text."""
        if self.calibrate is None:
            return None
        from fathomlm.checkpoints.activations import measure_activations
        from fathomlm.train.data.sources import expand, read

        documents = (document for each in expand(list(self.calibrate)) for document in read(each, (self.column or "text",)))
        texts = (document.fields[0] for document in documents)
        tokens = self.calibrate_tokens or CALIBRATION_TOKENS
        with progress_bar("calibrating") as update:
            return measure_activations(source, texts, tokens=tokens, moments=moments, device=device, on_layer=update)


@dataclass(frozen=True, kw_only=True)
class MeasuredDropOptions(DropOptions, CalibrateOptions):
    """Which layers are left out, also by what was measured."""
