"""Looped models in stock llama.cpp: a tied GGUF file against its unrolled twin and against our own decoder.

    python benchmarks/gguf_tied.py --llama-perplexity PATH --text FILE --out gguf_tied.json

SmolLM2-135M is tied 15 x 2 and exported tied and unrolled. llama.cpp's `llama-perplexity` reads each over the same text;
our decoder scores the same tokens of the same file in the same windows (the second half of each, as that tool does). The
model is tied and not uptrained, so its perplexity is a check of the format and says nothing of quality.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import fathomlm

WINDOW, CHUNKS = 512, 4


def read_by_llama_cpp(binary: Path, file: Path, text: Path) -> float:
    command = [str(binary), "-m", str(file), "-f", str(text), "-c", str(WINDOW), "--chunks", str(CHUNKS)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
    assert found is not None, said[-2000:]
    return float(found[1])


@torch.inference_mode()
def read_by_us(file: Path, text: Path) -> float:
    """llama-perplexity's figure: windows in a row, each scored in its second half. This tokenizer puts no token in front."""
    model = fathomlm.load(file)
    tokens = model.tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    total, many = 0.0, 0
    for chunk in range(CHUNKS):
        window = tokens[chunk * WINDOW : (chunk + 1) * WINDOW]
        losses = -model(window[None]).logits[0].log_softmax(-1)[:-1].gather(1, window[1:, None])[:, 0]
        total += float(losses[WINDOW // 2 :].double().sum())
        many += len(losses[WINDOW // 2 :])
    return float(torch.tensor(total / many).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a text of some thousand tokens")
    parser.add_argument("--kinds", nargs="+", default=["f32", "q8_0", "q4_1"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = fathomlm.load("smollm2-135m")
    models = {"tied 15 x 2": fathomlm.convert(model, recursions=2), "plain": model}
    record: dict[str, Any] = {
        "what": "SmolLM2-135M-Instruct, tied 15 x 2 without uptraining (to check the format, not quality), and as it is",
        "text": args.text.name,
        "window": WINDOW,
        "chunks": CHUNKS,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "llama_cpp": subprocess.run(
            [str(args.llama_perplexity), "--version"], capture_output=True, text=True, check=False
        ).stderr.strip(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as place:
        for name, one in models.items():
            for kind in args.kinds:
                for unroll in (False, True) if one.plan.recursions > 1 else (False,):
                    file = Path(place) / "model.gguf"
                    written = fathomlm.export_gguf(one, file, kind, unroll=unroll)
                    found = {
                        "model": name,
                        "weights": kind,
                        "architecture": written.architecture,
                        "layers": written.layers,
                        "loops": written.loops,
                        "bytes": file.stat().st_size,
                        "perplexity_llama_cpp": read_by_llama_cpp(args.llama_perplexity, file, args.text),
                        "perplexity_ours": read_by_us(file, args.text),
                    }
                    record["runs"].append(found)
                    print(json.dumps(found))
                    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
