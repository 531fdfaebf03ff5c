"""Private parts of vLLM that the filling relies on, as recorded from 0.32.0.

Another version is refused if these differ. If they are the same, it may still behave differently:
benchmarks/vllm_fill.py compares outputs.
"""

import inspect
import re
from pkgutil import resolve_name

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
METHODS = {
    f"{SCHEDULER}.schedule": "throttle_prefills",
    f"{SCHEDULER}.update_from_output": "scheduler_output, model_runner_output",
    f"{SCHEDULER}._preempt_request": "request, timestamp, drop_stale_output",
    f"{SCHEDULER}.shutdown": "",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": (
        "request, num_computed_tokens"
    ),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "",
    f"{RUNNER}._update_states": "scheduler_output",
    f"{RUNNER}._sample": "logits, spec_decode_metadata",
    f"{RUNNER}._bookkeeping_sync": (
        "scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens"
    ),
    f"{RUNNER}.execute_model": "scheduler_output, intermediate_tensors",
    "vllm.v1.worker.gpu_worker:Worker.init_device": "",
}
"""Method -> its parameters without self."""
ATTRIBUTES = {
    SCHEDULER: "requests running waiting kv_holding_waiting max_num_active_reqs max_model_len "
    "kv_cache_manager finished_req_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "coordinator block_pool",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
    "vllm.v1.request:Request": "request_id max_tokens num_computed_tokens num_in_flight_tokens "
    "num_stale_output_tokens drop_stale_output _output_token_ids _all_token_ids num_tokens "
    "num_tokens_with_spec num_output_tokens is_finished structured_output_request lora_request "
    "pooling_params prompt_embeds mm_features resumable kv_transfer_params sampling_params",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens scheduled_cached_reqs "
    "finished_req_ids",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids resumed_req_ids new_token_ids "
    "num_computed_tokens num_output_tokens",
    "vllm.v1.outputs:ModelRunnerOutput": "req_id_to_index sampled_token_ids",
    RUNNER: "requests input_batch intermediate_tensors discard_request_mask max_num_tokens",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_id_to_index req_ids num_tokens_no_spec "
    "generators token_ids_cpu",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": "prompt_token_ids output_token_ids "
    "num_computed_tokens",
}
"""Class -> attributes that its source sets or declares."""


def parameters(method: object) -> str:
    return ", ".join([*inspect.signature(method).parameters][1:])  # type: ignore[arg-type]


def differences() -> list[str]:
    """Return what the installed vLLM lacks of the recorded interface, or has otherwise."""
    found = []
    for name, recorded in METHODS.items():
        try:
            if parameters(resolve_name(name)) != recorded:
                found.append(name)
        except (ImportError, AttributeError):
            found.append(name)
    for name, attributes in ATTRIBUTES.items():
        try:
            source = inspect.getsource(resolve_name(name))
        except (ImportError, AttributeError):
            found.append(name)
            continue
        for word in attributes.split():
            if not re.search(rf"\bself\.{word}\b|^    {word}:|def {word}\(", source, re.MULTILINE):
                found.append(f"{name}.{word}")
    return found
