"""`fathomlm demo [MODEL]`: a routed model's tokens by depth, or a plain model made recursive and the two side by side.

What `make demo` runs: the model that came with FathomLM, or where none did, SmolLM2-135M.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import SOURCE, JsonOptions, read_text
from fathomlm.cli.decoding import ReferenceOptions
from fathomlm.cli.display import log, output_console, progress_bar
from fathomlm.cli.first import check_model
from fathomlm.errors import OptionError
from fathomlm.options import option
from fathomlm.packaged import FETCHED, default_model
from fathomlm.sizes import amount

if TYPE_CHECKING:
    from fathomlm.model.hub import FathomForCausalLM

PROMPT = "Explain in two sentences why the sky is blue."
OUT = Path("demo")
MARK = "demo.json"
"""Beside the converted model: the sample of the one that it was made from (`BaseSample`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """One model's figures, each measured here except where its name says otherwise."""

    name: str
    layers: str
    parameters: int
    non_embedding_parameters: int
    disk_bytes: int
    disk_format: str
    bfloat16_bytes: int
    memory_bytes: int
    """Weights and KV cache as they were held while the text was made (float32)."""
    tokens: int
    tokens_per_second: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Demo(ReferenceOptions, JsonOptions):
    """A MODEL with a router completes some prompts, each token in the color of its depth, with how often each depth was
    used and the speed against full depth. Any other model has its layers tied into a block that runs twice, with a rank-64
    LoRA at each step, and the sizes, memory and speed of both models on this CPU are printed."""

    model: str = option(default_model, positional=True, help=SOURCE, first=check_model)
    out: Path | None = option(None, metavar="DIR", help="where the converted model goes", default_text=str(OUT))
    tokens: int = option(48, ge=1, help="tokens per prompt")

    def run(self) -> int:
        from fathomlm.checkpoints.resolve import architecture_of

        plan = architecture_of(self.model)[1]
        if plan is None or plan.routing is None:
            return _compare(self)
        if self.out is not None:
            raise OptionError(f"--out cannot be combined with a routed model: {self.model} is not converted")
        from fathomlm.cli.demo_routed import run_routed

        return run_routed(self.model, self.tokens, as_json=self.json, reference=self.reference)


def _compare(options: Demo) -> int:
    from fathomlm.checkpoints.locate import locate
    from fathomlm.checkpoints.resolve import decoder_only, load
    from fathomlm.cli.display import model_name

    begin = time.perf_counter()
    log(f"1/3  {'SmolLM2-135M-Instruct (Apache-2.0): fetched once' if options.model == FETCHED else options.model}")
    path = locate(options.model)
    log(f"     {path}")
    base = decoder_only(load(path, dtype="float32"), "the demo")
    small_dir = (options.out or OUT) / f"{model_name(options.model)}-cycle2-lora64"
    _make_recursive(base, small_dir)
    small = decoder_only(load(small_dir, dtype="float32"), "the demo")
    log(f"3/3  the same question to both, {options.tokens} tokens each, greedy")
    columns = [
        _measure(base, "original", path, _disk_format(path), options),
        _measure(small, "recursive", small_dir, "bfloat16", options),
    ]
    seconds = time.perf_counter() - begin
    if options.json:
        record = {"model": options.model, "out": str(small_dir), "seconds": seconds, "columns": [asdict(c) for c in columns]}
        print(json.dumps(record))
        return 0
    _show(options.model, columns, small_dir, seconds, chats=_chats(base))
    return 0


def _make_recursive(base: FathomForCausalLM, out: Path) -> None:
    """The base looped twice, unless an earlier demo left it there."""
    from fathomlm.checkpoints.base_sample import BaseSample
    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.native import save
    from fathomlm.checkpoints.writing import whole_file

    mark = json.dumps(BaseSample.of(base.decoder).to_dict())
    if (out / "config.json").is_file():
        if not (out / MARK).is_file() or read_text(out / MARK) != mark:
            raise OptionError(f"{out} was made from another model; delete it, or give another --out")
        log(f"2/3  {out} is there already (delete it to convert again)")
        return
    layers = base.architecture.layers
    tied = f"tying {layers} layers into {-(-layers // 2)} that run twice"
    log(f"2/3  {tied}; what tying takes away is put into rank-64 LoRA by SVD")
    with progress_bar("     converting") as update:
        small = convert(
            base, sharing="cycle", recursions=2, resize="add", init="average", relax="lora", rank=64, dtype="bfloat16",
            on_layer=update,
        )  # fmt: skip
    save(small, out)
    with whole_file(out / MARK) as temporary:
        temporary.write_text(mark, encoding="utf-8")


def _measure(model: FathomForCausalLM, name: str, path: Path, disk_format: str, options: Demo) -> ModelFigures:
    from fathomlm.checkpoints.native import directory_bytes, weight_bytes
    from fathomlm.checkpoints.resolve import describe
    from fathomlm.decode.prompts import chat_prompt, encode_prompt
    from fathomlm.decode.sampling import Sampling
    from fathomlm.depth.cost import count
    from fathomlm.engine.session import decoder_for

    question = [{"role": "user", "content": PROMPT}]
    prompt = chat_prompt(model, question) if _chats(model) else encode_prompt(model, PROMPT)
    decode, tokens = decoder_for(model, reference=options.reference), options.tokens
    decode([prompt], Sampling(max_new_tokens=2, ignore_eos=True))  # the first pass pays for allocations
    with progress_bar(f"     {name}", "tokens") as update:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        (result,) = decode([prompt], sampling, on_step=lambda done: update(done, tokens))
    cost = count(model.architecture, model.plan, relaxation=model.relaxation, kv_element_bytes=4)
    held = len(prompt) + len(result.tokens)
    return ModelFigures(
        name=name,
        layers=describe(model),
        parameters=cost.parameters,
        non_embedding_parameters=cost.non_embedding_parameters,
        disk_bytes=directory_bytes(path),
        disk_format=disk_format,
        bfloat16_bytes=2 * cost.parameters,
        memory_bytes=weight_bytes(model) + held * cost.kv_bytes_per_token,
        tokens=len(result.tokens),
        tokens_per_second=result.tokens_per_second,
        text=result.text.strip(),
    )


def _chats(model: FathomForCausalLM) -> bool:
    return model.tokenizer is not None and model.tokenizer.chat_template is not None


def _disk_format(path: Path) -> str:
    if path.is_dir():
        return "as stored"
    return "4-bit GGUF" if ".Q4_" in path.name else "GGUF"


def _show(model: str, columns: list[ModelFigures], out: Path, seconds: float, *, chats: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from fathomlm.cli.display import command_note

    table = Table(title=Text(f"{model}, original and recursive"), title_justify="left", show_lines=False)
    table.add_column("")
    for column in columns:
        table.add_column(column.name, overflow="fold", max_width=48)
    rows: list[tuple[str, Any]] = [
        ("layers", lambda c: c.layers),
        ("parameters", lambda c: amount(c.parameters)),
        ("without embeddings", lambda c: amount(c.non_embedding_parameters)),
        ("size on disk", lambda c: f"{amount(c.disk_bytes, 'B')} ({c.disk_format})"),
        ("size in bfloat16", lambda c: amount(c.bfloat16_bytes, "B")),
        ("memory while running (float32)", lambda c: amount(c.memory_bytes, "B")),
        ("tokens generated", lambda c: str(c.tokens)),
        ("tokens/s, batch size 1, this CPU", lambda c: f"{c.tokens_per_second:.1f}"),
        ("text", lambda c: c.text),
    ]
    for label, value in rows:
        table.add_row(label, *(Text(value(column)) for column in columns))
    output_console().print(table)
    print(
        "The recursive model has not been trained yet: tying is a starting point, and its text shows it. At full rank it\n"
        "would compute what the original computes; at rank 64 it needs uptraining (fathomlm train --list).\n"
        "A loop runs as many steps as before: at batch size 1 it is not faster, LoRA even adds work. The weights shrink.\n"
        f"\n{seconds:.0f} s in all. Try next:\n"
        + (f"  fathomlm chat {model}\n" if chats else "")
        + f"  fathomlm generate {out} -p 'The capital of France is' --stream\n"
        f"  fathomlm inspect {model} --sharing middle-cycle --recursions 3 --resize --router expert\n"
        f"  fathomlm convert {model} my-model --sharing middle-cycle --recursions 2 --relax lora --rank 128\n"
        f"  fathomlm export {out} plain-model      # a plain Hugging Face checkpoint" + command_note()
    )
