"""Options of commands that decode: how deep tokens go, where they exit early, and what is reported of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ExitPackOptions, threshold_file
from fathomlm.cli.first import check_pack
from fathomlm.decode.exiting import OPTIONS, ORACLES, USED, Exiting, Threshold, shown_threshold
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.options import like, option
from fathomlm.packaged import packaged_drafts, packaged_exits

if TYPE_CHECKING:
    from fathomlm.decode.generation import Generation
    from fathomlm.engine.session import EngineSession
    from fathomlm.model.route import DepthControl
    from fathomlm.model.seq2seq import FathomModel

NONE = Path("none")
"""What --exits takes to mean no pack, not even a shipped one; a directory of that name is ./none, an equal path, so this is
compared by identity."""


def _read_pack(text: str, flag: str) -> Path:
    return NONE if text == str(NONE) else Path(text)


def _check_pack(path: Path) -> None:
    if path is not NONE:
        check_pack(path)


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """Prompts in the model's chat template."""

    chat: bool = option(False, help="apply the model's chat template to the prompt")
    system: str | None = option(None, help="system message for --chat", requires=("chat",))


@dataclass(frozen=True, kw_only=True)
class DepthOptions:
    """How deep the tokens of looped and routed models go."""

    max_depth: int | None = option(None, ge=1, help="looped models: at most N recursions", default_text="all")
    depth_bias: float = like(EngineOptions, "depth_bias")

    start_scale: float = option(
        0.0, ge=0, metavar="S",
        help="Huginn and recurrent retrofits: loops begin from noise of this width, 1 as in training; 0 is none",
    )  # fmt: skip

    kv_loops: int | None = option(
        None, ge=1, metavar="K", default_text="all",
        help="looped models: keep keys and values of the last K loops only; each loop stores over the one K before it",
    )  # fmt: skip

    def control(self, name: str, model: FathomModel, seed: int = 0) -> DepthControl | None:
        """What is asked for, checked against the model."""
        from fathomlm.model.route import DepthControl

        if self.max_depth is None and not self.depth_bias and not self.start_scale and self.kv_loops is None:
            return None
        if self.start_scale and not model.plan.injection:
            raise OptionError(f"--start-scale requires a model whose loops begin with an injection; {name} has none")
        if self.depth_bias and model.plan.routing is None:
            raise OptionError(f"--depth-bias requires a routed model; {name} has no router")
        control = DepthControl(
            max_depth=self.max_depth,
            bias=self.depth_bias,
            start_scale=self.start_scale,
            seed=seed,
            kv_loops=self.kv_loops,
        )
        control.check(model.plan.recursions)
        control.kept_loops(model.plan)
        return control


@dataclass(frozen=True, kw_only=True)
class ShippedExitOptions(ExitPackOptions):
    """A pack of exits, by default one that ships with FathomLM."""

    exits: Path | None = like(
        ExitPackOptions, "exits", parse=_read_pack, first=_check_pack,
        default_text="those that ship with FathomLM for MODEL, if any; 'none' disables them",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.any_base and self.exits is NONE:
            raise OptionError("--any-base requires --exits")

    def pack(self, model: str, mode: str | None, *, placed: bool, exits_only: bool = False) -> Path | None:
        """The pack that is used. A shipped one is for a decoding mode that requires an exit, for a model that is named (a
        path that exists wins, as everywhere), and where nothing else says where tokens exit. A draft layer comes first where
        drafts are verified, unless only exits will do."""
        if self.exits is not None:
            return None if self.exits is NONE else self.exits
        if placed or mode in (None, "full") or Path(model).expanduser().exists():
            return None
        drafts = packaged_drafts(model) if mode == "speculative" and not exits_only else None
        return drafts or packaged_exits(model)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ShippedExitOptions):
    """Early exit as flags: `Exiting`, where --decode chooses the mode."""

    mode: str | None = like(Exiting, "mode", None, default_text="full")
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers")
    min_exit_layer: int | None = like(Exiting, "min_exit_layer")
    confidence: str | None = like(Exiting, "confidence")
    threshold: Threshold | str | None = like(Exiting, "threshold")
    decay: float | None = like(Exiting, "decay")
    refine: float | None = like(Exiting, "refine")
    max_stack: int | None = like(Exiting, "max_stack")
    draft_tree: tuple[int, ...] | None = like(Exiting, "draft_tree")
    draft_best: tuple[int, ...] | None = like(Exiting, "draft_best")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is None:
            for name in (name for name in ("exits", *OPTIONS) if getattr(self, name) is not None):
                flag = {"exit_layers": "--exit-layer"}.get(name, f"--{name.replace('_', '-')}")
                mode = next(mode for mode in ("parallel", *USED) if name in ("exits", *USED[mode]))
                raise OptionError(f"{flag} requires --decode, such as --decode {mode}")

    def settle(self, model: str, depth: DepthOptions) -> tuple[Exiting | None, dict[str, Any]]:
        """The checked settings, None for full decoding, and the pack as `load` takes it; before the model is loaded."""
        if self.mode is None:
            return None, {}
        if self.mode != "full" and depth.max_depth is not None:
            raise OptionError("--max-depth cannot be combined with --decode")
        placed = self.exit_layers is not None or self.min_exit_layer is not None
        pack = self.pack(model, self.mode, placed=placed)
        shipped = pack is not None and self.exits is None
        where = self._calibrated(model, pack, shipped)
        fields = {"exit_layers": self.exit_layers, "confidence": self.confidence, "threshold": self.threshold} | where
        exiting = Exiting(
            mode=self.mode,  # type: ignore[arg-type]
            min_exit_layer=self.min_exit_layer, decay=self.decay, refine=self.refine, max_stack=self.max_stack,
            draft_tree=self.draft_tree, draft_best=self.draft_best, **fields,
        )  # fmt: skip
        if shipped:
            tell_shipped(model)
        return None if self.mode == "full" else exiting, {"exits": pack, "any_base": self.any_base}

    def _calibrated(self, model: str, pack: Path | None, shipped: bool) -> dict[str, Any]:
        """What a calibration says: an adaptive threshold goes on from it, and a shipped pack's is the default."""
        from fathomlm.decode.calibration import Calibration
        from fathomlm.decode.threshold import ThresholdEstimator

        path, drafts = threshold_file(model, pack), self.mode == "speculative"
        if self.threshold == "adaptive":
            if not path.is_file():
                estimator = ThresholdEstimator()
                return {"threshold": estimator.for_drafts() if drafts else estimator}
        else:
            compares = self.mode not in ORACLES and "threshold" in USED.get(str(self.mode), ())
            if not shipped or self.threshold is not None or not compares or not path.is_file():
                return {}
            if self.confidence is not None and self.confidence != Calibration.load(path).confidence:
                return {}
        return calibrated_fields(
            path, self.exit_layers, self.confidence, drafts=drafts, adaptive=self.threshold == "adaptive"
        )


def calibrated_fields(
    path: Path, exit_layers: tuple[int, ...] | None, confidence: str | None, *, drafts: bool, adaptive: bool
) -> dict[str, Any]:
    """Where and how sure tokens exit by the calibration in `path`, which must be for the exit that is asked for."""
    from fathomlm.decode.calibration import Calibration

    found = Calibration.load(path)
    layers = exit_layers or (found.exit_layer,)
    found.check([layer - 1 for layer in layers], confidence or found.confidence, str(path))
    estimator = found.estimator.for_drafts() if drafts else found.estimator
    if estimator.threshold == 1 and not (adaptive and estimator.calibrating):
        print(f"fathomlm: no token exits: the threshold in {path} is 1; see `fathomlm calibrate --help`", file=sys.stderr)
    threshold = estimator if adaptive else estimator.threshold
    return {"exit_layers": (found.exit_layer,), "confidence": found.confidence, "threshold": threshold}


def tell_shipped(model: str) -> None:
    """One line for people, once everything else is in order."""
    print(f"fathomlm: using the exits that ship with FathomLM for {model} (--exits none: without)", file=sys.stderr)


def lift_exit_vocab(model: FathomModel) -> None:
    """Before text is scored. An exit with an exit vocabulary gives all other tokens no probability: its loss would be
    infinite, and nothing would be said of how well it predicts."""
    model.limit_exits(None)


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """What decodes: the engine where it can, otherwise the reference."""

    reference: bool = option(False, help="decode with the reference, which is slow and plain, instead of the engine")

    def open_engine(
        self, model: FathomModel, control: DepthControl | None, exiting: Exiting | None, sequences: int = 1
    ) -> EngineSession | None:
        """None where the reference is asked for, or the engine does not do what is."""
        if self.reference:
            return None
        from fathomlm.engine.session import EngineSession, reference_only

        if reference_only(model, control, exiting) is not None:
            return None
        return EngineSession(model, control, exiting, sequences=sequences)


def exit_statistic(results: Sequence[Generation]) -> str:
    """How early tokens exited, for the line on standard error; empty where none could."""
    from fathomlm.decode.generation import exit_rate, mean_exit_layer

    first = results[0].exits
    if first is None:
        return ""
    mode = "oracle (it knows the last layer's choice)" if results[0].oracle else first.mode
    threshold = "" if first.threshold is None else f", threshold {shown_threshold(first.threshold)}"
    drafted = sum(result.exits.drafted for result in results if result.exits)
    accepted = sum(result.exits.accepted for result in results if result.exits)
    drafts = f", {accepted} of {drafted} drafts accepted" if drafted else ""
    return (
        f"{mode}: {exit_rate(results):.0%} exited early, mean exit layer {mean_exit_layer(results):.2f} of {first.layers}"
        f"{threshold}{drafts}; "
    )


def exit_record(exiting: Exiting | None, model: FathomModel, results: Sequence[Generation]) -> dict[str, Any] | None:
    """The same for JSON, with the settings. Each result has its own tokens' layers and confidences."""
    from fathomlm.decode.generation import exit_rate, mean_exit_layer

    if exiting is None:
        return None
    first, exiting = results[0].exits, exiting.for_plan(model.plan, model.device.type, len(results))
    assert first is not None
    return {
        "mode": exiting.mode,
        "oracle": results[0].oracle,
        "layers": first.layers,
        "exit_layers": [index + 1 for index in exiting.exits(model.plan)],
        "confidence": exiting.confidence,
        "threshold": first.threshold,
        "adaptive": exiting.estimator is not None,
        "decay": exiting.decay,
        "refine": exiting.refine,
        "max_stack": exiting.max_stack,
        "draft_tree": exiting.draft_tree,
        "draft_best": exiting.draft_best,
        "exit_rate": exit_rate(results),
        "mean_exit_layer": mean_exit_layer(results),
    }
