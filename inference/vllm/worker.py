"""vLLM's worker whose model runner takes guesses back. vLLM imports it, in its own environment."""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform

from .gate import parse_draft, read_settings
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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        kind, *place = parse_draft(read_settings(self.vllm_config).draft)
        if kind == "head":
            self._load_head(place[0])

    def _load_head(self, folder: str) -> None:
        """Load the head on the last rank, and tap the target's layers on every rank.

        Raises:
            ValueError: vLLM's model does not pass hidden states from rank to rank.
        """
        from .head import RankHead

        model, config = self.model_runner.get_model(), self.vllm_config
        if not getattr(model.model, "supports_aux_hidden_states_over_pp", False):
            name = type(model).__name__
            raise ValueError(f"draft: vLLM's {name} passes on no hidden states; give ngram")
        num_tokens = config.parallel_config.pipeline_parallel_size - 1
        head = RankHead(folder, config.model_config.model, num_tokens)
        model.set_aux_hidden_state_layers(head.taps)
        if get_pp_group().is_last_rank:
            self.model_runner.head = head
