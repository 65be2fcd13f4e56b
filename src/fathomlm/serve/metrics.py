"""Metrics for Prometheus, and the tally behind them.

The engine's own counts are read when they are scraped. Times are noted as tokens come: to the first token from the request's
arrival, waiting included, and from each token to the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fathomlm.engine.request import Request, Result, TokenEvent
from fathomlm.engine.status import EngineStatus
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.service import Service

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One server's. `observe` gets all tokens, `ended` every completion, `answered` every HTTP request."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        self._replica = service.replica
        self.depths: defaultdict[str, Tally[int]] = defaultdict(Tally)
        """Each model's tokens by how deep they were chosen, where that differs."""
        registry.register(_EngineCollector(service, self.depths))
        self._http = Counter("fathomlm_http_requests", "HTTP requests answered", ["path", "status"], registry=registry)
        self._ends = Counter("fathomlm_completions", "Completions that ended", ["reason"], registry=registry)
        self._read = Counter("fathomlm_prompt_tokens", "Tokens of prompts that came in", registry=registry)
        self._first = _histogram("time_to_first_token", "From a request's arrival to its first token", FIRST, registry)
        self._between = _TimeTally("fathomlm_inter_token_seconds", "From one token of a completion to the next", BETWEEN)
        registry.register(self._between)
        self._whole = _histogram("request", "From a request's arrival to the end of its completion", WHOLE, registry)

    def observe(self, model: str, request: Request, events: Sequence[TokenEvent], at: float, before: float | None) -> None:
        """Tokens of a completion came together; `before` is when the one before them did."""
        if before is None:
            self._first.observe(max(at - request.arrival, 0.0))
        else:
            self._between.add(max(at - before, 0.0))
        self._between.add(0.0, len(events) - 1)
        if events[0].depth is not None:
            self.depths[model].update(event.depth for event in events if event.depth is not None)

    def ended(self, result: Result, at: float) -> None:
        self._ends.labels(result.finish.reason).inc()
        self._whole.observe(max(at - result.arrival, 0.0))

    def accepted(self, prompt_tokens: int) -> None:
        self._read.inc(prompt_tokens)

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry if self._replica is None else _Labelled(self.registry, self._replica))


class _TimeTally(Collector):
    """A histogram that takes many equal times at once. The client library's takes one at a time, under a lock, which is as
    long as a token takes the engine; here one event loop adds and reads."""

    def __init__(self, name: str, what: str, buckets: tuple[float, ...]) -> None:
        self._name, self._what, self._buckets = name, what, buckets
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._buckets, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        yield HistogramMetricFamily(
            self._name, self._what, buckets=list(zip(bounds, accumulate(self._counts), strict=True)), sum_value=self._sum
        )


class _Labelled(CollectorRegistry):
    """Every sample with the replica that it is of: behind a proxy a scrape meets one replica now and another then."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        super().__init__()
        self._registry, self._replica = registry, replica

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [one._replace(labels=one.labels | {"replica": self._replica}) for one in metric.samples]
            yield metric


class _EngineCollector(Collector):
    """The engines' counts at this moment; nothing but `ready` while there is none. Where a server has several models, each
    sample has its model as a label."""

    def __init__(self, service: Service, depths: defaultdict[str, Tally[int]]) -> None:
        self._service, self._depths = service, depths

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("fathomlm_ready", "Whether requests are accepted", float(self._service.phase == "ready"))
        found: dict[str, Metric] = {}
        for served in self._service.loaded_models:
            label = {"model": served.name} if self._service.catalog.offers else {}
            for metric in self._of(served):
                samples = [one._replace(labels=one.labels | label) for one in metric.samples]
                metric.samples = []
                found.setdefault(metric.name, metric).samples += samples
        yield from found.values()

    def _of(self, served: ServedModel) -> Iterator[Metric]:
        status = served.engine.status()
        yield from _standing(status)
        yield from _pages(served, status)
        yield from self._depth(served, status)

    def _depth(self, served: ServedModel, status: EngineStatus) -> Iterator[Metric]:
        totals = status.totals
        depths = CounterMetricFamily("fathomlm_tokens_by_depth", "Tokens by the depth they were chosen at", labels=["depth"])
        for depth, count in sorted(self._depths[served.name].items()):
            depths.add_metric([str(depth)], count)
        yield depths
        yield CounterMetricFamily("fathomlm_exited_tokens", "Tokens that exited early", totals.exited)
        yield CounterMetricFamily("fathomlm_verified_drafts", "Drafts that the full model verified", totals.drafted)
        yield CounterMetricFamily("fathomlm_kept_drafts", "Drafts that it would have chosen too", totals.accepted)
        yield GaugeMetricFamily("fathomlm_mean_depth", "Mean depth of all tokens so far", mean_depth(status))
        yield GaugeMetricFamily("fathomlm_exit_rate", "Part of all tokens so far that exited early", exit_rate(status))


def _standing(status: EngineStatus) -> Iterator[Metric]:
    counters, totals = status.counters, status.totals
    yield GaugeMetricFamily("fathomlm_queued", "Requests that wait", counters.queued)
    yield GaugeMetricFamily("fathomlm_prefilling", "Requests whose prompt is being prefilled", counters.prefilling)
    yield GaugeMetricFamily("fathomlm_running", "Requests that generate tokens", counters.running)
    yield GaugeMetricFamily("fathomlm_tokens_per_second", "Over the last ten seconds", status.tokens_per_second)
    yield CounterMetricFamily("fathomlm_tokens", "Tokens that were generated", totals.tokens)
    yield CounterMetricFamily("fathomlm_prefill_tokens", "Prompt tokens that were prefilled", totals.prefill_tokens)
    yield CounterMetricFamily("fathomlm_cached_tokens", "Prompt tokens that the prefix cache had", counters.prefix_hits)
    yield CounterMetricFamily("fathomlm_decode_steps", "Decode steps of the engine", totals.decode_steps)
    yield CounterMetricFamily("fathomlm_engine_restarts", "Times that a failed engine was built again", status.restarts)
    yield CounterMetricFamily("fathomlm_preemptions", "Sequences preempted for want of memory", counters.preemptions)


def _pages(served: ServedModel, status: EngineStatus) -> Iterator[Metric]:
    counters = status.counters
    for name, what, counts in (
        ("used", "Pages of the KV cache in use, cached prefixes included", counters.pages_used),
        ("cached", "Pages that only cached prefixes hold", counters.pages_cached),
        ("total", "Pages there are", served.pool_pages),
    ):
        family = GaugeMetricFamily(f"fathomlm_kv_pages_{name}", what, labels=["pool"])
        for pool, count in enumerate(counts):
            family.add_metric([str(pool)], count)
        yield family


def mean_depth(status: EngineStatus) -> float:
    return status.totals.depths / status.totals.tokens if status.totals.tokens else 0.0


def exit_rate(status: EngineStatus) -> float:
    return status.totals.exited / status.totals.tokens if status.totals.tokens else 0.0


def _histogram(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"fathomlm_{name}_seconds", what, buckets=buckets, registry=registry)
