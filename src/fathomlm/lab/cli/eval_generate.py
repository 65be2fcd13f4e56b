"""`fathomlm eval generate MODEL --data FILE`: completions against references, in any decoding mode."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ModelOptions
from fathomlm.cli.decoding import DecodeOptions, DepthOptions, ReferenceOptions
from fathomlm.cli.first import check_file, check_new_file
from fathomlm.cli.progress import progress_bar
from fathomlm.decode.sampling import Sampling
from fathomlm.lab.cli.eval_common import BatchOptions, ShotOptions, about, answer, write_lines
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option, section

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.generation import CompletedSamples
    from fathomlm.lab.evaluate.samples import PromptForm, Sample


@dataclass(frozen=True, kw_only=True)
class EvalGenerate(BatchOptions, ModelOptions, ReferenceOptions):
    """Let MODEL complete a prompt for every row of FILE and compare the completion with the row's references: ROUGE-1/2/L,
    BLEU, SQuAD's F1 and exact match, or the number that a solution comes to. Quality, tokens per second and exit rate are
    shown together. Files with summaries, answers or translations are known by their fields; --source, --prompt and
    --references name others."""

    data: Path = option(metavar="FILE", first=check_file, help="JSON Lines (.jsonl, also .gz, .xz, .zst)")
    source: str | None = option(None, metavar="FIELD", help="field that is the prompt")
    prompt: str | None = option(
        None, metavar="TEMPLATE", help="prompt of several fields, such as '{document} In short:'; \\n is a new line"
    )
    references: str | None = option(None, metavar="FIELD", help="field with a reference, or a list of them")
    metric: str | None = option(
        None, metavar="NAME", help="rouge, bleu, squad or number", default_text="by the file's fields"
    )
    shots: int | None = like(ShotOptions, "shots", default_text="0; 5 for GSM8K")
    max_source_tokens: int | None = option(None, ge=1, help="truncate prompts to N tokens", default_text="the context")
    out: Path | None = option(
        None, metavar="FILE", first=check_new_file, help="write prompts, completions and references, as JSON Lines"
    )
    batch_size: int = like(BatchOptions, "batch_size", 1)
    sampling: Sampling = section(Sampling, "sampling", max_new_tokens=64)
    depth: DepthOptions = section(DepthOptions, "depth")
    decoding: DecodeOptions = section(DecodeOptions, "early exit", "how far down a model without a router each token goes")

    def run(self) -> int:
        sampling = self.sampling
        exiting, pack = self.decoding.settle(self.model, self.depth)

        from fathomlm.checkpoints.resolve import encoder_of
        from fathomlm.lab.evaluate.generation import complete_samples, report
        from fathomlm.lab.evaluate.metrics import find_metric
        from fathomlm.lab.evaluate.samples import read_samples

        form = _form(self)
        assert form.metric is not None
        metric = find_metric(form.metric)
        alone = encoder_of(self.model) is not None
        samples = read_samples(self.data, form, limit=self.limit, alone=alone)
        if not self.sampling.stop and not alone:
            sampling = sampling.with_options(stop=form.stop)
        model = self.load_any(**pack)
        control = self.depth.control(self.model, model)
        with progress_bar("generating", unit="prompts") as update:
            written = complete_samples(
                model,
                samples,
                sampling,
                batch=self.batch_size,
                most_source=self.max_source_tokens,
                control=control,
                exiting=exiting,
                reference=self.reference,
                on_done=update,
            )
        if self.out is not None:
            write_lines(self.out, _lines(samples, written))
        record = about(self, "generate", model, pack.get("exits")) | {
            "data": str(self.data),
            "metric": form.metric,
            "prompt": form.prompt,
            "reference": form.reference,
            "shots": form.shots,
            "sampling": dataclasses.asdict(sampling),
            "max_depth": self.depth.max_depth,
            "loops": self.loops,
            "kv_loops": self.depth.kv_loops,
            "start_scale": self.depth.start_scale,
            **report(written, samples, metric),
        }
        if written.cut:
            print(f"fathomlm: {written.cut} of {len(samples)} prompts were truncated to fit the context", file=sys.stderr)
        answer(self, record, _print)
        return 0


def _form(options: EvalGenerate) -> PromptForm:
    from fathomlm.lab.evaluate.samples import choose_form

    prompt = None if options.prompt is None else options.prompt.replace("\\n", "\n")
    return choose_form(
        options.data,
        source=options.source,
        prompt=prompt,
        reference=options.references,
        metric=options.metric,
        shots=options.shots,
    )


def _lines(samples: Sequence[Sample], written: CompletedSamples) -> list[dict[str, Any]]:
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
    shown["tokens per completion"] = f"{latency['tokens_per_text']:.1f}"
    if exits is not None:
        shown["exited early"] = f"{exits['exit_rate']:.1%}"
        shown["mean exit layer"] = f"{exits['mean_exit_layer']:.2f} of {exits['layers']}"
        if exits["last_threshold"] is not None:
            shown["threshold"] = f"{exits['last_threshold']:.3f}"
        if exits["drafts_kept"] is not None:
            shown["drafts accepted"] = f"{exits['drafts_kept']:.1%}"
    if record["mean_depth"] is not None:
        shown["mean depth"] = f"{record['mean_depth']:.2f}"
    mode = (
        "full depth" if exits is None else "oracle (it knows the last layer's choice)" if exits["oracle"] else exits["mode"]
    )
    print_table(
        [["decoding", mode], ["completions", f"{record['texts']:,}"], *([name, value] for name, value in shown.items())]
    )
