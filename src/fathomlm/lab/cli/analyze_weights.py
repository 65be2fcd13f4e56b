"""`fathomlm analyze weights MODEL --recursions N`: what tying would take away, and what rank would give it back."""

from __future__ import annotations

import argparse
from pathlib import Path

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.device import use_threads
from fathomlm.cli.plan_options import add_plan_arguments
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.shown import model_name
from fathomlm.depth.plan import DEFAULT_RECURSIONS
from fathomlm.lab.cli.analyze_options import answer, out_directory

HELP = "what tying layers takes away, and what rank of relaxation gives it back"
DESCRIPTION = (
    "Ties the layers of a plain MODEL on paper, as `convert` would, and looks at what each step loses: the singular values "
    "of the residuals that a LoRA or DoRA would start from. Says for each linear and depth which rank captures how much, "
    "and what it would cost. No text is needed, and nothing is converted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a plain model: a preset, Hugging Face directory, hub id or GGUF file")
    inits = "initialisations of tied layers: average, stepwise, lower, upper (average,stepwise)"
    add("--init", metavar="I,I", default="average,stepwise", help=inits)
    add("--threads", metavar="N", type=int, help=THREADS)
    add("--out", metavar="DIR", type=Path, help="directory to write (analysis/weights-MODEL)")
    add("--force", action="store_true", help="replace DIR if it is a weights analysis")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> int:
    out = out_directory(args, "weights")

    from fathomlm import __version__
    from fathomlm.depth import DepthPlan
    from fathomlm.lab.analyze.report import About
    from fathomlm.lab.analyze.weights import check_inits, measure, open_plain
    from fathomlm.lab.analyze.weights_report import kind_table, rank_table, write_weights

    inits = check_inits([word.strip() for word in args.init.split(",")])
    use_threads(args.threads)
    base = open_plain(args.model)
    recursions = DEFAULT_RECURSIONS if args.recursions is None else args.recursions
    plan = DepthPlan.build(args.sharing or "cycle", recursions, base.architecture.layers, args.resize)
    with layer_bar("spectra", unit="linears") as tick:
        numbers = measure(base, plan, inits, on_linear=tick)
    shown = About(
        model=args.model,
        name=model_name(args.model),
        plan=f"{plan.layout} layers looped {plan.recursions} times ({plan.sharing})",
        dtype=str(base.dtype).removeprefix("torch."),
        device="cpu",
        data=[],
        version=__version__,
    )
    files = write_weights(numbers, shown, out, args.force)
    answer(args, shown, numbers.summary(), [rank_table(numbers), kind_table(numbers)], files)
    return 0
