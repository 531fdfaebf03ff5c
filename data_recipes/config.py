"""Configure data recipes with sources and limits on their rows."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..chats import check_template_variables
from ..errors import check_ranges
from .groups import check_shares

Duplicates = Literal["keep", "exact"]
# Hiragana and katakana, CJK extension A, CJK unified ideographs.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
CJK_CHARACTER = re.compile(f"[{CJK}]")
MAX_SEED = 2**63 - 1
SHARES = ("max_non_alphabetic", "max_repeated_lines", "min_cjk", "max_cjk")


@dataclass(frozen=True, kw_only=True)
class RowFilters:
    """Limits on a row, all inclusive; null: no limit.

    Characters, letters and lines are counted over all turns, system prompts included.
    """

    min_turns: int | None = None
    """Fewest user and assistant turns together; for conversations only."""
    max_turns: int | None = None
    """Most user and assistant turns, counted as in min_turns."""
    min_characters: int | None = None
    """Fewest characters in all turns."""
    max_characters: int | None = None
    """Most characters in all turns."""
    min_tokens: int | None = None
    """Fewest tokens in the whole row, as the target reads it; for long rows see too_long."""
    max_non_alphabetic: float | None = None
    """Highest share of non-letters (in any script) among the visible characters."""
    max_repeated_lines: float | None = None
    """Highest share of lines equal to an earlier one, among lines with text."""
    max_cut_answers: int | None = None
    """Most answers cut at a token limit, by the row's `cut_answers` or a `finish_reason` of
    "length"; 0 drops these rows. For conversations only."""
    min_cjk: float | None = None
    """Lowest Chinese and Japanese share among the letters."""
    max_cjk: float | None = None
    """Highest Chinese and Japanese share among the letters."""

    def __post_init__(self) -> None:
        ranges = dict.fromkeys(vars(self), "[0, inf)") | dict.fromkeys(SHARES, "[0, 1]")
        check_ranges(self, ranges, "sources.filters.")
        for name in ("turns", "characters", "cjk"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"sources.filters.min_{name}: {least} is above max_{name} = {most}, which "
                    "leaves no row; swap them or leave one out"
                )

    def refuse(
        self, texts: Sequence[str], num_turns: int | None, num_cut: int = 0
    ) -> tuple[str, float]:
        """Return the first limit that a row violates and the row's value, or ("", 0).

        Args:
            texts: the contents of all turns, or a single document.
            num_turns: number of user and assistant turns, or None for a document.
            num_cut: number of answers cut at a token limit.
        """
        measures: dict[str, Callable[[], float]] = {
            "characters": lambda: sum(map(len, texts)),
            "non_alphabetic": lambda: non_alphabetic_share(texts),
            "repeated_lines": lambda: repeated_line_share(texts),
            "cjk": lambda: cjk_share(texts),
            "cut_answers": lambda: num_cut,
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
    """Return the share of non-letters among visible characters, or 1 if none is visible."""
    visible = sum(len(part) for text in texts for part in text.split())
    return 1 - count_letters(texts) / visible if visible else 1.0


def repeated_line_share(texts: Sequence[str]) -> float:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def cjk_share(texts: Sequence[str]) -> float:
    """Return the share of Chinese and Japanese letters, or 0 for a row without letters."""
    letters = count_letters(texts)
    found = sum(len(CJK_CHARACTER.findall(text)) for text in texts)
    return min(1.0, found / letters) if letters else 0.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of rows."""

    path: str = ""
    """A file, a folder (also one written by datasets' save_to_disk), or a Hub data set id.
    conversations: .jsonl, .json, .parquet or .arrow; text: .txt, .md or .py (.gz is read too).
    python_stdlib ignores it."""
    kind: Literal["conversations", "text", "python_stdlib"] = "conversations"
    """conversations: rows in the OpenAI or the ShareGPT form. text: one document per file, or per
    row with text_field. python_stdlib: the running interpreter's standard library, one module per
    row."""
    split: str = "train"
    """Split of a Hub data set or of a saved DatasetDict; other files and folders have none."""
    subset: str | None = None
    """Configuration of a Hub data set that has several, such as `all` of HuggingFaceTB/smoltalk."""
    files: str | None = None
    """Glob that selects files from a Hub data set; null: all."""
    revision: str | None = None
    """A Hub data set's branch, tag or commit; null: its main branch."""
    streaming: bool = False
    """Read a Hub data set over the network row by row and store only the rows read. Local files are
    always read like this."""
    max_rows: int | None = None
    """Read only this many rows, starting with the first."""
    weight: float = 1.0
    """Expected occurrences per row in the training set: 0.25 draws a quarter of the rows; 2.5 takes
    every row twice, and half of them once more. The draw depends only on row content and data.seed.
    A larger weight never removes a row. Held-out rows occur at most once."""
    prompt_field: str | None = None
    """conversations: field with the only user turn, for question-and-answer rows."""
    answer_field: str | None = None
    """conversations: field with the only assistant turn; requires prompt_field."""
    text_field: str | None = None
    """text: field with the document in .jsonl, .json, .parquet or .arrow rows or a Hub data set."""
    license: str | None = None
    """License as the Hub writes it (mit, cc-by-4.0); a conversation row's own `license` field takes
    precedence. Null and no such field: unknown."""
    filters: RowFilters | None = None
    """Limits on rows; null: none."""
    max_row_bytes: int = 2**22
    """Skip rows or documents longer than this: reading one takes many times its size in memory."""

    def __post_init__(self) -> None:
        if not self.path and self.kind != "python_stdlib":
            raise ValueError(
                f"sources.path: {self.path!r} for kind {self.kind!r}; name a file, folder or Hub id"
            )
        check_ranges(
            self,
            {"max_rows": "[1, 1e12]", "max_row_bytes": "[1, 1e12]"}
            | {"weight": "(0, 1000], or remove the source"},
            "sources.",
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
            ("filters.max_cut_answers", limits.max_cut_answers, "conversations"),
        ):
            if value is not None and self.kind != kind:
                raise ValueError(
                    f"sources.{name}: {value!r} with kind {self.kind!r}; it is for kind {kind!r}, "
                    "leave it out"
                )

    @property
    def name(self) -> str:
        """Return the source's name for reports and the column ``source``."""
        return ":".join(part for part in (self.path, self.subset, self.files) if part) or self.kind

    @property
    def reading_key(self) -> tuple[object, ...]:
        """Return the fields that decide the raw rows, apart from the files themselves."""
        place = (self.path, self.kind, self.split, self.subset, self.files, self.revision)
        columns = (self.text_field, self.prompt_field, self.answer_field)
        return (*place, self.streaming, self.max_rows, *columns, self.max_row_bytes)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data, and how its rows become token sequences."""

    sources: list[Source]
    """Sources, read fully in this order; each ``weight`` sets how often their rows occur."""
    max_length: int = 2048
    """Tokens per row; longer rows are cut."""
    too_long: Literal["cut", "drop"] = "cut"
    """Rows longer than max_length tokens: cut them, or drop and count them."""
    duplicates: Duplicates = "keep"
    """exact: drop a row equal to an earlier one except in case, white space and Unicode form."""
    decontaminate: list[str | Source] = field(default_factory=list)
    """Benchmark files or folders, or Hub data sets written like a source. Rows sharing a
    word 13-gram with a benchmark prompt are dropped, and counted per benchmark."""
    valid_fraction: float = 0.02
    """Share of rows held out for validation, chosen by a hash of content and seed. 0: none; any
    other value holds out at least one, given two different rows."""
    seed: int = 0
    """Seed for the split, and the rows drawn by weights."""
    num_proc: int = 1
    """Processes that tokenize."""
    cache_dir: str | None = None
    """Folder for the Arrow files; null: pipedraft/data in HF_HOME."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Chat template variables, as {enable_thinking: false}; a row's own chat_template_kwargs take
    precedence."""
    explode_turns: bool = False
    """Make one row per assistant turn: the conversation up to it, with loss on this turn only. For
    templates that keep only the last turn's thinking."""
    group_shares: dict[str, float] | None = None
    """Target row shares by group, as {language/de: 0.2, segment/code: 0.3}. Rows in these groups
    are drawn less often or repeated to reach the shares; other rows keep their proportions.
    Evaluation reports acceptance by the same groups. A row's language and segment come from its
    answers, its context from all tokens."""

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

    @property
    def chat_sources(self) -> set[str]:
        return {source.name for source in self.sources if source.kind == "conversations"}
