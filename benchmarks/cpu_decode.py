"""CPU, side by side in one run: greedy decoding of one sequence with float32, int8 and int4 weights, here, in transformers
and in llama.cpp; the bundled model through the server; what integers cost in loss, also those of a GPU, whose norms are
folded in before rounding; and the time of a conversion.

    python benchmarks/cpu_decode.py --data val.jsonl.xz [--tokens 64] [--rounds 7] [--llama-bench PATH]
        [--out benchmarks/results/cpu_decode.json]

All sides take turns in every round, so that a slow moment of the machine hits all of them. On a CPU only ratios are quoted:
each is the median of the rounds' own. Ctrl-C ends the rounds with what was measured so far.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.fetch import fetch
from fathomlm.cli.common import read_documents
from fathomlm.kernels.quantized import GPU_KINDS
from fathomlm.lab.common import environment
from fathomlm.model.quantize import quantize_layers
from fathomlm.packaged import default_model

PROMPT = "The history of the lighthouse begins"
KINDS = (None, "int8", "int4")
SERVED = {"int8": (), "float32": ("--quantize", "none")}
LOSS_TOKENS = 512


def rate_of_generate(model: Any, prompt: list[int], tokens: int) -> float:
    row = fathomlm.generate(model, [prompt], max_new_tokens=tokens, ignore_eos=True)[0]
    return (tokens - 1) / row.decode_seconds


def rate_of_engine(engine: Any, prompt: list[int], tokens: int) -> float:
    """As `bench latency` counts: the time between the first token and the last."""
    times: list[float] = []
    engine.submit(
        fathomlm.Request(
            id=engine.new_id(),
            prompt=tuple(prompt),
            sampling=fathomlm.Sampling(max_new_tokens=tokens, ignore_eos=True),
        ),
        lambda events: times.extend(time.perf_counter() for event in events if isinstance(event, fathomlm.TokenEvent)),
    )
    while engine.busy:
        engine.step()
    return (len(times) - 1) / (times[-1] - times[0])


@torch.inference_mode()
def rate_of_transformers(model: Any, prompt: list[int], tokens: int) -> float:
    """Without the prompt: a run of one token is taken off."""
    tensor, seconds = torch.tensor([prompt]), []
    for many in (1, tokens):
        options = {"max_new_tokens": many, "min_new_tokens": many, "do_sample": False, "pad_token_id": 2}
        begin = time.perf_counter()
        model.generate(tensor, attention_mask=torch.ones_like(tensor), **options)
        seconds.append(time.perf_counter() - begin)
    return (tokens - 1) / (seconds[1] - seconds[0])


def rate_of_llama(binary: Path, file: Path, tokens: int) -> float:
    command = [binary, "-m", file, "-p", "0", "-n", str(tokens), "-t", str(torch.get_num_threads()), "-r", "1", "-o", "json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def rate_of_server(address: str, name: str, tokens: int) -> float:
    """One user's stream, from the first token to the last."""
    body = {
        "model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times, made = [], 0
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            made = (chunk.get("usage") or {}).get("completion_tokens", made)
            if chunk["choices"]:
                times.append(time.perf_counter())
    return (made - 1) / (times[-1] - times[0])


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "fathomlm", "serve", model, "--port", str(port), "--max-loaded", "1", *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ.copy())
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@torch.inference_mode()
def losses(models: dict[str, Any], data: Path, rows: int) -> dict[str, float]:
    """Mean loss a token over the first documents that are long enough, the same for all."""
    tokenizer, found = next(iter(models.values())).tokenizer, []
    for text in read_documents([str(data)], "text", 50 * rows):
        tokens = tokenizer(text[: 20 * LOSS_TOKENS]).input_ids[:LOSS_TOKENS]
        found += [tokens] if len(tokens) == LOSS_TOKENS else []
        if len(found) == rows:
            break
    total = dict.fromkeys(models, 0.0)
    for tokens in found:
        tokens_1T = torch.tensor([tokens])
        for name, model in models.items():
            total[name] += F.cross_entropy(model(tokens_1T).logits[0, :-1].float(), tokens_1T[0, 1:]).item() / len(found)
    return {"tokens": len(found) * (LOSS_TOKENS - 1)} | {name: round(value, 4) for name, value in total.items()}


def decoding(args: argparse.Namespace) -> dict[str, Any]:
    file = fetch("smollm2-135m")
    models = {kind or "float32": fathomlm.load(file, dtype="float32", quantize=kind) for kind in KINDS}
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = models["float32"].tokenizer(PROMPT).input_ids
    ours = fathomlm.generate(models["float32"], [prompt], max_new_tokens=8, ignore_eos=True)[0].tokens
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=2)
    assert list(ours) == want[0, len(prompt) :].tolist(), "the two sides must say the same"

    sides: dict[str, Callable[[], float]] = {}
    for name, model in models.items():
        sides[f"generate, {name}"] = lambda model=model: rate_of_generate(model, prompt, args.tokens)
        engine = fathomlm.Engine(model, batch_size=1, max_length=256)
        sides[f"engine, {name}"] = lambda engine=engine: rate_of_engine(engine, prompt, args.tokens)
    sides["transformers, float32"] = lambda: rate_of_transformers(theirs, prompt, args.tokens)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as servers:
        for kind in ("f32", "q8_0") if args.llama_bench is not None else ():
            target = Path(scratch) / f"{kind}.gguf"
            fathomlm.export_gguf(models["float32"], target, kind)
            sides[f"llama.cpp, {kind}"] = lambda target=target: rate_of_llama(args.llama_bench, target, args.tokens)
        bundled = default_model()
        for name, options in SERVED.items():
            address = servers.enter_context(serving(bundled, *options))
            sides[f"server, bundled {name}"] = lambda address=address: rate_of_server(address, bundled, args.tokens)
        try:
            for side in sides.values():
                side()
            for number in range(args.rounds):
                found = {name: side() for name, side in sides.items()}
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
                told = ", ".join(f"{name} {rate:.1f}" for name, rate in found.items())
                print(f"round {number + 1}/{args.rounds}, tokens/s: {told}", flush=True)
        except KeyboardInterrupt:
            if not rates:
                raise
    return {
        "tokens": args.tokens,
        "rounds": len(next(iter(rates.values()))),
        "tokens_per_s": {
            name: {"median": round(statistics.median(found), 1), "all": [round(one, 1) for one in found]}
            for name, found in rates.items()
        },
        "ratios": {f"{a} / {b}": _ratio(rates[a], rates[b]) for a, b in RATIOS if a in rates and b in rates},
    }


def loss(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, source in (("SmolLM2-135M", fetch("smollm2-135m")), (default_model(), default_model())):
        models = {kind or "float32": fathomlm.load(source, dtype="float32", quantize=kind) for kind in KINDS}
        for kind in GPU_KINDS:
            models[f"{kind} of a GPU"] = fathomlm.load(source, dtype="float32")
            quantize_layers(models[f"{kind} of a GPU"].decoder, kind, None)
        found[name] = losses(models, args.data, args.rows)
    return found


def conversion(args: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    fathomlm.convert(fetch("smollm2-135m"), recursions=2, init="average", relax="lora", rank=64)
    return {"rank64_svd_seconds": round(time.perf_counter() - begin, 1)}


PARTS = {"decode": decoding, "loss": loss, "convert": conversion}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, help="text to measure the loss on")
    parser.add_argument("--rows", type=int, default=24, help=f"documents of {LOSS_TOKENS} tokens to measure it on")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, to stand beside")
    parser.add_argument("--out", type=Path, help="where the record goes; parts that are not measured stay in it")
    args = parser.parse_args()
    if "loss" in args.parts and args.data is None:
        parser.error("the loss requires --data")
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.out is not None and args.out.is_file() else {}
    record = {"benchmark": "cpu_decode"} | {name: before[name] for name in PARTS if name in before}
    for name in args.parts:
        load = {"load_average": round(os.getloadavg()[0], 1), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
        record[name] = {"environment": environment() | load, **PARTS[name](args)}
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _show(record)
    print(json.dumps(record))


RATIOS = (
    ("generate, float32", "transformers, float32"),
    ("generate, int8", "generate, float32"),
    ("generate, int4", "generate, float32"),
    ("engine, int8", "engine, float32"),
    ("engine, int4", "engine, float32"),
    ("engine, int8", "llama.cpp, f32"),
    ("engine, int8", "llama.cpp, q8_0"),
    ("generate, int8", "llama.cpp, f32"),
    ("server, bundled int8", "server, bundled float32"),
)


def _ratio(one: list[float], other: list[float]) -> dict[str, float]:
    found = [a / b for a, b in zip(one, other, strict=True)]
    return {"median": round(statistics.median(found), 3), "least": round(min(found), 3), "most": round(max(found), 3)}


def _show(record: dict[str, Any]) -> None:
    table = Table(title="One sequence on a CPU")
    for column in ("figure", "median of rounds", "least", "most"):
        table.add_column(column)
    for name, found in record.get("decode", {}).get("ratios", {}).items():
        table.add_row(name, *(f"{found[key]:.2f}x" for key in ("median", "least", "most")))
    for name, found in record.get("loss", {}).items():
        if name != "environment":
            table.add_row(f"loss of {name}", ", ".join(f"{kind} {value}" for kind, value in found.items()))
    if "convert" in record:
        table.add_row("converting with rank-64 SVD LoRA", f"{record['convert']['rank64_svd_seconds']} s")
    Console().print(table)


if __name__ == "__main__":
    main()
