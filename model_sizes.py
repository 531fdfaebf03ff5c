"""Sizes that a config.json of a model may have, whatever its class of transformers would take."""

from typing import Annotated, Any

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]


class Sizes(msgspec.Struct):
    """What every decoder's config.json may say; classes of transformers ask for less."""

    model_type: str | None = None
    num_hidden_layers: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    vocab_size: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    rope_parameters: dict[str, Any] | None = None


def check_sizes(config: dict[str, Any]) -> None:
    """Raise ValueError for a number of another type or range than any decoder's."""
    known = msgspec.convert(config.get("text_config") or config, Sizes)
    if known.pad_token_id is not None and known.pad_token_id >= (known.vocab_size or 2**31):
        raise ValueError(f"pad_token_id {known.pad_token_id} is outside its vocabulary")
