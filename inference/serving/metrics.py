"""Server counters, with vLLM's names after the prefix ``pipedraft:``."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pipedraft.inference.serving.answers import Choice
    from pipedraft.inference.serving.decoder import SequenceDecoder

STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
OWN, VLLM = "pipedraft:", "vllm:"
NOT_VLLM = (
    *("request_refused", "pipeline_steps", "step_time_seconds"),
    "equivalent_acceptance_length",
)
"""Metrics missing in vLLM."""
LENGTHS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


class Metrics:
    """One server's counters; threads may update them concurrently."""

    def __init__(self, model: str, *, has_vllm_names: bool = False) -> None:
        self._has_vllm_names = has_vllm_names
        # Its own: the global registry would refuse a second server in this process.
        self._registry = CollectorRegistry()
        self._model = model
        self._waiting = self._make(Gauge, "num_requests_waiting", "Sequences in the queue.")
        self._running = self._make(Gauge, "num_requests_running", "Sequences on their way.")
        self._prompt = self._make(Counter, "prompt_tokens", "Prompt tokens computed.")
        self._tokens = self._make(Counter, "generation_tokens", "Tokens of outputs.")
        self._success = Counter(
            "pipedraft:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "pipedraft:request_refused",
            "Requests that were not answered, by HTTP status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._rounds = self._make(Counter, "spec_decode_num_drafts", "Rounds of drafting.")
        self._tested = self._make(
            Counter, "spec_decode_num_draft_tokens", "Draft tokens that were tested."
        )
        self._accepted = self._make(
            Counter, "spec_decode_num_accepted_tokens", "Draft tokens that were accepted."
        )
        self._steps = self._make(Counter, "pipeline_steps", "Pipeline steps of all sequences, K.")
        self._first = self._make(
            Histogram, "time_to_first_token_seconds", "From request to first token.", REQUEST_S
        )
        self._between = self._make(
            Histogram, "inter_token_latency_seconds", "Between two tokens.", TOKEN_S
        )
        self._mean_between = self._make(
            Histogram,
            "request_time_per_output_token_seconds",
            "Mean time of a sequence's tokens after the first.",
            TOKEN_S,
        )
        self._whole = self._make(
            Histogram, "e2e_request_latency_seconds", "From request to last token.", REQUEST_S
        )
        self._queue = self._make(
            Histogram, "request_queue_time_seconds", "From request to its start.", REQUEST_S
        )
        self._step = self._make(Histogram, "step_time_seconds", "Of a pipeline step.", STEP_S)
        self._length = self._make(
            Histogram, "equivalent_acceptance_length", "L' of a sequence, n N / K.", LENGTHS
        )

    def _make(self, kind: type, name: str, text: str, buckets: tuple[float, ...] = ()):  # type: ignore[no-untyped-def]
        options = {"buckets": buckets} if buckets else {}
        made = kind(f"pipedraft:{name}", text, ["model_name"], registry=self._registry, **options)
        return made.labels(self._model)

    def started(self, num_prompt_tokens: int, queue_s: float) -> None:
        self._prompt.inc(num_prompt_tokens)
        self._queue.observe(queue_s)

    def stepped(self, seconds: float) -> None:
        self._steps.inc()
        self._step.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._tokens.inc()
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._tokens.inc()
        self._between.observe(seconds)

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def ended(self, choice: "Choice") -> None:
        self._success.labels(self._model, choice.finish_reason).inc()
        result = choice.result
        # A cancelled or failed sequence has no counts.
        if result is None:
            return
        self._rounds.inc(len(result.round_lengths))
        self._tested.inc(result.num_tested)
        self._accepted.inc(result.num_accepted)
        self._whole.observe(choice.last_s - choice.submitted_s)
        if result.num_tokens:
            self._mean_between.observe((choice.last_s - choice.first_s) / result.num_tokens)
        if math.isfinite(result.equivalent_acceptance_length):
            self._length.observe(result.equivalent_acceptance_length)

    def page(self, decoder: "SequenceDecoder") -> bytes:
        """Return all metrics in Prometheus' text format."""
        # Gauges are read now: the queue changes between two requests for this page.
        self._waiting.set(decoder.num_waiting)
        self._running.set(decoder.num_running)
        page = generate_latest(self._registry)
        if not self._has_vllm_names:
            return page
        return page + generate_latest(self._vllm())

    def _vllm(self) -> CollectorRegistry:
        """Return the metrics known to vLLM, under its names."""
        registry = CollectorRegistry()
        registry.register(_Renamed(self._registry))
        return registry


class _Renamed(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            name = metric.name.removeprefix(OWN)
            if name in NOT_VLLM:
                continue
            renamed = Metric(VLLM + name, metric.documentation, metric.type)
            renamed.samples = [
                sample._replace(name=VLLM + sample.name.removeprefix(OWN))
                for sample in metric.samples
            ]
            yield renamed
