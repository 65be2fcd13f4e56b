"""Records of runs that were never made, with losses that a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fathomlm.lab.study.jobs import Job, Place, jobs_of
from fathomlm.lab.study.ledger import Ledger, Record
from fathomlm.lab.study.spec import Study


def record_of(job: Job, loss: float, **more: object) -> Record:
    run, shaped = job.run, job.shaped
    routing = shaped.parts.plan.routing
    routed = {} if routing is None else {"causal": loss, "mean_depth": 2.0, "sampling_accuracy": 0.9, "dead_tokens": 0.0}
    if routing is not None and routing.kind == "token":
        routed = {"causal": loss, "mean_depth": 2.0, "max_violation": 0.1 if routing.balancing == "loss" else 0.5}
    curve = [{"step": i, "tokens": job.tokens * i // 4, "loss": loss + 1 / i - 0.25} for i in (1, 2, 3, 4)]
    return {
        "study": run.study,
        "variant": run.variant.name,
        "budget": run.budget.name,
        "seed": run.seed,
        "fingerprint": job.fingerprint,
        "data": {"mark": "m", "tokens": 191_000_000, "vocab": 12288},
        "status": "finished",
        "tokens": job.tokens,
        "flops": job.flops,
        "parameters": shaped.cost.non_embedding_parameters,
        "recursions": shaped.parts.plan.recursions,
        "router": None if routing is None else routing.kind,
        "loss": loss,
        "final": {"next_token": loss - 0.001, **routed},
        "validation": curve,
        "tokens_per_s": 1e6,
        "environment": {"device": "NVIDIA H200"},
        "date": "2026-11-16T12:00:00+00:00",
        "commit": "0123456789abcdef",
        **more,
    }


def fill(study: Study, ledger: Ledger, loss: Callable[[Job], float | None]) -> None:
    """Finished runs for a whole study; where the loss is None a run was not made."""
    made = ((job, loss(job)) for job in jobs_of(study, Place(None, Path())))
    ledger.add(study.name, [record_of(job, value) for job, value in made if value is not None])
