"""How much of what SmolLM2 will say is known at each layer: the best linear reading of its states.

    python release/smollm2_readout.py --chats data/chats.jsonl --out smollm2_exit.json

For every layer a linear map from its states to the last layer's is fitted by least squares over replies of the model's own
(smollm2_chats.py), and read by the model's own norm and head on replies that were held out: how often the likeliest token is
the last layer's. No training has to be trusted for that, and it takes minutes on a CPU. An adapter that looks at other
tokens does better.

It tells where leaving can pay. Speculative decoding that drafts one token behind an exit takes 1 + s of a whole pass and
gives 1 + a tokens, where s is what a pass up to the exit costs and a how often its choice is the last layer's: it gains
where a is above s.

Shapes: T tokens of a reply, M hidden width, X = M + 1 with a constant, L layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from smollm2_chats import held_out_file
from smollm2_exit_measure import behind, reply_header
from torch import Tensor

from fathomlm.checkpoints.resolve import load
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM

RIDGE = 1e-3
"""Of the median of the diagonal: states have a few directions of great length."""


def replies(model: FathomForCausalLM, file: Path, count: int) -> Iterator[tuple[list[int], int]]:
    """Chats as tokens, and where the reply begins."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    header = reply_header(tokenizer)
    with file.open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, count):
            tokens = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
            yield tokens, behind(tokens, header)


def states(decoder: Decoder, tokens: list[int], begin: int) -> list[Tensor]:
    """Every layer's states in front of the reply's tokens, (T, X) each with a constant; the last one's (T, M)."""
    layers = decoder.plan.unrolled_layers
    device = decoder.embed.weight.device
    found = decoder.states(torch.tensor([tokens[:-1]], device=device), at=range(layers))
    wide = [found[i][0, begin - 1 :] for i in range(layers)]
    return [*(torch.cat((x_TM, x_TM.new_ones(len(x_TM), 1)), 1) for x_TM in wide[:-1]), wide[-1]]


@torch.inference_mode()
def readout(model: FathomForCausalLM, chats: Path, learn: int, ask: int) -> dict[str, Any]:
    decoder = model.decoder
    early = decoder.plan.unrolled_layers - 1
    inner: list[Any] = [0.0] * early
    outer: list[Any] = [0.0] * early
    tokens = 0
    for number, reply in enumerate(replies(model, chats, learn)):
        *rows, last_TM = states(decoder, *reply)
        tokens += len(last_TM)
        for i, x_TX in enumerate(rows):
            inner[i] = inner[i] + (x_TX.T @ x_TX).double()
            outer[i] = outer[i] + (x_TX.T @ last_TM).double()
        if number % 100 == 99:
            print(f"  {number + 1} replies, {tokens:,} tokens", flush=True)
    maps = []
    for inner_XX, outer_XM in zip(inner, outer, strict=True):
        ridge = RIDGE * inner_XX.diagonal().median()
        maps.append(torch.linalg.solve(inner_XX + ridge * torch.eye(len(inner_XX)).double(), outer_XM).float())
    agreed, nats, count = [0] * early, [0.0] * early, 0
    for reply in replies(model, held_out_file(chats), ask):
        *rows, last_TM = states(decoder, *reply)
        wanted_T = _scores(decoder, last_TM).argmax(-1)
        count += len(wanted_T)
        for i, (x_TX, map_XM) in enumerate(zip(rows, maps, strict=True)):
            scores_TV = _scores(decoder, x_TX @ map_XM)
            agreed[i] += int((scores_TV.argmax(-1) == wanted_T).sum())
            nats[i] += float(torch.nn.functional.cross_entropy(scores_TV, wanted_T, reduction="sum"))
    layers = {i + 1: {"agreement": agreed[i] / count, "loss_of_the_last_choice": nats[i] / count} for i in range(early)}
    return {"learnt_from": tokens, "asked": count, "ridge": RIDGE, "layers": layers}


def _scores(decoder: Decoder, state_TM: Tensor) -> Tensor:
    return decoder.logits(decoder.norm(state_TM.to(decoder.embed.weight.dtype))).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chats", type=Path, required=True, help="what `smollm2_chats.py make` wrote")
    add("--source", default="smollm2-135m")
    add("--learn", type=int, default=300, help="replies that the maps are fitted to")
    add("--ask", type=int, default=40, help="held-out replies")
    add("--out", type=Path, required=True, help="the record, added to where it is there")
    args = parser.parse_args()
    record = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    record["readout"] = readout(load(args.source, dtype="float32"), args.chats, args.learn, args.ask)
    args.out.write_text(json.dumps(record) + "\n")
    for layer, found in record["readout"]["layers"].items():
        print(f"layer {layer:2}: {found['agreement']:.1%}")


if __name__ == "__main__":
    main()
