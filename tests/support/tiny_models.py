"""Tiny random targets and a tokenizer, built in code, and the checkout's path; no downloads."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(
    config_class: Any,
    model_class: Any,
    *,
    layers: int,
    hidden: int,
    vocab: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    **extra: Any,
) -> PreTrainedModel:
    """Return a random fp32 causal LM in eval mode, the same for the same arguments.

    Weights are drawn with standard deviation 0.2 instead of the usual 0.02: at this width 0.02
    gives nearly uniform logits, and greedy tests would hang on ties and rounding.
    """
    config = config_class(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.float().eval().requires_grad_(False)


def tiny_llama(layers: int = 4, hidden: int = 32, **sizes: Any) -> PreTrainedModel:
    return tiny_model(LlamaConfig, LlamaForCausalLM, layers=layers, hidden=hidden, **sizes)


def tiny_qwen3(layers: int = 4, hidden: int = 32, **sizes: Any) -> PreTrainedModel:
    """Like tiny_llama, with RMSNorm on queries and keys."""
    return tiny_model(Qwen3Config, Qwen3ForCausalLM, layers=layers, hidden=hidden, **sizes)


def tiny_mistral(
    layers: int = 4, hidden: int = 32, *, sliding_window: int | None = None, **sizes: Any
) -> PreTrainedModel:
    """Like tiny_llama; with ``sliding_window`` its cache keeps only that many tokens per layer."""
    sizes |= {"layers": layers, "hidden": hidden, "sliding_window": sliding_window}
    return tiny_model(MistralConfig, MistralForCausalLM, **sizes)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)
