"""`fathomlm eval ppl MODEL --data FILE`: how well a model predicts text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fathomlm.cli.common import ModelOptions, TextOptions, read_documents
from fathomlm.cli.decoding import lift_exit_vocab
from fathomlm.cli.progress import progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_common import BatchOptions, EvaluatedOutputOptions, about, number, print_record
from fathomlm.lab.tables import print_table
from fathomlm.options import option, section


@dataclass(frozen=True, kw_only=True)
class Perplexity(BatchOptions, TextOptions, ModelOptions):
    """Run text through MODEL in windows and report how well it is predicted: nats per token, perplexity, and bits per byte,
    which can be compared between tokenizers. A text file is one document, each row of JSON Lines another; a document begins
    with the model's begin-of-sequence token."""

    join: bool = option(False, help="join all documents with blank lines, as is usual for WikiText")
    context: int | None = option(None, ge=1, help="tokens per window", default_text="the model's context")
    stride: int | None = option(
        None, ge=1, help="new tokens per window; fewer give each more context and take longer", default_text="all that fit"
    )
    exit_options: EvaluatedOutputOptions = section(EvaluatedOutputOptions, "outputs")

    def run(self) -> int:
        documents = read_documents(self.data, self.column, self.limit, empty=True)
        outputs = self.exit_options.outputs(self.model)

        from fathomlm.lab.evaluate.encoding import TextEncoder
        from fathomlm.lab.evaluate.scoring import Scorer, predict

        model = self.load(exits=self.exit_options.exits, any_base=self.exit_options.any_base)
        lift_exit_vocab(model)
        if self.context is not None and self.context > model.architecture.context:
            raise OptionError(f"--context must be <= the model's {model.architecture.context:,} tokens, got {self.context}")
        begun = time.perf_counter()
        scorer = Scorer(model, outputs, batch=self.batch_size, max_length=self.context)
        with progress_bar("predicting", unit="windows") as update:
            found = predict(scorer, TextEncoder(model), documents, stride=self.stride, join=self.join, on_done=update)
        record: dict[str, Any] = about(self, "ppl", model, self.exit_options.exits) | {
            "data": list(self.data),
            "context": scorer.max_length,
            "stride": self.stride or scorer.max_length,
            "outputs": [output.record() | each.record() for output, each in zip(outputs, found, strict=True)],
            "seconds": time.perf_counter() - begun,
        }
        if self.json:
            print_record(record)
            return 0
        rows = [["output", "tokens", "nats per token", "perplexity", "bits per byte"]]
        rows += [
            [each["output"], f"{each['tokens']:,}"]
            + [number(each[name]) for name in ("nats_per_token", "perplexity", "bits_per_byte")]
            for each in record["outputs"]
        ]
        print_table(rows)
        return 0
