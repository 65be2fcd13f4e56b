"""`fathomlm generate MODEL -p TEXT`: complete one prompt or a batch of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import JsonOptions, ModelOptions, QuantizeOptions, check_input, read_text
from fathomlm.cli.decoding import DecodeOptions, DepthOptions, MessageOptions, ReferenceOptions, exit_record, exit_statistic
from fathomlm.cli.display import progress_bar
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.options import option, section

if TYPE_CHECKING:
    from fathomlm.decode.generation import Generation
    from fathomlm.model.seq2seq import FathomModel

MOST_AT_ONCE = 64
"""Prompts that are decoded together."""
ENDED = {"eos": "ended by itself", "stop": "ended at a stop string", "length": "ended at --max-new-tokens"}


@dataclass(frozen=True, kw_only=True)
class Generate(MessageOptions, QuantizeOptions, ModelOptions, ReferenceOptions, JsonOptions):
    """Complete one prompt, or several as one batch. The text goes to standard output, statistics to standard error. With
    --chat a prompt is a message in the model's chat template."""

    prompt: tuple[str, ...] = option(
        (), short="-p", help="text to complete; '-' reads standard input; repeatable, several prompts run as one batch"
    )
    prompt_file: Path | None = option(None, metavar="FILE", help="file with one prompt per line; empty lines are skipped")
    stream: bool = option(False, help="print the completion as it is generated; one prompt only")
    sampling: Sampling = section(Sampling, "sampling")
    depth: DepthOptions = section(DepthOptions, "depth")
    decoding: DecodeOptions = section(DecodeOptions, "early exit", "how far down a model without a router each token goes")

    def run(self) -> int:
        prompts = _read_prompts(self)
        _check(self, prompts)
        sampling = self.sampling
        exiting, pack = self.decoding.settle(self.model, self.depth)

        from fathomlm.decode.full import generate

        begun = time.perf_counter()
        model = self.load_any(**pack)
        loaded = time.perf_counter()
        how: dict[str, Any] = {"control": self.depth.control(self.model, model, self.sampling.seed or 0), "exiting": exiting}
        inputs = _encode(self, model, prompts)
        engine = self.open_engine(model, **how, sequences=min(len(inputs), MOST_AT_ONCE))
        if self.stream and engine is not None:
            results = [engine.generate(inputs[0], sampling, on_text=_show)]
            print()
        elif self.stream:
            results = generate(model, inputs, sampling, on_text=lambda _, piece: _show(piece), **how)
            print()
        else:
            with progress_bar("generating", "tokens") as update:
                begin, most = time.perf_counter(), sampling.max_new_tokens

                def on_step(done: int) -> None:
                    update(done, most, f", {done / (time.perf_counter() - begin):.1f} tokens/s, at most")

                if engine is not None:
                    results = engine.generate_all(inputs, sampling, on_step=on_step)
                else:
                    results = generate(model, inputs, sampling, on_step=on_step, **how)
        if self.json:
            record = _record(self, pack.get("exits"), model, prompts, results, load_seconds=loaded - begun)
            record["exits"] = exit_record(exiting, model, results)
            record["decoder"] = "reference" if engine is None else "engine"
            print(json.dumps(record, ensure_ascii=False))
            return 0
        if not self.stream:
            _print_texts(prompts, results)
        print(_statistic(results), file=sys.stderr)
        return 0


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _check(options: Generate, prompts: Sequence[str]) -> None:
    if not prompts:
        raise OptionError("no prompt: give -p TEXT, -p - for standard input, or --prompt-file FILE")
    if options.stream and len(prompts) > 1:
        raise OptionError(f"--stream takes one prompt, got {len(prompts)}")
    if options.stream and options.json:
        raise OptionError("--stream cannot be combined with --json")


def _read_prompts(options: Generate) -> list[str]:
    if options.prompt.count("-") > 1:
        raise OptionError("'-p -' can be given once only: standard input is read once")
    prompts = [_read_input() if prompt == "-" else prompt for prompt in options.prompt]
    if options.prompt_file is not None:
        prompts += [line for line in read_text(options.prompt_file).splitlines() if line.strip()]
    return prompts


def _read_input() -> str:
    check_input()
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _encode(options: Generate, model: FathomModel, prompts: Sequence[str]) -> Sequence[str] | Sequence[list[int]]:
    from fathomlm.decode.prompts import chat_prompt

    if not options.chat:
        return prompts
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [chat_prompt(model, [*system, {"role": "user", "content": prompt}]) for prompt in prompts]


def _print_texts(prompts: Sequence[str], results: Sequence[Generation]) -> None:
    if len(results) == 1:
        print(results[0].text)
        return
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1):
        start = " ".join(prompt.split())
        print(f"--- {number}: {start if len(start) <= 60 else start[:57] + '...'}")
        print(result.text)


def _rate(results: Sequence[Generation]) -> float:
    """Tokens a second of the whole batch while decoding; the first token of each row belongs to the prefill. 0 where each
    row's tokens came at once."""
    seconds = max(result.decode_seconds for result in results)
    tokens = sum(len(result.tokens) - 1 for result in results)
    return tokens / seconds if seconds else 0.0


def _statistic(results: Sequence[Generation]) -> str:
    prompt_tokens = sum(len(result.prompt_tokens) for result in results)
    tokens = sum(len(result.tokens) for result in results)
    seconds = max(result.decode_seconds for result in results)
    rate = _rate(results)
    speed = f", {rate:.1f} tokens/s" if rate else ""
    ended = ENDED[results[0].finish] if len(results) == 1 else f"{len(results)} completions"
    return (
        f"[{prompt_tokens} prompt tokens in {results[0].prefill_seconds:.2f} s, {tokens} new in {seconds:.2f} s{speed}; "
        f"{_depths(results)}{exit_statistic(results)}{ended}]"
    )


def _depths(results: Sequence[Generation]) -> str:
    """How deep the new tokens went, where a router chose."""
    depths = [depth for result in results for depth in result.depths or ()]
    if not depths:
        return ""
    counts = ", ".join(f"{depths.count(depth)} x {depth}" for depth in range(1, max(depths) + 1))
    return f"mean depth {sum(depths) / len(depths):.2f} ({counts}); "


def _record(
    options: Generate,
    pack: Path | None,
    model: FathomModel,
    prompts: Sequence[str],
    results: Sequence[Generation],
    load_seconds: float,
) -> dict[str, Any]:
    from fathomlm.checkpoints.resolve import describe, dtype_name

    rows = [
        {"prompt": prompt, **asdict(result), "tokens_per_second": result.tokens_per_second}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return {
        "model": options.model,
        "exit_pack": None if pack is None else str(pack),
        "plan": describe(model),
        "dtype": dtype_name(model),
        "device": options.device,
        "results": rows,
        "timings": {
            "load_seconds": load_seconds,
            "prefill_seconds": results[0].prefill_seconds,
            "decode_seconds": max(result.decode_seconds for result in results),
        },
        "tokens_per_second": _rate(results),
    }
