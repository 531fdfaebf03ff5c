"""The configuration of a data recipe: its sources, and the limits that their rows must keep."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipedraft.chats import check_template_variables
from pipedraft.cli import check_ranges
from pipedraft.data_recipes.groups import check_shares

Duplicates = Literal["keep", "exact"]
# Hiragana and katakana, CJK extension A, CJK unified ideographs.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
CJK_CHARACTER = re.compile(f"[{CJK}]")
MAX_SEED = 2**63 - 1
SHARES = ("max_non_alphabetic", "max_repeated_lines", "min_cjk", "max_cjk")


@dataclass(frozen=True, kw_only=True)
class RowFilters:
    """Limits that a row must keep, all inclusive; null: no limit.

    Characters, letters and lines are those of all turns, system prompts included.
    """

    min_turns: int | None = None
    """Turns of the user and the assistant together; for conversations only."""
    max_turns: int | None = None
    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    """Tokens of the whole row, as the target reads it; for more than max_length see too_long."""
    max_non_alphabetic: float | None = None
    """Share of the characters other than white space that are no letters of any script."""
    max_repeated_lines: float | None = None
    """Share of the lines with text that are equal to an earlier one."""
    min_cjk: float | None = None
    """Share of the letters that are Chinese or Japanese."""
    max_cjk: float | None = None

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit is not None and not 0 <= limit <= (1 if name in SHARES else math.inf):
                fix = "a share from 0 to 1" if name in SHARES else "0 or more"
                raise ValueError(f"sources.filters.{name}: {limit}; give {fix}, or null")
        for name in ("turns", "characters", "cjk"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"sources.filters.min_{name}: {least} is above max_{name} = {most}, which "
                    "leaves no row; swap them or leave one out"
                )

    def refuse(self, texts: Sequence[str], num_turns: int | None) -> tuple[str, float]:
        """The first limit that a row misses and its value there; ("", 0) for a good row.

        Args:
            texts: contents of all turns, or the one document.
            num_turns: turns of user and assistant; None for a document.
        """
        measures: dict[str, Callable[[], float]] = {
            "characters": lambda: sum(map(len, texts)),
            "non_alphabetic": lambda: non_alphabetic_share(texts),
            "repeated_lines": lambda: repeated_line_share(texts),
            "cjk": lambda: cjk_share(texts),
        }
        if num_turns is not None:
            measures = {"turns": lambda: num_turns, **measures}
        for name, measure in measures.items():
            least, most = (getattr(self, f"{side}_{name}", None) for side in ("min", "max"))
            if least is None and most is None:
                continue
            value = measure()
            if least is not None and value < least:
                return f"min_{name}", value
            if most is not None and value > most:
                return f"max_{name}", value
        return "", 0


def count_letters(texts: Sequence[str]) -> int:
    return sum(sum(map(str.isalpha, text)) for text in texts)


def non_alphabetic_share(texts: Sequence[str]) -> float:
    """Share of no letters among the visible characters; 1 for a row without any."""
    visible = sum(len(part) for text in texts for part in text.split())
    return 1 - count_letters(texts) / visible if visible else 1.0


def repeated_line_share(texts: Sequence[str]) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def cjk_share(texts: Sequence[str]) -> float:
    """Share of Chinese and Japanese among the letters; 0 for a row without letters."""
    letters = count_letters(texts)
    found = sum(len(CJK_CHARACTER.findall(text)) for text in texts)
    return min(1.0, found / letters) if letters else 0.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place that rows come from."""

    path: str = ""
    """A file, a folder of files, or the id of a Hub data set. conversations: .jsonl, .json or
    .parquet; text: .txt, .md or .py (.gz is read too). python_stdlib ignores it."""
    kind: Literal["conversations", "text", "python_stdlib"] = "conversations"
    """conversations: rows in the OpenAI or the ShareGPT form. text: one document per file, or per
    row with text_field. python_stdlib: the modules of the running interpreter's standard library,
    one per row."""
    split: str = "train"
    """Split of a Hub data set; a file or folder has none."""
    subset: str | None = None
    """Configuration of a Hub data set that has several, as `all` of HuggingFaceTB/smoltalk."""
    files: str | None = None
    """Files of a Hub data set to read instead of the whole, as a glob."""
    revision: str | None = None
    """Branch, tag or commit of a Hub data set; null is its main branch."""
    streaming: bool = False
    """Read a Hub data set over the network row by row; nothing but the rows read is stored. Local
    files are always read like that."""
    max_rows: int | None = None
    """Read only this many rows, from the first."""
    weight: float = 1.0
    """Expected number of times that a row occurs in the training set: 0.25 draws a quarter of the
    rows; 2.5 takes every row twice, and half of them once more. Which rows depends on their content
    and data.seed only, and a larger weight only adds. Held-out rows occur at most once."""
    prompt_field: str | None = None
    """conversations: the field of the user's one turn, for rows that are a question and an
    answer."""
    answer_field: str | None = None
    """conversations: the field of the assistant's one turn; goes with prompt_field."""
    text_field: str | None = None
    """text: the field that holds the document in .jsonl, .json or .parquet rows or a Hub data
    set."""
    license: str | None = None
    """License of the rows, as the Hub writes it (mit, cc-by-4.0); a `license` field of a row of
    conversations counts before it. Null and no such field: unknown."""
    filters: RowFilters | None = None
    """Limits that rows must keep; null: none."""
    max_row_bytes: int = 2**22
    """A longer row, or document, is left out: reading one takes many times its size in memory."""

    def __post_init__(self) -> None:
        if not self.path and self.kind != "python_stdlib":
            raise ValueError(
                f"sources.path: {self.path!r} for kind {self.kind!r}; name a file, folder or Hub id"
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"sources.max_rows: {self.max_rows}; give a number above 0, or null")
        check_ranges(self, {"max_row_bytes": "[1, 1e12]"}, "sources.")
        if not 0 < self.weight <= 1000:
            raise ValueError(
                f"sources.weight: {self.weight}; give the number of times that a row occurs, above "
                "0 and at most 1000, or remove the source"
            )
        if (self.prompt_field is None) != (self.answer_field is None):
            given = "answer_field" if self.prompt_field is None else "prompt_field"
            raise ValueError(
                f"sources.{given}: {getattr(self, given)!r} stands alone; give prompt_field and "
                "answer_field, or neither"
            )
        limits = self.filters or RowFilters()
        for name, value, kind in (
            ("prompt_field", self.prompt_field, "conversations"),
            ("text_field", self.text_field, "text"),
            ("filters.min_turns", limits.min_turns, "conversations"),
            ("filters.max_turns", limits.max_turns, "conversations"),
        ):
            if value is not None and self.kind != kind:
                raise ValueError(
                    f"sources.{name}: {value!r} with kind {self.kind!r}; it is for kind {kind!r}, "
                    "leave it out"
                )

    @property
    def name(self) -> str:
        """Name of the source in reports and in the column ``source``."""
        return ":".join(part for part in (self.path, self.subset, self.files) if part) or self.kind

    @property
    def reading_key(self) -> tuple[object, ...]:
        """Fields that decide the raw rows, apart from the files themselves."""
        place = (self.path, self.kind, self.split, self.subset, self.files, self.revision)
        columns = (self.text_field, self.prompt_field, self.answer_field)
        return (*place, self.streaming, self.max_rows, *columns, self.max_row_bytes)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a training run, and how its rows become token sequences."""

    sources: list[Source]
    """Read in this order, all rows of each; ``weight`` of each decides how often they occur."""
    max_length: int = 2048
    """Tokens per row: longer conversations are cut, packed text is cut in blocks of this size."""
    too_long: Literal["cut", "drop"] = "cut"
    """What happens to a row of more than max_length tokens; drop: it is left out and counted."""
    duplicates: Duplicates = "keep"
    """exact: leave out a row that says what an earlier one says, but for case, white space and
    Unicode form."""
    decontaminate: list[str | Source] = field(default_factory=list)
    """Files or folders of benchmarks, or Hub data sets in the form of a source: rows that share a
    13-gram of words with one of their prompts are left out, and counted per benchmark."""
    valid_fraction: float = 0.02
    """Share of rows, chosen by a hash of content and seed, held out for validation. 0 holds out
    none; any other value at least one, given two different rows."""
    seed: int = 0
    """Decides the split, the rows that weights draw, and the order of packed documents."""
    num_proc: int = 1
    """Processes that tokenize."""
    cache_dir: str | None = None
    """Folder of the Arrow files; null is the cache folder of ``datasets``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, as {enable_thinking: false}; a row's own
    chat_template_kwargs count before them."""
    explode_turns: bool = False
    """One row per turn of the assistant: the conversation up to it, nothing but it learned. For
    templates that keep the thinking of the last turn alone."""
    group_shares: dict[str, float] | None = None
    """Share of the rows that groups get, as {language/de: 0.2, segment/code: 0.3}: their rows are
    drawn less often or repeated, the others in proportion. Evaluation shows acceptance by the same
    groups; a row's language and segment are those of its answers, its context all tokens."""
    pack: bool = False
    """Language-model training: concatenate all documents instead of one row per conversation."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources: []; name at least one source")
        check_ranges(
            self,
            {"max_length": "[2, 1e9]", "num_proc": "[1, 4096]", "valid_fraction": "[0, 1)"}
            | {"seed": f"[0, {MAX_SEED}]"},
            "data.",
        )
        check_template_variables(self.chat_template_kwargs, "data.chat_template_kwargs")
        check_shares(self.group_shares or {})
        if self.cache_dir == "":
            raise ValueError("data.cache_dir: ''; give a folder, or leave it out")
        if self.pack and self.too_long == "drop":
            raise ValueError(
                "data.too_long: 'drop' with data.pack, which cuts documents in blocks whatever "
                "their length; leave one of the two out"
            )

    @property
    def chat_sources(self) -> set[str]:
        return {source.name for source in self.sources if source.kind == "conversations"}
