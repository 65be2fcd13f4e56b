"""`fathomlm eval generate MODEL --data FILE`: texts against references, in any way of decoding."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.exit_options import add_exit_arguments, pack_options, read_exiting
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import (
    add_depth_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load_any_model,
    read_depth,
    read_sampling,
)
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_options import (
    about,
    add_run_arguments,
    check_least,
    check_out,
    print_record,
    write_lines,
)
from fathomlm.lab.tables import print_table

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.generation import GeneratedTexts
    from fathomlm.lab.evaluate.samples import PromptForm, Sample

HELP = "writing texts: ROUGE, BLEU or SQuAD's scores with latency and exit rate, in any way of decoding"
DESCRIPTION = (
    "Lets MODEL write a text for every row of FILE and compares it with the row's references: ROUGE-1/2/L, BLEU, SQuAD's "
    "F1 and exact match, or the number that a solution comes to. Quality, tokens a second and exit rate are shown together. "
    "Files with summaries, answers or translations are known by their fields; --source, --prompt, --reference name others."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--data", metavar="FILE", type=Path, required=True, help="JSON lines (.jsonl, also .gz, .xz, .zst)")
    add("--source", metavar="FIELD", help="the field that is the prompt")
    add("--prompt", metavar="TEXT", help="a prompt of several fields, such as '{document} In short:'; \\n is a new line")
    add("--reference", metavar="FIELD", help="the field with a reference, or a list of them")
    add("--metric", metavar="NAME", help="rouge, bleu, squad or number")
    add("--shots", metavar="N", type=int, help="worked examples in front of each prompt (default: 0; 5 for GSM8K's form)")
    add("--max-source-tokens", metavar="N", type=int, help="cut prompts to N tokens (default: what fits the context)")
    add("--out", metavar="FILE", type=Path, help="write prompts, texts and references, as JSON lines")
    add_run_arguments(parser, batch=1, rows="rows")
    add_sampling_arguments(parser, max_new_tokens=64)
    add_depth_arguments(parser)
    add_exit_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_least(args, "limit", "batch", "max_source_tokens")
    check_out(args.out)
    sampling = read_sampling(args)
    exiting, pack = read_exiting(args), pack_options(args)

    from fathomlm.checkpoints.resolve import encoder_of
    from fathomlm.lab.evaluate.generation import report, write_texts
    from fathomlm.lab.evaluate.metrics import find_metric
    from fathomlm.lab.evaluate.samples import read_samples

    form = _form(args)
    assert form.metric is not None
    metric = find_metric(form.metric)
    alone = encoder_of(args.model) is not None
    samples = read_samples(args.data, form, limit=args.limit, alone=alone)
    if not args.stop and not alone:
        sampling = sampling.with_options(stop=form.stop)
    model = load_any_model(args, **pack)
    control = read_depth(args, model)
    with layer_bar("writing", unit="texts") as tick:
        written = write_texts(
            model,
            samples,
            sampling,
            batch=args.batch,
            most_source=args.max_source_tokens,
            control=control,
            exiting=exiting,
            on_done=tick,
        )
    if args.out is not None:
        write_lines(args.out, _lines(samples, written))
    record = about(args, model) | {
        "data": str(args.data),
        "metric": form.metric,
        "prompt": form.prompt,
        "reference": form.reference,
        "shots": form.shots,
        "sampling": dataclasses.asdict(sampling),
        "max_depth": args.max_depth,
        **report(written, samples, metric),
    }
    if written.cut:
        print(f"fathomlm: {written.cut} of {len(samples)} prompts were longer than fits, and cut", file=sys.stderr)
    if args.json:
        print_record(record)
    else:
        _print(record)
    return 0


def _form(args: argparse.Namespace) -> PromptForm:
    from fathomlm.lab.evaluate.samples import choose_form

    prompt = None if args.prompt is None else args.prompt.replace("\\n", "\n")
    if args.shots is not None and args.shots < 0:
        raise OptionError(f"--shots must be >= 0, got {args.shots}")
    return choose_form(
        args.data, source=args.source, prompt=prompt, reference=args.reference, metric=args.metric, shots=args.shots
    )


def _lines(samples: Sequence[Sample], written: GeneratedTexts) -> list[dict[str, Any]]:
    return [
        {
            "source": sample.source,
            "prompt": sample.prompt,
            "text": result.text,
            "references": list(sample.references),
            "tokens": len(result.tokens),
            "finish": result.finish,
            "exit_layers": None if result.exit_layers is None else list(result.exit_layers),
            "decode_seconds": result.decode_seconds,
        }
        for sample, result in zip(samples, written.results, strict=True)
    ]


def _print(record: dict[str, Any]) -> None:
    latency, exits = record["latency"], record["exits"]
    shown = {name: f"{value:.2f}" for name, value in record["quality"].items()}
    shown |= {"tokens/s": f"{latency['tokens_per_second']:.1f}", "ms per token": f"{latency['ms_per_token']:.2f}"}
    shown["tokens per text"] = f"{latency['tokens_per_text']:.1f}"
    if exits is not None:
        shown["left early"] = f"{exits['exit_rate']:.1%}"
        shown["mean exit layer"] = f"{exits['mean_exit_layer']:.2f} of {exits['layers']}"
        if exits["last_threshold"] is not None:
            shown["threshold"] = f"{exits['last_threshold']:.3f}"
        if exits["drafts_kept"] is not None:
            shown["drafts kept"] = f"{exits['drafts_kept']:.1%}"
    if record["mean_depth"] is not None:
        shown["mean depth"] = f"{record['mean_depth']:.2f}"
    mode = (
        "full depth" if exits is None else "oracle (it knows the last layer's choice)" if exits["oracle"] else exits["mode"]
    )
    print_table([["decoding", mode], ["texts", f"{record['texts']:,}"], *([name, value] for name, value in shown.items())])
