"""Where `simulate throughput` has its sequences and their depths from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import ColumnOptions
from fathomlm.cli.first import check_text
from fathomlm.decode.exiting import DEFAULT_THRESHOLD, Exiting
from fathomlm.errors import OptionError
from fathomlm.lab.cli.bench_setup import DEPTHS, ForcedDepthOptions, PlannedModelOptions, WorkloadOptions
from fathomlm.lab.cli.eval_common import PromptOptions
from fathomlm.options import like, option

if TYPE_CHECKING:
    from fathomlm.depth import Architecture, DepthPlan, Relaxation
    from fathomlm.lab.simulate.collect import ExitRule
    from fathomlm.lab.simulate.presets import PresetTimes
    from fathomlm.lab.simulate.trajectories import Trajectories

TOKENS = 512
"""Tokens of a sequence from --data, where the model's context has room for so many."""


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(ColumnOptions):
    """The sequences, and how deep their tokens go: recorded, drawn, or from text through a model."""

    trajectories: Path | None = option(
        None, metavar="FILE", help='JSON Lines, one sequence each: {"prompt": 12, "depths": [1, 2, 1]}'
    )
    depths: tuple[float, ...] | None = like(
        ForcedDepthOptions, "depths", gt=None, le=None, default_text=None, help=f"drawn: {DEPTHS}"
    )
    workload: str | None = like(
        WorkloadOptions,
        "workload",
        None,
        default_text="thesis",
        requires=("depths",),
        help="--depths: lengths as in `bench`",
    )
    requests: int | None = like(
        WorkloadOptions, "requests", default_text="as in `bench`", requires=("depths",), help="--depths: number of sequences"
    )
    data: tuple[str, ...] = option(
        (), metavar="FILE", first=check_text, help="text through MODEL (.txt, .md, .jsonl, a corpus); repeatable"
    )
    depth: Literal["oracle", "confidence", "router"] | None = like(
        ForcedDepthOptions, "depth", default_text="router with a router, oracle without", requires=("data",),
        help="--data: what decides: the last layer's own choice (oracle), the confidence at an exit, or the router",
    )  # fmt: skip
    threshold: float = like(
        Exiting, "threshold", DEFAULT_THRESHOLD, parse=None, default_text=None,
        help="--depth confidence: exit where the confidence exceeds T",
    )  # fmt: skip
    exit_layers: tuple[int, ...] | None = like(
        Exiting, "exit_layers", default_text="the model's, or its recursions", requires=("data",)
    )
    sequences: int = option(32, ge=1, help="--data: number of sequences")
    tokens: int | None = option(None, ge=1, help="--data: tokens of each", default_text=f"the context, at most {TOKENS}")
    prompt_tokens: int = like(PromptOptions, "prompt_tokens", 1, help="--data: how many of them are the prompt")
    save: Path | None = option(None, metavar="FILE", help="write the depths, for --trajectories")

    def __post_init__(self) -> None:
        chosen = [name for name in ("trajectories", "depths", "data") if getattr(self, name)]
        if len(chosen) != 1:
            raise OptionError("give the depths of tokens with one of --trajectories FILE, --depths P,P and --data FILE")
        if self.save is not None and not self.save.absolute().parent.is_dir():
            raise OptionError(f"cannot write {self.save}: {self.save.parent} is not a directory")


@dataclass(frozen=True, slots=True)
class SimulationSource:
    """The sequences, and the model that they are of, where there is one."""

    trajectories: Trajectories
    architecture: Architecture | None = None
    plan: DepthPlan | None = None
    relaxation: Relaxation | None = None

    def planned(self, times: PresetTimes | None) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The model that is asked for, or the preset's."""
        if self.architecture is not None:
            assert self.plan is not None
            return self.architecture, self.plan, self.relaxation
        from fathomlm.depth import DepthPlan
        from fathomlm.depth.presets import PRESETS
        from fathomlm.depth.relaxation import build_relaxation

        assert times is not None
        architecture = PRESETS[times.model].architecture
        plan = DepthPlan.build("cycle", times.blocks, architecture.layers, "add")
        return architecture, plan, build_relaxation(architecture.linears(), "lora", times.rank) if times.rank else None

    def shape(self, options: PlannedModelOptions) -> dict[str, Any]:
        from fathomlm.checkpoints.resolve import parse_device

        device = parse_device(options.device)
        architecture, plan, relaxation = self.planned(None)
        named = {"architecture": architecture, "plan": plan, "relaxation": relaxation}
        return named | {"dtype": options.dummy_dtype(device), "device": device}


def read_sequences(wanted: SequenceOptions, options: PlannedModelOptions, model: str | None) -> SimulationSource:
    options.use_threads()
    if wanted.data:
        assert model is not None
        return _through_model(wanted, options, model)
    found: tuple[Any, ...] = () if model is None else options.shape(model)
    deepest = found[1].recursions if found else None
    if wanted.trajectories is not None:
        from fathomlm.lab.simulate.trajectories import read_trajectories

        return SimulationSource(read_trajectories(wanted.trajectories, deepest), *found)
    parts = wanted.depths or (1.0,)
    if deepest is not None and len(parts) != deepest:
        raise OptionError(f"--depths has {len(parts)} parts, but the model has {deepest} recursions")
    return SimulationSource(_drawn(wanted, parts, options.seed), *found)


def _drawn(wanted: SequenceOptions, parts: tuple[float, ...], seed: int) -> Trajectories:
    from fathomlm.lab.bench.workload import build_workload
    from fathomlm.lab.simulate.trajectories import draw

    workload = build_workload(wanted.workload or "thesis", 2, requests=wanted.requests, seed=seed)
    return draw(((len(request.prompt), request.new) for request in workload.requests), parts, seed)


def _through_model(wanted: SequenceOptions, options: PlannedModelOptions, name: str) -> SimulationSource:
    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.cli.progress import progress_bar
    from fathomlm.lab.analyze.token_rows import find, read_rows, row_length
    from fathomlm.lab.simulate.collect import collect

    if options.replanned:
        raise OptionError("--data runs text through MODEL as it is; make another with `fathomlm convert` first")
    places = find(wanted.data)
    model = decoder_only(options.load_source(name), "this command")
    tokens = row_length(model, wanted.tokens, most=TOKENS)
    rows = read_rows(places, model, context=tokens, rows=wanted.sequences, column=wanted.column)
    exit_rule: ExitRule = wanted.depth or ("router" if model.plan.routing is not None else "oracle")
    with progress_bar("prefill", unit="sequences") as update:
        found = collect(
            model, rows.tokens_NT, exit_rule=exit_rule, threshold=wanted.threshold, layers=wanted.exit_layers,
            prompt=wanted.prompt_tokens, on_rows=update,
        )  # fmt: skip
    return SimulationSource(found, model.architecture, model.plan, model.relaxation)
