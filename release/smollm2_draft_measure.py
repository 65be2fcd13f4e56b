"""What a draft layer gives in the engine: time against full decoding, tokens a pass, and whether the text is the same.

Every setting is a race: the same prompts through an engine without drafts and engines with some, one after the other, round
after round, and of each one's rounds the fastest counts. Times are of whole texts, prompts included. Drawn texts are drawn
with the same random numbers, so they too must be the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from bundled_measure import chosen, revision
from smollm2_exit_measure import behind, held_out, is_chat, reply_header

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Request, Result
from fathomlm.engine.sizing import ample_memory
from fathomlm.lab.common import environment, free_memory

PASSAGE, BEGINNING = 300, 48
"""Tokens of a document that are to be summarised, and that are to be continued."""
AHEAD = 128
"""Tokens that a sequence's pages may run ahead of it."""
SEED = 7


def make_prompts(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Held-out prompts of three kinds, as tokens."""
    model = load(args.source)
    header = reply_header(model.tokenizer)
    chats = [tokens[: behind(tokens, header)] for tokens in held_out(args.chats) if is_chat(tokens, header)]
    documents = [tokens for tokens in held_out(args.data / "corpus") if len(tokens) > PASSAGE]
    asked = [f"Summarize this text.\n\n{model.tokenizer.decode(tokens[:PASSAGE])}" for tokens in documents[: args.count]]
    summaries = [chat_prompt(model, [{"role": "user", "content": said}]) for said in asked]
    found = {"chats": chats, "documents": [tokens[:BEGINNING] for tokens in documents], "summaries": summaries}
    return {kind: [list(prompt) for prompt in prompts[: args.count]] for kind, prompts in found.items()}


def measure(args: argparse.Namespace) -> None:
    device = chosen(args.device)
    prompts = {kind: found[: args.count] for kind, found in json.loads(args.prompts.read_text()).items()}
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for dtype in args.dtypes:
        model = load(args.source, dtype, device, exits=args.pack)
        place = record.setdefault(f"{device}, {dtype}", {"environment": environment(device), "revision": revision()})
        for rows in args.rows:
            for name, figures in race(model, prompts, rows, args):
                place[name] = figures
                if dtype == args.dtypes[0]:
                    record[f"cpu_{name.removeprefix('greedy_')}" if device == "cpu" else name] = figures
                args.out.write_text(json.dumps(record, indent=1) + "\n")
            free_memory()


def race(
    model: Any, prompts: dict[str, list[list[int]]], rows: int, args: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the figures of a setting: of each temperature, for all prompts and kind by kind, with the best number of
    drafts and with every one that was tried."""
    longest = max(len(prompt) for found in prompts.values() for prompt in found) + args.new_tokens
    sizes = {"batch_size": rows, "max_length": longest, "penalties": False, "max_logprobs": 0, "prefix_caching": False}
    ways: dict[int | str, Exiting | None] = {0: None}
    for drafts in args.drafts:
        ways[drafts] = Exiting(mode="speculative", threshold=args.threshold, max_stack=drafts + 1)
    for tree in args.trees:
        widths = tuple(map(int, tree.split(",")))
        ways[tree] = Exiting(mode="speculative", threshold=args.threshold, draft_tree=widths)
    for best in args.best:
        most = tuple(map(int, best.split(",")))
        ways[f"best {best}"] = Exiting(mode="speculative", threshold=args.threshold, draft_best=most)
    engines = {}
    for drafts, exiting in ways.items():  # every row has its pages: what is preempted is computed twice, in every way
        room = ample_memory(model.decoder, EngineOptions(**sizes), longest + AHEAD, exiting)
        engines[drafts] = Engine(model, exiting=exiting, always_draft=True, memory=room, **sizes)
    for temperature in args.temperatures:
        tried: dict[int | str, dict[str, Any]] = {drafts: {} for drafts in engines}
        for kind, found in prompts.items():
            best: dict[int | str, tuple[float, list[Result], int]] = {}
            for engine in engines.values():
                _run(engine, found[: max(1, min(rows, 2))], rows, temperature, args)  # kernels are compiled, steps captured
            for _ in range(args.rounds):
                for drafts, engine in engines.items():
                    accepted = engine.totals.accepted
                    seconds, results = _run(engine, found, rows, temperature, args)
                    if drafts not in best or seconds < best[drafts][0]:
                        best[drafts] = (seconds, results, engine.totals.accepted - accepted)
            for drafts, (seconds, results, accepted) in best.items():
                tokens = sum(len(result.tokens) for result in results)
                same = sum(a.tokens == b.tokens for a, b in zip(results, best[0][1], strict=True))
                tried[drafts][kind] = {
                    "seconds": seconds, "tokens": tokens, "passes": tokens - accepted, "same": same, "texts": len(results)
                }  # fmt: skip
        name, figures = (
            f"{'drawn' if temperature else 'greedy'}_{rows}row{'s' if rows > 1 else ''}",
            _figures(tried, temperature),
        )
        print(json.dumps({name: figures}), flush=True)
        yield name, figures


def _run(
    engine: Engine, prompts: list[list[int]], rows: int, temperature: float, args: argparse.Namespace
) -> tuple[float, list[Result]]:
    how = {"temperature": temperature} if temperature else {}
    requests = [
        Request(
            id=engine.new_id(),
            prompt=tuple(prompt),
            sampling=Sampling(max_new_tokens=args.new_tokens, seed=SEED + number if temperature else None, **how),
        )
        for number, prompt in enumerate(prompts)
    ]
    begun = time.perf_counter()
    results = [engine.run([request])[0] for request in requests] if rows == 1 else engine.run(requests)
    return time.perf_counter() - begun, results


def _figures(tried: dict[int | str, dict[str, Any]], temperature: float) -> dict[str, Any]:
    def summed(drafts: int | str, name: str) -> float:
        return sum(found[name] for found in tried[drafts].values())

    def speed(drafts: int | str) -> float:
        return summed(drafts, "tokens") / summed(drafts, "seconds")

    best = max((drafts for drafts in tried if drafts), key=speed)
    kinds = {
        kind: {
            "speedup": (found["tokens"] / found["seconds"]) / (tried[0][kind]["tokens"] / tried[0][kind]["seconds"]),
            "tokens_per_pass": found["tokens"] / found["passes"],
            "same_text": found["same"] / found["texts"],
        }
        for kind, found in tried[best].items()
    }
    every = {
        drafts: {"tokens_per_s": speed(drafts), "tokens_per_pass": summed(drafts, "tokens") / summed(drafts, "passes")}
        for drafts in tried
    }
    return {
        "speedup": speed(best) / speed(0), "drafts": best, "temperature": temperature,
        "tokens_per_pass": every[best]["tokens_per_pass"], "same_text": summed(best, "same") / summed(best, "texts"),
        "full_tokens_per_s": speed(0), "tokens_per_s": speed(best), **kinds, "tried": every,
    }  # fmt: skip
