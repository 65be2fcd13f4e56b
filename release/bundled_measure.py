"""What the bundled model and the plain one beside it are worth: losses, bytes, speed, and what the deep tokens are.

Depth belongs to a token's place and serves the prediction of what follows (fathomlm.lab.analyze.routing_meters). So classes
are of the token that stands there, and the loss beside them is of the token behind it: once with every recursion that the
routers ask for, and once with one only. The difference is what the other recursions bought.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm.lab.common import environment

SHARD_BYTES = 12_000_000
PROMPTS = (
    "The moon is",
    "In the middle of the nineteenth century,",
    "Cells divide in order to",
    '"I do not believe you," said the old man,',
)
FUNCTION_WORDS = """
a an the of to in on at by for with from as that this these those it its he she they we you i his her their our is are was
were be been being has have had do does did will would can could may might must shall should and or but nor not no if than
then so which who whom whose what when where there
"""
CLASSES = (
    "end of document",
    "line break",
    "digit",
    "punctuation",
    "function word",
    "name or sentence start",
    "word",
    "part of a word",
)


def token_class(text: str, special: bool) -> str:
    """What kind of token stands at a place, by its text alone."""
    word = text.strip()
    if special:
        return "end of document"
    if not word:
        return "line break" if "\n" in text else "punctuation"
    if word.isdigit():
        return "digit"
    if not any(letter.isalnum() for letter in word):
        return "punctuation"
    if not text[0].isspace() and not word[0].isupper():
        return "part of a word"
    if word.lower() in FUNCTION_WORDS.split():
        return "function word"
    return "name or sentence start" if word[0].isupper() else "word"


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One model, from the directory of its run."""
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.resolve import load
    from fathomlm.depth.cost import count
    from fathomlm.lab.token_rows import find, read_rows
    from fathomlm.train.reading import read_recipe
    from fathomlm.train.report import read_records

    device = torch.device(chosen(args.device))
    model = load(directory / "last", dtype="float32", device=device)
    context = model.architecture.context
    rows = read_rows(find([str(args.data / "corpus")]), model, context=context, rows=args.rows)
    small = directory / "int8"
    save(model, small, force=small.exists(), quantize="int8", shard_bytes=SHARD_BYTES)
    cost = count(model.architecture, model.plan, context=context)
    recipe = read_recipe(directory / "recipe.yaml")
    records = read_records(directory / "metrics.jsonl")
    if recipe.branch_from is not None:  # a cooled run: the plateau that it came from lies beside it
        records = [*read_records(_trunk(directory) / "metrics.jsonl"), *records]
    found = {
        "environment": environment(),
        "revision": revision(),
        "data": _described(args.data / "data.json"),
        "trained_on": args.trained_on,
        "seed": recipe.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "non_embedding_parameters": cost.non_embedding_parameters,
        "forward_flops_per_token": cost.forward_flops_per_token,
        "settings": {"lr": recipe.optimizer.lr, "sequences": recipe.batch.sequences, "context": context},
        "training": [
            {key: r[key] for key in ("step", "tokens", "loss", "lr", "tokens_per_s")}
            for r in records
            if r["kind"] == "train"
        ],
        "validations": [{"tokens": r["tokens"], **r["parts"]} for r in records if r["kind"] == "validation"],
        "validation": {"rows": len(rows), **losses(model, rows)},
        "int8": {"files": {file.name: file.stat().st_size for file in sorted(small.glob("*.safetensors"))}},
        "texts": texts(model),
    }
    found["int8"] |= {"rows": len(rows), **losses(load(small, dtype="float32", device=device), rows)}
    if model.plan.routing is not None:
        found["depth"] = depth_statistics(model, rows)
    return found


def chosen(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _trunk(cooled: Path) -> Path:
    """The run that a cooled one branched from; it stopped at the branch, so its records go before."""
    return cooled.with_name(cooled.name.removesuffix("-cooled"))


@torch.inference_mode()
def losses(model: Any, rows: Any) -> dict[str, float]:
    """Nats a token on all rows: causal, as the model is used, and by top-k, as expert-choice trains."""
    from fathomlm.lab.analyze.depth_limits import token_losses

    decoder = model.decoder
    device = decoder.embed.weight.device
    sums = {"causal": 0.0} | ({"top_k": 0.0} if model.plan.routing is not None else {})
    for tokens_BT, targets_BT in rows.batches(device):
        sums["causal"] += float(token_losses(decoder, decoder(tokens_BT), targets_BT).sum(dtype=torch.float64))
        if "top_k" in sums:
            (state_BTM,) = decoder.states(tokens_BT).values()
            sums["top_k"] += float(token_losses(decoder, decoder.norm(state_BTM), targets_BT).sum(dtype=torch.float64))
    return {name: value / (len(rows) * rows.context) for name, value in sums.items()}


@torch.inference_mode()
def depth_statistics(model: Any, rows: Any) -> dict[str, Any]:
    """Depth by the class of the token, loss by depth, and the tokens that go deepest and least deep."""
    from fathomlm.lab.analyze.depth_limits import token_losses
    from fathomlm.lab.analyze.routing import SEEN
    from fathomlm.lab.analyze.routing_meters import TokenDepths
    from fathomlm.model.route import DepthControl, RoutingTrace

    decoder = model.decoder
    device, recursions = decoder.embed.weight.device, model.plan.recursions
    kind_V = torch.tensor(class_numbers(model.tokenizer, model.architecture.vocab), device=device)
    sums = torch.zeros(len(CLASSES), recursions + 1, 3, dtype=torch.float64, device=device)
    depths = TokenDepths(model.architecture.vocab)
    for tokens_BT, targets_BT in rows.batches(device):
        trace = RoutingTrace()
        full_BT = token_losses(decoder, decoder(tokens_BT, trace=trace), targets_BT)
        one_BT = token_losses(decoder, decoder(tokens_BT, control=DepthControl(max_depth=1)), targets_BT)
        depths.add(tokens_BT, trace)
        assert trace.depths_BT is not None
        _add(sums, kind_V[tokens_BT], trace.depths_BT, (torch.ones_like(full_BT), full_BT, one_BT))
    deepest, shallowest = depths.read(model.tokenizer, max(SEEN, len(rows) // 4))
    by_class = {name: summary(sums[i]) for i, name in enumerate(CLASSES) if sums[i, :, 0].sum() > 0}
    whole = sums.sum(0)
    by_depth = {
        depth: {"share": float(whole[depth, 0] / whole[:, 0].sum()), **_means(whole[depth])}
        for depth in range(recursions + 1)
        if whole[depth, 0] > 0
    }
    return {
        "classes": dict(sorted(by_class.items(), key=lambda item: -item[1]["mean_depth"])),
        "by_depth": by_depth,
        "deepest": [[t.text, t.count, t.mean_depth] for t in deepest],
        "shallowest": [[t.text, t.count, t.mean_depth] for t in shallowest],
    }


def class_numbers(tokenizer: Any, vocab: int) -> list[int]:
    """The class of every token of the vocabulary; ids that the tokenizer does not use are parts of words."""
    special = set(tokenizer.all_special_ids)
    known = min(vocab, len(tokenizer))
    found = [CLASSES.index(token_class(tokenizer.decode([token]), token in special)) for token in range(known)]
    return found + [CLASSES.index("part of a word")] * (vocab - known)


def _add(sums: Tensor, kinds_BT: Tensor, depths_BT: Tensor, values: tuple[Tensor, ...]) -> None:
    """Add values at their class and depth."""
    place = kinds_BT.flatten() * sums.shape[1] + depths_BT.flatten()
    for i, value_BT in enumerate(values):
        found = place.bincount(value_BT.flatten().double(), minlength=sums.shape[0] * sums.shape[1])
        sums[:, :, i] += found.view(sums.shape[:2])


def summary(sums: Tensor) -> dict[str, Any]:
    """Of one class: how often, how deep, and the loss behind it."""
    counts = sums[:, 0]
    depth = float((counts * torch.arange(len(counts), device=counts.device)).sum() / counts.sum())
    shares = (counts / counts.sum()).tolist()
    return {"count": int(counts.sum()), "mean_depth": depth, "shares": shares, **_means(sums.sum(0))}


def _means(sums: Tensor) -> dict[str, float]:
    count, full, one = sums.tolist()
    return {"loss": full / count, "loss_at_depth_1": one / count}


def texts(model: Any) -> list[dict[str, Any]]:
    """Continuations to read, sampled with one seed."""
    from fathomlm.decode.full import generate

    made = generate(model, list(PROMPTS), max_new_tokens=80, temperature=0.8, top_p=0.95, seed=0)
    return [
        {"prompt": prompt, "text": one.text, "depths": None if one.depths is None else list(one.depths)}
        for prompt, one in zip(PROMPTS, made, strict=True)
    ]


def engine_speeds(models: dict[str, Path], device: str) -> dict[str, Any]:
    """What `fathomlm bench throughput` says of the stored models, one after the other, or why it could not."""
    device = chosen(device)
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    found: dict[str, Any] = {"environment": environment(), "revision": revision(), "device": device, "dtype": dtype}
    for name, path in models.items():
        words = ["bench", "throughput", str(path), "--device", device, "--dtype", dtype, "--json"]
        done = subprocess.run([sys.executable, "-m", "fathomlm", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            found[name] = {"cannot": done.stderr.strip().splitlines()[-1]}
            continue
        whole = json.loads(done.stdout.splitlines()[-1])
        found[name] = {"timing": whole["ours"]["timing"], "workload": whole["workload"]}
    return found


def revision() -> str | None:
    """The commit that was measured, where this is a checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _described(file: Path) -> dict[str, Any] | None:
    """What `prepare` wrote down of the data; tokens that travelled alone come without it."""
    return json.loads(file.read_text()) if file.exists() else None
