"""A FathomLM model for lm-evaluation-harness: a thin shell around `scoring.py`.

    python -m fathomlm.lab.evaluate --model fathomlm --model_args pretrained=PATH,exit_layer=6 --tasks hellaswag

`lm_eval` itself finds it by the entry point `lm_eval.models` where it looks at those (its plugin guide; 0.4.13 does not).
Importing this file needs lm-eval; nothing else here does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from fathomlm.checkpoints.confined import Refused, render_chat
from fathomlm.checkpoints.resolve import decoder_only, load
from fathomlm.decode.full import generate
from fathomlm.decode.prompts import encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices
from fathomlm.lab.common import OnProgress
from fathomlm.lab.evaluate.generation import cut_prompt
from fathomlm.lab.evaluate.outputs import FULL, Output, depth_outputs, exit_outputs
from fathomlm.lab.evaluate.scoring import DEFAULT_BATCH, Score, Scorer, TextEncoder, TextPair, windows
from fathomlm.model.hub import FathomForCausalLM

log = logging.getLogger("lm_eval.fathomlm")
MOST_TOKENS = 256
"""New tokens where a task says nothing, as for lm-eval's own models."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names that the most new tokens go by; the first that is there counts."""
SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("fathomlm")
class HarnessModel(LM):  # type: ignore[misc]
    """Answers requests at one output at a time. Where several are asked for, one pass answers for all of them, and what
    the others said is kept until `at` moves to them."""

    def __init__(
        self,
        pretrained: str | Path | FathomForCausalLM,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        exit_layer: int | None = None,
        max_depth: int | None = None,
        outputs: Sequence[Output] | None = None,
        on_done: OnProgress | None = None,
    ) -> None:
        """`pretrained` is anything that `fathomlm generate` takes as a model; `exit_layer` leaves after a layer, counted
        from 1, and `max_depth` runs at most so many recursions. `outputs` and `on_done` are for Python."""
        super().__init__()
        model = pretrained if isinstance(pretrained, FathomForCausalLM) else _load(pretrained, dtype, device)
        chosen = (read_output(model.plan, exit_layer, max_depth),) if outputs is None else tuple(outputs)
        self.scorer = Scorer(model, chosen, batch=read_batch(batch_size, max_batch_size), max_length=max_length)
        self.encoder = TextEncoder(model)
        self.inputs = False
        """Whether any request came: what fails before, failed while tasks were loaded."""
        self.at = 0
        """Which of the outputs answers."""
        self._on_done = on_done
        self._device = model.decoder.embed.weight.device
        self._pairs: dict[TextPair, tuple[Score, ...]] = {}
        self._texts: dict[str, tuple[float, ...]] = {}

    @property
    def model(self) -> FathomForCausalLM:
        return self.scorer.model

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def batch_size(self) -> int:
        return self.scorer.batch

    @property
    def eot_token_id(self) -> int | None:
        token: int | None = self.tokenizer.eos_token_id
        return token

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            return render_chat(
                self.tokenizer,
                chat_history,
                add_generation_prompt=add_generation_prompt,
                continue_last=not add_generation_prompt,
            )
        except Refused as error:
            raise OptionError(f"the model's chat template refused the conversation: {error}") from error

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation): its log-likelihood, and whether a greedy choice would give it."""
        self.inputs = True
        inputs = [(context, continuation) for context, continuation in (request.args for request in requests)]
        if new := [pair for pair in dict.fromkeys(inputs) if pair not in self._pairs]:
            with self._watched("loglikelihood", disable_tqdm) as update:
                found = self.scorer.score(self.encoder.pairs(new), update)
            self._pairs |= dict(zip(new, zip(*found, strict=True), strict=True))
        scores = [self._pairs[pair][self.at] for pair in inputs]
        answers = [(score.log_likelihood, score.greedy) for score in scores]
        for pair, answer in zip(inputs, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text, in windows as long as the context."""
        self.inputs = True
        inputs = [text for (text,) in (request.args for request in requests)]
        if new := [text for text in dict.fromkeys(inputs) if text not in self._texts]:
            self._score_texts(new, disable_tqdm)
        answers = [self._texts[text][self.at] for text in inputs]
        for text, answer in zip(inputs, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Of each (context, options): what follows, to a stop string or the most tokens."""
        self.inputs = True
        inputs = [(context, options) for context, options in (request.args for request in requests)]
        alike: dict[Sampling, list[int]] = {}
        for number, (_, options) in enumerate(inputs):
            alike.setdefault(read_sampling(options), []).append(number)
        answers = [""] * len(inputs)
        done = 0
        with self._watched("generate_until", disable_tqdm) as update:
            for sampling, numbers in alike.items():
                for number, text in self._generate([(number, inputs[number][0]) for number in numbers], sampling):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", inputs[number], text)
                    done += 1
                    update(done, len(inputs))
        return answers

    def _generate(self, contexts: Sequence[tuple[int, str]], sampling: Sampling) -> Iterator[tuple[int, str]]:
        """Each context's number and what follows it, longest first, in batches."""
        output, room = self.scorer.outputs[self.at], self.max_length - sampling.max_new_tokens
        if room < 1:
            raise OptionError(
                f"{sampling.max_new_tokens} new tokens leave no room for a prompt in a context of {self.max_length}"
            )
        prompts = {number: cut_prompt(self.model, encode_prompt(self.model, text), room) for number, text in contexts}
        order = sorted(prompts, key=lambda number: len(prompts[number]), reverse=True)
        how: dict[str, Any] = {"control": output.control, "exiting": output.exiting, "max_context": self.max_length}
        for at in range(0, len(order), self.batch_size):
            group = order[at : at + self.batch_size]
            rows = generate(self.model, [prompts[number] for number in group], sampling, **how)
            yield from ((number, row.text) for number, row in zip(group, rows, strict=True))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        from fathomlm import __version__
        from fathomlm.checkpoints.resolve import describe, dtype_name

        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": dtype_name(self.model),
            "model_plan": describe(self.model),
            "model_output": self.scorer.outputs[self.at].name,
            "fathomlm_version": __version__,
        }

    def _score_texts(self, texts: Sequence[str], disable_tqdm: bool) -> None:
        prefix = self.encoder.prefix
        parts = [windows(tokens, prefix=prefix, length=self.max_length) for tokens in self.encoder.encode(texts)]
        with self._watched("loglikelihood_rolling", disable_tqdm) as update:
            found = self.scorer.score([pair for part in parts for pair in part], update)
        for text, part in zip(texts, parts, strict=True):
            mine = [scores[: len(part)] for scores in found]
            found = [scores[len(part) :] for scores in found]
            self._texts[text] = tuple(sum(score.log_likelihood for score in scores) for scores in mine)

    @contextmanager
    def _watched(self, what: str, disable_tqdm: bool) -> Iterator[OnProgress]:
        """Progress for whoever wants to see it: our command's own bar, else the kind that lm-eval shows."""
        if self._on_done is not None:
            yield self._on_done
            return
        with tqdm(desc=f"fathomlm {what}", disable=disable_tqdm) as bar:

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield update


def _load(source: str | Path, dtype: str | None, device: str | None) -> FathomForCausalLM:
    """lm-eval asks for cuda:0 where nobody chose a device, and every model of its own then takes what there is."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        log.warning("no CUDA device is here; fathomlm computes on the processor")
        place = "cpu"
    kind = None if dtype in (None, "auto") else dtype
    return decoder_only(load(source, kind, place), "lm-evaluation-harness")


def read_output(plan: DepthPlan, exit_layer: int | None, max_depth: int | None) -> Output:
    """Where a model is read, from `exit_layer=` or `max_depth=` in its arguments."""
    if exit_layer is not None and max_depth is not None:
        raise OptionError("exit_layer and max_depth cannot be combined")
    if exit_layer is not None:
        return exit_outputs(plan, str(exit_layer))[0]
    return FULL if max_depth is None else depth_outputs(plan, max_depth)[0]


def read_batch(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """A number of rows; `auto` is ours to choose."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return DEFAULT_BATCH if max_batch_size is None else min(DEFAULT_BATCH, int(max_batch_size))
    if not str(batch_size).isdecimal():
        raise OptionError(f"batch_size must be an integer or auto, got '{batch_size}'")
    return int(batch_size)


def read_sampling(options: Mapping[str, Any]) -> Sampling:
    """How a task wants tokens chosen."""
    rest = {name: value for name, value in options.items() if value is not None}
    until = rest.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    lengths = [rest.pop(name, None) for name in LENGTHS]
    most = next((length for length in lengths if length is not None), MOST_TOKENS)
    temperature = float(rest.pop("temperature", 0.0))
    if not rest.pop("do_sample", temperature > 0):
        temperature = 0.0
    elif temperature == 0:
        temperature = 1.0
    if rest.get("num_beams") == 1:
        del rest["num_beams"]
    for name in rest:
        if name not in SAMPLED:
            known = (*LENGTHS, *SAMPLED, "until", "temperature", "do_sample")
            raise OptionError(f"unsupported generation options: {choices('option', name, known)}")
    stop = tuple(text for text in until if text)
    return Sampling(max_new_tokens=int(most), temperature=temperature, stop=stop, **rest)
