"""Models to measure: with random weights of any shape and plan, and what they are compared with, a plain one of the same
depth and transformers'.

The last is the same weights in transformers' own model, run by its continuous batching or its `generate`.

Its times come from its own clock, which is `time.perf_counter` as ours, a request's from when it was handed in: what it
prepares before that (captured graphs, the cache) is left out of its figures, as warming up is left out of ours.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.families import family_for, hf_name
from fathomlm.checkpoints.planned import routed_plan
from fathomlm.checkpoints.resolve import architecture_of, decoder_only, parse_device, parse_dtype, quantize_model
from fathomlm.cli.common import DeviceOptions
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.relaxation import check_fits
from fathomlm.errors import OptionError, UnsupportedModel
from fathomlm.lab.bench.options import PlannedModelOptions
from fathomlm.lab.bench.play import RequestTimes, WorkloadRun
from fathomlm.lab.bench.workload import Workload
from fathomlm.model.hub import FathomConfig, FathomForCausalLM


def engine_device(text: str) -> torch.device:
    """The engine's kernels and their twins are for CUDA and the CPU."""

    device = parse_device(text)
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"the engine runs on cpu, cuda or cuda:N, not on '{text}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no '{text}': this machine's {torch.cuda.device_count()} GPUs are counted from cuda:0")
    return device


def planned_shape(options: PlannedModelOptions, model: str) -> tuple[Architecture, DepthPlan, Relaxation | None]:
    """The model's shape and the plan that the options lay over it, without weights."""
    architecture, plan, relaxation = architecture_of(model)
    if architecture.cross:
        raise OptionError(f"bench takes decoder-only models; this is an encoder-decoder ({architecture.family})")
    if options.plan.planned:
        architecture, plan = options.plan.over(architecture, plan)
        relaxation = None
    plan = DepthPlan.vanilla(architecture.layers) if plan is None else plan
    relaxation = options.relaxation.build_relaxation(architecture.linears()) or relaxation
    check_fits(relaxation, plan)
    return architecture, routed_plan(plan, options.routing.routing, options.routing.kv), relaxation


def load_planned(options: PlannedModelOptions, model: str) -> FathomForCausalLM:
    if not options.replanned:
        return decoder_only(options.load_source(model), "this benchmark")
    fields = (
        asdict(options.plan) | asdict(options.relaxation) | {"router": options.routing.routing, "kv": options.routing.kv}
    )
    found = convert(model, dtype=options.dtype, device=options.device, seed=options.seed, **fields)
    if (kind := options.quantized(model)) is not None:
        quantize_model(found, kind)
    return decoder_only(found, "this benchmark")


def dummy_dtype(options: DeviceOptions, device: torch.device) -> torch.dtype:
    """Of random weights: what was asked for, or what a GPU is made for."""
    return parse_dtype(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))  # type: ignore[return-value]


def random_model(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> FathomForCausalLM:
    """A model that was never trained. Time does not depend on weights, but for what they decide: where depth is to be a
    trained model's, force it."""
    with torch.device("meta"):
        model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation, dtype=dtype))
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(seed)  # what has no generator of its own draws from torch's
    model.decoder.reset_parameters(generator=torch.Generator(device).manual_seed(seed))
    ready: FathomForCausalLM = model.eval().requires_grad_(False)
    return ready


def plain_model(model: FathomForCausalLM, seed: int = 0) -> FathomForCausalLM:
    """The plain Transformer that is as deep as `model` unrolled, with random weights. That is also the thesis' rule: a
    model to which layers were added is compared with a base that has them too (its appendix on throughput)."""
    architecture = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    weight = model.decoder.embed.weight
    plan = DepthPlan.vanilla(architecture.layers)
    return random_model(architecture, plan, dtype=weight.dtype, device=weight.device, seed=seed)


def with_context(architecture: Architecture, tokens: int) -> Architecture:
    """Long enough for sequences of so many tokens. Random weights were trained for no length."""
    return architecture if architecture.context >= tokens else dataclasses.replace(architecture, context=tokens)


PAGE = 256
"""Tokens of a page in its cache, by its own default."""
REQUESTS, NEW = 64, 128
"""What it gets at most: it is slow, and this is enough for its figure."""


def hugging_face_model(model: FathomForCausalLM) -> Any:
    """transformers' model over the same weights, unrolled; nothing is copied. Exits have no place in it."""
    reason = _why_not(model)
    if reason is not None:
        raise UnsupportedModel(reason)
    a = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    family, weight = family_for(a), model.decoder.embed.weight
    config = AutoConfig.for_model(family.model_type, **family.write(a))
    with weight.device:
        made = AutoModelForCausalLM.from_config(config, dtype=weight.dtype)
    missing, unknown = made.load_state_dict(_tensors(model), strict=False, assign=True)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing
    made.tie_weights()
    return made.eval().requires_grad_(False)


def _why_not(model: FathomForCausalLM) -> str | None:
    plan = model.plan
    if plan.routing is not None:
        return "transformers does not support routers"
    if plan.kv != "cache":
        return "transformers does not support a shared KV cache"
    if model.relaxation is not None:
        return f"transformers does not support a {model.relaxation.kind} relaxation"
    if model.architecture.family == "neox":
        return "transformers' GPT-NeoX keeps queries, keys and values in one matrix, so weights cannot be shared with it"
    return None


def _tensors(model: FathomForCausalLM) -> dict[str, Tensor]:
    """Under transformers' names; a looped layer has a name for each time it runs."""
    family, decoder = family_for(model.architecture), model.decoder
    named = {"embed.weight": decoder.embed.weight}
    named |= {f"norm.{name}": tensor for name, tensor in decoder.norm.named_parameters()}
    if decoder.head is not None:
        named["head.weight"] = decoder.head.weight
    for step in model.plan:
        layer = decoder.layers[step.layer]
        for name in model.architecture.layer_shapes():
            named[f"layers.{step.index}.{name}"] = layer.get_parameter(name)
    return {hf_name(family, name): tensor.detach() for name, tensor in named.items()}


def batched(
    model: Any, workload: Workload, batch_size: int, *, keep: bool = False, **settings: Any
) -> WorkloadRun:  # fmt: skip
    """Continuous batching with at most `batch_size` requests at a time, all of one length and handed in at once. `settings`
    are fields of its config. With `keep` the model keeps what it has captured for a next call with the same settings, until
    `destroy_cached_continuous_batching_manager`."""
    prompts = [list(request.prompt) for request in workload.requests]
    fields: dict[str, Any] = {"max_requests_per_batch": batch_size}
    if model.device.type != "cuda":  # it would take nearly all memory there is, and a minute to fill it
        fields |= {"num_blocks": batch_size * -(-workload.longest // PAGE) + 1, "max_batch_tokens": max(PAGE, batch_size)}
    (new,) = {request.new for request in workload.requests}
    with _quiet():
        found: Mapping[str, Any] = model.generate_batch(
            prompts,
            generation_config=_greedy(new),
            continuous_batching_config=ContinuousBatchingConfig(**(fields | settings)),
            record_timestamps=True,
            persistent_manager=keep,
        )
    outputs = list(found.values())
    if len(outputs) < len(prompts):
        raise UnsupportedModel(f"transformers answered {len(outputs)} of {len(prompts)} requests; its log says why")
    requests = []
    for request, output in zip(workload.requests, outputs, strict=True):
        requests.append(RequestTimes(len(request.prompt), output.created_time, list(output.timestamps), reason="length"))
        if output.error is not None:
            requests[-1].reason, requests[-1].error = "error", str(output.error)
    played = WorkloadRun(begun=min(one.arrival for one in requests), requests=requests)
    played.ended = played.last
    return played


class _Moments:
    """A streamer that notes when each token came. The first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


@torch.inference_mode()
def one_by_one(model: Any, workload: Workload) -> WorkloadRun:
    """`generate`, one prompt after the other, after a first time to warm up."""
    played = WorkloadRun(begun=0.0)
    with _quiet():
        for number, request in enumerate((workload.requests[0], *workload.requests)):
            prompt = torch.tensor([request.prompt], device=model.device)
            moments, arrival = _Moments(), time.perf_counter()
            if number == 1:
                played.begun = arrival
            greedy = _greedy(request.new)
            model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy, streamer=moments)
            if number:
                played.requests.append(RequestTimes(len(request.prompt), arrival, moments.times, reason="length"))
    played.ended = played.last
    return played


def _greedy(new: int) -> GenerationConfig:
    """No token ends a sequence: each gets the length that was requested."""
    return GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Its remarks about settings are not for the reader of a table."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
