"""Prometheus metrics. They live in the API process, so counters go on when the engine is restarted.

Names are vLLM's with octavo_ for vllm:. Requests are counted when they are over; what the engine counts is read when a
scraper asks, so that a token costs nothing here but its place in a list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from octavo.engine.client import EngineState
from octavo.server.state import RequestRecord

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from octavo.engine.client import EngineClient
    from octavo.server.admission import Admission

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(1 << power) for power in range(0, 18, 2))


class Histogram:
    """Counts below each bound, filled many values at a time."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def metric(self) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        names = [*map(str, self._bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, accumulate(self._counts))]
        return HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Metrics:
    """A collector for prometheus_client; `observe` is ServerState.observe's part of it."""

    def __init__(self, engine: EngineClient, admission: Admission, model_name: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._engine = engine
        self._admission = admission
        self._model_name = model_name
        self._first_token = Histogram("octavo_time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._between = Histogram("octavo_inter_token_latency_seconds", "Between tokens of a request.", _BETWEEN)
        self._whole = Histogram("octavo_e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._queue = Histogram("octavo_request_queue_time_seconds", "From arrival to the first step.", _FIRST)
        self._prompts = Histogram("octavo_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._outputs = Histogram("octavo_request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._finished: Counter[str] = Counter()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._disconnected = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(namespace="octavo", registry=self.registry)

    def observe(self, record: RequestRecord) -> None:
        self._answers[record.route, str(record.status) if record.status else "none"] += 1
        self._disconnected += record.disconnected
        if record.first_token is None:
            return
        self._finished.update(record.finish_reasons)
        if record.disconnected:
            self._finished["abort"] += max(0, record.sequences - len(record.finish_reasons))
        self._prompt_tokens += record.prompt_tokens
        self._cached_tokens += record.cached_tokens
        self._first_token.observe((record.first_token - record.arrival,))
        self._between.observe(record.gaps)
        if record.first_scheduled is not None:
            self._queue.observe((max(0.0, record.first_scheduled - record.arrival),))
        if record.finished is not None:
            self._whole.observe((record.finished - record.arrival,))
        self._prompts.observe((record.prompt_tokens,))
        self._outputs.observe((record.completion_tokens,))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for histogram in (self._first_token, self._between, self._whole, self._queue, self._prompts, self._outputs):
            yield histogram.metric()

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        engine, stats = self._engine, self._engine.stats
        total = stats.blocks_free + stats.blocks_cached + stats.blocks_used
        values = {
            "num_requests_running": ("Sequences that run.", stats.running),
            "num_requests_waiting": ("Requests that have no token yet.", self._admission.queued_requests),
            "num_tokens_waiting": ("Their prompt tokens.", self._admission.queued_tokens),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", stats.blocks_used / max(1, total)),
            "kv_cache_waste_perc": ("Share of them that holds no token, 0 to 1.", stats.waste_percent / 100),
            "step_seconds": ("Duration of the last step.", stats.step_seconds),
            "step_rows": ("Tokens the last step computed.", stats.step_rows),
            "engine_silent_seconds": ("How long the engine has owed a sign of progress.", engine.silent_seconds),
        }
        for name, (help, value) in values.items():
            yield GaugeMetricFamily(f"octavo_{name}", help, value=value)
        blocks = GaugeMetricFamily("octavo_kv_blocks", "KV blocks of 16 tokens by their state.", labels=["state"])
        for state in ("free", "cached", "used"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        states = GaugeMetricFamily("octavo_engine_state", "1 for the state the engine is in.", labels=["state"])
        for each in EngineState:
            states.add_metric([each.value], float(each is engine.state))
        yield states
        if engine.info is not None:
            facts = {"model_name": self._model_name, "fingerprint": engine.info.fingerprint}
            yield InfoMetricFamily("octavo_engine", "What runs.", value=facts)

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        stats = self._engine.stats
        values = {
            "prompt_tokens": ("Prompt tokens of finished requests.", self._prompt_tokens),
            "prompt_tokens_cached": ("Of those, found in the prefix cache.", self._cached_tokens),
            "generation_tokens": ("Tokens generated.", stats.generated_tokens),
            "computed_tokens": ("Tokens the model computed, prompts included.", stats.computed_tokens),
            "prefix_cache_hits": ("Prompt tokens the prefix cache spared.", stats.prefix_hit_tokens),
            "prefix_cache_evictions": ("Blocks evicted from the prefix cache.", stats.evictions),
            "num_preemptions": ("Sequences preempted.", stats.preemptions),
            "jump_forward_tokens": ("Tokens that a grammar forced, without a step.", stats.jump_forward_tokens),
            "engine_steps": ("Steps run.", stats.steps),
            "engine_restarts": ("Times the engine process was started again.", self._engine.restarts),
            "requests_disconnected": ("Requests whose client left before the end.", self._disconnected),
        }
        for name, (help, value) in values.items():
            yield CounterMetricFamily(f"octavo_{name}", help, value=value)
        success = CounterMetricFamily(
            "octavo_request_success", "Outputs by how they ended.", labels=["finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([reason], count)
        yield success
        answers = CounterMetricFamily(
            "octavo_http_requests", "Requests by route and status.", labels=["route", "status"]
        )
        for (route, status), count in self._answers.items():
            answers.add_metric([route, status], count)
        yield answers
        refused = CounterMetricFamily("octavo_admission_rejections", "Requests refused at once.", labels=["reason"])
        for reason, count in self._admission.refused.items():
            refused.add_metric([reason], count)
        yield refused
