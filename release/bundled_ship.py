"""From a finished run to what the package holds: int8 files, the tokenizer in few bytes, a card and a record.

    python release/bundled_mor.py ship bundled_mor.json --work runs --out src/fathomlm/packaged/models/fathom-mor-23m

The card is bundled_card.md with this run's figures in it. The record's losses are of the stored int8 weights, since those
are what a user gets: on the validation split as `measure` found them, and on the held-out text of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bundled_measure import SHARD_BYTES

CARD = Path(__file__).parent / "bundled_card.md"
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
}
"""Nothing of the machine and the versions that trained it."""


def ship(run: Path, found: dict[str, Any], data: dict[str, Any], held_out: Path, out: Path) -> dict[str, Any]:
    """Writes the directory; `found` is what `measure` says of the run, `data` what `prepare` says of its text."""
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.resolve import load

    save(load(run / "last", dtype="float32"), out, force=out.exists(), quantize="int8", shard_bytes=SHARD_BYTES)
    _write_tokenizer(out)
    (out / "generation_config.json").unlink()  # it says nothing that config.json does not
    record = {
        "recipe": "bundled-mor",
        "seed": found["seed"],
        "tokens_seen": found["training"][-1]["tokens"],
        "rows": found["validation"]["rows"],
        "causal_loss": round(found["int8"]["causal"], 4),
        "top_k_loss": round(found["int8"]["top_k"], 4),
        "float32_causal_loss": round(found["validation"]["causal"], 4),
        "held_out_loss": round(_loss_on(out, held_out.read_text(encoding="utf-8")), 4),
    }
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_card(record, found, data), encoding="utf-8")
    return record


def _write_tokenizer(out: Path) -> None:
    file = out / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(whole, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=1) + "\n", encoding="utf-8")


def _loss_on(model: Path, text: str) -> float:
    """Nats a token, as `fathomlm eval ppl` says."""
    from fathomlm.checkpoints.resolve import load
    from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder, predict

    loaded = load(model)
    (found,) = predict(Scorer(loaded), TextEncoder(loaded), [text])
    return found.nats_per_token


def _card(record: dict[str, Any], found: dict[str, Any], data: dict[str, Any]) -> str:
    classes = sorted(found["depth"]["classes"].items(), key=lambda one: -one[1]["mean_depth"])
    figures = {
        "seen": f"{record['tokens_seen'] / 1e6:,.0f}M",
        "own": f"{data['tokens']['train'] / 1e6:,.0f}M",
        "epochs": f"{record['tokens_seen'] / data['tokens']['train']:.1f}",
        "rows": str(record["rows"]),
        "causal": f"{record['causal_loss']:.4f}",
        "top_k": f"{record['top_k_loss']:.4f}",
        "float32": f"{record['float32_causal_loss']:.4f}",
        "held_out": f"{record['held_out_loss']:.4f}",
        "depths": "\n".join(
            f"| {name} | {one['mean_depth']:.2f} | {one['loss']:.2f} | {one['loss_at_depth_1']:.2f} |"
            for name, one in classes
        ),
    }
    text = CARD.read_text(encoding="utf-8")
    for name, value in figures.items():
        text = text.replace("{" + name + "}", value)
    return text
