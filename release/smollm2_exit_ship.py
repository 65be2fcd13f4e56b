"""From a measured exit to what the package holds: the pack, a threshold, a card and a record.

    python release/smollm2_exit.py ship RECORD --pack PACK --chats data/smollm2-chats --out DIRECTORY

The card is smollm2_exit_card.md with this exit's figures in it. The threshold is calibrated on held-out chats from the end
of the list; `measure` takes its own from the beginning.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from smollm2_exit_measure import behind, held_out, held_out_loss, reply_header
from smollm2_exit_report import fastest

from fathomlm.decode.calibration import Calibration
from fathomlm.decode.threshold_samples import STEPS

CARD = Path(__file__).parent / "smollm2_exit_card.md"
TEXTS, NEW_TOKENS = 100, 64
"""Chats that the threshold is learnt from, and the tokens of each."""
REPLY = 64
"""Tokens of the replies to the tests' messages."""


def ship(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the directory and returns its record."""
    from fathomlm.checkpoints.exit_pack import RECORD, THRESHOLD, WEIGHTS, read_pack
    from fathomlm.checkpoints.resolve import load
    from fathomlm.checkpoints.writing import whole_directory
    from fathomlm.decode.calibration import calibrate
    from fathomlm.decode.sampling import Sampling

    pack = read_pack(args.pack)
    (index,) = pack.exits
    model = load(args.source, dtype="float32", exits=args.pack)
    measured = entries(json.loads(args.record.read_text()), index + 1)
    first = next(iter(measured.values()))[0]
    header = reply_header(model.tokenizer)
    prompts = [tokens[: behind(tokens, header)] for tokens in list(held_out(args.chats))[-TEXTS:]]
    learnt = calibrate(model, prompts, Sampling(max_new_tokens=NEW_TOKENS))
    on_messages = held_out_loss(model.decoder, index + 1, replies(model, args.messages))
    record = {
        "recipe": "exit-layer-smollm2-135m",
        "layer": index + 1,
        "tokens_seen": first["tokens"],
        "words": first["words"],
        "parameters": sum(value.numel() for value in pack.tensors.values()),
        **thresholds(learnt),
        "agreement": round(first["kinds"]["chats"]["held_out"]["agreement"], 4),
        "known": round(first["kinds"]["chats"]["held_out"]["known"], 4),
        "held_out_tokens": first["kinds"]["chats"]["held_out"]["tokens"],
        "held_out_agreement": round(on_messages["agreement"], 4),
        "held_out_loss": round(on_messages["loss"], 4),
        "speeds": {device: _speeds([one["kinds"]["chats"] for one in found]) for device, found in measured.items()},
    }
    with whole_directory(args.out, force=True, what="exit", sign=RECORD) as out:
        for name in (RECORD, WEIGHTS):
            shutil.copyfile(args.pack / name, out / name)
        learnt.save(out / THRESHOLD)
        (out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (out / "README.md").write_text(_card(record, (out / WEIGHTS).stat().st_size), encoding="utf-8")
    return record


def thresholds(learnt: Calibration) -> dict[str, Any]:
    """Where tokens exit by themselves, and where drafts are made; how many exit there, and how many of all are wrong."""
    estimator = learnt.estimator
    at = round(estimator.threshold * STEPS)
    return {
        "threshold": round(estimator.threshold, 4),
        "draft_threshold": round(estimator.for_drafts().threshold, 4),
        "texts": estimator.texts.count,
        "exiting": round(estimator.texts.exiting(at), 4),
        "wrong": round(estimator.texts.share(at), 4),
    }


def entries(record: dict[str, Any], layer: int) -> dict[str, list[dict[str, Any]]]:
    """All that was measured of the exit in float32, by device, repeats included."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, place in record["runs"].items():
        where = place["environment"]
        if place["settings"]["dtype"] != "float32":
            continue
        name = f"{where['device']}, {where['threads']} threads" if kind.startswith("cpu") else where["device"]
        of_layer = [one for one in place["exits"].values() if one["layer"] == layer and one["rank"] is None]
        found[name] = [*found.get(name, []), *of_layer]
    found = {name: several for name, several in found.items() if several}
    if not found:
        raise SystemExit(f"no device measured a layer's exit after {layer} in float32")
    return found


def replies(model: Any, messages: Path) -> list[tuple[list[int], int]]:
    """The full model's replies behind their prompts, and where they begin."""
    from fathomlm.decode.full import generate
    from fathomlm.decode.prompts import chat_prompt

    said = messages.read_text(encoding="utf-8").splitlines()
    prompts = [chat_prompt(model, [{"role": "user", "content": message}]) for message in said]
    made = generate(model, prompts, max_new_tokens=REPLY)
    return [([*prompt, *row.tokens], len(prompt)) for prompt, row in zip(prompts, made, strict=True)]


def _speeds(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Speculative decoding at its fastest, beside all that it came to, since the fastest of many flatters; and parallel
    decoding at the threshold that set itself, with as many drafts."""
    tried = [one for kind in kinds for one in kind["speculative"].values()]
    best = max(kinds, key=lambda kind: max(one["speedup"] for one in kind["speculative"].values()))
    speculative, parallel = fastest(best["speculative"]), best["parallel"]["adaptive"]
    assert speculative is not None
    return {
        "speculative": {name: speculative[name] for name in ("speedup", "threshold", "acceptance", "same_texts")},
        "tried": {"measurements": len(tried), "slowest": min(one["speedup"] for one in tried)},
        "parallel": {name: parallel[name] for name in ("speedup", "threshold", "agreement", "perplexity")},
        "full_perplexity": best["full"]["perplexity"],
    }


def _card(record: dict[str, Any], size: int) -> str:
    figures = {
        "layer": str(record["layer"]),
        "parameters": f"{record['parameters'] / 1e6:.2f}M",
        "bytes": f"{size / 1e6:.2f}",
        "words": f"{record['words']:,}",
        "tokens": f"{record['tokens_seen'] / 1e6:.0f}M",
        "threshold": f"{record['threshold']:.2f}",
        "draft_threshold": f"{record['draft_threshold']:.2f}",
        "texts": str(record["texts"]),
        "exiting": _percent(record["exiting"]),
        "wrong": _percent(record["wrong"]),
        "agreement": _percent(record["agreement"]),
        "known": _percent(record["known"]),
        "held_out_tokens": f"{record['held_out_tokens']:,}",
        "held_out_agreement": _percent(record["held_out_agreement"]),
        "held_out_loss": f"{record['held_out_loss']:.2f}",
        "speeds": "\n".join(_row(device, one) for device, one in record["speeds"].items()),
    }
    text = CARD.read_text(encoding="utf-8")
    for name, value in figures.items():
        text = text.replace("{" + name + "}", value)
    return text


def _row(device: str, one: dict[str, Any]) -> str:
    exact, loose = one["speculative"], one["parallel"]
    many, slowest = one["tried"]["measurements"], one["tried"]["slowest"]
    cells = [f"{exact['speedup']:.2f}x", f"{slowest:.2f}x ({many})", f"{exact['same_texts']:.0%}"]
    cells += [
        f"{loose['speedup']:.2f}x",
        _percent(loose["agreement"]),
        f"{loose['perplexity']:.2f} ({one['full_perplexity']:.2f})",
    ]
    return f"| {device} | {' | '.join(cells)} |"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
