"""Count all rows by outcome, for example kept, refused, duplicate or not drawn."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from ..files import Values
from .config import DataConfig
from .overlap import (
    CONTAMINATED,
    EXACT_DUPLICATE,
    Benchmarks,
)
from .rows import FILTERED, TOO_LONG
from .table import Rows

EMPTY_MASK = "empty mask"
UNKNOWN_LICENSE = "unknown"


@dataclass(kw_only=True)
class DataReport:
    """Row counts by outcome.

    rows_read = rows_kept + bad rows + rows with an empty mask + rows refused by filters,
    benchmarks, length or as duplicates + rows not drawn.
    """

    rows_read: int
    rows_kept: int
    """Distinct rows in both sets; a row repeated by a weight counts once."""
    bad_rows: dict[str, int]
    """Rows that cannot be read or rendered, by reason."""
    empty_mask_rows: int
    """Rows without a supervised token."""
    filtered_rows: dict[str, int] = field(default_factory=dict)
    """Refused rows by filter."""
    contaminated_rows: int = 0
    benchmarks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per benchmark: prompts, short_prompts (too few words to search for), rows left out. A row may
    contain prompts from several benchmarks."""
    too_long_rows: int = 0
    duplicate_rows: dict[str, int] = field(default_factory=dict)
    """Rows by kind of duplicate."""
    not_drawn_rows: int = 0
    """Good rows skipped by a weight below 1."""
    truncated_rows: int
    """Kept rows cut at max_length."""
    missing_turns: int
    """Assistant turns dropped by the chat template, or rewritten beyond recognition."""
    tokens: int
    """Tokens in both sets, repetitions included."""
    supervised_tokens: int
    """Tokens with loss_mask 1."""
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    """Maximum length over kept rows before the cut, in tokens."""
    sources: dict[str, dict[str, int]]
    """Per source: rows_read, rows_kept, tokens."""
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    """Chat template variables set by the recipe."""
    left_out_fields: dict[str, int] = field(default_factory=dict)
    """Kept rows for each field without effect: unread, or not rendered by the chat template."""
    thinking_back: int = 0
    """Kept rows whose last turn got its thinking back after the template stripped it."""
    licenses: dict[str, int]
    """Kept rows by license; `unknown` where neither the row nor its source names one."""
    hub_datasets: list[str] = field(default_factory=list)
    """Ids of the Hub data sets among the sources."""
    groups: dict[str, int] = field(default_factory=dict)
    """Rows in both sets by group (context/512, language/de, segment/code), repetitions included,
    the most frequent first."""
    train_rows: int = 0
    valid_rows: int = 0
    """``train_rows``, ``valid_rows``: rows per set, repetitions included."""

    def to_dict(self) -> Values:
        return asdict(self)

    def refused_rows(self) -> dict[str, int]:
        """Count the readable rows that the configuration leaves out, by reason."""
        counts = {f"{FILTERED}{name}": count for name, count in self.filtered_rows.items()}
        counts |= {f"duplicate: {kind}": count for kind, count in self.duplicate_rows.items()}
        counts |= {CONTAMINATED: self.contaminated_rows, TOO_LONG: self.too_long_rows}
        counts["not drawn (weight)"] = self.not_drawn_rows
        return {reason: count for reason, count in counts.items() if count}

    def summary(self) -> str:
        """Return a report of a few lines for people to read."""
        bad = sum(self.bad_rows.values())
        refused = self.refused_rows()
        lines = [
            f"rows: {self.rows_read} read, {self.rows_kept} kept, {bad} bad, "
            f"{self.empty_mask_rows} with an empty mask, "
            + (f"{sum(refused.values())} left out, " if refused else "")
            + f"{self.truncated_rows} truncated",
            f"tokens: {self.tokens}, supervised {self.supervised_tokens}",
            f"length before the cut: p50 {self.length_p50}, p90 {self.length_p90}, "
            f"p99 {self.length_p99}, max {self.length_max}",
            f"sets: {self.train_rows} train rows, {self.valid_rows} valid rows",
        ]
        lines += [f"bad rows: {count} {reason}" for reason, count in self.bad_rows.items()]
        lines += [f"left out: {count} {reason}" for reason, count in refused.items()]
        lines += [
            f"benchmark {name}: {counts['rows']} rows with one of {counts['prompts']} prompts, "
            f"{counts['short_prompts']} prompts too short to look for"
            for name, counts in self.benchmarks.items()
        ]
        if self.missing_turns:
            lines.append(f"assistant turns not found in the rendered text: {self.missing_turns}")
        lines += [
            f"not in the text: {name}, of {count} rows"
            for name, count in self.left_out_fields.items()
        ]
        if self.groups:
            listed = (f"{name} {count}" for name, count in self.groups.items())
            lines.append(f"groups: {', '.join(listed)}")
        if self.chat_template_kwargs:
            lines.append(f"template variables: {json.dumps(self.chat_template_kwargs)}")
        if self.thinking_back:
            lines.append(
                f"thinking of the last turn, which the template strips, put back: "
                f"{self.thinking_back} rows"
            )
        if len(self.sources) > 1:
            lines += [
                f"{name}: {counts['rows_kept']} of {counts['rows_read']} rows, "
                f"{counts['tokens']} tokens"
                for name, counts in self.sources.items()
            ]
        return "\n".join(lines)


def build_report(
    rows: Rows,
    errors: np.ndarray,
    copies: np.ndarray,
    config: DataConfig,
    benchmarks: Benchmarks | None,
) -> DataReport:
    """Count the tokenized rows.

    Args:
        errors: for each row, the reason why it is left out, or "".
        copies: occurrences per row in both sets together; 0 for a row left out.
    """
    kept = copies > 0
    licenses = np.asarray(rows["license"], dtype=object)
    names = np.asarray(rows["source"], dtype=object)
    full = np.asarray(rows["num_tokens"], dtype=np.int64)
    supervised = np.asarray(rows["num_supervised"], dtype=np.int64)
    lengths = np.minimum(full, config.max_length)
    reasons = Counter(errors[errors != ""])
    quantiles = (
        np.quantile(full[kept], [0.5, 0.9, 0.99, 1.0], method="higher") if kept.any() else [0] * 4
    )
    p50, p90, p99, longest = (int(value) for value in quantiles)
    exact = reasons.pop(EXACT_DUPLICATE, 0)
    filtered = {
        reason.removeprefix(FILTERED): reasons.pop(reason)
        for reason in sorted(reasons)
        if reason.startswith(FILTERED)
    }
    return DataReport(
        rows_read=len(rows),
        rows_kept=int(kept.sum()),
        filtered_rows=filtered,
        duplicate_rows={"exact": exact} if exact else {},
        contaminated_rows=reasons.pop(CONTAMINATED, 0),
        empty_mask_rows=reasons.pop(EMPTY_MASK, 0),
        benchmarks=_count_benchmarks(rows, benchmarks),
        too_long_rows=reasons.pop(TOO_LONG, 0),
        not_drawn_rows=int(((errors == "") & ~kept).sum()),
        bad_rows=dict(reasons.most_common()),
        truncated_rows=int((full[kept] > config.max_length).sum()),
        missing_turns=sum(rows["num_missing"]),
        chat_template_kwargs=dict(config.chat_template_kwargs or {}),
        left_out_fields=_count_left_out(rows, kept),
        thinking_back=int(np.asarray(rows["thinking_back"], dtype=np.int64)[kept].sum()),
        tokens=int((copies * lengths).sum()),
        supervised_tokens=int((copies * supervised).sum()),
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=longest,
        sources={
            name: {
                "rows_read": int((names == name).sum()),
                "rows_kept": int((kept & (names == name)).sum()),
                "tokens": int((copies * lengths)[names == name].sum()),
            }
            for name in dict.fromkeys(names)
        },
        licenses=dict(Counter(name or UNKNOWN_LICENSE for name in licenses[kept]).most_common()),
    )


def count_groups(groups: Mapping[str, np.ndarray], copies_N: np.ndarray) -> dict[str, int]:
    """Count rows per group, as stored in ``DataReport.groups``."""
    counts: Counter[str] = Counter()
    for dimension, group_N in groups.items():
        for group in dict.fromkeys(group_N[copies_N > 0]):
            counts[f"{dimension}/{group}"] = int(copies_N[group_N == group].sum())
    return dict(counts.most_common())


def _count_left_out(rows: Rows, kept: np.ndarray) -> dict[str, int]:
    """Count how many kept rows have each ignored field, the most frequent field first."""
    counts: Counter[str] = Counter()
    for listed, times in Counter(np.asarray(rows["left_out"], dtype=object)[kept]).items():
        for name in json.loads(listed) if listed else ():
            counts[name] += times
    return dict(counts.most_common())


def _count_benchmarks(rows: Rows, benchmarks: Benchmarks | None) -> dict[str, dict[str, int]]:
    if benchmarks is None:
        return {}
    masks = np.asarray(rows["contamination"], dtype=np.int64)
    sizes = zip(benchmarks.names, benchmarks.num_prompts, benchmarks.num_short, strict=True)
    return {
        name: {
            "prompts": prompts,
            "short_prompts": short,
            "rows": int((masks >> bit & 1).sum()),
        }
        for bit, (name, prompts, short) in enumerate(sizes)
    }
