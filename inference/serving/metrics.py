"""Server metrics for Prometheus, with vLLM's names after the prefix ``pipedraft:``."""

import math
import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ..batch import BatchEngine
    from ..result import DecodeResult

STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
LENGTHS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)

GAUGES = {
    "num_requests_waiting": "Sequences in the queue.",
    "num_requests_running": "Sequences on their way.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens of outputs.",
    "request_success": "Sequences that ended, by reason.",
    "request_refused": "Requests that were not answered, by HTTP status.",
    "spec_decode_num_drafts": "Rounds of drafting.",
    "spec_decode_num_draft_tokens": "Draft tokens that were tested.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "pipeline_steps": "Pipeline steps of all sequences, K.",
}
LABELS = {"request_success": ["finished_reason"], "request_refused": ["status"]}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From request to first token.", REQUEST_S),
    "inter_token_latency_seconds": ("Between two tokens.", TOKEN_S),
    "request_time_per_output_token_seconds": (
        "Mean time of a sequence's tokens after the first.",
        TOKEN_S,
    ),
    "e2e_request_latency_seconds": ("From request to last token.", REQUEST_S),
    "request_queue_time_seconds": ("From request to its start.", REQUEST_S),
    "step_time_seconds": ("Of a pipeline step.", STEP_S),
    "equivalent_acceptance_length": ("L' of a sequence, n N / K.", LENGTHS),
}
NOT_VLLM = {
    *("request_refused", "pipeline_steps", "step_time_seconds"),
    "equivalent_acceptance_length",
}
"""Metrics missing in vLLM."""


class Metrics:
    """Metrics of one server. Several threads may update them concurrently."""

    def __init__(self, model: str, *, has_vllm_names: bool = False) -> None:
        self._model, self._has_vllm_names = model, has_vllm_names
        # Own registries: the global one would refuse a second server in this process.
        self._as_vllm, self._others = CollectorRegistry(), CollectorRegistry()

        def place(name: str) -> CollectorRegistry:
            return self._others if name in NOT_VLLM else self._as_vllm

        own = ["model_name"]
        self._gauges = {
            name: Gauge(f"pipedraft:{name}", text, own, registry=place(name)).labels(model)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(
                f"pipedraft:{name}", text, own + LABELS.get(name, []), registry=place(name)
            )
            for name, text in COUNTERS.items()
        }
        # With labels, series are shown before the first observation: a rate needs their zeros.
        self._histograms = {
            name: Histogram(
                f"pipedraft:{name}", text, own, registry=place(name), buckets=buckets
            ).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for name in COUNTERS.keys() - LABELS.keys():
            self._count(name, 0)  # shown from the beginning

    def _count(self, name: str, amount: int = 1, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def started(self, num_prompt_tokens: int, queue_s: float) -> None:
        self._count("prompt_tokens", num_prompt_tokens)
        self._observe("request_queue_time_seconds", queue_s)

    def stepped(self, seconds: float) -> None:
        self._count("pipeline_steps")
        self._observe("step_time_seconds", seconds)

    def first_token(self, seconds: float) -> None:
        self._count("generation_tokens")
        self._observe("time_to_first_token_seconds", seconds)

    def next_token(self, seconds: float) -> None:
        self._count("generation_tokens")
        self._observe("inter_token_latency_seconds", seconds)

    def refused(self, status: int) -> None:
        self._count("request_refused", 1, str(status))

    def ended(
        self, reason: str, result: "DecodeResult | None", *, total_s: float, after_first_s: float
    ) -> None:
        """Count a sequence that ended.

        Args:
            result: None for a cancelled or failed sequence, which has no counts.
            total_s: seconds from the request to the last token.
            after_first_s: seconds from the first token to the last one.
        """
        self._count("request_success", 1, reason)
        if result is None:
            return
        self._count("spec_decode_num_drafts", len(result.round_lengths))
        self._count("spec_decode_num_draft_tokens", result.num_tested)
        self._count("spec_decode_num_accepted_tokens", result.num_accepted)
        self._observe("e2e_request_latency_seconds", total_s)
        if result.num_tokens:
            mean_s = after_first_s / result.num_tokens
            self._observe("request_time_per_output_token_seconds", mean_s)
        if math.isfinite(result.equivalent_acceptance_length):
            self._observe("equivalent_acceptance_length", result.equivalent_acceptance_length)

    def page(self, batch: "BatchEngine") -> bytes:
        """Return all metrics in Prometheus' text format."""
        # Gauges are read now: the queue changes between two requests for this page.
        self._gauges["num_requests_waiting"].set(batch.num_waiting)
        self._gauges["num_requests_running"].set(batch.num_live)
        page: bytes = generate_latest(self._as_vllm)
        others: bytes = generate_latest(self._others)
        if not self._has_vllm_names:
            return page + others
        # Names only: a model may be called pipedraft:x.
        return page + others + re.sub(rb"(?m)^(# \w+ )?pipedraft:", rb"\1vllm:", page)
