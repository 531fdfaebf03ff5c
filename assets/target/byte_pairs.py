"""Byte-level BPE tokenizer with the embedded target's chat template, trained on a data set."""

from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipedraft.data_recipes.config import DataConfig
from pipedraft.data_recipes.conversations import read_json
from pipedraft.data_recipes.rows import read_messages
from pipedraft.data_recipes.sources import read_source

SEPARATOR, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [SEPARATOR, TURN_START, TURN_END]
BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def iterate_texts(config: DataConfig) -> Iterator[str]:
    """Every readable text, whatever its filters and weight: all turns, or the whole document."""
    for source in config.sources:
        for row in read_source(source):
            if row.error:
                continue
            if source.kind != "conversations":
                yield row.text
                continue
            try:
                messages = read_messages(read_json(row.text), source).messages
            except ValueError:
                continue
            yield from (message["content"] for message in messages)


def train_tokenizer(config: DataConfig, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on every usable text of the sources; the same input, the same result.

    Any string round-trips: the 256 bytes are in the vocabulary. Digits are split one by one.
    ``<|im_end|>`` is the EOS token (it ends an assistant turn); ``<|endoftext|>`` is the pad token
    and separates the documents of packed text. There is no BOS token. A corpus with too few merges
    is filled up with ``<|reserved_i|>`` tokens, so that len(tokenizer) == vocab_size always.
    """
    smallest = BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size: {vocab_size} is below {smallest} (256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens); raise it"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(iterate_texts(config), trainer)
    missing = vocab_size - bpe.get_vocab_size()
    bpe.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(missing)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=SEPARATOR,
        extra_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
