"""vLLM's worker whose model runner takes guesses back. vLLM imports it, in its own environment."""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform

from .gate import read_settings
from .ranks import fill

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class FillWorker(Worker):
    """Works with any scheduler: without guesses it changes nothing."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        trace = read_settings(self.vllm_config).trace
        is_traced = trace is not None and get_pp_group().is_first_rank
        fill(self.model_runner, f"{trace}.rank0" if is_traced else None)
