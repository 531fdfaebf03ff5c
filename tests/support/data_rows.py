"""Rows, recipes and a tokenizer for data recipe tests."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from small_tokenizers import train_tokenizer

from pipedraft.data_recipes.card import DataReport
from pipedraft.data_recipes.chat import ChatRenderer
from pipedraft.data_recipes.recipe import DataConfig, TokenizedData, load_data
from pipedraft.data_recipes.sources import Source

CHINESE = "\u8bf7\u7528\u4e2d\u6587\u89e3\u91ca\u4ec0\u4e48\u662f\u6d41\u6c34\u7ebf\u63a8\u7406"
TURN = "'<|im_start|>' + m['role'] + '\n' + {content} + '<|im_end|>\n'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}{{ " + TURN.format(content="m['content']") + " }}{% endfor %}"
PLAIN += PROMPT
"""Chat template without generation marks: turns, and a prompt for the next one."""
CHAT = [
    {"role": "user", "content": "Say ok."},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "Count: ok, 12, 345?"},
    {"role": "assistant", "content": "\u00e9t\u00e9 12 345, \u65e5\u672c ok"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "def f(x):\n    return x\n\n# ok \U0001f600"},
]
"""Answers with several lines, scripts and digits."""
WORDS = [f"term{i}" for i in range(40)]


def small_tokenizer(folder: Path):
    path = folder / "corpus.txt"
    path.write_text("Say ok. Count the ducks: 12, 345.\ndef f(x):\n    return x\n\n" * 20)
    return train_tokenizer(DataConfig(sources=[Source(path=str(path), kind="text")]), 400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("corpus"))


def templated(tokenizer, template: str):
    """Return a copy with another chat template."""
    copy = deepcopy(tokenizer)
    copy.chat_template = template
    return copy


class Loader:
    """Calls load_data with its caches and the side file in one folder."""

    def __init__(self, tokenizer, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder

    def __call__(self, *sources: Source, **values) -> TokenizedData:
        config = DataConfig(sources=list(sources), cache_dir=str(self.folder / "cache"), **values)
        return load_data(config, self.tokenizer, side_file=self.folder / "left_out.jsonl")

    def left_out(self) -> list[dict]:
        """Read the side file from the latest call."""
        return [json.loads(line) for line in (self.folder / "left_out.jsonl").open()]


@pytest.fixture
def load(tokenizer, tmp_path) -> Loader:
    return Loader(tokenizer, tmp_path)


def write(path: Path, rows: list) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def chat(question: str, *answers: str, system: str | None = None) -> dict:
    """Chat with the same question before every answer."""
    turns = [{"role": "system", "content": system}] if system else []
    for answer in answers or ("fine",):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def total(report: DataReport) -> int:
    """Expected value for rows_read."""
    refused = sum(report.refused_rows().values())
    return report.rows_kept + sum(report.bad_rows.values()) + report.empty_mask_rows + refused


def tokenize_conversation(tokenizer, messages: list[dict], max_length: int) -> tuple[list, list]:
    """Tokenize one conversation as (input_ids, loss_mask), cut at ``max_length`` tokens."""
    renderer = ChatRenderer(tokenizer)
    ids, mask = renderer.tokenize([renderer.render(messages)])[0]
    return ids[:max_length], mask[:max_length]
