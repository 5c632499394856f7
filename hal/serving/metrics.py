"""Prometheus metrics, under vLLM's names with ``hal:`` in front."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        label, self._label = ("model_name",), {"model_name": model}
        self.running = Gauge("hal:num_requests_running", "Requests in slots.", label, registry=registry)
        self.waiting = Gauge("hal:num_requests_waiting", "Requests that wait for a slot.", label, registry=registry)
        self.cache = Gauge("hal:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", label, registry=registry)
        self.preemptions = Counter("hal:num_preemptions", "Requests that lost their blocks.", label, registry=registry)
        self.steps = Counter("hal:engine_steps", "Steps of the engine.", label, registry=registry)
        self.host_seconds = Counter(
            "hal:engine_host_seconds", "Processor time of the engine's thread in steps.", label, registry=registry
        )
        self.step_seconds = Counter("hal:engine_step_seconds", "Elapsed time of steps.", label, registry=registry)
        self.drafted = Counter("hal:spec_decode_num_draft_tokens", "Drafts fed.", label, registry=registry)
        self.accepted = Counter("hal:spec_decode_num_accepted_tokens", "Drafts accepted.", label, registry=registry)
        self.prompt_tokens = Counter("hal:prompt_tokens", "Tokens of prompts.", label, registry=registry)
        self.generation_tokens = Counter("hal:generation_tokens", "Tokens generated.", label, registry=registry)
        self.ended = Counter(
            "hal:request_success", "Requests that ended, by reason.", (*label, "finished_reason"), registry=registry
        )
        self.first_token = Histogram(
            "hal:time_to_first_token_seconds",
            "From a request to its first token.",
            label,
            buckets=_SHORT,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "hal:inter_token_latency_seconds", "Between parts of an answer.", label, buckets=_SHORT, registry=registry
        )
        self.whole = Histogram(
            "hal:e2e_request_latency_seconds", "From a request to its end.", label, buckets=_LONG, registry=registry
        )
        self._counted: dict[str, float] = {}

    def take(self, stats: Mapping[str, float]) -> None:
        """Take the engine's figures: gauges as they are, counters as totals since it was started."""
        for name in ("running", "waiting", "cache"):
            getattr(self, name).labels(**self._label).set(stats[name])
        for name in ("preemptions", "steps", "host_seconds", "step_seconds", "drafted", "accepted"):
            more = stats[name] - self._counted.get(name, 0.0)
            self._counted[name] = stats[name]
            getattr(self, name).labels(**self._label).inc(max(0.0, more))

    def request(self, prompt_tokens: int) -> Timing:
        """Return what times one answer."""
        self.prompt_tokens.labels(**self._label).inc(prompt_tokens)
        return Timing(self, self._label)

    def text(self) -> bytes:
        """Return the exposition format."""
        return generate_latest(self.registry)


class Timing:
    """Times one answer."""

    def __init__(self, metrics: Metrics, label: dict[str, str]) -> None:
        self._metrics, self._label = metrics, label
        self._began, self._last = time.monotonic(), 0.0

    def part(self, tokens: int) -> None:
        """Count a part of the answer."""
        now, metrics = time.monotonic(), self._metrics
        if self._last:
            metrics.between_tokens.labels(**self._label).observe(now - self._last)
        else:
            metrics.first_token.labels(**self._label).observe(now - self._began)
        self._last = now
        metrics.generation_tokens.labels(**self._label).inc(tokens)

    def end(self, reason: str) -> None:
        """Count the end."""
        self._metrics.whole.labels(**self._label).observe(time.monotonic() - self._began)
        self._metrics.ended.labels(**self._label, finished_reason=reason).inc()
