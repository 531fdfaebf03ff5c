"""Limits on files of whoever made the model: sizes in a config.json, programs in chat templates."""

import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec

from pipedraft.errors import UsageError
from pipedraft.files import Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]


class Sizes(msgspec.Struct):
    """Sizes that a decoder's config.json may say; classes of transformers ask for less."""

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
    rope_parameters: Values | None = None


def check_sizes(config: Values) -> None:
    """Raise ValueError for a number of another type or range than any decoder's."""
    known = msgspec.convert(config.get("text_config") or config, Sizes)
    if known.pad_token_id is not None and known.pad_token_id >= (known.vocab_size or 2**31):
        raise ValueError(f"pad_token_id {known.pad_token_id} is outside its vocabulary")


# -- chat templates

RENDER_S = 5.0
"""On the processor, of all threads."""
RENDER_BYTES = 2**30
"""Memory that one rendering may take; its text may have a 64th of that in characters."""


class ChatRefused(ValueError):
    """The chat template does not render this conversation."""


class TemplateLimit(UsageError):
    """The chat template wants more time or memory than any conversation needs."""


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, str]],
    *,
    prompt: bool = True,
) -> str:
    """A conversation as the model reads it.

    Args:
        messages: {"role", "content"} of every turn.
        prompt: the beginning of the assistant's next turn follows.

    Raises:
        ChatRefused: by the template, or by a fault in it.
        TemplateLimit: it was ended after ``RENDER_S``, or for its memory.
    """
    with rendering(tokenizer.name_or_path):
        text = str(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in messages],
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )
        if len(text) > RENDER_BYTES // 64:
            raise MemoryError
    return text


@contextmanager
def rendering(name: str) -> Iterator[None]:
    """A chat template runs inside, limited as far as this thread and system can."""
    limit = f"tokenizer: the chat template of {name!r} takes more than {{}}; use another model's"
    before = resource.getrlimit(resource.RLIMIT_AS)
    is_main = threading.current_thread() is threading.main_thread()

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    try:
        if is_main:
            handler = signal.signal(signal.SIGPROF, late)
            signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            wanted = pages * resource.getpagesize() + RENDER_BYTES
            if before[1] == resource.RLIM_INFINITY or wanted < before[1]:
                resource.setrlimit(resource.RLIMIT_AS, (wanted, before[1]))
        yield
    except TimeoutError as error:
        raise TemplateLimit(limit.format(f"{RENDER_S:g} s")) from error
    except MemoryError as error:
        raise TemplateLimit(limit.format(f"{RENDER_BYTES >> 20} MiB")) from error
    except Exception as error:
        raise ChatRefused(f"chat template refused: {error}") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        if is_main:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
