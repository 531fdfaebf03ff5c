"""Links with latency between vLLM's ranks, for vllm_fill.py. vLLM imports these classes.

What a rank sends to the next one, and the last one to the scheduler, arrives LINK_MS milliseconds
later. All processes run on one machine, so they share its monotonic clock.
"""

import os
import time

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from pipedraft.inference.vllm.scheduler import FillScheduler
from pipedraft.inference.vllm.worker import FillWorker

LINK_S = float(os.environ.get("LINK_MS", "0")) / 1e3
STAMP = "link_sent_at"


def wait_until_arrived(sent_at):
    time.sleep(max(0.0, sent_at + LINK_S - time.monotonic()))


class LinkedRunner:
    """Mixin in front of a filling runner."""

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if intermediate_tensors is not None:
            wait_until_arrived(float(intermediate_tensors.tensors.pop(STAMP)))
        result = super().execute_model(scheduler_output, intermediate_tensors)
        if hasattr(result, "tensors"):
            result.tensors[STAMP] = torch.tensor(time.monotonic(), dtype=torch.float64)
        return result

    def sample_tokens(self, grammar_output):
        output = super().sample_tokens(grammar_output)
        output.link_sent_at = time.monotonic()
        return output


class LinkedWorker(FillWorker):
    def init_device(self):
        super().init_device()
        kind = type(self.model_runner)
        self.model_runner.__class__ = type("LinkedFillRunner", (LinkedRunner, kind), {})


class Linked:
    """Mixin in front of a scheduler."""

    def update_from_output(self, scheduler_output, model_runner_output):
        if scheduler_output.num_scheduled_tokens:
            wait_until_arrived(model_runner_output.link_sent_at)
        return super().update_from_output(scheduler_output, model_runner_output)


class LinkedScheduler(Linked, Scheduler):
    """vLLM's own scheduler."""


class LinkedFillScheduler(Linked, FillScheduler):
    """Ours."""
