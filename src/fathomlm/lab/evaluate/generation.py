"""Completions in any decoding mode: their quality, their speed, and how early tokens exited."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.checkpoints.resolve import encoder_of
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import Generation, exit_rate, mean_exit_layer
from fathomlm.decode.prompts import encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.session import decoder_for
from fathomlm.errors import OptionError
from fathomlm.lab.common import OnProgress, unwatched, write_lines
from fathomlm.lab.evaluate.options import EvalGenerate
from fathomlm.lab.evaluate.run_tasks import about
from fathomlm.lab.evaluate.samples import Metric, Sample, choose_form, find_metric, read_samples
from fathomlm.model.route import DepthControl
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

WARM_UP = 2
"""New tokens of a first completion that is not timed: it warms up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSamples:
    """All completions of a task."""

    results: tuple[Generation, ...]
    batches: tuple[tuple[Generation, ...], ...]
    """The same, as they shared passes."""
    cut: int
    """Prompts that were longer than the model reads."""
    seconds: float
    """From the first prompt to the last text, everything included."""


def complete_samples(
    model: FathomModel,
    samples: Sequence[Sample],
    sampling: Sampling,
    *,
    batch: int = 1,
    most_source: int | None = None,
    control: DepthControl | None = None,
    exiting: Exiting | None = None,
    reference: bool = False,
    on_done: OnProgress = unwatched,
) -> CompletedSamples:
    """One text for each sample, in order, so that an adaptive threshold learns from the first for the later ones.

    `most_source` limits the tokens of a prompt; a decoder's also leaves room for the text. `reference` decodes without the
    engine.
    """
    if batch < 1:
        raise OptionError(f"batch must be >= 1, got {batch}")
    room = _room(model, sampling, most_source)
    whole = [encode_prompt(model, sample.prompt) for sample in samples]
    prompts = [tokens if room is None else cut_prompt(model, tokens, room) for tokens in whole]
    short = sampling.with_options(max_new_tokens=min(WARM_UP, sampling.max_new_tokens))
    decoder_for(model, reference=reference)(prompts[:1], short)  # without exits: an estimator learns nothing from it
    decode = decoder_for(model, control, exiting, sequences=min(batch, len(prompts)), reference=reference)
    begun = time.perf_counter()
    batches: list[tuple[Generation, ...]] = []
    for at in range(0, len(prompts), batch):
        batches.append(tuple(decode(prompts[at : at + batch], sampling)))
        on_done(min(at + batch, len(prompts)), len(prompts))
    return CompletedSamples(
        results=tuple(result for group in batches for result in group),
        batches=tuple(batches),
        cut=sum(len(long) > len(short) for long, short in zip(whole, prompts, strict=True)),
        seconds=time.perf_counter() - begun,
    )


def report(generated: CompletedSamples, samples: Sequence[Sample], metric: Metric) -> dict[str, Any]:
    """Quality, latency and exits together: none of them means much without the others (thesis 2.6)."""
    texts = [result.text.strip() for result in generated.results]
    return {
        "texts": len(texts),
        "quality": metric(texts, [sample.references for sample in samples]),
        "latency": latency(generated),
        "exits": _exits(generated.results),
        "mean_depth": _mean_depth(generated.results),
        "prompts_cut": generated.cut,
    }


def latency(generated: CompletedSamples) -> dict[str, float | int]:
    """End to end: embedding, head, sampling and caches included. A text's first token belongs to reading its prompt, as in
    `fathomlm generate`; tokens a second are a batch's, milliseconds are what one text waits for a token."""
    behind = sum(len(result.tokens) - 1 for result in generated.results)
    decoding = sum(max(result.decode_seconds for result in group) for group in generated.batches)
    waited = sum(result.decode_seconds for result in generated.results)
    tokens = sum(len(result.tokens) for result in generated.results)
    return {
        "tokens": tokens,
        "seconds": generated.seconds,
        "prefill_seconds": sum(group[0].prefill_seconds for group in generated.batches),
        "decode_seconds": decoding,
        "tokens_per_second": behind / decoding if decoding else 0.0,
        "ms_per_token": 1000 * waited / behind if behind else 0.0,
        "tokens_per_text": tokens / len(generated.results),
    }


def _exits(results: Sequence[Generation]) -> dict[str, Any] | None:
    """How early tokens exited; None where none could."""
    every = [result.exits for result in results if result.exits is not None]
    if not every:
        return None
    drafted = sum(exits.drafted for exits in every)
    return {
        "mode": every[0].mode,
        "oracle": results[0].oracle,
        "layers": every[0].layers,
        "exit_rate": exit_rate(results),
        "mean_exit_layer": mean_exit_layer(results),
        "first_threshold": every[0].threshold,
        "last_threshold": every[-1].threshold,
        "drafts_kept": sum(exits.accepted for exits in every) / drafted if drafted else None,
    }


def _mean_depth(results: Sequence[Generation]) -> float | None:
    """Recursions a token, where a router chose."""
    depths = [depth for result in results for depth in result.depths or ()]
    return sum(depths) / len(depths) if depths else None


def _room(model: FathomModel, sampling: Sampling, most: int | None) -> int | None:
    """How many tokens a prompt may have; None where nothing limits it."""
    if most is not None and most < 1:
        raise OptionError(f"--max-source-tokens must be >= 1, got {most}")
    if isinstance(model, FathomForSeq2SeqLM):
        return most
    room = model.architecture.context - sampling.max_new_tokens
    if room < 1:
        raise OptionError(
            f"--max-new-tokens {sampling.max_new_tokens} leaves no room for a prompt in a context of "
            f"{model.architecture.context}"
        )
    return room if most is None else min(most, room)


def cut_prompt(model: FathomModel, tokens: Sequence[int], most: int) -> list[int]:
    """At most so many tokens. A decoder goes on from where its prompt ends, so that loses its beginning, but for a begin
    token; an encoder's loses its end, but for the end token that its tokenizer puts there (`train.data.pairs` cuts so)."""
    if len(tokens) <= most:
        return list(tokens)
    if isinstance(model, FathomForSeq2SeqLM):
        end = [tokens[-1]] if tokens[-1] == model.config.eos_token_id and most > 1 else []
        return [*tokens[: most - len(end)], *end]
    begin = [tokens[0]] if tokens[0] == model.config.bos_token_id and most > 1 else []
    return [*begin, *tokens[len(tokens) - (most - len(begin)) :]]


def run(options: EvalGenerate) -> int:
    sampling = options.sampling
    exiting, pack = options.decoding.settle(options.model, options.depth)

    form = choose_form(
        options.data, source=options.source, prompt=options.template, reference=options.references, metric=options.metric,
        shots=options.shots,
    )  # fmt: skip
    assert form.metric is not None
    metric = find_metric(form.metric)
    alone = encoder_of(options.model) is not None
    samples = read_samples(options.data, form, limit=options.limit, alone=alone)
    if not options.sampling.stop and not alone:
        sampling = sampling.with_options(stop=form.stop)
    model = options.load_any(**pack)
    control = options.depth.control(options.model, model)
    with progress_bar("generating", unit="prompts") as update:
        written = complete_samples(
            model, samples, sampling, batch=options.batch_size, most_source=options.max_source_tokens, control=control,
            exiting=exiting, reference=options.reference, on_done=update,
        )  # fmt: skip
    if options.out is not None:
        write_lines(options.out, _lines(samples, written))
    record = about(options, "generate", model, pack.get("exits")) | {
        "data": str(options.data),
        "metric": form.metric,
        "prompt": form.prompt,
        "reference": form.reference,
        "shots": form.shots,
        "sampling": dataclasses.asdict(sampling),
        "max_depth": options.depth.max_depth,
        "loops": options.loops,
        "kv_loops": options.depth.kv_loops,
        "start_scale": options.depth.start_scale,
        **report(written, samples, metric),
    }
    if written.cut:
        print(f"fathomlm: {written.cut} of {len(samples)} prompts were truncated to fit the context", file=sys.stderr)
    return options.answer(record, _print)


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
