"""`fathomlm convert`: a plain model in, a (relaxed) recursive one out."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.tying import INITS, NORM_INITS, RELAX_INITS
from fathomlm.cli.first import check_device, check_model
from fathomlm.cli.model_options import SOURCE, DtypeOptions, ForceOptions, JsonOptions, SeedOptions
from fathomlm.cli.plan_options import PlanOptions, RelaxOptions, RouterOptions
from fathomlm.cli.progress import progress_bar
from fathomlm.options import option, section
from fathomlm.sizes import amount


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Where tied layers and what steps add start from."""

    init: str | None = option(
        None, choices=INITS, help="of tied layers", default_text="average with lora and dora, stepwise otherwise"
    )
    norm_init: str | None = option(None, choices=NORM_INITS, help="of norms with --init average", default_text="average")
    relax_init: str | None = option(
        None, choices=RELAX_INITS, help="lora, dora: towards the original weights, or zero", default_text="svd"
    )


@dataclass(frozen=True, kw_only=True)
class Convert(ForceOptions, DtypeOptions, SeedOptions, JsonOptions):
    """Tie the layers of MODEL into one block that runs several times, optionally with a relaxation at each step (--relax),
    and write the result to OUT. The result needs uptraining; at full LoRA rank it computes what MODEL computes. With
    --router, tokens choose their own depth; a model that is recursive already keeps its weights and gets a router."""

    model: str = option(positional=True, help=SOURCE, first=check_model)
    out: Path = option(positional=True, help="directory to write")
    device: str = option("cpu", metavar="DEVICE", help="device of the result: cpu, cuda or cuda:N", first=check_device)
    plan: PlanOptions = section(PlanOptions, "depth plan")
    inits: InitOptions = section(InitOptions, "initialization")
    relaxation: RelaxOptions = section(RelaxOptions, "relaxation")
    routing: RouterOptions = section(RouterOptions, "routing")

    def run(self) -> int:
        from fathomlm.checkpoints.writing import check_target

        check_target(self.out, self.force)

        from fathomlm.checkpoints.convert import convert
        from fathomlm.checkpoints.native import directory_bytes, save
        from fathomlm.checkpoints.resolve import describe, dtype_name
        from fathomlm.depth import DepthPlan
        from fathomlm.depth.cost import count

        begin = time.perf_counter()
        fields: dict[str, Any] = asdict(self.plan) | asdict(self.inits) | asdict(self.relaxation)
        fields |= {"router": self.routing.routing, "kv": self.routing.kv}
        with progress_bar("converting") as update:
            model = convert(self.model, dtype=self.dtype, device=self.device, seed=self.seed, on_layer=update, **fields)
        save(model, self.out, self.force)
        seconds = time.perf_counter() - begin

        after = count(model.architecture, model.plan, relaxation=model.relaxation)
        before = count(model.architecture, DepthPlan.vanilla(model.plan.base_layers))
        size = directory_bytes(self.out)
        if self.json:
            record = {
                "model": self.model,
                "out": str(self.out),
                "plan": model.plan.to_dict(),
                "layout": model.plan.layout,
                "router": None if model.plan.routing is None else model.plan.routing.kind,
                "relaxation": None if model.relaxation is None else model.relaxation.to_dict(),
                "dtype": dtype_name(model),
                "seed": self.seed,
                "non_embedding_parameters": after.non_embedding_parameters,
                "base_non_embedding_parameters": before.non_embedding_parameters,
                "embedding_parameters": after.embedding_parameters,
                "bytes": size,
                "seconds": round(seconds, 3),
            }
            print(json.dumps(record))
            return 0
        share = after.non_embedding_parameters / before.non_embedding_parameters
        print(f"{self.out}: {describe(model)}, from {before.unrolled_layers} layers")
        print(
            f"  {amount(after.non_embedding_parameters)} parameters without embeddings "
            f"({share:.0%} of {amount(before.non_embedding_parameters)}), {amount(size, 'B')} on disk, {seconds:.1f} s"
        )
        if model.plan.recursions > 1:
            print("  tied weights are a starting point: uptrain the model before you judge its output")
        return 0
