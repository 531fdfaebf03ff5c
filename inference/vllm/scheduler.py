"""vLLM's scheduler with guesses in flight. vLLM imports it, in its own environment."""

from vllm.v1.core.sched.scheduler import Scheduler

from .filling import FillingScheduler


class FillScheduler(FillingScheduler, Scheduler):
    """Use it with ``FillWorker``: --scheduler-cls pipedraft.inference.vllm.FillScheduler."""
