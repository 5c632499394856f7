"""Prometheus metrics, under vLLM's names with ``hal:`` in front."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_COUNTED = ("preemptions", "steps", "host_seconds", "step_seconds", "wait_seconds", "drafted", "accepted")
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        names, label = ("model_name",), {"model_name": model}
        self._label = label

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(name, about, names, registry=registry).labels(**label)

        def counter(name: str, about: str) -> Counter:
            return Counter(name, about, names, registry=registry).labels(**label)

        def histogram(name: str, about: str, buckets: tuple[float, ...] = SHORT) -> Histogram:
            return Histogram(name, about, names, buckets=buckets, registry=registry).labels(**label)

        self.running = gauge("hal:num_requests_running", "Requests in slots.")
        self.waiting = gauge("hal:num_requests_waiting", "Requests that wait for a slot.")
        self.cache = gauge("hal:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.")
        self.preemptions = counter("hal:num_preemptions", "Requests that lost their blocks.")
        self.steps = counter("hal:engine_steps", "Steps of the engine.")
        self.host_seconds = counter("hal:engine_host_seconds", "Processor time of the engine's thread in steps.")
        self.step_seconds = counter("hal:engine_step_seconds", "Elapsed time of steps.")
        self.wait_seconds = counter(
            "hal:engine_wait_seconds", "Time in steps in which the engine's thread waited for the device, or for ranks."
        )
        device = "Time of the device in steps, with its gaps between a step's first work and its last; with ranks, of "
        ranks = "Processor time of the thread that runs the steps in the "
        first = "first rank of each group, together."
        self._measured = {  # without a figure there is no sample
            "device_seconds": Counter("hal:engine_device_seconds", device + first, names, registry=registry),
            "rank_seconds": Counter("hal:rank_host_seconds", ranks + first, names, registry=registry),
        }
        self.drafted = counter("hal:spec_decode_num_draft_tokens", "Drafts fed.")
        self.accepted = counter("hal:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.prompt_tokens = counter("hal:prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = counter("hal:generation_tokens", "Tokens generated.")
        self.tokens = 0  #: generated, which the counter takes when it is read
        ended = Counter(
            "hal:request_success", "Requests that ended, by reason.", (*names, "finished_reason"), registry=registry
        )
        self.ended = {reason: ended.labels(**label, finished_reason=reason) for reason in _REASONS}
        self.connections = gauge("hal:connections", "Connections of clients.")
        self.refused = Counter(
            "hal:connections_refused",
            "Connections that the server ended, by why.",
            (*names, "reason"),
            registry=registry,
        )
        self.first_token = histogram("hal:time_to_first_token_seconds", "From a request to its first token.")
        self.between_tokens = Gaps("hal:inter_token_latency_seconds", "Between parts of an answer.", label)
        registry.register(self.between_tokens)
        self.duration = histogram("hal:e2e_request_latency_seconds", "From a request to its end.", _LONG)
        self._counted: dict[str, float] = {}

    def take(self, stats: Mapping[str, float]) -> None:
        """Take the engine's figures: gauges as they are, counters as totals since it was started."""
        for name in ("running", "waiting", "cache"):
            getattr(self, name).set(stats[name])
        totals = {**stats, "wait_seconds": stats["step_seconds"] - stats["host_seconds"]}
        counters = {name: getattr(self, name) for name in _COUNTED}
        measured = {name: found for name, found in self._measured.items() if stats[name] is not None}
        counters |= {name: found.labels(**self._label) for name, found in measured.items()}
        for name, found in counters.items():
            self._raise(name, found, totals[name])

    def count(self, connections: int, refused: Mapping[str, int]) -> None:
        """Take how many connections there are, and how many were ended, by why."""
        self.connections.set(connections)
        for reason, total in refused.items():
            self._raise(f"refused {reason}", self.refused.labels(**self._label, reason=reason), total)

    def _raise(self, name: str, counter: Counter, total: float) -> None:
        """Have a counter show a total."""
        counter.inc(max(0.0, total - self._counted.get(name, 0.0)))
        self._counted[name] = total

    def request(self, prompt_tokens: int) -> Timing:
        """Return what times one answer."""
        self.prompt_tokens.inc(prompt_tokens)
        return Timing(self)

    def text(self) -> bytes:
        """Return the exposition format."""
        self._raise("tokens", self._generation_tokens, self.tokens)
        return generate_latest(self.registry)


class Gaps(Collector):
    """A histogram of seconds that costs little to observe: prometheus_client's takes a lock for each of two numbers,
    and that for every part of every answer. Its numbers are the event loop's."""

    def __init__(self, name: str, about: str, labels: Mapping[str, str]) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._counts, self._sum = [0] * (len(SHORT) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(SHORT, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        family = HistogramMetricFamily(self._name, self._about, labels=tuple(self._labels))
        bounds = [*map(floatToGoString, SHORT), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        yield family


class Timing:
    """Times one answer. ``first``: when its first token came, by the monotonic clock, 0.0 before; ``tokens``: how many
    have come; ``reason``: why it ended, "" before."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began, self._last = time.monotonic(), 0.0
        self.first, self.tokens, self.reason = 0.0, 0, ""

    def part(self, tokens: int) -> None:
        """Count a part of the answer."""
        now, metrics = time.monotonic(), self._metrics
        if self._last:
            metrics.between_tokens.observe(now - self._last)
        else:
            metrics.first_token.observe(now - self._began)
            self.first = now
        self._last = now
        self.tokens += tokens
        metrics.tokens += tokens

    def end(self, reason: str) -> None:
        """Count the end, once."""
        if self.reason:
            return
        self.reason = reason
        self._metrics.duration.observe(time.monotonic() - self._began)
        self._metrics.ended[reason].inc()
